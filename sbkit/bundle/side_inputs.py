"""Side inputs: what a network takes beside audio, such as the voice of a target speaker.

    columns of a table | options of a command | fields of a request -> the fields of the task
        -> its `side_inputs` -> arrays by name for each clip -> padded arrays for a batch

Legend: B clips, S samples, N entries of an array.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import Samples, read_audio, to_samples
from sbkit.base.arrays import Array
from sbkit.base.errors import DataError
from sbkit.base.files import size_and_mtime
from sbkit.bundle.task import Labels, SideField, Task

SideInputs = Mapping[str, Array]  # of a clip, by the names of the network's arguments
SIDE_SHAPES = "side_shapes"  # in config.json and in checkpoints: types and shapes of an example
LENGTHS_SUFFIX = "_lengths"
MAX_CACHED_FILES = 64  # of audio: the clips of a speaker often have the same


def make_side_inputs(
    task: Task, labels: Labels, row: Mapping[str, Any], *, sample_rate: int
) -> SideInputs:
    """Make the side inputs of a clip from its row; see `read_fields`."""
    return task.side_inputs(read_fields(task.side_fields, row, sample_rate=sample_rate), labels)


def read_fields(
    fields: Mapping[str, SideField], row: Mapping[str, Any], *, sample_rate: int
) -> dict[str, Any]:
    """Return the values of fields for a clip: texts, and samples (S,).

    row: strings by name; audio may also be an array at the model's rate.

    Raises DataError for a field without a value, and for a file that is no audio.
    """
    values: dict[str, Any] = {}
    for name, field in fields.items():
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value):
            value = field.default
        if value is None:
            clip = f"the clip {row['id']}" if "id" in row else "the audio"
            raise DataError(
                f"This model needs `{name}` beside the audio, but {clip} has none. Add a column to "
                f"the table, --side {name}=VALUE to `sbkit transcribe`, or a field to the request."
            )
        if field.kind == "audio":
            if isinstance(value, str | Path):
                value = _read_file(str(value), sample_rate, size_and_mtime(value))
            else:
                value = to_samples(value)
        values[name] = value
    return values


@lru_cache(maxsize=MAX_CACHED_FILES)
def _read_file(path: str, sample_rate: int, version: tuple[int, ...]) -> Samples:
    return read_audio(path, sample_rate)


def stack_side_inputs(clips: Sequence[SideInputs]) -> dict[str, Array]:
    """Pad the side inputs of clips to a batch: numbers become (B,), arrays (N, ...) (B, N, ...).

    The lengths N are added as `NAME_lengths` (B,).
    """
    batch: dict[str, Array] = {}
    for name in clips[0] if clips else ():
        arrays = [np.asarray(clip[name]) for clip in clips]
        if not arrays[0].ndim:
            batch[name] = np.stack(arrays)
            continue
        lengths = np.array([len(array) for array in arrays])
        padded = np.zeros((len(arrays), lengths.max(), *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        batch |= {name: padded, f"{name}{LENGTHS_SUFFIX}": lengths}
    return batch


def shapes_of(clip: SideInputs) -> dict[str, Any]:
    """Return the types and the shapes of a clip's side inputs as plain data."""
    arrays = {name: np.asarray(value) for name, value in clip.items()}
    return {name: [str(a.dtype), *a.shape] for name, a in arrays.items()}


def make_zeros(shapes: Mapping[str, Any]) -> dict[str, Array]:
    """Return side inputs of zeros with the types and shapes of `shapes_of`."""
    return {name: np.zeros(shape, dtype) for name, (dtype, *shape) in shapes.items()}
