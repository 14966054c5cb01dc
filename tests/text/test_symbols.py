"""Phonemes come from the voice of espeak-ng that speaks the language."""

import os
from pathlib import Path

import pytest

from sbkit.text.symbols import ESPEAK, read_texts


@pytest.mark.parametrize(
    ("language", "voice"), [("pt_BR", "pt-br"), ("pt", "pt-br"), ("de-AT", "de-at"), ("sv", "sv")]
)
def test_language_tag_chooses_voice(
    language: str, voice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ESPEAK).write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / ESPEAK).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (command,) = read_texts(["hej"], language, "phonemes")
    assert f"-v {voice} " in command
