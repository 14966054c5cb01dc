"""A recognizer of streams: audio arrives in blocks of any size, and runs through it in chunks.

The model runs in a thread of its own, by torch or any other runtime: this file imports none.

Legend: S samples, U frames, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.base.errors import BundleError
from sbkit.bundle.protocols import ChunkSizes, ModelState
from sbkit.decoding.decoder import BeamDecoder, CtcDecoder
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.transcriber import open_recognizer


@dataclass(frozen=True, kw_only=True)
class EndpointRules:
    """The seconds after which an utterance ends.

    nothing: of silence, if nothing was decoded.
    silence: after something was decoded.
    longest: of an utterance, whatever it contains.

    Silence is frames whose best token is no speech. The rules are those of Kaldi,
    `online2/online-endpoint.h`; the numbers are sherpa-onnx's.

    >>> EndpointRules().met(is_spoken=True, silence=1.3, seconds=4.0)
    'silence'
    """

    nothing: float = 2.4
    silence: float = 1.2
    longest: float = 20.0

    def met(self, *, is_spoken: bool, silence: float, seconds: float) -> str | None:
        """Return the name of the rule by which an utterance ends now, or None."""
        if silence >= (self.silence if is_spoken else self.nothing):
            return "silence" if is_spoken else "nothing"
        return "longest" if seconds >= self.longest else None


@dataclass(frozen=True)
class StreamingState:
    """The state of a session. It never changes, so a copy is the state itself.

    model: the state of the model.
    samples: (S,), from the first sample of the next chunk.
    """

    model: ModelState
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16))


class StreamingRecognizer(AbstractContextManager["StreamingRecognizer"]):
    """The model and the decoder of many sessions; made by `StreamingRecognizer.load`.

    chunks: the samples of a chunk.
    decoder: finds the tokens, and times the words.
    """

    def __init__(self, *, bundle: OpenBundle, rules: EndpointRules | None = None) -> None:
        """Take a bundle whose model has a thread of its own.

        Raises:
            BundleError: the model or its decoder only takes whole clips.
        """
        self._thread = bundle.model
        self.rules = EndpointRules() if rules is None else rules
        self.sample_rate, self.effective = bundle.config.sample_rate, bundle.model.effective
        self.chunks = self._chunk_sizes()
        self.samples_per_frame = self._thread.samples_per_frame
        self.decoder: CtcDecoder = bundle.decoder_pool.decoder
        self.silent = bundle.tokenizer.silent
        decoder = self.decoder.decoder
        if isinstance(decoder, BeamDecoder) and decoder.attention_rescoring:
            raise BundleError(
                "The decoder of this model rescores with the attention decoder, which takes whole "
                "clips. Pass --decoder greedy to transcribe live speech, or tune another decoder: "
                "sbkit tune RUN --no-attention-rescoring"
            )
        decoder.start()  # a decoding graph takes whole clips, too
        self._start = StreamingState(self._thread.start())

    def _chunk_sizes(self) -> ChunkSizes:
        sizes = self._thread.chunks
        if sizes is None:
            raise BundleError(
                "`--live` needs a streaming model, from a YAML with `streaming`. This one, run by "
                f"{self.effective.runtime}, only takes whole clips. Train "
                "hparams/ctc_streaming.yaml, or leave out --live."
            )
        return sizes

    @classmethod
    def load(
        cls, folder: Path | str, *, rules: EndpointRules | None = None, **options: Any
    ) -> Self:
        """Load a bundle, with the options of `Transcriber.load` except ``times``.

        Raises:
            SbkitError: the bundle cannot be used here, or only takes whole clips.
        """
        bundle = open_recognizer(Path(folder), streaming="only", **options)
        try:
            return cls(bundle=bundle, rules=rules)
        except BaseException:
            bundle.model.close()
            raise

    def start(self) -> StreamingState:
        """Return the state of a session before its first sample."""
        return self._start

    def forward_chunks(
        self,
        blocks: Sequence[Samples],
        states: Sequence[StreamingState],
        is_last: Sequence[bool] | None = None,
    ) -> list[tuple[list[LogProbs], StreamingState]]:
        """Run the chunks that blocks (S,) complete, those of all sessions in one batch.

        is_last: whether a session ends here, with a part of a chunk.

        Return the log-probabilities (U, V) of each chunk of each session, and its new state.
        """
        ends = is_last or [False] * len(blocks)
        pending = [
            np.concatenate([state.samples, block])
            for state, block in zip(states, blocks, strict=True)
        ]
        model_states: list[ModelState] = [state.model for state in states]
        outputs: list[list[LogProbs]] = [[] for _ in blocks]
        needed = [self.chunks.shortest if end else self.chunks.window for end in ends]
        while ready := [n for n, samples in enumerate(pending) if len(samples) >= needed[n]]:
            results = self._thread.advance(
                [pending[n][: self.chunks.window] for n in ready], [model_states[n] for n in ready]
            )
            for n, (log_probs, new_state) in zip(ready, results, strict=True):
                outputs[n].append(log_probs)
                model_states[n], pending[n] = new_state, pending[n][self.chunks.step :]
        new_states = [StreamingState(*one) for one in zip(model_states, pending, strict=True)]
        return list(zip(outputs, new_states, strict=True))

    def close(self) -> None:
        """End the thread of the model."""
        self._thread.close()

    def __exit__(self, *_: object) -> None:
        self.close()
