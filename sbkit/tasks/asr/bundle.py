"""What the bundle of a recognizer can do: transcribe, encode and align clips, and use hotwords.

Legend: B clips, S samples, U frames, V vocabulary, D model width.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from sbkit.audio.io import Samples, to_samples
from sbkit.audio.segments import MAX_SEGMENT_SECONDS, Segment, Segmenter
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import parsing_errors
from sbkit.base.machine import ONNX, usable_cores
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.bundle import Bundle, ModelT, OtherModelT
from sbkit.bundle.config import CONFIG_FILE, BundleFiles
from sbkit.bundle.protocols import Encoded
from sbkit.bundle.side_inputs import SideInputs
from sbkit.bundle.task import ClipBatch, Labels
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.hotwords import normalize_hotwords, read_hotwords
from sbkit.decoding.pool import (
    ClipDecoder,
    DecoderInput,
    DecoderPool,
    RecognizedClip,
    join_recognitions,
)
from sbkit.decoding.word_times import BEAM, GREEDY, WordAligner
from sbkit.lm.language_models import describe_seen, load_language_models
from sbkit.lm.ngram import NgramModel
from sbkit.logs.progress import ping
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE, DecoderTokenizer
from sbkit.text.recognized_word import Word
from sbkit.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AsrBundle(Bundle[ModelT]):
    """The bundle of a recognizer.

    decoder: None for greedy decoding.
    decoder_tokenizer: for an attention decoder with its own tokens, such as Whisper's.
    word_lm: the n-gram model of words. Word confidences use it even with greedy decoding.
    refused_hotwords: phrases that the model's tokens cannot spell.
    """

    decoder: BeamDecoder | None = None
    decoder_tokenizer: DecoderTokenizer | None = field(default=None, repr=False)
    word_lm: NgramModel | None = field(default=None, repr=False)
    refused_hotwords: tuple[str, ...] = ()

    @classmethod
    def read_fields(cls, files: BundleFiles, labels: Labels) -> Mapping[str, Any]:
        folder, options = files.folder, files.config.decoder
        values: dict[str, Any] = {}
        if files.has(DECODER_TOKENIZER_FILE):
            content = files.read(DECODER_TOKENIZER_FILE)
            file = folder / DECODER_TOKENIZER_FILE
            values["decoder_tokenizer"] = DecoderTokenizer(file=file, content=content)
        if options is None or not isinstance(labels, Tokenizer):
            return {**values, **super().read_fields(files, labels)}
        language_models = load_language_models(
            folder / LANGUAGE_MODELS_FILE, labels, files.read(LANGUAGE_MODELS_FILE)
        )
        with parsing_errors(
            folder / CONFIG_FILE, "describe the decoder", fix="Export it again.", is_json=True
        ):
            decoder = BeamDecoder(
                tokenizer=labels,
                language_models=language_models,
                beam_size=options["beam_size"],
                weights=options["weights"],
                attention_rescoring=options["attention_rescoring"],
            )
        return {**values, "decoder": decoder, "word_lm": language_models.words}

    def with_model(self, model: OtherModelT) -> "AsrBundle[OtherModelT]":
        return as_recognizer(super().with_model(model))

    # ---- recognition

    def transcribe(
        self, clips: Sequence[Samples], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Transcribe clips at the bundle's rate, in one batch; `to_samples` converts them.

        rows: the values of the task's `side_fields` for each clip.
        """
        return [recognized.text for recognized in self.recognize(clips, rows)]

    def recognize(
        self,
        clips: Sequence[Samples],
        rows: Sequence[Mapping[str, Any]] = (),
        *,
        times: bool = False,
        with_greedy: bool = False,
    ) -> list[RecognizedClip]:
        """Transcribe clips as `transcribe` does; times, with_greedy: see `ClipBatch`."""
        samples = [*map(to_samples, clips)]
        options: dict[str, Any] = {"times": times, "with_greedy": with_greedy}
        return self.predict_batch(ClipBatch(clips=samples, rows=rows, **options))

    def predict_batch(self, batch: ClipBatch) -> list[RecognizedClip]:
        """Transcribe clips (S,) in one batch, or in segments if one is too long for the model."""
        task, rate = self.task, self.config.sample_rate
        longest = seconds_to_samples(MAX_SEGMENT_SECONDS, rate)
        # A decoder with its own tokens cannot read more frames than its encoder has positions for.
        joins_frames = task.decodes_frames and self.decoder_tokenizer is None
        if joins_frames or all(len(clip) <= longest for clip in batch.clips):
            return [*task.predict(self, batch)]
        recognized: list[RecognizedClip] = []
        for index, clip in enumerate(batch.clips):
            rows = batch.rows[index : index + 1]
            segments: list[RecognizedClip] = []
            for segment in Segmenter(rate, overlaps=False).split([clip]):
                ping("test")
                segment_batch = replace(batch, clips=[segment.samples], rows=rows)
                (text,) = task.predict(self, segment_batch)
                segments.append(text.later(samples_to_seconds(segment.start, rate)))
            recognized.append(join_recognitions(segments, spaces=self.config.has_words))
        return recognized

    def decoder_inputs(
        self, clips: Sequence[Samples], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[DecoderInput]:
        """Run the encoder on clips as `encode` does."""
        return [
            self.decoder_input(encoded, samples=len(clip))
            for encoded, clip in zip(self.encode(clips, rows), clips, strict=True)
        ]

    def encode(
        self, clips: Sequence[Samples], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[Encoded]:
        """Run the encoder on clips (S,) in one batch, or on each by itself if one needs segments.

        All log-probabilities of clips come from this method, because Whisper's encoder has
        positions for 30 s only. A test refuses other calls of the model.

        rows: the values of the task's `side_fields` for each clip.
        """
        rate, silent_ids = self.config.sample_rate, self.tokenizer.silent_ids
        longest = seconds_to_samples(MAX_SEGMENT_SECONDS, rate)
        sides = self.side_inputs(rows, len(clips))
        if all(len(clip) <= longest for clip in clips):
            return self.model.encode(clips, sides)
        segmenter = Segmenter(rate, self.model.samples_per_frame)
        outputs: list[Encoded] = []
        for index, clip in enumerate(clips):
            encode = partial(self._encode_one, sides=sides[index : index + 1])
            if len(clip) > longest:
                outputs.append(encode_in_segments(clip, segmenter, silent_ids, encode))
            else:
                outputs += self.model.encode([clip], sides[index : index + 1])
        return outputs

    def _encode_one(self, segment: Segment, sides: Sequence[SideInputs]) -> Encoded:
        ping("test")
        return self.model.encode([segment.samples], sides)[0]

    def align(self, clips: Sequence[Samples], texts: Sequence[str]) -> list[tuple[Word, ...]]:
        """Time the words of normalized texts, one for each clip."""
        aligner = self.decoder_pool.decoder.aligner
        clips = [*map(to_samples, clips)]
        return [
            aligner.align(encoded.log_probs, self.tokenizer.encode(text), samples=len(clip))
            for clip, encoded, text in zip(clips, self.encode(clips), texts, strict=True)
        ]

    def decoder_input(self, encoded: Encoded, *, samples: int, start: float = 0.0) -> DecoderInput:
        is_rescored = self.decoder is not None and self.decoder.attention_rescoring
        is_generated = self.decoder is None and self.decoder_tokenizer is not None
        needs_attention = is_rescored or is_generated
        return DecoderInput(
            log_probs=encoded.log_probs,
            samples=samples,
            start=start,
            attention=self.attention_scorer(encoded) if needs_attention else None,
        )

    def attention_scorer(self, encoded: Encoded) -> AttentionScorer:
        """Return a scorer of a clip's texts; with a decoder tokenizer, it also proposes texts."""
        score = partial(self.model.score_texts, encoded.states)
        tokenizer, decoder_tokenizer = self.tokenizer, self.decoder_tokenizer
        if decoder_tokenizer is None:
            return AttentionScorer(score_texts=score, end=tokenizer.vocabulary.eos)

        def spell(tokens: Sequence[int]) -> list[int]:
            return decoder_tokenizer.encode(tokenizer.decode(tokens))

        def propose() -> list[tuple[int, ...]]:
            generated = self.model.generate(encoded.states)
            text = self.normalizer()(decoder_tokenizer.decode(generated))
            return [tuple(tokenizer.encode(text))]

        end = decoder_tokenizer.end
        return AttentionScorer(score_texts=score, end=end, spell=spell, propose=propose)

    @cached_property
    def decoder_pool(self) -> DecoderPool:
        return self._make_pool(self.decoder)

    @cached_property
    def greedy_pool(self) -> DecoderPool:
        return self.decoder_pool if self.decoder is None else self._make_pool(None)

    def _make_pool(self, decoder: BeamDecoder | None) -> DecoderPool:
        self.task.require_frames("CTC's decoder")
        name = GREEDY if decoder is None else BEAM
        aligner = WordAligner(
            tokenizer=self.tokenizer,
            samples_per_frame=self.model.samples_per_frame,
            sample_rate=self.config.sample_rate,
            offsets=self.config.word_offsets,
            word_lm=self.word_lm,
            confidence=self.config.confidence.get(name),
            hotwords=frozenset() if decoder is None else decoder.hotwords,
        )
        processes = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return DecoderPool(ClipDecoder(decoder, aligner), processes=processes)

    # ---- decoder and hotwords

    def with_options(
        self,
        *,
        decoder: str | None = None,
        hotwords: str | Path | Sequence[str] | None = None,
        **options: Any,
    ) -> Self:
        """Return the bundle with a decoder and hotwords, as the two methods below do."""
        bundle = super().with_options(**options)
        bundle = bundle.with_decoder(decoder).with_hotwords_option(hotwords)
        rescores = bundle.decoder is not None and bundle.decoder.attention_rescoring
        is_onnx = bundle.model.runs_on.runtime == ONNX
        if rescores and is_onnx and bundle.decoder_tokenizer is None:
            raise ConfigError(
                "The decoder rescores with the attention decoder, which the runtime onnx lacks. "
                "Choose the decoder greedy, or run `sbkit tune RUN --no-attention-rescoring --out "
                "NEW`."
            )
        return bundle

    def with_decoder(self, name: str | None) -> Self:
        """Return the bundle with the decoder of this name; None keeps the present decoder."""
        if name == GREEDY:
            return replace(self, decoder=None)
        if name not in (None, BEAM):
            raise ConfigError(f"`decoder` must be {GREEDY} or {BEAM}; got {name}.")
        if name == BEAM:
            self.task.require_frames("The decoder beam")
        if name == BEAM and self.decoder is None:
            raise ConfigError(
                "The decoder beam needs language models and weights, which this model lacks. Tune "
                "it: sbkit tune RUN --out NEW, or sbkit tune BUNDLE --data dev.csv --out NEW"
            )
        return self

    def with_hotwords_option(self, hotwords: str | Path | Sequence[str] | None) -> Self:
        """Return the bundle with hotwords from a list, a file, or a text with commas.

        Phrases that the model's tokens cannot spell are logged and listed in ``refused_hotwords``.
        """
        if hotwords is None:
            return self
        if self.decoder is None:
            raise ConfigError(
                "`hotwords` need a decoder with language models, but decoding is greedy."
            )
        phrases = read_hotwords(str(hotwords)) if isinstance(hotwords, str | Path) else hotwords
        spelled, refused = self.split_phrases(phrases)
        for phrase in refused:
            logger.warning(
                f"hotword {phrase[:100]} is ignored: the model has no tokens to spell it."
            )
        if not spelled:
            raise ConfigError(
                f"`hotwords` has no phrase that the model can spell: {str(hotwords)[:100]}"
            )
        return self.with_more_hotwords(phrases)

    def with_more_hotwords(self, phrases: Iterable[str]) -> Self:
        """Return the bundle with more hotwords; unchanged if decoding is greedy."""
        if self.decoder is None:
            return self
        spelled, refused = self.split_phrases(phrases)
        decoder = self.decoder.with_hotwords([*self.decoder.phrases, *spelled])
        return replace(self, decoder=decoder, refused_hotwords=(*self.refused_hotwords, *refused))

    def split_phrases(self, phrases: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Normalize phrases; return the phrases that tokens can spell, and the other ones."""
        return normalize_hotwords(phrases, normalize=self.normalizer(), tokenizer=self.tokenizer)

    # ---- texts

    @property
    def tags(self) -> tuple[str, ...]:
        """The names of the tags that texts keep; empty without a tokenizer of sbkit."""
        return self.labels.tags if isinstance(self.labels, Tokenizer) else ()

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self.labels
        return tokenizer

    @property
    def blank(self) -> int:
        """The id of CTC's blank."""
        return int(self.tokenizer.vocabulary.blank)

    # ---- what a report says about it

    def facts(self, rows: Any) -> Mapping[str, Any]:
        """Return the decoder, its hotwords, and how many texts its language models have seen."""
        if not self.task.decodes_frames:
            return {}
        if self.decoder is None:
            return {"decoder": GREEDY}
        facts: dict[str, Any] = {"decoder": BEAM}
        if self.decoder.phrases:
            facts["hotwords"] = self.decoder.phrases
            facts["refused_hotwords"] = self.refused_hotwords
        from sbkit.data.splits import read_column  # only tests need the package datasets

        texts = read_column(rows, "text")
        seen = self.decoder.language_models.count_seen(texts, self.config.text_table)
        return {**facts, **seen, "notes": [*map(describe_seen, seen.values())]}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The hashes of its files, and the settings of the chosen decoder."""
        settings = None if self.decoder is None else self.decoder.plain()
        return {**self.digests, "decoder": settings}


def as_recognizer(bundle: Bundle[ModelT], *, command: str = "transcribe") -> AsrBundle[ModelT]:
    """Return a bundle that writes text; raise BundleError, which names the command, for others."""
    bundle.task.require_prediction("text", command=command)
    if not isinstance(bundle, AsrBundle):
        raise BundleError(
            f"Models of {bundle.task.name} predict text, but its bundles are not of the class "
            "AsrBundle. Derive the task from `sbkit.tasks.asr.task.AsrTask`."
        )
    return bundle


def encode_in_segments(
    clip: Samples,
    segmenter: Segmenter,
    silent_ids: Collection[int],
    encode: Callable[[Segment], Encoded],
) -> Encoded:
    """Run a model on the overlapping segments of a clip (S,), and join its outputs."""
    outputs: list[Encoded] = []
    start = 0  # the frames before it belong to the previous segment
    for segment in segmenter.split([clip]):
        encoded = encode(segment)
        end, next_start = segment.end_frame(encoded.log_probs, segmenter.frame_samples, silent_ids)
        if segment.next_start < len(clip):  # only the last segment includes the zeros after it
            end = min(end, segment.num_frames(segmenter.frame_samples))
        outputs.append(encoded.frames(start, end))
        start = next_start
    log_probs = np.concatenate([output.log_probs for output in outputs])
    states = [output.states for output in outputs]
    if states[0] is None:
        return Encoded(log_probs)
    if isinstance(states[0], np.ndarray):
        return Encoded(log_probs, np.concatenate(states))
    import torch

    return Encoded(log_probs, torch.cat(states))
