"""Facts about rows, kept in files of their corpus: token counts, texts as normalized, pitch.

rows, inputs -> digest -> CORPUS/facts/NAME-DIGEST, which one process makes
"""

import atexit
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from datasets import Dataset

from sbkit.base.code_versions import code_state
from sbkit.base.files import fsync_path, remove, temporary_path, to_json
from sbkit.data.cache import CORPUS_FILE, ENCODING
from sbkit.data.units import digest_of

FACTS_FOLDER = "facts"

logger = logging.getLogger(__name__)


def keep_fact(
    rows: Dataset, name: str, made_from: Mapping[str, object], write: Callable[[Path], None]
) -> Path:
    """Return the file that an earlier call has written for these rows and inputs, or write it.

    It lies in the corpus; if that is read-only, in the cache.

    name: of what is kept; `CODE_VERSIONS` has the version of the code that makes it.
    made_from: plain data that names all inputs but the rows and our code.
    write: writes the file, whose path it is given.
    """
    if file := find_fact(rows, name, made_from):
        return file
    for file in _places_of(rows, name, made_from):
        temporary = temporary_path(file)
        try:
            if file.parent == _session_folder():
                atexit.register(remove, file.parent)
            file.parent.mkdir(exist_ok=True)
            write(temporary)
            fsync_path(temporary)
            return temporary.replace(file)
        except OSError as error:  # a corpus may be read-only, or its disk full
            failure = error
            logger.info(f"note: {file} cannot be kept, because {error}")
        finally:
            remove(temporary)
    raise failure


def find_fact(rows: Dataset, name: str, made_from: Mapping[str, object]) -> Path | None:
    """Return the file of `keep_fact`, None if there is none."""
    return next(filter(Path.exists, _places_of(rows, name, made_from)), None)


def _places_of(rows: Dataset, name: str, made_from: Mapping[str, object]) -> list[Path]:
    inputs = {"rows": rows._fingerprint, **made_from, "code": code_state(name)}
    file_name = f"{name}-{digest_of(inputs)}"
    return [folder / file_name for folder in (*_folders_of(rows), _session_folder())]


def measure_once(
    rows: Dataset, name: str, made_from: Mapping[str, object], measure: Callable[[], Any]
) -> Any:
    """Return plain data about rows, which an earlier call has kept, or measure it."""

    def write(file: Path) -> None:
        file.write_text(to_json(measure()), encoding="utf-8")

    file = keep_fact(rows, name, made_from, write)
    return json.loads(file.read_text(encoding="utf-8"))


def _folders_of(rows: Dataset) -> list[Path]:
    """Return the folders for facts: of a prepared corpus that the YAML names, and in the cache."""
    files = rows.cache_files
    if not files:  # rows in memory
        return []
    folder = Path(files[0]["filename"]).parent
    record = json.loads((folder / CORPUS_FILE).read_text(**ENCODING))
    declared = record["about"].get("folder")
    return [Path(place) / FACTS_FOLDER for place in (declared, folder) if place]


def _session_folder() -> Path:
    """Return the folder for facts that can be kept nowhere else; it is removed at the end."""
    return Path(gettempdir()) / f"sbkit-facts-{os.getpid()}"
