"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json        the parts as plain data, and where they come from
    model.safetensors  the weights of the one ModuleList
    tokenizer.model    the labels of its task, where it has any: of a recognizer, sentencepiece
    lm.safetensors     the language models of its decoder, where it has any
    MODULE.py          the source of parts of the user's, which only `--import MODULE` runs
    checksums.json     SHA-256 of the other files

Loading it is safe whoever made it: every file is read once, as a regular file, and what was hashed
is what is parsed; weights are safetensors; and only classes of `sbkit.bundle.allowed` are built.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import Samples, to_samples
from sbkit.base.checksums import CHECKSUMS, check_unchanged
from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, reading
from sbkit.base.machine import usable_cores
from sbkit.base.process import import_user_modules
from sbkit.bundle.config import BundleConfig, parse_config
from sbkit.bundle.protocols import Encoded
from sbkit.config.ranges import require_in_range
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.confidence import GREEDY, WordAligner
from sbkit.decoding.ctc_decoder import (
    CtcDecoder,
    DecoderInput,
    DecoderPool,
    Recognized,
)
from sbkit.decoding.decoder import KINDS, LANGUAGE_MODELS, BeamDecoder
from sbkit.decoding.hotwords import normalize_hotwords, read_hotwords
from sbkit.decoding.language_models import load_language_models
from sbkit.lm.ngram import NgramModel
from sbkit.tasks.task import Task, load_task
from sbkit.text.normalize import normalize
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.word import Word

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LARGEST = {True: 1 << 36, False: 1 << 25}  # bytes: of safetensors, and of other files


