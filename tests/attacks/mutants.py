"""Healthy files of every kind with a few things changed at random; checksums follow them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import write_checksums
from sbkit.evaluate.utterances import hash_references, read_utterances
from tests.attacks.case import Case, Place
from tests.attacks.decoders import GOOD, with_models
from tests.attacks.mutate import (
    Mutate,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_text,
    mutating,
)
from tests.inference.bundles import edit_config, edit_tokenizer

OF_BUNDLES = (
    ("config.json", mutate_json, 90),
    ("config.json", mutate_bytes, 20),
    ("tokenizer.model", mutate_bytes, 60),
    ("model.safetensors", mutate_bytes, 40),
    ("lm.safetensors", mutate_bytes, 60),
    ("checksums.json", mutate_json, 12),
)
OF_RUNS = (
    ("hyperparams.yaml", mutate_text, 60),
    ("decoder.json", mutate_json, 20),
    ("confidence.json", mutate_json, 16),
    ("tokenizer.model", mutate_bytes, 14),
    ("lm.safetensors", mutate_bytes, 14),
    ("CKPT.yaml", mutate_text, 24),
    ("model.ckpt", mutate_bytes, 40),
)
OF_TRAINED = (
    ("brain.ckpt", mutate_json, 24),
    ("epochs.ckpt", mutate_bytes, 5),
    ("optimizer.ckpt", mutate_bytes, 20),
    ("CKPT.yaml", mutate_text, 12),
    ("declaration.json", mutate_json, 20),
    ("train_log.jsonl", mutate_lines, 16),
    ("decoder.json", mutate_json, 10),
    ("checkpoints/averaged.json", mutate_json, 8),
)
OF_RESULTS = (
    ("summary.json", mutate_json, 40),
    ("utterances_test.jsonl", mutate_lines, 40),
    ("report.html", mutate_text, 12),
    ("train_log.jsonl", mutate_lines, 40),
    ("data_report.json", mutate_json, 60),
)
DECODER = b'{"beam_size": 4, "weights": {"word": 0.5, "token": 0.3}, "kind": "beam", "CER": 0.5}'
CONFIDENCE = b'{"greedy": {"weights": {"bias": 0.5, "entropy": -3.0}}, "beam": {"weights": null}}'


def all_mutants() -> Iterator[Case]:
    """List healthy files of every kind with a few things changed."""
    for group, table, prepare in (
        ("mutant bundle", OF_BUNDLES, _bundle),
        ("mutant run", OF_RUNS, _run),
        ("mutant resume", OF_TRAINED, _trained),
        ("mutant results", OF_RESULTS, _results),
    ):
        for name, mutate, count in table:
            for seed in range(count):
                spoil = partial(prepare, name, mutate, seed)
                called = f"{name}, {mutate.__name__} {seed}"
                yield Case(group, called, spoil, harmless=True)


def _bundle(name: str, mutate: Mutate, seed: int, place: Place) -> list[str]:
    if name == "lm.safetensors" or seed % 3 == 0:
        with_models(place.bundle)
        edit_config(
            place.bundle, lambda config: config.update(decoder=GOOD, confidence=None, labels=None)
        )
    mutating(mutate, seed)(place.bundle / name)
    if name == "tokenizer.model":
        edit_tokenizer(place.bundle, (place.bundle / name).read_bytes())
    elif name != "checksums.json":
        write_checksums(place.bundle)
    return [*place.transcribe(), "--format", ("json", "text", "srt")[seed % 3]]


def _run(name: str, mutate: Mutate, seed: int, place: Place) -> list[str]:
    with_models(place.run)
    (place.run / "decoder.json").write_bytes(DECODER)
    (place.run / "confidence.json").write_bytes(CONFIDENCE)
    _mutate_within(place.run, name, mutate, seed)
    return place.export()


def _trained(name: str, mutate: Mutate, seed: int, place: Place) -> list[str]:
    _mutate_within(place.trained, name, mutate, seed)
    return ["resume", str(place.folder)]


def _mutate_within(run: Path, name: str, mutate: Mutate, seed: int) -> None:
    file = run / name
    if not file.exists():
        (checkpoint,) = (run / "checkpoints").glob("CKPT*")
        file = checkpoint / name
    mutating(mutate, seed)(file)
    if file.parent.name.startswith("CKPT"):
        write_checksums(file.parent)


def _results(name: str, mutate: Mutate, seed: int, place: Place) -> list[str]:
    """Compare a changed run with itself, so that both have the same references."""
    run = place.trained
    mutating(mutate, seed)(run / name)
    if name.startswith("utterances"):
        with suppress(SbkitError):
            changed = hash_references(read_utterances(run / name))
            figures = json.loads((run / "summary.json").read_text())
            figures["test"]["test"]["references"] = changed
            (run / "summary.json").write_text(json.dumps(figures))
    page = ["--html", str(place.folder / "page.html")] if seed % 4 else []
    return ["compare", str(run), str(run), *page]
