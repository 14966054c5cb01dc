"""Names that are not there: what was probably meant, what is called otherwise now, and --help."""

import pytest

from sbkit.config.document import nearest, read_document
from sbkit.config.hparams import parse_command
from tests.runs import ROOT

KEYS = list(read_document(ROOT / "hparams/ctc.yaml").root)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epochs", "number_of_epochs"),
        ("batch_size", "batch_seconds"),
        ("batch_secnds", "batch_seconds"),
        ("speedz", "speeds"),
        ("temperature", None),
        ("lm_weight", None),
    ],
)
def test_only_what_is_near_is_offered(word: str, meant: str | None) -> None:
    assert nearest(word, KEYS) == meant


def test_a_module_is_no_mode() -> None:
    assert nearest("encoder_module", ["compile_mode", "max_grad_norm", "train"]) is None


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["a.yaml", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_command(arguments)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: train.py FILE.yaml")
