"""The chunks of a streaming encoder: what a frame sees, and what is kept from chunk to chunk.

Legend: B utterances, U frames of 40 ms, L frames of left context, N blocks, K frames that a
convolution sees to one side, H heads, D model width, M mel bins, C channels.

A frame sees its own chunk to its end, and the L frames before it; convolutions see K frames before
and to the end of the chunk. So a chunk needs nothing of what follows it, and computing a clip chunk
by chunk is computing it at once under a mask. Without chunks it is the encoder of whole clips.
Sources: Zhang et al. 2020, arXiv 2012.05481 (one model for many chunk sizes, drawn in training); Li
et al. 2023, arXiv 2304.09325 (convolutions that end with the chunk).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sbkit.audio.draws import draw_for_step
from sbkit.base.errors import SbkitError

FRAME_MS = 40  # of the front-end: four shifts of 10 ms
WHOLE_SHARE = 0.3  # of the micro-batches in training that see whole clips


class Chunks(NamedTuple):
    """The chunks of a batch: visible (B, 1, U, U), which frames each frame attends to; size."""

    visible: Tensor
    size: int


@dataclass(frozen=True)
class Streaming:
    """How an encoder is cut, in frames; ``chunk``: None for whole clips."""

    chunk: int | None
    left: int

    @classmethod
    def of(cls, declared: Mapping[str, object]) -> Self:
        """Read `streaming` of a YAML; raise SbkitError for what cannot be.

        `lookahead_ms` is 0: nothing sees past its chunk, so a longer one sees more to the right.
        """
        match declared:
            case {"chunk_ms": int(chunk), "left_ms": int(left), **more} if (
                more in ({}, {"lookahead_ms": 0})
                and chunk % FRAME_MS == left % FRAME_MS == 0
                and chunk > 0
                and left >= 0
            ):
                return cls(chunk // FRAME_MS, left // FRAME_MS)
        raise SbkitError(
            "`streaming` must be {chunk_ms: .., left_ms: .., lookahead_ms: 0}, multiples of the "
            f"{FRAME_MS} ms of a frame, of which the first is above 0, but is {dict(declared)}. "
            "Correct it; for more context to the right, raise chunk_ms."
        )

    def draw(self) -> "Streaming":
        """Draw the cut of a micro-batch in training: whole clips, or half to twice the chunk.

        All micro-batches of a step have the same (`sbkit/audio/draws.py`).
        """
        whole, share = draw_for_step(2).tolist()
        if self.chunk is None or whole < WHOLE_SHARE:
            return Streaming(None, self.left)
        shortest, longest = max(1, self.chunk // 2), 2 * self.chunk
        return Streaming(shortest + int(share * (longest + 1 - shortest)), self.left)

    def cut(self, mask: Tensor) -> Chunks | None:
        """Cut a batch: mask (B, U), true within an utterance; None for whole clips.

        A frame beyond an utterance attends to itself, since a row without any frame is NaN on
        some devices.
        """
        if self.chunk is None:
            return None
        place = torch.arange(mask.shape[1], device=mask.device)
        first = (place // self.chunk * self.chunk).unsqueeze(1)  # (U, 1)
        near = (place >= first - self.left) & (place < first + self.chunk)  # (U, U)
        visible = near & mask.unsqueeze(1) | (place == place.unsqueeze(1))
        return Chunks(visible.unsqueeze(1), self.chunk)


class BlockState(NamedTuple):
    """What a block keeps: attention (B, L, 2, H, D/H), convolution (B, K, D)."""

    attention: Tensor
    convolution: Tensor


@dataclass(frozen=True)
class ChunkState:
    """Where sessions stand, one a row; no tensor is ever changed, so a copy is the state itself.

    `vars(state)` are plain tensors to save, and the class makes the state of them again.
    """

    @classmethod
    def stack(cls, states: Sequence[Self]) -> Self:
        """Put sessions into one batch, whatever their ages."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: torch.cat([getattr(each, name) for each in states]) for name in names})

    def rows(self) -> list[Self]:
        """Return the state of each session by itself, with storage of its own."""
        split = (tensor.split(1) for tensor in vars(self).values())
        return [type(self)(*(each.clone() for each in row)) for row in zip(*split, strict=True)]


@dataclass(frozen=True)
class StreamState(ChunkState):
    """What the encoder of a recognizer keeps.

    frames (B,): encoded so far; features (B, 3, M): the last normalized ones; hidden (B, 3, C):
    the last frames between the two convolutions of the front-end; attention (B, N, L, 2, H, D/H):
    keys before they are rotated, and values; convolution (B, N, K, D): the last frames after each
    gate.
    """

    frames: Tensor
    features: Tensor
    hidden: Tensor
    attention: Tensor
    convolution: Tensor


def last_frames(x: Tensor, count: int) -> Tensor:
    """Return the last frames, also none: (B, U, ...) -> (B, count, ...)."""
    return x[:, x.shape[1] - count :]
