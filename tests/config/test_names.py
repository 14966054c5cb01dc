"""Names that are not there: what was probably meant, what is called otherwise now, and --help."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.config.document import nearest, read_document
from sbkit.config.hparams import load_hparams, parse_command, read_knobs
from tests.runs import ROOT

KEYS = list(read_document(ROOT / "hparams/ctc.yaml").root)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epochs", "number_of_epochs"),
        ("epoch", "number_of_epochs"),
        ("batch_size", "batch_seconds"),
        ("batch_secnds", "batch_seconds"),
        ("speedz", "speeds"),
        ("nheads", "nhead"),
        ("temperature", None),
        ("lm_weight", None),
        ("pretrainer", None),
        ("xyz", None),
    ],
)
def test_only_what_is_near_is_offered(word: str, meant: str | None) -> None:
    assert nearest(word, KEYS) == meant


def test_a_module_is_no_mode() -> None:
    assert nearest("encoder_module", ["compile_mode", "max_grad_norm", "train"]) is None


OLD = (
    ("join_share", "concat_prob"),
    ("time_share", "max_time_fraction"),
    ("warmup", "warmup_frac"),
)


@pytest.mark.parametrize(
    ("old", "new"), [*OLD, ("warmup", "warmup_fraction"), ("channels", "cnn_channels")]
)
def test_an_old_override_is_refused_with_the_new_name(old: str, new: str) -> None:
    with pytest.raises(SbkitError, match=f"`--{old}` must .* It is called `{new}"):
        read_knobs(ROOT / "hparams/ctc.yaml", {old: 0.1})


def test_an_old_key_is_refused_with_the_new_name(tmp_path: Path) -> None:
    yaml = tmp_path / "old.yaml"
    yaml.write_text("lr: 0.1\njoin_share: 0.5\n")
    with pytest.raises(SbkitError, match=r"`join_share` \(.*:2\) must be written `concat_prob`"):
        read_knobs(yaml, {})
    yaml.write_text("channels: 5\nwidth: !ref <channels> * 2\n")
    assert read_knobs(yaml, {}) == {"channels": 5, "width": 10}  # a knob of the user's own


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("sbkit.audio.augment.SpecAugment", "time_share", "max_time_fraction"),
        ("sbkit.train.schedule.WarmupCosine", "warmup", "warmup_fraction"),
    ],
)
def test_an_old_argument_is_refused_with_the_new_name(
    part: str, old: str, new: str, tmp_path: Path
) -> None:
    yaml = tmp_path / "old.yaml"
    yaml.write_text(f"part: !new:{part}\n    {old}: 0.1\n")
    with pytest.raises(SbkitError, match=f"It is called `{new}` now"):
        load_hparams(yaml, {})


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["a.yaml", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_command(arguments)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: train.py FILE.yaml")
