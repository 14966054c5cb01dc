"""Streaming: what the frames of a chunk see, and the state that sessions keep between chunks.

Legend: B utterances or sessions, S samples, U frames of the encoder, L frames of left context, N
blocks, K frames that a convolution sees to one side, H heads, D model width, V tokens.

Attention sees the L frames before a chunk and all of the chunk. A convolution sees K frames back
and K ahead, but none past the end of the chunk. A chunk therefore needs nothing that follows it,
and computing a clip chunk by chunk equals computing it at once under a mask. Without chunks the
encoder sees whole clips.
Sources: Zhang et al. 2020, arXiv 2012.05481 (one model for many chunk sizes, drawn in training); Li
et al. 2023, arXiv 2304.09325 (convolutions that end with the chunk).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from sbkit.audio.fbank import Fbank
from sbkit.audio.random_draws import draw_for_step
from sbkit.base.errors import ConfigError

Streaming = Annotated[
    Mapping[str, Any] | None, "Write {chunk_ms: 640, left_ms: 2560}, or null for none."
]
WHOLE_CLIP_SHARE = 0.3  # of the micro-batches in training


@dataclass(frozen=True)
class StreamingConfig:
    """The chunk and left context of an encoder; ``chunk_frames`` None means whole clips."""

    chunk_frames: int | None
    left_frames: int

    @classmethod
    def parse(cls, declared: Mapping[str, object], *, frame_ms: int) -> Self:
        """Read `streaming` of a YAML, in frames of ``frame_ms``."""
        match declared:
            case {"chunk_ms": int(chunk_ms), "left_ms": int(left_ms), **rest} if (
                rest in ({}, {"lookahead_ms": 0})  # no frame sees past its chunk
                and chunk_ms % frame_ms == left_ms % frame_ms == 0
                and chunk_ms > 0
                and left_ms >= 0
            ):
                return cls(chunk_ms // frame_ms, left_ms // frame_ms)
        raise ConfigError(
            "`streaming` must be {chunk_ms: .., left_ms: .., lookahead_ms: 0}, in multiples of the "
            f"{frame_ms} ms of a frame, but is {dict(declared)}."
        )

    def draw(self) -> "StreamingConfig":
        """Draw the chunk of a micro-batch in training: whole clips, or half to twice the chunk.

        All micro-batches of a step draw the same (`sbkit/audio/random_draws.py`).
        """
        whole_clips, share = draw_for_step(2).tolist()
        if self.chunk_frames is None or whole_clips < WHOLE_CLIP_SHARE:
            return StreamingConfig(None, self.left_frames)
        shortest = max(1, self.chunk_frames // 2)
        longest = 2 * self.chunk_frames
        return StreamingConfig(shortest + int(share * (longest + 1 - shortest)), self.left_frames)

    def visible(self, mask: Tensor) -> Tensor:
        """Mark the frames that each frame attends to: (B, U), true within -> (B, 1, U, U).

        For whole clips, all frames attend to the same frames: -> (B, 1, 1, U).
        """
        if self.chunk_frames is None:
            return mask[:, None, None]
        position = torch.arange(mask.shape[1], device=mask.device)
        chunk_start = (position // self.chunk_frames * self.chunk_frames).unsqueeze(1)  # (U, 1)
        is_before_end = position < chunk_start + self.chunk_frames
        is_near = is_before_end & (position >= chunk_start - self.left_frames)
        return (is_near & mask.unsqueeze(1)).unsqueeze(1)


class BlockState(NamedTuple):
    """The state of an encoder block."""

    attention: Tensor  # (B, L, 2, H, D/H)
    convolution: Tensor  # (B, K, D)


# The state of sessions between two chunks, one per row: tensors (B, ...) by name, which are never
# modified. The names are those that `start` returns.
State = dict[str, Tensor]


def stack_states(states: Sequence[State]) -> State:
    """Join the states of sessions into the state of a batch."""
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def split_state(state: State) -> list[State]:
    """Return the state of each session of a batch, in storage of its own."""
    num_sessions = len(next(iter(state.values())))
    return [
        {name: tensor[row : row + 1].clone() for name, tensor in state.items()}
        for row in range(num_sessions)
    ]


class StreamingPart(Protocol):
    """A part of a recognizer that runs chunk by chunk: features, front-end, Transformer or encoder.

    For a whole clip, `forward` returns what `forward_chunk` does chunk by chunk: no frame sees past
    its chunk. The last part, `Transformer` or `encoder`, also has ``chunk_frames``: the number of
    its frames in a chunk, or None if it sees whole clips. A part whose ``is_causal`` is False sees
    frames after its own, though it has the methods.
    """

    def start(self) -> State:
        """Return the state of one session before its first chunk: tensors (1, ...)."""

    def forward_chunk(
        self, x: Tensor, lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Return what `forward` does, (B, T, ...), (B,) -> (B, U, ...), (B,), and the next state.

        lengths: all T, or fewer for a session that ends with this chunk.
        """


class StreamingNetwork(Protocol):
    """A network that runs chunk by chunk; the state of a session is passed in and returned."""

    chunk_shift_samples: int  # the distance between the starts of two chunks
    chunk_samples: int  # the shift and the overlap of feature windows
    min_samples: int  # for one frame

    def start(self) -> State:
        """Return the state of one session before its first sample."""

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Compute log-probabilities of a chunk: (B, S), (B,) -> (B, U, V), (B,), state."""


def streaming_network(model: object) -> StreamingNetwork | None:
    """Return the network that runs a model chunk by chunk; None if it only takes whole clips."""
    return getattr(model, "as_streaming", lambda: None)()


def require_causal_level(features: object) -> None:
    """Raise ConfigError for features by the level of a whole utterance, known only at its end."""
    if isinstance(features, Fbank) and features.level == "utterance":
        raise ConfigError(
            "`level` must be `running` for a model that runs chunk by chunk, but is `utterance`.",
            keys=("level",),
        )


def last_frames(x: Tensor, count: int) -> Tensor:
    """Return the last frames, possibly none: (B, U, ...) -> (B, count, ...)."""
    return x[:, x.shape[1] - count :]
