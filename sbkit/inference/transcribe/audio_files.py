"""The audio files that a command line names: files, folders, patterns, and standard input."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory

from sbkit.audio.io import SUFFIXES, audio_below
from sbkit.base.errors import SbkitError
from sbkit.base.files import naming

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class AudioFile:
    """A file to read, and the name that it was given by."""

    name: str
    path: Path


@contextmanager
def find_audio(arguments: Sequence[str]) -> Iterator[list[AudioFile]]:
    """List the files that arguments name, in their order; a folder's and a pattern's are sorted.

    Folders are searched to any depth for files with the suffix of an audio format. Standard input
    is written to a file first, which is removed in the end, since audio cannot be read from a pipe.
    Missing files are listed too; reading them raises the error.

    Raises:
        SbkitError: a folder or a pattern has no audio.
    """
    with ExitStack() as closing:
        spool = Path()
        if STANDARD_INPUT in arguments:
            spool = Path(closing.enter_context(TemporaryDirectory()), "audio")
            with naming(spool), spool.open("wb") as content:
                shutil.copyfileobj(sys.stdin.buffer, content)
        yield [
            each
            for argument in arguments
            for each in (
                [AudioFile(STANDARD_INPUT, spool)]
                if argument == STANDARD_INPUT
                else [AudioFile(str(path), path) for path in _find(argument)]
            )
        ]


def _find(argument: str) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        found = audio_below(path)
    elif has_magic(argument) and not path.exists():
        found = sorted(map(Path, glob(argument, recursive=True)))  # noqa: PTH207, that refuses **.wav
    else:
        return [path]
    if not found:
        raise SbkitError(
            f"FILE must be audio, a folder or a pattern with some, but {argument} has none "
            f"({', '.join(SUFFIXES[:6])} ...). Correct it."
        )
    return found
