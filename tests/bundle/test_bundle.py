"""Bundles are read as data: the checked bytes are parsed, and their settings are verified."""

import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.bundle import config as files
from sbkit.bundle.bundle import read_bundle
from sbkit.commands.cli import run
from sbkit.lm.ngram import UNKNOWN
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import train_models
from tests.runtime.bundles import edit_config


@pytest.fixture
def bundle(plain_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_bundle, tmp_path / "bundle"))


def test_recognizer_has_no_codes(plain_bundle: Path) -> None:
    with pytest.raises(SbkitError, match="Use: sbkit transcribe FOLDER"):
        run(["encode", str(plain_bundle), "talk.wav", "--out", "talk.codes"])


def test_normalizer_uses_the_table_of_the_checkpoint(bundle: Path) -> None:
    assert load_bundle(bundle).normalizer()("Café & Co") == "cafe and co"
    older = {"letters": "abcdefghijklmnopqrstuvwxyzé", "joiners": "'", "rewrite": {"&": " et "}}
    older |= {"spaces": True, "version": 1}
    edit_config(bundle, lambda config: config.update(normalizer=older))
    assert load_bundle(bundle).normalizer()("Café & Co") == "café et co"
    edit_config(bundle, lambda config: config["normalizer"].update(letters=0))
    with pytest.raises(SbkitError, match="what `sbkit export` writes, .* wrong type"):
        load_bundle(bundle)


def test_words_have_the_confidences_of_the_bundle(bundle: Path) -> None:
    """Also those of greedy decoding need the decoder's language model of words."""
    tokenizer = Tokenizer(model_file=bundle / "tokenizer.model")
    train_models(bundle / "lm.safetensors", tokenizer, ["hello there"])
    decoder = {"attention_rescoring": False, "weights": {}, "beam_size": 4}
    record = {"greedy": {"bias": 2.0, "posterior": 0.0, "length": 0.0, "lm": 0.01}}
    edit_config(bundle, lambda config: config.update(confidence=record, decoder=decoder))
    clip = np.random.default_rng(0).integers(-9000, 9000, 32_000, np.int16)
    greedy = load_bundle(bundle).with_decoder("greedy")
    (recognized,) = greedy.recognize([clip], times=True)
    assert recognized.text.split() == [word.text for word in recognized.words]
    word, lm = recognized.words[0], greedy.word_lm
    assert lm is not None and lm.id_of(word.text) == UNKNOWN
    log_prob = lm.advance(lm.start, UNKNOWN)[0] - 3 * len(word.text)
    assert word.confidence == pytest.approx(1 / (1 + np.exp(-2 - 0.01 * log_prob)), abs=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 8000}, "is made for 16000 Hz"),
        ({"format": 6}, "its format is 6, not 8"),
        ({"task": "os.system"}, "is not one of sbkit's.* --import os"),
        ({"task": "sbkit.tasks.gone.TASK"}, "TASK, cannot be imported: No module named .*gone"),
    ],
)
def test_impossible_setting_is_refused(bundle: Path, change: dict[str, Any], message: str) -> None:
    edit_config(bundle, lambda config: config.update(change))
    with pytest.raises(SbkitError, match=message):
        load_bundle(bundle)


def test_load_bundle_parses_and_runs_the_bytes_that_were_hashed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is swapped as soon as it has been read."""
    (bundle / "module_to_swap.py").write_text("is_verified = True")
    write_checksums(bundle)
    read = files.read_regular

    def swapping(path: Path, **more: Any) -> bytes:
        content = read(path, **more)
        path.write_bytes(b"other")
        return content

    monkeypatch.setattr(files, "read_regular", swapping)
    load_bundle(bundle, user_modules=frozenset(["module_to_swap"]))
    assert sys.modules["module_to_swap"].is_verified


def test_serve_imports_the_modules_of_every_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_all(options: Namespace) -> int:
        modules = options.user_modules
        return len([read_bundle(folder, user_modules=modules) for folder in options.bundles])

    monkeypatch.setattr("sbkit.commands.serve.serve", read_all)
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    (other / "served_heads.py").write_text("import served_layers")
    (other / "served_layers.py").write_text("")
    write_checksums(other)
    imported = [f"--import={name}" for name in ("served_heads", "served_layers")]
    assert run(["serve", str(bundle), str(other), *imported]) == 2
    (bundle / "served_layers.py").write_text("is_other = True")
    write_checksums(bundle)
    with pytest.raises(SbkitError, match=f"{bundle}/served_layers.py is another module"):
        run(["serve", str(bundle), str(other), *imported])
