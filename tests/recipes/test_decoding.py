"""What is heard of the validation sets, for the weights of a decoder."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speechbrain import Stage
from torch import nn

from recipes.asr.decoding import RunDecoding
from sbkit.audio.augment import SpeedGroup
from sbkit.data.batches.batch import TextBatch
from sbkit.models.asr import AsrModel

TEXTS = ["one", "two", "three", "four"]


def test_a_batch_that_does_not_fit_is_heard_in_halves(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = torch.arange(1, 5)
    batch = TextBatch(
        ids=TEXTS,
        columns={},
        texts=TEXTS,
        audio=torch.zeros(4, 4, dtype=torch.int16),
        audio_lengths=lengths,
        tokens=torch.ones(4, 2, dtype=torch.int64),
        token_lengths=torch.full((4,), 2),
        weights=torch.ones(4, dtype=torch.int64),
        speed_groups=(SpeedGroup(100, utterances=4, longest=4),),
        seconds=0.01,
    )
    started: list[Any] = []

    def compute_forward(batch: TextBatch, stage: Stage) -> SimpleNamespace:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("pretended")
        log_probs = torch.zeros(len(batch), 4, 3)
        return SimpleNamespace(log_probs=log_probs, states=None, frames=batch.audio_lengths)

    brain = SimpleNamespace(
        _declared=lambda name, default: SimpleNamespace(current=7),
        on_stage_start=lambda *stage: started.append(stage),
        modules=nn.ModuleDict(),
        loaders=SimpleNamespace(valid={"dev": [batch]}),
        pinging=lambda loader, phase: loader,
        placed=lambda batch: batch,
        evaluation_ctx=nullcontext(),
        compute_forward=compute_forward,
    )
    hparams = SimpleNamespace(ctc_weight=1.0)  # without a search
    heard = list(RunDecoding(hparams, AsrModel.__new__(AsrModel)).encode_validation(brain))
    assert [each.text for each in heard] == TEXTS
    assert [len(each.log_probs) for each in heard] == lengths.tolist()
    assert started == [(Stage.VALID, 7)]
    assert "did not fit into the memory" in capsys.readouterr().out
