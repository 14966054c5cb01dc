"""The corpus of a folder with the layout of LibriSpeech: audio files, and transcripts by chapter.

<data_folder>[/LibriSpeech]/SPLIT/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NNNN.flac
                                                  SPEAKER-CHAPTER.trans.txt    lines "ID WORDS"
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sbkit.audio.io import SUFFIXES
from sbkit.base.files import read_text_lines
from sbkit.data.cache import unpack_corpus
from sbkit.data.corpus import Corpus, SettingValues, named_folder, splits_by_prefix
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.text.languages import single_language_tag

GENDERS = {"F": "female", "M": "male"}  # as SPEAKERS.TXT writes them


class LibriSpeech(Corpus):
    """A folder with the layout of LibriSpeech."""

    layout = "a folder with the layout of LibriSpeech"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder, or ``LibriSpeech/`` in it, has splits of this layout."""
        folder = named_folder(settings)
        return folder is not None and bool(_split_names(_root(folder)))

    def splits(self) -> Mapping[str, Sequence[str]]:
        return splits_by_prefix(self.available())

    def available(self) -> list[str]:
        return _split_names(_root(unpack_corpus(self.settings["data_folder"])))

    def read(self, split: str) -> Iterator[Manifest]:
        """Read one split, with the columns speaker, chapter, language and, if known, gender."""
        root = _root(unpack_corpus(self.settings["data_folder"]))
        language = single_language_tag(self.settings["language"])
        return Manifest.of(_read_split(root, split, language), root).blocks()


def _root(folder: Path) -> Path:
    return folder / "LibriSpeech" if (folder / "LibriSpeech").is_dir() else folder


def _split_names(root: Path) -> list[str]:  # of folders with transcripts
    if not root.is_dir():
        return []
    # The folder of all clips of Common Voice takes seconds to list.
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and entry.name != "clips")
    return [folder.name for folder in folders if any(folder.glob("*/*/*.trans.txt"))]


def _read_genders(file: Path) -> dict[str, str]:
    """Read lines ``ID | SEX | SUBSET | MINUTES | NAME``; comments start with a semicolon."""
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [line.split("|") for line in lines if "|" in line and not line.startswith(";")]
    return {row[0].strip(): GENDERS.get(row[1].strip(), "") for row in rows}


def _read_split(root: Path, split: str, language: str) -> Iterator[Clip | Excluded]:
    folder = root / split
    genders = _read_genders(root / "SPEAKERS.TXT")
    for chapter in sorted(folder.glob("*/*/")):
        speaker = chapter.parent.name
        columns = {"speaker": speaker, "chapter": chapter.name, "language": language}
        if genders:
            columns["gender"] = genders.get(speaker, "")
        yield from _read_chapter(chapter, columns)


def _read_chapter(chapter: Path, columns: Mapping[str, str]) -> Iterator[Clip | Excluded]:
    """Pair lines of the transcripts with audio files; exclude what has no partner."""
    audio: dict[str, Path] = {}
    for file in sorted(chapter.iterdir()):
        if file.suffix.lower() in SUFFIXES and audio.setdefault(file.stem, file) != file:
            detail = f"{audio[file.stem].name} has the same id"
            yield Excluded(file.name, "second audio file of an id", detail)
    for file in sorted(chapter.glob("*.trans.txt")):
        lines = read_text_lines(file, subject="A file of transcripts")
        for line in filter(str.strip, lines):
            id, _, words = line.strip().partition(" ")
            path = audio.pop(id, None)
            if path is None:
                yield Excluded(id, "no audio file", f"there is no {id}.flac beside {file.name}")
            elif not words.strip():
                yield Excluded(id, "no transcript", f"{file.name} has no words of it")
            else:
                yield Clip(id, path, words.strip(), columns)
    for file in audio.values():
        yield Excluded(file.name, "no transcript", f"no *.trans.txt beside {file} has its id")
