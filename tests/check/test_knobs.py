"""Which keys of a YAML count as read: by a reference, or by the code that the dry run runs."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from sbkit.check.check import check_planned_run
from sbkit.check.knobs import check_unread, unread
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import read_document
from sbkit.config.hparams import KnobAttributes, Knobs, MissingKnobError, parse_command
from tests.check.harness import healthy_workplace
from tests.check.mutations.data import rewrite
from tests.runs import COUNTS, ROOT, TINY, TINY_VOICE, Workplace, one_thread, rows_of

SMALL = {
    "codec": ("--d_model=16", "--d_ffn=32"),
    "ctc": TINY,
    "ctc_large": (*TINY, "--vocab_size=50", "--num_workers=0", "--precision=fp32"),
    "ctc_streaming": TINY,
    "language_id": ("--label=pace", "--language=[en]", "--min_seconds=0"),
    "tts": TINY_VOICE,
}


def test_knobs_remember_every_way_of_reading_a_key() -> None:
    knobs = Knobs({"train_rows": 1, "lr": 2, "seed": 3, "other": 4})
    assert [knobs[f"{split}_rows"] for split in ("train",)] == [1]
    assert (KnobAttributes(knobs).lr, "seed" in knobs, knobs.get("absent", 5)) == (2, True, 5)
    assert dict(knobs.items()) == {"train_rows": 1, "lr": 2, "seed": 3, "other": 4}
    with pytest.raises(MissingKnobError, match="`needed`, which is not in the YAML"):
        _ = KnobAttributes(knobs).needed
    assert knobs.names_read == {"train_rows", "lr", "seed", "absent", "needed"}
    assert {**knobs, "new": 1} == {"train_rows": 1, "lr": 2, "seed": 3, "other": 4, "new": 1}
    assert "other" in knobs.names_read  # nobody knows what is read of a copy


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("named: 1", []),
        ("unnamed: 1", ["unnamed"]),
        ("called: !apply:os.getcwd", []),  # it had its effect when it was built
        ("size: 1\nsizes: {a: 1}\nnamed: !ref <size> * <sizes[a]>", []),
        ("named: 1\nspare: !new:torch.nn.Linear [1, 1]", ["spare"]),
    ],
)
def test_a_key_without_a_reader_is_found(yaml: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{yaml}\n")
    assert list(unread(read_document(tmp_path / "a.yaml"), {"named"})) == expected


@pytest.fixture(scope="module")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    workplace = healthy_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))
    for split in COUNTS:  # a label for language_id.yaml
        rows = rows_of(workplace.release / f"{split}.tsv")
        paces = [{"pace": ("quick", "slow")[index % 2]} for index in range(len(rows))]
        rewrite(
            workplace.release, split, [row | pace for row, pace in zip(rows, paces, strict=True)]
        )
    return workplace


@pytest.mark.slow
@pytest.mark.parametrize(
    "yaml",
    sorted(set((ROOT / "hparams").glob("*.yaml")) - {ROOT / "hparams/ctc_pretrained.yaml"}),
    ids=lambda yaml: yaml.stem,
)
def test_every_key_of_the_yamls_is_read(yaml: Path, workplace: Workplace, tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text(f"base: {yaml}\nforgotten_knob: 3\n", encoding="utf-8")
    declared = read_document(yaml).root
    options = ("--device=cpu", "--batch_seconds=6", *SMALL.get(yaml.stem, ()))
    folders = (f"--data_folder={workplace.release}", f"--output_folder={tmp_path / 'run'}")
    with (
        patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}),
        one_thread(),
        PlannedRun(*parse_command([str(odd), *folders, *options])) as planned,
    ):
        assert [finding.where for finding in check_planned_run(planned, [check_unread])] == [
            f"{odd}:2"
        ]
        names = planned.knobs.names_read | planned.build_hparams().names_read
        assert not {*unread(planned.document, names)} & {*declared}
