"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json             the parts as plain data, and where they come from
    model.safetensors       the weights of the one ModuleList
    tokenizer.model         the labels of the task, if it has any (sentencepiece for a recognizer)
    lm.safetensors          the language models of the decoder, if it has any
    decoder_tokenizer.json  the tokens of an attention decoder that has its own
    MODULE.py               the code of user modules, which only `--import MODULE` runs
    checksums.json          SHA-256 of the other files
    README.md               the model card: data, results, licenses, how to run it
    card.json               the facts of the model card
    FORMAT/                 a form of the model for another runtime, if export or run named it

Loading a bundle is safe, whoever made it: only regular files are read; the bytes that were hashed
are the bytes that are parsed or, with `--import`, run; weights are safetensors; and only classes on
the list of `sbkit.bundle.allowed_classes` are built.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from sbkit.audio.io import Samples, to_samples
from sbkit.audio.segments import MAX_SEGMENT_SECONDS, Segment, Segmenter
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import parsing_errors
from sbkit.base.imports import import_user_modules
from sbkit.base.machine import usable_cores
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE, BundleConfig, BundleFiles
from sbkit.bundle.protocols import ClipModel, Encoded
from sbkit.bundle.task import ClipBatch, Labels, Task, load_task
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
from sbkit.lm.language_models import load_language_models
from sbkit.lm.ngram import NgramModel
from sbkit.logs.progress import ping
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE, DecoderTokenizer
from sbkit.text.recognized_word import Word
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.transcripts import transcript_normalizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleContents:
    """The contents of a bundle's files.

    labels: the object that the task makes from its label file, such as a Tokenizer.
    decoder: None for greedy decoding.
    decoder_tokenizer: for an attention decoder with its own tokens, such as Whisper's.
    word_lm: the n-gram model of words. Word confidences use it even with greedy decoding.
    weights: the bytes of the weights, if they were requested.
    digests: SHA-256 of the weights and of the language models, if there are any.
    """

    config: BundleConfig
    task: Task = field(repr=False)
    labels: Labels = field(default=None, repr=False)
    decoder: BeamDecoder | None = None
    decoder_tokenizer: DecoderTokenizer | None = field(default=None, repr=False)
    word_lm: NgramModel | None = field(default=None, repr=False)
    weights: bytes = field(default=b"", repr=False)
    digests: Mapping[str, str | None] = field(default_factory=dict, repr=False)


class Opening(NamedTuple):
    """The call that opened a bundle, and the bundle that it returned."""

    call: "Callable[[], Bundle]"
    bundle: "Bundle"


def _open_again(call: "Callable[[], Bundle]", changes: Mapping[str, Any]) -> "Bundle":
    return replace(call(), **changes)


