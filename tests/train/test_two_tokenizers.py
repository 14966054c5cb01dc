"""A recipe may write further files of labels, such as a second tokenizer for another head."""

import json
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT
from sbkit.bundle.config import BundleFiles
from tests.runs import ROOT, Workplace

TASK = """
from sbkit.tasks.asr.task import AsrTask


class LetterTask(AsrTask):
    training_parts = ("letter_lin",)
"""
RECIPE = """
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from letter_task import LetterTask
from torch.nn.utils.rnn import pad_sequence

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from sbkit.data.splits import read_texts
from sbkit.models.loss import Loss, ctc
from sbkit.text.tokenizer import ensure_tokenizer


class LetterBrain(AsrBrain):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        letters = self.hparams.letters
        ids = [torch.tensor(letters.encode(text)) for text in batch.texts]
        log_probs = self.hparams.letter_lin(predictions.states).log_softmax(-1)
        lengths = torch.tensor([*map(len, ids)])
        padded = pad_sequence(ids, batch_first=True)
        other = ctc(log_probs, predictions.frame_lengths, padded, lengths, letters.vocabulary.blank)
        weighted = Loss(other.sums * batch.weights, other.counts * batch.weights)
        return weighted.interpolate(loss, own_weight=0.3)


class LetterRecipe(AsrRecipe):
    task = LetterTask()
    brain = LetterBrain

    def prepare_labels(self, settings, splits):
        ensure_tokenizer(
            model_file=Path(settings["output_folder"]) / "letters.model",
            token_type="char",
            vocab_size=None,
            texts=lambda: chain.from_iterable(read_texts(splits.train)),
        )
        return super().prepare_labels(settings, splits)
"""
YAML = """
base: hparams/ctc.yaml
recipe: letter_recipe.LetterRecipe
token_type: bpe
vocab_size: 60
letters: !new:sbkit.text.tokenizer.Tokenizer
    model_file: !ref <output_folder>/letters.model
letter_lin: !new:torch.nn.Linear
    in_features: !ref <d_model>
    out_features: !ref <letters.vocab_size>
model: !new:torch.nn.ModuleList
    - [!ref <CNN>, !ref <Transformer>, !ref <seq_lin>, !ref <ctc_lin>, !ref <letter_lin>]
"""


@pytest.mark.slow
def test_second_tokenizer_is_a_file_of_the_run(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter_task.py").write_text(TASK)
    (tmp_path / "letter_recipe.py").write_text(RECIPE)
    (tmp_path / "letters.yaml").write_text(YAML)
    (tmp_path / "hparams").symlink_to(ROOT / "hparams")
    run = tmp_path / "run"

    def train(epochs: int) -> int:
        yaml = tmp_path / "letters.yaml"
        return workplace.train_here(run, f"--number_of_epochs={epochs}", yaml=yaml)

    assert train(1) == 0
    files = ("letters.model", "tokenizer.model")
    assert {*files} <= json.loads((run / "labels.json").read_text())["files"].keys()
    before = {name: ((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in files}
    assert train(2) == 0
    for name, state in before.items():
        assert state == ((run / name).read_bytes(), (run / name).stat().st_mtime_ns)
    assert "letter_lin" not in BundleFiles(run / "bundle").config.model
    (run / "letters.model").write_bytes((run / "tokenizer.model").read_bytes())
    capsys.readouterr()
    assert train(3) == BAD_INPUT
    assert "the labels in letters.model: " in capsys.readouterr().err