@dataclass(frozen=True)
class Bundle:
    """A model that is ready to run; torch is imported when the model is made, not here.

    task: what the model predicts; labels: what the task makes of its file of labels, such as a
    Tokenizer; model: None until one is made; decoder: None where the best token of each frame is
    taken; lm: its language model of words, which the confidences of words need with any decoder;
    refused_hotwords: what the model's tokens cannot spell.
    """

    config: BundleConfig
    task: Task
    labels: Any = None
    model: Any = None
    decoder: BeamDecoder | None = None
    lm: NgramModel | None = None
    refused_hotwords: tuple[str, ...] = ()

    def predict(self, clips: Sequence[Samples]) -> Any:
        """Return what the model predicts of clips, as of `to_samples`, in one batch."""
        return self.model.predict([*map(to_samples, clips)])

    def transcribe(self, clips: Sequence[Samples]) -> list[str]:
        """Transcribe clips at the bundle's rate, as of `to_samples`, in one batch."""
        return [each.text for each in self.recognize(clips)]

    def recognize(self, clips: Sequence[Samples], *, times: bool = False) -> list[Recognized]:
        """Transcribe clips as `transcribe` does; with ``times``, with their words in time, too."""
        pool, clips = self.decoder_pool, [*map(to_samples, clips)]
        pairs = zip(self.model.encode(clips), clips, strict=True)
        inputs = [self.decoder_input(each, samples=len(clip)) for each, clip in pairs]
        return pool.decode(inputs, times=times)

    def align(self, clips: Sequence[Samples], texts: Sequence[str]) -> list[tuple[Word, ...]]:
        """Time the words of normalized texts, one for each clip."""
        aligner = replace(self.decoder_pool.decoder.aligner, confidence=None)
        clips = [*map(to_samples, clips)]
        return [
            aligner.align(encoded.log_probs, self.tokenizer.encode(text), samples=len(clip))
            for clip, encoded, text in zip(clips, self.model.encode(clips), texts, strict=True)
        ]

    def decoder_input(self, encoded: Encoded, *, samples: int, begin: float = 0.0) -> DecoderInput:
        """Return the encoder's output of a clip as the decoder takes it."""
        return DecoderInput(
            log_probs=encoded.log_probs,
            samples=samples,
            begin=begin,
            attention=self._attention(encoded),
        )

    def _attention(self, encoded: Encoded) -> AttentionDecoder | None:
        """Return the attention decoder of a clip, where it takes part."""
        if self.decoder is None or self.decoder.attention is None:
            return None
        score = partial(self.model.decoder_log_probs, encoded.states)
        return AttentionDecoder(log_probs=score, eos=self.tokenizer.vocabulary.eos)

    @cached_property
    def decoder_pool(self) -> DecoderPool:
        """Make the decoder of the encoder's output, which times and judges words too."""
        aligner = WordAligner(
            tokenizer=self.tokenizer,
            samples_per_frame=self.model.samples_per_frame,
            sample_rate=self.config.sample_rate,
            offsets=self.config.word_offsets,
            lm=self.lm,
            confidence=self.config.confidence.get(
                GREEDY if self.decoder is None else self.decoder.kind
            ),
            unjudged=frozenset() if self.decoder is None else self.decoder.hotwords,
        )
        return DecoderPool(CtcDecoder.of(self.decoder, aligner), processes=usable_cores())

    def classify(self, clips: Sequence[Samples]) -> npt.NDArray[np.float32]:
        """Compute the probability of every label: clips, as of `to_samples` -> (B, V)."""
        self.task.require("classify")
        probabilities: npt.NDArray[np.float32] = self.model.probabilities([*map(to_samples, clips)])
        return probabilities

    def with_decoder(self, name: str | None) -> "Bundle":
        """Return the bundle with its own decoder (None), or without one (greedy).

        Raises SbkitError: another is asked for, whose weights were not chosen, or it cannot be run.
        """
        if name == GREEDY:
            return replace(self, decoder=None)
        kind = None if self.decoder is None else self.decoder.kind
        if name not in (None, kind):
            raise SbkitError(
                f"`--decoder {name}` must have language models and weights that were chosen for "
                f"it, but this model's are of {kind or 'none'}. Tune it first: sbkit tune RUN "
                f"--decoder {name}, or sbkit tune BUNDLE --decoder {name} --data dev.csv --out NEW"
            )
        if self.decoder is not None:
            self.decoder.check_graph()
        return self

    def with_hotwords(self, named: str | None) -> "Bundle":
        """Return the bundle with phrases to expect: a file of them, or a list with commas.

        What the model's tokens cannot spell is logged and named in ``refused_hotwords``.
        Raises SbkitError: no phrase can be spelled, or there is no decoder that expects any.
        """
        if named is None:
            return self
        if self.decoder is None:
            raise SbkitError(
                "`--hotwords` must have a decoder with language models, but this one is greedy. "
                "Export a run that has them, and do not pass --decoder greedy."
            )
        expecting = self.expecting(read_hotwords(named))
        for phrase in expecting.refused_hotwords:
            logger.warning(
                f"the hotword {phrase[:100]} is left out: the model has no tokens to spell it."
            )
        if expecting.decoder is None or not expecting.decoder.phrases:
            raise SbkitError(
                "`--hotwords` must name phrases in the letters of the model's language, but "
                f"{named[:100]} has none. Correct the list."
            )
        return expecting

    def expecting(self, texts: Iterable[str]) -> "Bundle":
        """Return the bundle with more phrases to expect, where its decoder can expect any."""
        if self.decoder is None:
            return self
        phrases, refused = self.spellable(texts)
        decoder = self.decoder.with_hotwords([*self.decoder.phrases, *phrases])
        return replace(self, decoder=decoder, refused_hotwords=refused)

    def spellable(self, texts: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Normalize phrases as transcripts; return them, and those that no tokens can spell."""
        return normalize_hotwords(texts, normalize=self.normalizer(), tokenizer=self.tokenizer)

    def normalizer(self) -> Callable[[str], str]:
        """Return what normalizes a text as the transcripts that the model was trained on."""
        language, table = self.config.language or "und", self.config.normalizer
        return partial(normalize, language=language, table=table)

    @property
    def blank(self) -> int:
        """Return the label of a frame without a token, or without speech."""
        return 0 if self.labels is None else int(self.tokenizer.vocabulary.blank)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises SbkitError for a model that does not transcribe."""
        self.task.require("transcribe")
        tokenizer: Tokenizer = self.labels
        return tokenizer


@dataclass(frozen=True)
class ReadBundle:
    """A bundle without its model, and the bytes of its weights where they were read, too."""

    bundle: Bundle
    weights: bytes


def read_bundle(
    folder: Path, *names: str, user_modules: frozenset[str] = frozenset()
) -> ReadBundle:
    """Read a bundle and WEIGHTS if named, each file once, and compare them with their checksums.

    ``user_modules`` are those that `--import` names, one of which may hold the task: they are
    imported from the bundle if they are not installed.
    Raises SbkitError when a file is missing or damaged, or the task is not here.
    """
    if not (folder / CONFIG).exists():
        raise SbkitError(
            f"A bundle must be a folder with {CONFIG} and {CHECKSUMS}, but {folder} is none. Make "
            "one of a run: sbkit export RUN --out BUNDLE"
        )
    import_user_modules(sorted(user_modules), folder)
    contents = {CONFIG: _read(folder, CONFIG)}
    config = parse_config(contents[CONFIG], of=folder / CONFIG)
    task = load_task(config.task, user_modules=user_modules)
    contents |= {name: _read(folder, name) for name in names}
    if task.labels is not None:
        contents[task.labels.name] = _read(folder, task.labels.name)
    for name in (f"{each}.py" for each in user_modules):
        if (folder / name).exists():
            contents[name] = _read(folder, name)
    if config.decoder is not None:
        contents[LANGUAGE_MODELS] = _read(folder, LANGUAGE_MODELS)
    check_unchanged(contents, _read(folder, CHECKSUMS), of=folder)
    labels: Any = None
    decoder, lm = None, None
    if task.labels is not None:
        labels = task.labels.read(folder / task.labels.name, contents[task.labels.name])
    if (chosen := config.decoder) is not None:
        file = folder / LANGUAGE_MODELS
        models = load_language_models(file, labels, contents[LANGUAGE_MODELS])
        with reading(folder / CONFIG, must="describe the decoder", fix="Export it again."):
            require_in_range({"beam_size": chosen["beam_size"]}, BeamDecoder.RANGES)
            decoder = BeamDecoder(
                tokenizer=labels,
                language_models=models,
                beam_size=chosen["beam_size"],
                weights=chosen["weights"],
                attention=chosen.get("attention"),
                kind=chosen.get("kind", KINDS[0]),
            )
        lm = models.words
    bundle = Bundle(config, task, labels, decoder=decoder, lm=lm)
    return ReadBundle(bundle, contents.get(WEIGHTS, b""))


def language_of(model: Path) -> str:
    """Return the language of a bundle or a run, whose normalizer made its transcripts.

    That of another folder is "und".
    """
    if (model / CONFIG).is_file():
        return parse_config(_read(model, CONFIG), of=model / CONFIG).language or "und"
    from sbkit.checkpoint.run_config import RESOLVED  # imports what a server lacks
    from sbkit.config.hparams import read_knobs

    file = model / RESOLVED
    return str(read_knobs(file, {}).get("language", "und")) if file.is_file() else "und"


def _read(folder: Path, name: str) -> bytes:
    largest = LARGEST[name.endswith(".safetensors")]
    return read_regular(folder / name, largest=largest, what=f"A bundle's {name}")
