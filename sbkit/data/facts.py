"""Facts about rows, kept in files of their corpus: token counts, texts as normalized, pitch.

    rows, inputs -> digest -> CORPUS/facts/NAME-DIGEST, which one process makes
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset

from sbkit.base.code_versions import code_state
from sbkit.base.files import fsync_path, remove, temporary_path
from sbkit.data.prepared import CORPUS_FILE, ENCODING
from sbkit.data.units import digest_of

FACTS_FOLDER = "facts"

logger = logging.getLogger(__name__)


def keep_fact(
    rows: Dataset, name: str, made_from: Mapping[str, object], write: Callable[[Path], None]
) -> Path:
    """Return the file that an earlier call has written for these rows and inputs, or write it.

    It lies in the corpus; if that is read-only, in the cache.

    name: of what is kept, in `CODE_VERSIONS`.
    made_from: plain data that names all inputs but the rows and our code.
    write: writes the file, whose path it is given.
    """
    inputs = {"rows": rows._fingerprint, **made_from, "code": code_state(name)}
    folders = [*map(Path, _folders_of(rows)), _session_folder()]
    file_name = f"{name}-{digest_of(inputs)}"
    for folder in folders:
        if (folder / file_name).exists():
            return folder / file_name
    for folder in folders:
        temporary = temporary_path(folder / file_name)
        try:
            folder.mkdir(exist_ok=True)
            write(temporary)
            fsync_path(temporary)
            return temporary.replace(folder / file_name)
        except OSError as error:  # a corpus may be read-only, or its disk full
            logger.info(f"note: {folder / file_name} cannot be kept, because {error}")
        finally:
            remove(temporary)
    raise OSError(f"{file_name} cannot be written to {folders[-1]}")


def _folders_of(rows: Dataset) -> list[Path]:
    """Return the folders for facts: of the prepared corpus that the YAML names, and in the cache."""
    files = rows.cache_files
    if not files:  # rows in memory
        return []
    folder = Path(files[0]["filename"]).parent
    record = json.loads((folder / CORPUS_FILE).read_text(**ENCODING))
    declared = record["about"].get("folder")
    return [Path(place) / FACTS_FOLDER for place in (declared, folder) if place]


@cache
def _session_folder() -> Path:
    """Return a folder that is removed when the process ends."""
    folder = TemporaryDirectory(prefix="sbkit-facts-")
    _session_folder.folder = folder  # type: ignore[attr-defined] # it is removed with its object
    return Path(folder.name)
