"""The figures of a run in ``train_log.jsonl`` and TensorBoard.

Figures are plain numbers, not tensors: reading a tensor would make the host wait for the device.
"""

import io
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from sbkit.base.errors import ConfigError
from sbkit.base.files import (
    os_errors_name,
    read_file,
    to_json,
    write_bytes_atomically,
)

logger = logging.getLogger(__name__)

LOG_FILE = "train_log.jsonl"
FIGURES_FOLDER = "figures"  # pictures that a recipe logs
# Beginnings of the names of logged figures
SOURCE_LOSS = "source_loss/"  # and the name of a training source
VALID = "valid_"  # and the name of a figure that was logged in a validation
GRADIENT = "grad_"
GRAD_NORM, GRAD_SCALE = f"{GRADIENT}norm", f"{GRADIENT}scale"

Record = dict[str, Any]  # a line of the log, parsed from JSON


@dataclass(frozen=True, kw_only=True)
class LoggedFigures:
    """Measurements at a step.

    metrics: the values of the recipe's metrics, by name.
    logged: means of the parts of the loss, of gradients, of training sources, and of `Brain.log`.
    """

    kind: ClassVar[str]
    epoch: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)

    def as_record(self) -> Record:
        """Return all figures as one flat line of the log."""
        record: Record = {"kind": self.kind, **vars(self), **self.logged}
        del record["metrics"], record["logged"]
        if clashes := record.keys() & self.metrics.keys():
            raise ConfigError(
                f"A metric may not be called {min(clashes)}, as the run log has such a figure."
            )
        return {**record, **self.metrics}


@dataclass(frozen=True, kw_only=True)
class StepFigures(LoggedFigures):
    """Figures of the steps since the last logged step."""

    kind: ClassVar[str] = "step"
    loss: float
    learning_rate: float
    rtfx: float  # seconds of audio per second of wall time, over all ranks
    data_wait_share: float  # share of wall time spent waiting for data, 0 to 1
    skipped_steps: int = 0  # steps whose loss or gradient was not finite


@dataclass(frozen=True, kw_only=True)
class EpochFigures(LoggedFigures):
    """Figures of a validation, and of its epoch so far.

    valid_loss: None if there is no validation set.
    """

    kind: ClassVar[str] = "epoch"
    loss: float  # mean training loss over the epoch
    rtfx: float
    skipped_steps: int = 0
    valid_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class SplitFigures(LoggedFigures):
    """Metrics of a test set, at the epoch and step of the weights.

    decoder: the decoder that was used; None for a task without decoders.
    """

    kind: ClassVar[str] = "test"
    split: str
    decoder: str | None = None


KINDS = {figures.kind: figures for figures in (StepFigures, EpochFigures, SplitFigures)}
FIGURE_NAMES = {"kind"} | {figure.name for kind in KINDS.values() for figure in fields(kind)}


def require_free_name(name: str, metrics: Collection[str]) -> None:
    """Raise ConfigError if a part of a loss, or a figure of `Brain.log`, has a name of the log."""
    reserved = (GRADIENT, VALID, SOURCE_LOSS)
    if name in FIGURE_NAMES or name in metrics or name.startswith(reserved):
        raise ConfigError(
            f"`{name}` cannot be logged, as the run log has such a figure. Give it another name."
        )


def read_log(path: Path | str) -> list[Record]:
    """Read a run's records, without lines of the user's own, or left incomplete by a killed run.

    path: the `train_log.jsonl` of a run; a missing file is an empty log. The `kind` of a record is
        "step", "epoch" or "test".
    """
    path = Path(path)
    if not path.exists():
        return []
    records: list[Record] = []
    # Not splitlines(): a text in a record may contain other line separators, such as U+2028.
    for line in read_file(path).decode(errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("kind") in KINDS:
            records.append(record)
    return records


class RunLog:
    """Append figures to ``train_log.jsonl``, one JSON object per line, and to TensorBoard.

    ``write`` passes each line to the operating system before it returns, so a killed run loses at
    most its last line.

    size: bytes of the log that stay, as the checkpoint has them; the first write drops what follows
        them. A log that is only opened stays as it is.
    step: points of TensorBoard's curves after this step are dropped.
    """

    def __init__(self, folder: Path, *, size: int = 0, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG_FILE
        self._curves = _open_tensorboard(folder / "tensorboard", step + 1)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self.size = min(size, self._path.stat().st_size)
        self._is_cut = False

    def write(self, figures: LoggedFigures) -> None:
        """Add a line to the log, and a point to each curve of TensorBoard."""
        record = figures.as_record()
        with os_errors_name(self._path):
            if not self._is_cut:
                self._file.truncate(self.size)
                self._is_cut = True
            self._file.write(to_json(record) + "\n")
            self.size = self._path.stat().st_size
        group = record.get("split", record["kind"])  # each test set has its own curves
        for name, value in record.items():
            # A metric may be a number of numpy, such as np.float32, which is no float.
            if isinstance(value, Real) and name not in ("step", "epoch"):
                self._curves.add_scalar(f"{group}/{name}", float(value), figures.step)
        self._curves.flush()

    def write_figure(self, name: str, step: int, figure: Any) -> None:
        """Write a figure of matplotlib as PNG, and to TensorBoard, which closes it."""
        file = self._path.parent / FIGURES_FOLDER / f"{name}-{step}.png"
        figure.savefig(png := io.BytesIO(), format="png")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(file, png.getvalue())
        self._curves.add_figure(name, figure, step)

    def close(self) -> None:
        self._curves.close()
        # On a full disk, closing fails like writing, and would hide the error that ended the run.
        with suppress(OSError):
            self._file.close()


def _open_tensorboard(folder: Path, purge_step: int) -> Any:
    if find_spec("tensorboard") is not None:
        return import_module("torch.utils.tensorboard").SummaryWriter(folder, purge_step=purge_step)
    logger.info("No TensorBoard files without tensorboard: pip install 'sbkit[curves]' adds it.")
    names = ("add_scalar", "add_figure", "flush", "close")
    return SimpleNamespace(**dict.fromkeys(names, _do_nothing))


def _do_nothing(*_: object) -> None:
    pass
