"""Encoders of waveforms for sherpa-onnx, in the form of its `omnilingual` models.

Legend: B clips, S samples, U frames, V vocabulary.

sherpa-onnx gives such a model whole clips, one by one, without lengths. It subtracts the mean of
each and divides by the root of its variance and 1e-5 (`offline-omnilingual-asr-ctc-model.cc`),
where the encoder was trained with 1e-7: the graph turns the one into the other.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.base.errors import SbkitError
from sbkit.base.process import require_package
from sbkit.base.units import SAMPLE_RATE
from sbkit.inference.formats.onnx_format import make_onnx, save_onnx
from sbkit.inference.formats.parity import Run
from sbkit.inference.formats.traced import EXAMPLE, TrainedModel, WaveformModel, trace
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs
from sbkit.models.pretrained.features import LEAST_VARIANCE, NormalizedAudio

OMNILINGUAL = "omnilingual-asr-ctc"
ADDED = 1e-5  # to the variance, by sherpa-onnx


class NormalizedModel(WaveformModel):
    """Clips that sherpa-onnx has normalized to log-probabilities: (B, S) -> (B, U, V)."""

    def forward(self, audio: Tensor) -> Tensor:  # type: ignore[override]
        """Score every token at every frame."""
        variance = audio.double().var(1, correction=0, keepdim=True)  # v / (v + ADDED), of its v
        share = LEAST_VARIANCE / ADDED
        audio = audio * (variance + share * (1 - variance)).rsqrt().float()
        lengths = torch.full_like(audio[:, 0], audio.shape[1], dtype=torch.int64)
        states, _ = self.model.encoder.encode_features(audio.unsqueeze(-1), lengths)
        log_probs: Tensor = self.model.ctc_log_probs(states)
        return log_probs


def takes_waveforms(features: Any) -> bool:
    """Check whether `compute_features` leaves the audio a waveform.

    Raises SbkitError for one that sherpa-onnx would normalize though the model was not trained so.
    """
    body = getattr(features, "body", None)
    if not isinstance(body, NormalizedAudio):
        return False
    if not body.do_normalize or features.sample_rate != SAMPLE_RATE:
        raise SbkitError(
            f"A model of waveforms for sherpa-onnx must have been trained on normalized audio of "
            f"{SAMPLE_RATE} Hz, as sherpa-onnx makes it, but this one has do_normalize: "
            f"{str(body.do_normalize).lower()} and {features.sample_rate} Hz. Leave the format out."
        )
    return True


def write_waveform_model(trained: TrainedModel, file: Path) -> Run:
    """Write the model, and return what runs it."""
    example = torch.randn(EXAMPLE, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    program = trace(NormalizedModel(trained.bundle.model.network).eval(), example)
    save_onnx(make_onnx(program, ["audio"], ["log_probs"]), file, {"model_type": OMNILINGUAL})
    session = require_package("onnxruntime", extra="export").InferenceSession(file)
    return partial(_log_probs, session)


def _log_probs(session: Any, audio: Floats, lengths: Counts) -> LogProbs:
    """Run the graph on one clip after the other, normalized as sherpa-onnx does it."""
    rows = []
    for row, length in zip(audio, lengths, strict=True):
        clip = row[:length].astype(np.float64)
        clip = (clip - clip.mean()) / np.sqrt(clip.var() + ADDED)
        (found,) = session.run(None, {"audio": clip[None].astype(np.float32)})
        rows.append(torch.from_numpy(found[0]))
    return LogProbs(pad_sequence(rows, batch_first=True).numpy(), np.array([*map(len, rows)]))