@dataclass(frozen=True, kw_only=True)
class Bundle(BundleContents):
    """A bundle whose model is ready to run, without the bytes of its weights.

    This module imports no torch.

    model: runs on clips.
    refused_hotwords: phrases that the model's tokens cannot spell.
    opening: how the bundle was opened; None if it is stored in no folder.
    """

    model: ClipModel
    refused_hotwords: tuple[str, ...] = ()
    opening: Opening | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_contents(cls, contents: BundleContents, model: ClipModel) -> Self:
        """Combine the contents of a bundle with the model that runs it."""
        # Without `opening`, which would keep the model of the earlier bundle in memory.
        names = {item.name for item in fields(cls)} & vars(contents).keys() - {"opening"}
        values = {name: getattr(contents, name) for name in names}
        return cls(**{**values, "model": model, "weights": b""})

    def opened_by(self, call: "Callable[[], Bundle]") -> Self:
        """Return a copy that pickles as the call that opened it."""
        return replace(self, opening=Opening(call, self))

    def __reduce__(self) -> tuple[Callable[..., "Bundle"], tuple[object, ...]]:
        """Pickle as the call that opened it, with the fields that were replaced afterwards."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        opening = values.pop("opening")
        if opening is None:
            return partial(type(self), **values), ()
        changes = {
            name: value
            for name, value in values.items()
            if value is not getattr(opening.bundle, name)
        }
        return _open_again, (opening.call, changes)

    def predict(self, clips: Sequence[Samples]) -> Any:
        """Return the network's predictions for clips, which `to_samples` converts, in one batch."""
        return self.model.predict([*map(to_samples, clips)])

    # ---- recognition

    def transcribe(self, clips: Sequence[Samples]) -> list[str]:
        """Transcribe clips at the bundle's rate, in one batch; `to_samples` converts them."""
        return [recognized.text for recognized in self.recognize(clips)]

    def recognize(
        self, clips: Sequence[Samples], *, times: bool = False, with_greedy: bool = False
    ) -> list[RecognizedClip]:
        """Transcribe clips as `transcribe` does; times, with_greedy: see `ClipBatch`."""
        task, rate = self.task, self.config.sample_rate
        task.require_prediction("text", command="transcribe")
        batch = ClipBatch(clips=[*map(to_samples, clips)], times=times, with_greedy=with_greedy)
        longest = seconds_to_samples(MAX_SEGMENT_SECONDS, rate)
        # A decoder with its own tokens cannot read more frames than its encoder has positions for.
        joins_frames = task.decodes_frames and self.decoder_tokenizer is None
        if joins_frames or all(len(clip) <= longest for clip in batch.clips):
            return [*task.predict(self, batch)]
        recognized: list[RecognizedClip] = []
        for clip in batch.clips:
            segments: list[RecognizedClip] = []
            for segment in Segmenter(rate, overlaps=False).split([clip]):
                ping("test")
                (text,) = task.predict(self, replace(batch, clips=[segment.samples]))
                segments.append(text.later(samples_to_seconds(segment.start, rate)))
            recognized.append(join_recognitions(segments, spaces=self.config.has_words))
        return recognized

    def decoder_inputs(self, clips: Sequence[Samples]) -> list[DecoderInput]:
        """Run the encoder on clips as `encode` does."""
        return [
            self.decoder_input(encoded, samples=len(clip))
            for encoded, clip in zip(self.encode(clips), clips, strict=True)
        ]

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips (S,) in one batch, or on each by itself if one needs segments.

        All log-probabilities of clips come from this method, because Whisper's encoder has
        positions for 30 s only. A test refuses other calls of the model.
        """
        rate = self.config.sample_rate
        longest = seconds_to_samples(MAX_SEGMENT_SECONDS, rate)
        if all(len(clip) <= longest for clip in clips):
            return self.model.encode(clips)
        segmenter = Segmenter(rate, self.model.samples_per_frame)
        return [
            encode_in_segments(clip, segmenter, self.tokenizer.silent_ids, self._encode_segment)
            if len(clip) > longest
            else self.model.encode([clip])[0]
            for clip in clips
        ]

    def _encode_segment(self, segment: Segment) -> Encoded:
        ping("test")
        return self.model.encode([segment.samples])[0]

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

    # ---- text

    def normalizer(self) -> Callable[[str], str]:
        """Return the function that normalized the training transcripts."""
        return transcript_normalizer(self.config.text_table, self.tags)

    @property
    def tags(self) -> tuple[str, ...]:
        """The names of the tags that texts keep; empty without a tokenizer of sbkit."""
        return self.labels.tags if isinstance(self.labels, Tokenizer) else ()

    @property
    def blank(self) -> int:
        """The output that means "no token" in a recognizer, "no speech" in a detector."""
        return 0 if self.labels is None else int(self.tokenizer.vocabulary.blank)

    @property
    def tokenizer(self) -> Tokenizer:
        self.task.require_prediction("text", command="transcribe")
        tokenizer: Tokenizer = self.labels
        return tokenizer


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


def read_bundle(
    folder: Path | str, *, with_weights: bool = False, user_modules: frozenset[str] = frozenset()
) -> BundleContents:
    """Read the files of a bundle, and compare their bytes with the checksums.

    user_modules: the modules that `--import` names; one of them may define the task. If a module
        cannot be imported otherwise, the copy in the bundle is run.
    """
    files = BundleFiles(folder)
    folder = files.folder
    config = files.config
    import_user_modules(sorted(user_modules), {folder: files.read_modules(user_modules)})
    task = load_task(config.task, user_modules=user_modules)
    weights = files.read(WEIGHTS_FILE) if with_weights else b""
    labels: Labels = None
    if task.label_file is not None:
        labels = task.read_labels(folder / task.label_file, files.read(task.label_file))
    checksums = read_checksums(folder)
    names = {"weights": WEIGHTS_FILE, "language_models": LANGUAGE_MODELS_FILE}
    digests = {name: checksums.get(file) for name, file in names.items()}
    decoder_tokenizer = None
    if DECODER_TOKENIZER_FILE in checksums:
        content = files.read(DECODER_TOKENIZER_FILE)
        decoder_tokenizer = DecoderTokenizer(file=folder / DECODER_TOKENIZER_FILE, content=content)
    contents = BundleContents(
        config,
        task,
        labels,
        decoder_tokenizer=decoder_tokenizer,
        weights=weights,
        digests=digests,
    )
    options = config.decoder
    if options is None:
        return contents
    if not isinstance(labels, Tokenizer):
        raise BundleError(
            f"{folder / CONFIG_FILE} has a decoder, but models of {config.task} have none."
        )
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
    return replace(contents, decoder=decoder, word_lm=language_models.words)
