"""Phonemes come from the voice of espeak-ng that speaks the language."""

import os
from pathlib import Path

import pytest

from sbkit.tasks.tts.symbols import ESPEAK, read_texts
from tests.processes import run_fresh


@pytest.fixture(autouse=True)
def espeak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an espeak-ng that prints its arguments and its input."""
    (tmp_path / ESPEAK).write_text('#!/bin/sh\necho "$* $(cat)"\n')
    (tmp_path / ESPEAK).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("language", "voice"), [("pt_BR", "pt-br"), ("pt", "pt-br"), ("de-AT", "de-at"), ("sv", "sv")]
)
def test_language_tag_chooses_voice(language: str, voice: str) -> None:
    (command,) = read_texts(["hej"], language, "phonemes")
    assert f"-v {voice} " in command


def test_voice_reads_text_in_locale_without_utf8() -> None:
    code = (
        "from sbkit.tasks.tts.symbols import *; print(read_texts(['ol\\u00e1'], 'pt', 'phonemes'))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": 0, "PYTHONCOERCECLOCALE": 0}
    process = run_fresh(code, PYTHONIOENCODING="utf-8", **locale)
    assert "olá" in process.stdout, process.stderr
