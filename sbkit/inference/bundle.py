"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json        the parts as plain data, and where they come from
    model.safetensors  the weights of the one ModuleList
    tokenizer.model    sentencepiece, where the model writes text
    lm.safetensors     the language models of its decoder, where it has any
    checksums.json     SHA-256 of the other files

Loading it is safe whoever made it: every file is read once, as a regular file, and what was hashed
is what is parsed; weights are safetensors; and only classes of `sbkit.config.allowed` are built,
within the memory that the weights account for. Checksums find accidents, they are no signature.
"""

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sbkit.audio.rate import require_rate
from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.checkpoint.integrity import CHECKSUMS, refuse_changed
from sbkit.checkpoint.weights import refuse_other_model, refuse_unusable
from sbkit.decoding.attention import attend
from sbkit.decoding.confidence import BEAM, GREEDY
from sbkit.decoding.decoder import LANGUAGE_MODELS, BeamDecoder
from sbkit.decoding.hotword_list import normalize_hotwords, read_hotwords
from sbkit.decoding.hypothesis import Hypothesis
from sbkit.decoding.language_models import load_language_models
from sbkit.decoding.scorer import LanguageModel
from sbkit.decoding.word_reader import WordReader
from sbkit.inference.budget import within_budget
from sbkit.inference.config import FEATURES, MODEL_CLASSES, BundleConfig, parse_config
from sbkit.inference.module_spec import LARGEST_NUMBER, build, refuse_unlisted
from sbkit.lm.storage import LARGEST_FILE as LARGEST_LANGUAGE_MODEL
from sbkit.models.decoding import greedy
from sbkit.text.normalize import normalize
from sbkit.text.tokenizer import LARGEST_MODEL, Tokenizer
from sbkit.text.vocabulary import Vocabulary
from sbkit.text.word import Word

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"
LARGEST = {  # bytes
    CONFIG: 1 << 22,
    CHECKSUMS: 1 << 16,
    TOKENIZER: LARGEST_MODEL,
    WEIGHTS: 1 << 36,
    LANGUAGE_MODELS: LARGEST_LANGUAGE_MODEL,
}


@dataclass(frozen=True)
class Recognized:
    """What is said in a clip, and its words in time where they were asked for."""

    text: str
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Bundle:
    """A model that is ready to be run.

    model: an AsrModel or an UtteranceClassifier, as config.model_class says; decoder: None where
    the best token of each frame is taken; lm: its language model of words, which whoever asks how
    sure a word is asks, too, also of a greedy decoder.
    """

    config: BundleConfig
    model: Any
    tokenizer: Tokenizer | None
    decoder: BeamDecoder | None = None
    lm: LanguageModel | None = None

    def transcribe(self, clips: list[Tensor]) -> list[str]:
        """Transcribe clips of int16 audio at the bundle's rate, (S,) each, as one batch."""
        return [each.text for each in self.recognize(clips)]

    @torch.inference_mode()
    def recognize(self, clips: list[Tensor], *, times: bool = False) -> list[Recognized]:
        """Transcribe clips as `transcribe` does; with ``times``, with their words in time, too."""
        tokenizer = self.require_asr()
        states, frames = self._encode(clips)
        log_probs = self.model.ctc_log_probs(states)
        beams: list[list[Hypothesis]] = [[] for _ in clips]
        if self.decoder is None:
            best = greedy(log_probs, frames, tokenizer.vocabulary.blank)
        else:
            attends = self.decoder.attention is not None
            attention = attend(self.model, states, frames) if attends else None
            beams = self.decoder.beams(log_probs, frames, attention)
            best = [list(beam[0].tokens) for beam in beams]
        texts = map(tokenizer.decode, best)
        if not times:
            return [Recognized(text, ()) for text in texts]
        rows = zip(clips, log_probs.numpy(), frames.tolist(), best, beams, strict=True)
        words = (
            self._reader.read(row[:count], ids, beam, samples=len(clip))
            for clip, row, count, ids, beam in rows
        )
        return [Recognized(*each) for each in zip(texts, words, strict=True)]

    @torch.inference_mode()
    def align(self, clips: list[Tensor], texts: Sequence[str]) -> list[tuple[Word, ...]]:
        """Time the words of normalized texts that are known, one for each clip.

        Raises:
            SbkitError: a text is longer than its clip can hold.
        """
        encode, reader = self.require_asr().encode, replace(self._reader, confidence=None)
        states, frames = self._encode(clips)
        rows = zip(clips, self.model.ctc_log_probs(states), frames.tolist(), texts, strict=True)
        return [
            reader.read(row[:count].numpy(), encode(text), samples=len(clip))
            for clip, row, count, text in rows
        ]

    def _encode(self, clips: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Encode clips of int16 audio: (S,) each -> (B, U, D), (B,)."""
        features, frames = self.model.features(*_as_batch(clips))
        states, frames = self.model.encode(features, frames)
        return states, frames

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        count: int = self.model.samples_per_frame(self.config.sample_rate)
        return count

    @cached_property
    def _reader(self) -> WordReader:
        """Make what aligns and judges the words of the bundle's decoder."""
        return WordReader(
            tokenizer=self.require_asr(),
            samples_per_frame=self.samples_per_frame,
            sample_rate=self.config.sample_rate,
            offsets=self.config.word_offsets,
            lm=self.lm,
            confidence=self.config.confidence.get(GREEDY if self.decoder is None else BEAM),
            unjudged=frozenset() if self.decoder is None else self.decoder.expected,
        )

    @torch.inference_mode()
    def classify(self, clips: list[Tensor]) -> Tensor:
        """Compute the probability of every label: clips of int16 audio, (S,) each -> (B, V)."""
        labels = self.require_labels()
        probabilities: Tensor = self.model.log_probs(*_as_batch(clips)).exp()
        if probabilities.shape != (len(clips), len(labels)):
            raise SbkitError(
                f"A classifier must score its {len(labels)} labels, but gives a tensor of "
                f"{tuple(probabilities.shape)} for {len(clips)} clips. Export it again."
            )
        return probabilities

    def with_decoder(self, name: str | None) -> "Bundle":
        """Return the bundle with another decoder: greedy or beam; None for its own.

        Raises:
            SbkitError: it has no language models for a beam.
        """
        if name == "beam" and self.decoder is None:
            raise SbkitError(
                "`--decoder beam` must have the language models of a run, but this bundle has "
                "none. Export a run with them, or pass --decoder greedy."
            )
        return replace(self, decoder=None) if name == "greedy" else self

    def with_hotwords(self, named: str | None) -> "Bundle":
        """Return the bundle with phrases to expect: a file of them, or a list with commas.

        What the model's tokens cannot spell is named on standard error.

        Raises:
            SbkitError: there is no phrase that can be spelled, or no decoder that expects any.
        """
        if named is None:
            return self
        tokenizer = self.require_asr()
        if self.decoder is None:
            raise SbkitError(
                "`--hotwords` must have a decoder with language models, but this one is greedy. "
                "Export a run that has them, and do not pass --decoder greedy."
            )
        spell = partial(normalize, language=self.config.language or "und")
        found = normalize_hotwords(read_hotwords(named), normalize=spell, tokenizer=tokenizer)
        for phrase in found.refused:
            what = f"the hotword {printable(phrase)[:100]} is left out"
            print(f"{what}: the model has no tokens to spell it.", file=sys.stderr)
        if not found.phrases:
            raise SbkitError(
                "`--hotwords` must name phrases in the letters of the model's language, but "
                f"{printable(named)[:100]} has none. Correct the list."
            )
        return replace(self, decoder=self.decoder.with_hotwords(found.phrases))

    def require_asr(self) -> Tokenizer:
        """Return the tokenizer; raises SbkitError for a model that does not transcribe."""
        if not self.config.is_asr or self.tokenizer is None:
            raise SbkitError(
                "`sbkit transcribe` must have a bundle of a model that writes text, but this one "
                "tells labels apart. Use: sbkit classify BUNDLE FILE"
            )
        return self.tokenizer

    def require_labels(self) -> tuple[str, ...]:
        """Return the labels; raises SbkitError for a model that is no classifier."""
        if self.config.is_asr or self.config.labels is None:
            raise SbkitError(
                "`sbkit classify` must have a bundle of a classifier, but this one writes text. "
                "Use: sbkit transcribe BUNDLE FILE"
            )
        return self.config.labels


def load_bundle(folder: Path, *, own: frozenset[str] = frozenset()) -> Bundle:
    """Load a bundle for inference; ``own`` names modules of the user's that it may use.

    Raises SbkitError when a file is missing, damaged, of another model, or not what it should be.
    """
    _require_folder(folder)
    contents = {CONFIG: _read(folder, CONFIG)}
    config = parse_config(contents[CONFIG], of=str(folder / CONFIG))
    contents[WEIGHTS] = _read(folder, WEIGHTS)
    if config.tokenizer is not None:
        contents[TOKENIZER] = _read(folder, TOKENIZER)
    if config.decoder is not None:
        contents[LANGUAGE_MODELS] = _read(folder, LANGUAGE_MODELS)
    refuse_changed(contents, _read(folder, CHECKSUMS), of=folder)
    tokenizer = _load_tokenizer(config, contents, folder)
    decoder = _load_decoder(config, tokenizer, contents, folder)
    lm = _words_of(config, decoder, folder)
    weights = _parse_weights(contents[WEIGHTS], folder / WEIGHTS)
    for part in config.parts.values():
        refuse_unlisted(part, own=own, imports=config.imports)
    vocabulary = None if tokenizer is None else tokenizer.vocabulary
    with within_budget(weights):
        model = build_model(config, vocabulary, own=own, largest=_largest(weights))
    modules: nn.ModuleList = model.model
    refuse_other_model(weights, modules.state_dict(), of=str(folder))
    names = {name for name, _ in modules.named_parameters()}
    refuse_unusable(weights, of=str(folder / WEIGHTS), parameters=names)
    _load_state(modules, weights, folder)
    return Bundle(config, model, tokenizer, decoder, lm)


def build_model(
    config: BundleConfig,
    vocabulary: Vocabulary | None,
    *,
    own: frozenset[str] = frozenset(),
    largest: int = LARGEST_NUMBER,
) -> Any:
    """Build the parts that a config describes, with fresh weights, for inference.

    The parts go to the model's class by their names, with what else it asks for.
    """
    made = model_class(config.model_class)
    parts = {name: build(each, own=own, largest=largest) for name, each in config.parts.items()}
    strange = [name for name, part in parts.items() if not isinstance(part, nn.Module)]
    if strange:
        raise SbkitError(
            f"Every part must be a torch.nn.Module, but `{printable(strange[0])}` is a "
            f"{type(parts[strange[0]]).__name__}. Export it again."
        )
    model = nn.ModuleList(parts[name] for name in config.model).eval()
    require_rate(parts[FEATURES].eval(), config.sample_rate)
    more = {"vocabulary": vocabulary, "classes": len(config.labels or ())}
    wanted = inspect.signature(made).parameters
    more = {name: value for name, value in more.items() if name in wanted}
    try:
        return made(model=model, **parts, **more)
    except SbkitError:
        raise
    except Exception as error:  # parts of others, which fit no other part
        raise SbkitError(
            f"The parts must fit {config.model_class}, but it raised {type(error).__name__} "
            f"({printable(str(error))[:200]}). Export it again."
        ) from error


def model_class(name: str) -> Any:
    """Import one of MODEL_CLASSES; raises SbkitError when this version of sbkit has no such."""
    home, _, last = name.rpartition(".")
    if name not in MODEL_CLASSES or find_spec(home) is None:
        raise SbkitError(
            f"A bundle's model must be one that this sbkit has, but {printable(name)} is not "
            "here. Install a newer sbkit."
        )
    return getattr(import_module(home), last)


def _require_folder(folder: Path) -> None:
    there = (folder / CONFIG).is_symlink() or (folder / CONFIG).exists()
    if not folder.is_dir() or not there:
        raise SbkitError(
            f"A bundle must be a folder with {CONFIG} and {CHECKSUMS}, but {folder} is none. Make "
            "one of a run: sbkit export RUN --out BUNDLE"
        )


def _read(folder: Path, name: str) -> bytes:
    return read_regular(folder / name, largest=LARGEST[name], what=f"A bundle's {name}")


def _load_tokenizer(
    config: BundleConfig, contents: Mapping[str, bytes], folder: Path
) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    if hashlib.sha256(contents[TOKENIZER]).hexdigest() != config.tokenizer:
        raise SbkitError(
            f"{folder / TOKENIZER} must be the one that the model was trained with, but its "
            f"SHA-256 is not the one in {CONFIG}. Export it again."
        )
    return Tokenizer(model_file=folder / TOKENIZER, content=contents[TOKENIZER])


def _load_decoder(
    config: BundleConfig,
    tokenizer: Tokenizer | None,
    contents: Mapping[str, bytes],
    folder: Path,
) -> BeamDecoder | None:
    if config.decoder is None or tokenizer is None:
        return None
    file = folder / LANGUAGE_MODELS
    return BeamDecoder(
        tokenizer=tokenizer,
        language_models=load_language_models(file, tokenizer, contents[LANGUAGE_MODELS]),
        beam_size=config.decoder["beam_size"],
        weights=config.decoder["weights"],
        attention=config.decoder.get("attention"),
    )


def _words_of(
    config: BundleConfig, decoder: BeamDecoder | None, folder: Path
) -> LanguageModel | None:
    """Return the language model of words; refuse confidences that ask for one without it."""
    words = None if decoder is None else decoder.language_models.words
    if words is None and any(each.needs_language_model for each in config.confidence.values()):
        raise SbkitError(
            f"`confidence` in {folder / CONFIG} must be of what the bundle has, but asks for a "
            "language model of words, which is not there. Export it again."
        )
    return words


def _parse_weights(content: bytes, file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise SbkitError(
            f"{file} must be a safetensors file, but cannot be read "
            f"({printable(str(error))[:200]}). Export it again."
        ) from error


def _largest(weights: Mapping[str, Tensor]) -> int:
    return max((size for each in weights.values() for size in each.shape), default=0)


def _load_state(modules: nn.ModuleList, weights: Mapping[str, Tensor], folder: Path) -> None:
    try:
        modules.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise SbkitError(
            f"The weights in {folder} must be those of its model, but do not go into it "
            f"({printable(str(error))[:200]}). Export it again."
        ) from error


def _as_batch(clips: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad clips to one length, in the scale of int16: (S,) each -> (B, S), (B,)."""
    audio = nn.utils.rnn.pad_sequence([clip.float() for clip in clips], batch_first=True)
    return audio, torch.tensor([len(clip) for clip in clips])
