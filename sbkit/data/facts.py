"""Facts about rows, cached in files of their corpus: token counts, normalized texts, pitch.

rows, inputs -> digest -> CORPUS/facts/NAME-DIGEST, which one process makes
"""

import atexit
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar

from datasets import Dataset

from sbkit.base.code_versions import versions_of_code
from sbkit.base.files import fsync_path, remove, temporary_path, to_json
from sbkit.data.cache import CORPUS_FILE, ENCODING
from sbkit.data.units import digest_of

FACTS_FOLDER = "facts"

Fact = TypeVar("Fact")

logger = logging.getLogger(__name__)


def cached_fact(
    rows: Dataset,
    name: str,
    made_from: Mapping[str, object],
    write: Callable[[Path], None],
    read: Callable[[Path], Fact],
) -> Fact:
    """Return the fact that an earlier call has cached for these rows and inputs, or write it.

    It lies in the corpus; if that is read-only, in the cache.

    name: of the fact; `CODE_VERSIONS` has the version of the code that makes it.
    made_from: plain data that names all inputs but the rows and our code.
    write: writes the file, whose path it is given.
    read: reads it; raises OSError or ValueError if it is damaged.
    """
    fact = _find_fact(rows, name, made_from, read)
    if fact is not None:
        return fact
    for file in _places_of(rows, name, made_from):
        temporary = temporary_path(file)
        try:
            if file.parent == _process_folder():
                atexit.register(remove, file.parent)
            file.parent.mkdir(exist_ok=True)
            write(temporary)
            fsync_path(temporary)
            return read(temporary.replace(file))
        except OSError as error:  # a corpus may be read-only, or its disk full
            failure = error
            logger.info(f"note: {file} cannot be cached, because {error}")
        finally:
            with suppress(OSError):  # a read-only disk refuses to remove even what is not there
                remove(temporary)
    raise failure


def _find_fact(
    rows: Dataset, name: str, made_from: Mapping[str, object], read: Callable[[Path], Fact]
) -> Fact | None:
    """Return the fact that `cached_fact` has written; None if there is none or it is damaged."""
    for file in _places_of(rows, name, made_from):
        with suppress(OSError, ValueError, EOFError):
            return read(file)
    return None


def _places_of(rows: Dataset, name: str, made_from: Mapping[str, object]) -> list[Path]:
    inputs = {"rows": rows._fingerprint, **made_from, "code": versions_of_code(name)}
    file_name = f"{name}-{digest_of(inputs)}"
    return [folder / file_name for folder in (*_folders_of(rows), _process_folder())]


def measure_once(
    rows: Dataset, name: str, made_from: Mapping[str, object], measure: Callable[[], Any]
) -> Any:
    """Return plain data about rows that an earlier call has cached, or measure it."""

    def write(file: Path) -> None:
        file.write_text(to_json(measure()), encoding="utf-8")

    return cached_fact(rows, name, made_from, write, read_json)


def read_json(file: Path) -> Any:
    """Read a fact of plain data."""
    return json.loads(file.read_text(encoding="utf-8"))


def _folders_of(rows: Dataset) -> list[Path]:
    """Return the folders for facts: of a prepared corpus that the YAML names, and in the cache."""
    files = rows.cache_files
    if not files:  # rows in memory
        return []
    folder = Path(files[0]["filename"]).parent
    places = [folder]
    with suppress(OSError, ValueError, LookupError):
        record = json.loads((folder / CORPUS_FILE).read_text(**ENCODING))
        named = record["made_from"]["source"]["data_folder"]
        if isinstance(named, str) and (Path(named) / CORPUS_FILE).is_file():
            places = [Path(named), folder]
    return [place / FACTS_FOLDER for place in places]


def _process_folder() -> Path:
    """Return the folder for facts that can be cached nowhere else; it is removed at the end."""
    return Path(gettempdir()) / f"sbkit-facts-{os.getpid()}"
