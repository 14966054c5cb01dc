"""A bundle that recognizes speech as it comes: samples in pieces of any size, frames out in chunks.

Legend: S samples, U frames, V vocabulary. The model runs in a thread of its own, and is torch's or
any other that has `chunks`, `start` and `advance`: this file imports none.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import ChunkSizes
from sbkit.decoding.ctc_decoder import CtcDecoder
from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.frames import LogProbs
from sbkit.live.endpoint import EndpointRules
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.transcriber import open_recognizer


@dataclass(frozen=True)
class LiveState:
    """Where a session stands; it never changes, so that a copy is the state itself.

    model: what the model keeps; samples (S,): from the first one of the next chunk.
    """

    model: Any
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16))


class LiveRecognizer(AbstractContextManager["LiveRecognizer"]):
    """The model and decoder of many sessions; made by `LiveRecognizer.load`.

    Attributes:
        chunks: the samples of a chunk.
        decoder: the search, and what times words.
    """

    def __init__(self, *, bundle: OpenBundle, rules: EndpointRules | None = None) -> None:
        """Take a bundle whose model has a thread of its own.

        Raises:
            SbkitError: the model takes whole clips alone, or the decoder does.
        """
        self._thread = bundle.model
        self.rules = EndpointRules() if rules is None else rules
        self.sample_rate, self.effective = bundle.config.sample_rate, bundle.model.effective
        self.chunks = self._chunk_sizes()
        self.samples_per_frame = self._thread.samples_per_frame
        self.decoder: CtcDecoder = bundle.decoder_pool.decoder
        self.silent = bundle.tokenizer.silent
        search = self.decoder.search
        if isinstance(search, BeamDecoder) and search.attention is not None:
            raise SbkitError(
                "Speech that comes in pieces must be decoded without the attention decoder, which "
                f"takes whole clips, but this model's is used to {search.attention}. Pass "
                "--decoder greedy, or tune another: sbkit tune RUN --attention none"
            )
        search.start()  # a word graph takes whole clips, too
        self._start = LiveState(self._thread.start())

    def _chunk_sizes(self) -> ChunkSizes:
        sizes = self._thread.chunks
        if sizes is None:
            raise SbkitError(
                "`--live` must have a model that is run chunk by chunk, of a YAML with "
                f"`streaming`, but this one, by {self.effective.runtime}, takes whole clips alone. "
                "Train hparams/ctc_streaming.yaml, or leave out --live."
            )
        return sizes

    @classmethod
    def load(
        cls, folder: Path | str, *, rules: EndpointRules | None = None, **options: Any
    ) -> Self:
        """Load a bundle; options: as for `Transcriber.load`, but ``times``.

        Raises:
            SbkitError: it cannot be used, here or for speech that comes in pieces.
        """
        bundle = open_recognizer(Path(folder), streaming="only", **options)
        try:
            return cls(bundle=bundle, rules=rules)
        except BaseException:
            bundle.model.close()
            raise

    def start(self) -> LiveState:
        """Return the state of a session before its first sample."""
        return self._start

    def forward_chunk(
        self,
        pieces: Sequence[Samples],
        states: Sequence[LiveState],
        is_last: Sequence[bool] | None = None,
    ) -> list[tuple[list[LogProbs], LiveState]]:
        """Run the chunks that pieces (S,) of int16 complete, those of all sessions in one batch.

        is_last: of each session whether it ends here, with what it has of a chunk. Returns of each
        the log-probabilities of its chunks, (U, V) each, and the state after them.
        """
        ends = is_last or [False] * len(pieces)
        waiting = [
            np.concatenate([state.samples, piece])
            for state, piece in zip(states, pieces, strict=True)
        ]
        kept: list[Any] = [state.model for state in states]
        found: list[list[LogProbs]] = [[] for _ in pieces]
        enough = [self.chunks.shortest if end else self.chunks.window for end in ends]
        while ready := [n for n, each in enumerate(waiting) if len(each) >= enough[n]]:
            chunks = [waiting[n][: self.chunks.window] for n in ready]
            for n, (log_probs, after) in zip(
                ready, self._thread.advance(chunks, [kept[n] for n in ready]), strict=True
            ):
                found[n].append(log_probs)
                kept[n], waiting[n] = after, waiting[n][self.chunks.step :]
        states = [LiveState(*each) for each in zip(kept, waiting, strict=True)]
        return list(zip(found, states, strict=True))

    def close(self) -> None:
        """End the thread of the model."""
        self._thread.close()

    def __exit__(self, *_: object) -> None:
        """End the thread of the model."""
        self.close()
