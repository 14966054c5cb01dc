"""Cache facts about rows in files of their corpus: token counts, normalized texts, pitch.

rows, inputs -> digest -> CORPUS/facts/NAME-DIGEST
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

from sbkit.base.files import fsync_path, remove, temporary_path, to_json
from sbkit.base.versions import data_versions
from sbkit.data.cache import CORPUS_FILE, ENCODING
from sbkit.data.work_units import short_digest

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

    Its file is in the corpus; if that is read-only, in the cache.

    name: of the fact.
    made_from: plain data that names all inputs except the rows, and the version of the code that
        computes the fact.
    write: writes the fact to a path.
    read: reads the fact from a path; raises OSError or ValueError if the file is damaged.
    """
    fact = _find_fact(rows, name, made_from, read)
    if fact is not None:
        return fact
    for file in _candidate_files(rows, name, made_from):
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
            with suppress(OSError):  # a read-only disk refuses to remove even a missing file
                remove(temporary)
    raise failure


def _find_fact(
    rows: Dataset, name: str, made_from: Mapping[str, object], read: Callable[[Path], Fact]
) -> Fact | None:
    """Return the fact that `cached_fact` has written; None if it is missing or damaged."""
    for file in _candidate_files(rows, name, made_from):
        with suppress(OSError, ValueError, EOFError):
            return read(file)
    return None


def fingerprint_of(rows: Dataset) -> str:
    """Return the hash of rows and of all operations on them, which `datasets` keeps private."""
    fingerprint: str = rows._fingerprint
    return fingerprint


def _candidate_files(rows: Dataset, name: str, made_from: Mapping[str, object]) -> list[Path]:
    """Return the paths where a fact may be stored, the preferred one first."""
    inputs = {"rows": fingerprint_of(rows), **made_from, **data_versions()}
    file_name = f"{name}-{short_digest(inputs)}"
    return [folder / file_name for folder in (*_folders_of(rows), _process_folder())]


def measure_once(
    rows: Dataset, name: str, made_from: Mapping[str, object], measure: Callable[[], Any]
) -> Any:
    """Return plain data about rows that an earlier call has cached, or measure it."""

    def write(file: Path) -> None:
        file.write_text(to_json(measure()), encoding="utf-8")

    return cached_fact(rows, name, made_from, write, read_json_fact)


def read_json_fact(file: Path) -> Any:
    """Read a fact of plain data."""
    return json.loads(file.read_text(encoding="utf-8"))


def _folders_of(rows: Dataset) -> list[Path]:
    """Return the folders for facts: in a prepared corpus that the YAML names, and in the cache."""
    files = rows.cache_files
    if not files:  # rows in memory
        return []
    cache_folder = Path(files[0]["filename"]).parent
    corpus_folders = [cache_folder]
    with suppress(OSError, ValueError, LookupError):
        record = json.loads((cache_folder / CORPUS_FILE).read_text(**ENCODING))
        source = record["made_from"]["source"]["data_folder"]
        if isinstance(source, str) and (Path(source) / CORPUS_FILE).is_file():
            corpus_folders = [Path(source), cache_folder]
    return [folder / FACTS_FOLDER for folder in corpus_folders]


def _process_folder() -> Path:
    """Return a folder for facts that cannot be cached; it is removed when the process ends."""
    return Path(gettempdir()) / f"sbkit-facts-{os.getpid()}"
