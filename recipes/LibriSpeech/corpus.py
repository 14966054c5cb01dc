"""The corpus of a folder laid out as LibriSpeech: audio files and their transcripts by chapter.

<data_folder>[/LibriSpeech]/SPLIT/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NNNN.flac
                                                  SPEAKER-CHAPTER.trans.txt    lines "ID WORDS"
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.audio.io import SUFFIXES
from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.data.cache import unpacked
from sbkit.data.corpus import resolve_splits
from sbkit.data.manifest import BadRow, Clip, Manifest, collect
from sbkit.text.languages import spoken_language

LARGEST = 1 << 28  # bytes of the transcripts of a chapter
CHAPTERS = ("*/", "*/*/**/")  # folders of a split at any depth; ** passes over links
PREFIXES = {"train": "train", "valid": "dev", "test": "test"}  # of the split names of each role
SEXES = {"F": "female", "M": "male"}  # as SPEAKERS.TXT writes them


def recognizes(folder: Path) -> bool:
    """Check whether a folder, or ``LibriSpeech/`` in it, has splits of this layout."""
    return bool(_split_names(_root(folder)))


def splits(knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: of the knob ``splits``, else train-*, dev-* and test-*.

    Raises:
        SbkitError: ``data_folder`` has no split of this layout, or not the one named.
    """
    there = _split_names(_find(knobs))
    own = {
        role: [split for split in there if split.startswith(prefix)]
        for role, prefix in PREFIXES.items()
    }
    return resolve_splits(knobs.get("splits"), own, there)


def read(knobs: Mapping[str, Any], split: str) -> Manifest:
    """Read one split, with the columns speaker, chapter, language and, where it is known, gender.

    Raises:
        SbkitError: the folder is not of this layout, or a transcript is not UTF-8.
    """
    root = _find(knobs)
    language = spoken_language(knobs["language"])
    rows = _read_split(root / split, language, _read_genders(root / "SPEAKERS.TXT"))
    manifest = collect(rows, root)
    if not manifest.clips:
        raise SbkitError(
            f"The split {split} must have clips and transcripts as SPEAKER/CHAPTER/*.trans.txt, "
            f"but none of those in {root / split} can be used. Choose another split."
        )
    return manifest


def _find(knobs: Mapping[str, Any]) -> Path:
    folder = unpacked(Path(knobs["data_folder"]).expanduser().absolute())
    if not recognizes(folder):
        raise SbkitError(
            "data_folder must have splits as LibriSpeech has them (train-clean-100/SPEAKER/CHAPTER/"
            f"*.trans.txt and .flac), but {folder} has none. Pass --data_folder=FOLDER that holds "
            "train-clean-100 and the other splits."
        )
    return _root(folder)


def _root(folder: Path) -> Path:
    return folder / "LibriSpeech" if (folder / "LibriSpeech").is_dir() else folder


def _split_names(root: Path) -> list[str]:
    """Return the names of the folders in the root that hold transcripts."""
    if not root.is_dir():
        return []
    folders = sorted(each for each in root.iterdir() if each.is_dir())
    return [
        each.name
        for each in folders
        if any(next(each.glob(f"{chapter}*.trans.txt"), None) for chapter in CHAPTERS)
    ]


def _read_genders(file: Path) -> dict[str, str]:
    """Read lines ``ID | SEX | SUBSET | MINUTES | NAME``; a semicolon begins a comment."""
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [line.split("|") for line in lines if "|" in line and not line.startswith(";")]
    return {row[0].strip(): SEXES.get(row[1].strip(), "") for row in rows}


def _read_split(folder: Path, language: str, genders: Mapping[str, str]) -> Iterator[Clip | BadRow]:
    for chapter in sorted(chain.from_iterable(map(folder.glob, CHAPTERS))):
        speaker = (chapter if chapter.parent == folder else chapter.parent).name
        columns = {"speaker": speaker, "chapter": chapter.name, "language": language}
        if genders:
            columns["gender"] = genders.get(speaker, "")
        yield from _read_chapter(chapter, columns)


def _read_chapter(chapter: Path, columns: Mapping[str, str]) -> Iterator[Clip | BadRow]:
    """Pair the lines of the transcripts with the audio files; name those without a partner."""
    audio = {
        file.stem: file for file in sorted(chapter.iterdir()) if file.suffix.lower() in SUFFIXES
    }
    named: set[str] = set()
    for file in sorted(chapter.glob("*.trans.txt")):
        lines = read_text(file, max_bytes=LARGEST, subject="A file of transcripts")
        for number, line in enumerate(lines, start=1):
            utterance, _, words = line.strip().partition(" ")
            where = f"{file.name} line {number}"
            named.add(utterance)
            if not utterance:
                yield BadRow(where, "empty line", "an id and its words are missing")
            elif not words.strip():
                yield BadRow(where, "no transcript", f"{utterance} has no words")
            elif utterance not in audio:
                detail = f"there is no {utterance}.flac beside {file.name}"
                yield BadRow(where, "no audio file", detail)
            else:
                yield Clip(utterance, audio[utterance], words.strip(), columns)
    for utterance in sorted(audio.keys() - named):
        detail = f"no line of {chapter.parent.name}/{chapter.name}/*.trans.txt has its id"
        yield BadRow(audio[utterance].name, "no transcript", detail)
