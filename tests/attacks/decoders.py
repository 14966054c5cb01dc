"""Hostile decoders: of bundles, `config.json` and `lm.safetensors`, and of runs to be exported."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from sbkit.checkpoint.integrity import write_checksums
from sbkit.decoding.language_models import LanguageModelSpec, ensure_language_models
from sbkit.text.tokenizer import Tokenizer
from tests.attacks.bundles import KINDS
from tests.attacks.case import Case, Place
from tests.inference.bundles import edit_config

TEXTS = ["hello there", "a quick brown fox", "the fox there"]
GOOD: dict[str, Any] = {"beam_size": 4, "weights": {"word": 0.5, "token": 0.3}}
DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]


def all_decoders() -> Iterator[Case]:
    """List every attack by way of a decoder."""
    for name, described in DESCRIBED.items():
        yield _case(name, partial(_with_decoder, described, None))
    for name, spoil in MODELS.items():
        yield _case(name, partial(_with_decoder, GOOD, spoil), harmless=name in HARMLESS)
    for name, kind in KINDS.items():
        yield _case(f"lm.safetensors {name}", partial(_with_kind, kind))
    for content in (b"[]", b"{}", b'"beam_size"', b"[" * 50_000, b"\xff", b'{"weights": NaN}'):
        prepare = partial(_export, content, "decoder.json")
        yield Case("decoder of a run", f"{content[:20]!r}", prepare, harmless=content == b"{}")
    huge = b'{"beam_size": 1e999, "weights": {}}'
    yield Case("decoder of a run", "huge", partial(_export, huge, "decoder.json"))
    yield Case("decoder of a run", "a pipe", _export_pipe)
    yield from _confidences()


def _confidences() -> Iterator[Case]:
    """List every attack by way of a confidence, of a bundle and of a run."""
    for name, described in CONFIDENCES.items():
        prepare = partial(_with_confidence, described)
        yield Case("bundle confidence", name, prepare, harmless=name in HARMLESS)
        content = json.dumps(described).encode()
        export = partial(_export, content, "confidence.json")
        yield Case("confidence of a run", name, export, harmless=name in HARMLESS)
    for content in (b"[" * 50_000, b"\xff", b'{"greedy": {"weights": {"bias": 1e999}}}'):
        export = partial(_export, content, "confidence.json")
        yield Case("confidence of a run", f"{content[:20]!r}", export)


def _with_confidence(described: Any, place: Place) -> list[str]:
    edit_config(place.bundle, lambda config: config.update(confidence=described))
    return [*place.transcribe(), "--format", "json"]


def _case(name: str, spoil: Callable[[Place], None], *, harmless: bool = False) -> Case:
    def prepare(place: Place) -> list[str]:
        spoil(place)
        return place.transcribe()

    return Case("bundle decoder", name, prepare, harmless=harmless)


def with_models(folder: Path) -> Path:
    """Train real language models of the bundle's tokenizer."""
    file = folder / "lm.safetensors"
    ensure_language_models(
        file,
        LanguageModelSpec(source="these", word_order=2, token_order=3),
        texts=lambda: TEXTS,
        tokenizer=Tokenizer(model_file=folder / "tokenizer.model"),
    )
    return file


def _with_decoder(described: Any, spoil: Callable[[Path], Any] | None, place: Place) -> None:
    file = with_models(place.bundle)
    if spoil is not None:
        spoil(file)
    edit_config(place.bundle, lambda config: config.update(decoder=described))
    write_checksums(place.bundle)


def _with_kind(kind: Callable[[Path], None], place: Place) -> None:
    _with_decoder(GOOD, None, place)
    kind(place.bundle / "lm.safetensors")


def _export(content: bytes, name: str, place: Place) -> list[str]:
    with_models(place.run)
    (place.run / name).write_bytes(content)
    return place.export()


def _export_pipe(place: Place) -> list[str]:
    os.mkfifo(place.run / "decoder.json")
    return place.export()


