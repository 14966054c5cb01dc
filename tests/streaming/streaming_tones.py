"""A model of tones that is run chunk by chunk, and bundles of it: no torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.bundle.protocols import ChunkSizes, StreamingModel
from sbkit.decoding.decoder import BeamDecoder
from sbkit.runtime.model import ModelThread
from sbkit.streaming.session import EndpointRules, StreamingRecognizer
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import train_models
from tests.runtime.tones import STEP, ToneModel, tone_bundle

CHUNK = 16 * STEP


class StreamingToneModel(ToneModel):
    """Hear tones in chunks; the state counts them."""

    chunks = ChunkSizes(CHUNK, CHUNK, STEP)

    @property
    def streaming(self) -> StreamingModel:
        return self

    def start(self) -> int:
        return 0

    def advance(self, chunks: Sequence[Samples], states: Sequence[int]) -> list[Any]:
        self.batches.append([len(chunk) / STEP for chunk in chunks])
        outputs: list[LogProbs] = [self._hear(chunk) for chunk in chunks]
        return [(output, state + 1) for output, state in zip(outputs, states, strict=True)]


def streaming_tones(
    folder: Path, *, texts: Sequence[str] = (), rules: EndpointRules | None = None, **decoder: Any
) -> tuple[StreamingRecognizer, Tokenizer, StreamingToneModel]:
    """Make a recognizer of tones; with texts, it has a beam and language models of them."""
    bundle, tokenizer, _ = tone_bundle(folder)
    model = StreamingToneModel(tokenizer.vocab_size, tokenizer.vocabulary.blank)
    bundle = replace(bundle, model=ModelThread(lambda: model))
    if texts:
        train_models(folder / "lm.safetensors", tokenizer, texts)
        beam = BeamDecoder(
            tokenizer=tokenizer,
            language_models=folder / "lm.safetensors",
            **{"weights": {}, **decoder},
        )
        bundle = replace(bundle, decoder=beam)
    return StreamingRecognizer(bundle=bundle, rules=rules), tokenizer, model
