"""Arrow stores: the utterances of one split, decoded once and read through a memory map."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbkit.base.errors import SbkitError
from sbkit.base.files import building

DATA_FILE = "data.arrow"
ROWS_PER_BATCH = 100  # about 16 MB of audio; the binary values of one batch must stay below 2 GB

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "sentence": pa.string(),
        "client_id": pa.string(),
        "samples": pa.int64(),
        "audio": pa.binary(),
    }
)


@dataclass(frozen=True)
class Utterance:
    """One row of a store.

    Attributes:
        id: the clip's file name without extension.
        text: the normalized transcript.
        sentence: the transcript as the release writes it.
        client_id: who speaks.
        samples: the number of 16 kHz samples.
        audio: the samples, little-endian int16, mono.
    """

    id: str
    text: str
    sentence: str
    client_id: str
    samples: int
    audio: bytes


def default_cache() -> Path:
    """Give ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if own := os.environ.get("SBKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sbkit"


def write_store(folder: Path, utterances: Iterable[Utterance]) -> None:
    """Write the utterances as they come; ``folder`` appears when all of them are written."""
    rows = iter(utterances)
    with (
        building(folder) as beside,
        pa.OSFile(str(beside / DATA_FILE), "wb") as file,
        pa.ipc.new_stream(file, SCHEMA) as stream,
    ):
        while batch := [asdict(row) for row in islice(rows, ROWS_PER_BATCH)]:
            stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=SCHEMA))


def open_store(folder: Path) -> datasets.Dataset:
    """Open a store as a ``datasets.Dataset``; audio is read from disk when it is asked for."""
    if not (folder / DATA_FILE).is_file():
        raise SbkitError(
            f"A store must hold {DATA_FILE}, but {folder} does not. Remove it and prepare again."
        )
    datasets.disable_progress_bars()
    return datasets.Dataset.from_file(str(folder / DATA_FILE))


def take_columns(split: datasets.Dataset, *names: str) -> pa.Table:
    """Give some columns of a selection of rows, whole.

    datasets takes the rows of a selection one by one: 7.5 s for a million, instead of 0.1.
    """
    columns = split.data.table.select(names)
    return columns if split._indices is None else columns.take(split._indices.column(0))


def sample_counts(split: datasets.Dataset) -> npt.NDArray[np.int64]:
    """Give the length of the audio of every row."""
    counts: npt.NDArray[np.int64] = take_columns(split, "samples")["samples"].to_numpy()
    return counts