DESCRIBED: dict[str, Any] = {
    "a list": [GOOD],
    "a text": "beam",
    "no weights": {"beam_size": 4},
    "no beam": {"weights": {}},
    "a beam of nothing": {**GOOD, "beam_size": 0},
    "a beam below nothing": {**GOOD, "beam_size": -3},
    "a beam of a billion": {**GOOD, "beam_size": 10**9},
    "a beam that is true": {**GOOD, "beam_size": True},
    "a beam of text": {**GOOD, "beam_size": "4"},
    "weights that are a list": {**GOOD, "weights": [1.0]},
    "a weight of text": {**GOOD, "weights": {"word": "0.5"}},
    "a weight beyond numbers": {**GOOD, "weights": {"word": 1e300}},
    "a weight of another name": {**GOOD, "weights": {"__class__": 1.0}},
    "deep": {**GOOD, "weights": DEEP},
}


def _changed(file: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    _rewritten(file, lambda arrays, about: arrays.update({name: array}))


def _about(file: Path, **changes: str) -> None:
    _rewritten(file, lambda arrays, about: about.update(changes))


def _rewritten(file: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    about: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    arrays = {name: each.copy() for name, each in safetensors.numpy.load(content).items()}
    change(arrays, about)
    file.write_bytes(safetensors.numpy.save(arrays, metadata=about))


def _words(*words: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"\n".join((b"<unk>", b"<s>", b"</s>", *words)), np.uint8).copy()


MODELS: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda file: None,
    "of another tokenizer": partial(_about, tokenizer="0" * 64),
    "of no tokenizer": partial(_about, tokenizer=""),
    "orders that are a list": partial(_about, orders="[1, 2]"),
    "orders of a billion": partial(_about, orders='{"words": 1000000000, "tokens": 3}'),
    "orders that are deep": partial(_about, orders="[" * 50_000),
    "keys beyond": lambda file: _changed(file, "words.keys_2", np.array([1 << 62])),
    "keys below": lambda file: _changed(file, "words.keys_2", np.array([-5])),
    "keys as floats": lambda file: _changed(file, "words.keys_2", np.zeros(3)),
    "keys of two axes": lambda file: _changed(file, "words.keys_2", np.zeros((2, 2), np.int64)),
    "NaN": lambda file: _changed(file, "words.log_probs_1", np.full(9, np.nan, np.float32)),
    "no words": lambda file: _changed(file, "words.words", np.zeros(0, np.uint8)),
    "words of one letter, twice": lambda file: _changed(file, "words.words", _words(b"a", b"a")),
    "words that are no text": lambda file: _changed(file, "words.words", _words(b"\xff\xfe")),
    "words of escapes": lambda file: _changed(file, "words.words", _words(b"\x1b[2J")),
    "one more array": lambda file: _changed(file, "more", np.zeros(3)),
    "a header without end": lambda file: file.write_bytes(b"\xff" * 7 + b"\x0f" + b"{" * 99),
    "a pickle": lambda file: file.write_bytes(b"cos\nsystem\n(S'touch x'\ntR."),
    "random": lambda file: file.write_bytes(os.urandom(5000)),
}
CONFIDENCES: dict[str, Any] = {
    "good": {"greedy": {"weights": {"bias": 0.5, "entropy": -3.0}}, "beam": {"weights": None}},
    "a list": [{"bias": 0.0}],
    "a text": "greedy",
    "of another decoder": {"__class__": {"weights": {"bias": 0.0}}},
    "without weights": {"greedy": {}},
    "that is a number": {"greedy": 0.5},
    "without a bias": {"greedy": {"weights": {"entropy": 1.0}}},
    "of another feature": {"greedy": {"weights": {"bias": 0.0, "format": 1.0}}},
    "of text": {"greedy": {"weights": {"bias": "0.0"}}},
    "that is true": {"greedy": {"weights": {"bias": True}}},
    "beyond numbers": {"greedy": {"weights": {"bias": 0.0, "entropy": 1e300}}},
    "whole and beyond numbers": {"greedy": {"weights": {"bias": 10**400}}},
    "no number": {"greedy": {"weights": {"bias": float("nan")}}},
    "that asks a language model": {"greedy": {"weights": {"bias": 0.0, "known": 1.0}}},
    "deep confidence": {"greedy": {"weights": {"bias": DEEP}}},
}
HARMLESS = ("as it is", "good")
