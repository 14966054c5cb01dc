"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json        the parts as plain data, and where they come from
    model.safetensors  the weights of the one ModuleList
    tokenizer.model    the labels of the task, if it has any: a recognizer's are sentencepiece
    lm.safetensors     the language models of the decoder, if it has any
    MODULE.py          the source of user modules, which only `--import MODULE` runs
    checksums.json     SHA-256 of the other files

Loading a bundle is safe, whoever made it: every file is read once, as a regular file, and the bytes
that were hashed are the bytes that are parsed; weights are safetensors; and only classes on the
list of `sbkit.bundle.allowed` are built.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from sbkit.audio.io import Samples, to_samples
from sbkit.base.errors import ConfigError
from sbkit.base.files import reading
from sbkit.base.imports import import_user_modules
from sbkit.base.machine import usable_cores
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE, BundleConfig, BundleFiles
from sbkit.bundle.protocols import Encoded, RunnableModel
from sbkit.config.ranges import require_in_range
from sbkit.decoding.decoder import (
    LANGUAGE_MODELS,
    AttentionDecoder,
    BeamDecoder,
    CtcDecoder,
    DecoderInput,
    DecoderPool,
    Recognized,
)
from sbkit.decoding.hotwords import normalize_hotwords, read_hotwords
from sbkit.decoding.words import GREEDY, WordAligner
from sbkit.lm.language_models import load_language_models
from sbkit.lm.ngram import NgramModel
from sbkit.tasks.task import Labels, Task, load_task
from sbkit.text.normalization import normalize
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleContents:
    """What the files of a bundle hold.

    Attributes:
        config: the parsed config.json.
        task: what the model predicts.
        labels: the object that the task makes from its label file, such as a Tokenizer.
        decoder: None for greedy decoding.
        lm: the decoder's word language model, which word confidences need with any decoder.
        weights: the bytes of the weights, if they were read too.
    """

    config: BundleConfig
    task: Task
    labels: Labels = None
    decoder: BeamDecoder | None = None
    lm: NgramModel | None = None
    weights: bytes = b""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose model is ready to run. This module does not import torch.

    Attributes:
        config, task, labels, decoder, lm: as in `BundleContents`.
        model: runs on clips.
        refused_hotwords: phrases that the model's tokens cannot spell.
    """

    config: BundleConfig
    task: Task
    labels: Labels
    model: RunnableModel
    decoder: BeamDecoder | None = None
    lm: NgramModel | None = None
    refused_hotwords: tuple[str, ...] = ()

    @classmethod
    def of(cls, other: "BundleContents | Bundle", model: RunnableModel) -> Self:
        """Combine a bundle, without its hotwords, with a model that runs it."""
        return cls(other.config, other.task, other.labels, model, other.decoder, other.lm)

    # Recognition

    def transcribe(self, clips: Sequence[Samples]) -> list[str]:
        """Transcribe clips at the bundle's rate, in one batch; `to_samples` says their types."""
        return [recognized.text for recognized in self.recognize(clips)]

    def recognize(self, clips: Sequence[Samples], *, times: bool = False) -> list[Recognized]:
        """Transcribe clips as `transcribe` does; ``times`` adds their timed words."""
        pool, clips = self.decoder_pool, [*map(to_samples, clips)]
        inputs = [
            self.decoder_input(encoded, samples=len(clip))
            for encoded, clip in zip(self.model.encode(clips), clips, strict=True)
        ]
        return pool.decode(inputs, times=times)

    def align(self, clips: Sequence[Samples], texts: Sequence[str]) -> list[tuple[Word, ...]]:
        """Time the words of normalized texts, one for each clip."""
        aligner = replace(self.decoder_pool.decoder.aligner, confidence=None)
        clips = [*map(to_samples, clips)]
        return [
            aligner.align(encoded.log_probs, self.tokenizer.encode(text), samples=len(clip))
            for clip, encoded, text in zip(clips, self.model.encode(clips), texts, strict=True)
        ]

    def decoder_input(self, encoded: Encoded, *, samples: int, start: float = 0.0) -> DecoderInput:
        """Turn the encoder's output of a clip into the decoder's input."""
        return DecoderInput(
            log_probs=encoded.log_probs,
            samples=samples,
            start=start,
            attention=self.attention_decoder(encoded) if self._rescores else None,
        )

    @property
    def _rescores(self) -> bool:
        return self.decoder is not None and self.decoder.attention_rescoring

    def attention_decoder(self, encoded: Encoded) -> AttentionDecoder:
        """Return the attention decoder of a clip."""
        score = partial(self.model.decoder_log_probs, encoded.states)
        return AttentionDecoder(log_probs=score, eos=self.tokenizer.vocabulary.eos)

    @cached_property
    def decoder_pool(self) -> DecoderPool:
        """The decoder of the encoder's output, with word times and confidences."""
        aligner = WordAligner(
            tokenizer=self.tokenizer,
            samples_per_frame=self.model.samples_per_frame,
            sample_rate=self.config.sample_rate,
            offsets=self.config.word_offsets,
            lm=self.lm,
            confidence=self.config.confidence.get(
                GREEDY if self.decoder is None else self.decoder.decoder_type
            ),
            unjudged=frozenset() if self.decoder is None else self.decoder.hotwords,
        )
        return DecoderPool(CtcDecoder.of(self.decoder, aligner), processes=usable_cores())

    # Decoder and hotwords

    def with_decoder(self, name: str | None) -> Self:
        """Return the bundle with its own decoder (None), or without one (greedy).

        Raises:
            ConfigError: another decoder is named, for which the bundle has no weights, or the
                decoder cannot be run.
        """
        if name == GREEDY:
            return replace(self, decoder=None)
        own_name = None if self.decoder is None else self.decoder.decoder_type
        if name not in (None, own_name):
            raise ConfigError(
                f"`--decoder {name}` needs language models and weights, but this model's are for "
                f"{own_name or 'greedy decoding'}. Tune it first: sbkit tune RUN --decoder {name}, "
                f"or sbkit tune BUNDLE --decoder {name} --data dev.csv --out NEW"
            )
        if self.decoder is not None:
            self.decoder.check_graph()
        return self

    def with_hotwords(self, phrases: str | None) -> Self:
        """Return the bundle with hotwords: a file of phrases, or phrases separated by commas.

        Phrases that the model's tokens cannot spell are logged and listed in ``refused_hotwords``.

        Raises:
            ConfigError: no phrase can be spelled, or decoding is greedy.
        """
        if phrases is None:
            return self
        if self.decoder is None:
            raise ConfigError(
                "`--hotwords` needs a decoder with language models, but decoding is greedy. Export "
                "a run with language models, and do not pass --decoder greedy."
            )
        bundle = self.with_phrases(read_hotwords(phrases))
        for phrase in bundle.refused_hotwords:
            logger.warning(
                f"hotword {phrase[:100]} is ignored: the model has no tokens to spell it."
            )
        if bundle.decoder is None or not bundle.decoder.phrases:
            raise ConfigError(
                f"`--hotwords {phrases[:100]}` has no phrase in the letters of the model's "
                "language. Correct the list."
            )
        return bundle

    def with_phrases(self, phrases: Iterable[str]) -> Self:
        """Return the bundle with more hotwords; unchanged if decoding is greedy."""
        if self.decoder is None:
            return self
        spelled, refused = self.split_phrases(phrases)
        decoder = self.decoder.with_hotwords([*self.decoder.phrases, *spelled])
        return replace(self, decoder=decoder, refused_hotwords=refused)

    def split_phrases(self, phrases: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Normalize phrases; return those that the tokens can spell, and the others."""
        return normalize_hotwords(phrases, normalize=self.normalizer(), tokenizer=self.tokenizer)

    # Text

    def normalizer(self) -> Callable[[str], str]:
        """Return the function that normalized the transcripts that the model was trained on."""
        language, table = self.config.language or "und", self.config.normalizer
        return partial(normalize, language=language, table=table)

    @property
    def blank(self) -> int:
        """Return the label of a frame without a token, or without speech."""
        return 0 if self.labels is None else int(self.tokenizer.vocabulary.blank)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises BundleError for a model that does not transcribe."""
        self.task.require_prediction("text", command="transcribe")
        tokenizer: Tokenizer = self.labels
        return tokenizer


def read_bundle(
    folder: Path, *, with_weights: bool = False, user_modules: frozenset[str] = frozenset()
) -> BundleContents:
    """Read the files of a bundle, each once, and compare them with their checksums.

    ``user_modules`` are those that `--import` names, one of which may hold the task: they are
    imported from the bundle if they are not installed.

    Raises:
        SbkitError: a file is missing or damaged, or the task cannot be imported.
    """
    files = BundleFiles(folder)
    config = files.config
    import_user_modules(sorted(user_modules), {folder: files.user_modules(user_modules)})
    task = load_task(config.task, user_modules=user_modules)
    weights = files.read(WEIGHTS_FILE) if with_weights else b""
    labels: Labels = None
    if task.labels is not None:
        name = task.labels.name
        labels = task.labels.read(folder / name, files.read(name))
    if (chosen := config.decoder) is None:
        return BundleContents(config, task, labels, weights=weights)
    language_models = load_language_models(
        folder / LANGUAGE_MODELS, labels, files.read(LANGUAGE_MODELS)
    )
    with reading(folder / CONFIG_FILE, "describe the decoder", fix="Export it again."):
        require_in_range({"beam_size": chosen["beam_size"]}, BeamDecoder.RANGES)
        decoder = BeamDecoder(
            tokenizer=labels,
            language_models=language_models,
            beam_size=chosen["beam_size"],
            weights=chosen["weights"],
            attention_rescoring=chosen["attention_rescoring"],
            decoder_type=chosen["decoder_type"],
        )
    return BundleContents(config, task, labels, decoder, language_models.words, weights)


def language_of(model: Path) -> str:
    """Return the language of a bundle or a run, "und" for any other folder."""
    if (model / CONFIG_FILE).is_file():
        return BundleFiles(model).config.language or "und"
    from sbkit.checkpoint.run_config import RESOLVED  # imports packages that a server lacks
    from sbkit.config.hparams import read_knobs

    file = model / RESOLVED
    return str(read_knobs(file, {}).get("language", "und")) if file.is_file() else "und"
