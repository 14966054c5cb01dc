"""The example docs/examples/masked_prediction: an encoder learns from audio, then recognizes."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT, Workplace, records_of
from tests.test_language_id import SPLITS, write_table

EXAMPLE = ROOT / "docs/examples/masked_prediction"


@pytest.mark.slow
def test_encoder_is_pretrained_without_transcripts_and_finetuned(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained, finetuned = tmp_path / "pretrained", tmp_path / "finetuned"
    for split in SPLITS:
        write_table(tmp_path / f"{split}.csv", workplace, ("en",))
    tables = ", ".join(f"{split}: {tmp_path / split}.csv" for split in SPLITS)
    options = ("--data_folder=null", f"--manifest={{{tables}}}", "--num_decoder_layers=0")
    assert workplace.train_here(pretrained, *options, yaml=EXAMPLE / "pretrain.yaml") == 0
    losses = [epoch["valid_loss"] for epoch in records_of(pretrained, "epoch")]
    assert losses == sorted(losses, reverse=True)
    bundles = tmp_path / "encoder", tmp_path / "recognizer"
    sbkit(["export", str(pretrained), f"--out={bundles[0]}", "--import", "masked_prediction"])
    with pytest.raises(SbkitError, match="MaskedPrediction cannot score tables"):
        table = str(tmp_path / "test.csv")
        sbkit(["score", str(bundles[0]), table, "--import", "masked_prediction"])
    capsys.readouterr()
    for source in (pretrained, bundles[0]):
        options = (f"--init_from={source}", "--number_of_epochs=1")
        run = finetuned / source.name
        assert workplace.train_here(run, *options, yaml=EXAMPLE / "finetune.yaml") == 0
        output = capsys.readouterr().out
        assert "loaded: CNN." in output and "new: Transformer.decoder." in output
        assert "4 tensors" in output and "quantizer.codes" in output
    sbkit(["export", str(run), f"--out={bundles[1]}"])
    sbkit(["transcribe", str(bundles[1]), str(min(workplace.release.glob("clips/*")))])
