"""Special labels and sizes where there is nothing but a YAML in the manner of SpeechBrain's."""

from pathlib import Path

import pytest

from sbkit.check.data.labels import check_labels
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun

HEALTHY = """\
blank_index: 0
pad_index: 0
bos_index: 1
eos_index: 2
unk_index: 3
size: 10
ctc_cost: !name:speechbrain.nnet.losses.ctc_loss
    blank_index: !ref <blank_index>
searcher:
    eos_index: !ref <eos_index>
ctc_lin: !new:torch.nn.Linear
    in_features: 4
    out_features: !ref <size>
seq_lin: !new:torch.nn.Linear
    in_features: 4
    out_features: !ref <size>
"""


def check(tmp_path: Path, text: str, **overrides: object) -> list[Finding]:
    (tmp_path / "foreign.yaml").write_text(text, encoding="utf-8")
    with PlannedRun(tmp_path / "foreign.yaml", overrides) as planned:
        return list(check_labels(planned))


def test_a_healthy_yaml_gives_no_finding(tmp_path: Path) -> None:
    assert check(tmp_path, HEALTHY) == []


@pytest.mark.parametrize(
    ("overrides", "line", "words", "stops"),
    [
        ({"unk_index": 0, "pad_index": 9}, 5, "an unknown character of a transcript is", True),
        ({"pad_index": 1}, 3, "masks the start", True),
        ({"unk_index": 2}, 5, "ends it", True),
        ({"bos_index": 2}, 4, "the start of a transcript from its end", False),
        ({"ctc_cost": {"blank_index": 5}}, 8, "here it is 5", True),
        ({"searcher": {"eos_index": 5}}, 10, "here it is 5", True),
        ({"seq_lin": {"out_features": 9}}, 14, "has 9: no token from 9 on", True),
    ],
)
def test_what_collides_is_named_with_its_line(
    tmp_path: Path, overrides: dict[str, object], line: int, words: str, stops: bool
) -> None:
    (finding,) = check(tmp_path, HEALTHY, **overrides)
    assert finding.where == f"{tmp_path}/foreign.yaml:{line}"
    assert words in finding.effect
    assert finding.stops == stops
