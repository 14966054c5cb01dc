"""Kaldi's and WeNet's data folders: ``wav.scp``, ``text`` and, where it is, ``utt2spk``.

Each file has lines "KEY VALUE". A command in ``wav.scp`` is refused, never run.
"""

from collections.abc import Iterator
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.data.corpora.clips import Clip
from sbkit.data.corpora.manifest import BadRow

LARGEST = 1 << 31  # bytes
COLUMNS = {"utt2spk": "speaker", "utt2lang": "language", "utt2gender": "gender"}


def is_kaldi(source: Path) -> bool:
    """Return whether a source is a data folder of Kaldi's form."""
    return (source / "wav.scp").is_file()


def read_kaldi(folder: Path, language: str, *, transcripts: bool = True) -> Iterator[Clip | BadRow]:
    """Read a data folder in the order of its ``wav.scp``; paths are relative to the folder.

    Its clips have the column ``language``, which is that of what is spoken without ``utt2lang``.

    Raises:
        SbkitError: ``wav.scp`` holds a command, there are ``segments``, or ``text`` is missing.
    """
    if (folder / "segments").is_file():
        raise SbkitError(
            f"Each recording of {folder} must be one utterance, but the file segments cuts them. "
            "Cut the recordings into files first (in Kaldi: extract-segments)."
        )
    audio = _read_pairs(folder / "wav.scp")
    _check_no_commands(folder / "wav.scp", audio)
    sentences = dict(_read_pairs(folder / "text")) if transcripts else {}
    columns = {
        name: dict(_read_pairs(folder / file))
        for file, name in COLUMNS.items()
        if (folder / file).is_file()
    }
    if (folder / "spk2gender").is_file():
        of_speaker = dict(_read_pairs(folder / "spk2gender"))
        speakers = columns.get("speaker", {})
        columns.setdefault("gender", {u: of_speaker.get(s, "") for u, s in speakers.items()})
    for number, (utterance, name) in enumerate(audio, start=1):
        where = f"wav.scp line {number}"
        if not name:
            yield BadRow(where, "no path", f"{utterance or 'the line'} has no path")
        elif sentences and utterance not in sentences:
            yield BadRow(where, "no transcript", f"text has no line for {utterance}")
        else:
            kept = {column: values.get(utterance, "") for column, values in columns.items()}
            kept.setdefault("language", language)
            yield Clip(utterance, folder / name, sentences.get(utterance, ""), kept)
    for utterance in sorted(sentences.keys() - {key for key, _ in audio}):
        yield BadRow(utterance, "no audio file", "text has a line for it, wav.scp has none")


def _read_pairs(file: Path) -> list[tuple[str, str]]:
    what = f"The file {file.name} of a data folder of Kaldi"
    lines = read_text(file, largest=LARGEST, what=what)
    split = (line.strip().split(maxsplit=1) for line in lines)
    return [(parts[0] if parts else "", parts[1] if len(parts) > 1 else "") for parts in split]


def _check_no_commands(file: Path, audio: list[tuple[str, str]]) -> None:
    for number, (_, name) in enumerate(audio, start=1):
        if name.endswith("|") or name.startswith("|"):
            raise SbkitError(
                f"{file} must name audio files, but line {number} is a command ({name[:60]}), and "
                "sbkit runs none. Write its audio to files and name those."
            )
