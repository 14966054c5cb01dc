"""Voice activity: log-mel features -> causal convolution -> GRU -> one logit per frame.

Legend: B utterances or sessions, S samples, T features of 10 ms, U frames, K features before a
chunk, M mel bins, D width.

A frame sees the audio of its own feature windows, and all audio before them.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from sbkit.audio.fbank import LEVEL_STATE, Fbank
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.encoder import require_registered
from sbkit.models.encoder_parts import FeatureExtractor
from sbkit.models.streaming import State, last_frames, require_causal_level, stack_states


@dataclass(eq=False, kw_only=True)
class VadModel:
    """A detector for whole clips, and a `StreamingNetwork` whose chunks are frames."""

    model: nn.ModuleList
    compute_features: Fbank
    normalize: nn.Module
    conv: nn.Conv1d
    rnn: nn.GRU
    speech_lin: nn.Linear

    def __post_init__(self) -> None:
        names = ("normalize", "conv", "rnn", "speech_lin")
        require_registered(self.model, {name: getattr(self, name) for name in names})
        require_causal_level(self.compute_features)
        self.features = FeatureExtractor(self.compute_features)
        rate = self.compute_features.sample_rate
        shift = shift_samples(rate)
        self.min_samples = window_samples(rate)
        self.chunk_shift_samples = self.samples_per_frame = self.conv.stride[0] * shift
        self.chunk_samples = self.chunk_shift_samples - shift + self.min_samples

    def as_streaming(self) -> Self:
        return self

    def start(self) -> State:
        """Return the running level, the last features (1, K, M), and the GRU's (1, 1, D)."""
        zeros = self.speech_lin.weight.new_zeros
        context = self.conv.kernel_size[0] - self.conv.stride[0]
        return {
            "level": zeros(1, LEVEL_STATE),
            "features": zeros(1, context, self.conv.in_channels),
            "hidden": zeros(1, 1, self.rnn.hidden_size),
        }

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score silence and speech at every frame of clips: (B, S), (B,) -> (B, U, 2), (B,)."""
        states = stack_states([self.start()] * len(audio))
        return self.forward_chunk(audio, audio_lengths, states)[:2]

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Return log-probabilities of silence and speech: (B, S), (B,) -> (B, U, 2), (B,), state.

        audio: chunk_samples + (U - 1) * chunk_shift_samples samples, for sessions that continue.
        """
        features, lengths, level = self.compute_features.forward_chunk(audio, audio_lengths, state)
        x = torch.cat([state["features"], self.normalize(features)], 1)  # (B, K + T, M)
        y = silu(self.conv(x))
        y, hidden = self.rnn(y, state["hidden"].transpose(0, 1).contiguous())
        logits = self.speech_lin(y).float()  # (B, U, 1)
        log_probs = logsigmoid(torch.cat([-logits, logits], 2))
        context = last_frames(x, state["features"].shape[1])
        next_state = {**level, "features": context, "hidden": hidden.transpose(0, 1)}
        return log_probs, lengths // self.conv.stride[0], next_state
