"""The figures of a run, in ``train_log.jsonl`` and TensorBoard.

Figures are plain numbers, given every few steps, never tensors: reading a tensor would make
the host wait for the device.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from sbkit.base.files import naming, to_json, write_text_atomically

LOG_FILE = "train_log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Record = dict[str, Any]  # a line of the log, as JSON gives it


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured at a step; ``metrics`` are those of the recipe, by their names."""

    kind: ClassVar[str]
    epoch: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def as_record(self) -> Record:
        """Flatten to one line of the log."""
        named = asdict(self)
        metrics = named.pop("metrics")
        return {"kind": self.kind, **named, **metrics}


@dataclass(frozen=True, kw_only=True)
class StepFigures(Figures):
    """Figures of the steps since the last logged one."""

    kind: ClassVar[str] = "step"
    loss: float
    learning_rate: float
    rtfx: float  # seconds of audio per second of wall time, over all ranks
    waiting: float  # share of wall time spent waiting for data, 0 to 1
    skipped: int = 0  # steps whose loss or gradient was not finite


@dataclass(frozen=True, kw_only=True)
class EpochFigures(Figures):
    """Figures of a whole epoch; ``valid_loss`` is None when it was not validated."""

    kind: ClassVar[str] = "epoch"
    loss: float  # mean training loss over the epoch
    rtfx: float
    skipped: int = 0
    valid_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinalFigures(Figures):
    """Metrics of a test set; ``decoder`` is None where the task has none."""

    kind: ClassVar[str] = "test"
    split: str
    decoder: str | None = None


def read_log(path: Path) -> list[Record]:
    """Read a run's records in order, without a line that a killed run half wrote.

    A missing file is an empty log.
    """
    if not path.exists():
        return []
    records = map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [record for record in records if record is not None]


def _parse(line: str) -> Record | None:
    try:
        record: Record = json.loads(line)
    except ValueError:
        return None
    return record


class RunLog:
    """Append figures to ``train_log.jsonl``, a JSON object a line; mirror them to TensorBoard.

    A run that resumes at ``resume_step`` drops the records beyond it, and its test figures, which
    it measures again; a fresh run (0) drops all. ``within_epoch``: the run stands before the
    validation of an epoch, and drops the record of that step too. A line is handed to the system
    before ``write`` returns, so a killed run loses at most its last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = 0,
        within_epoch: bool = False,
        keep_test: bool = False,
    ) -> None:
        """Open the log of the run in ``folder``; ``keep_test``: keep the test figures."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG_FILE
        tested = resume_step if keep_test else -1
        _forget_beyond(self._path, resume_step, within_epoch=within_epoch, tested=tested)
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._curves = writer(folder / TENSORBOARD_FOLDER, purge_step=resume_step + 1)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, figures: Figures) -> None:
        """Add one line, and one point to each of TensorBoard's curves."""
        record = figures.as_record()
        with naming(self._path):
            self._file.write(to_json(record) + "\n")
        group = record.get("split", record["kind"])  # each test set has curves of its own
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self._curves.add_scalar(f"{group}/{name}", value, figures.step)
        self._curves.flush()

    def close(self) -> None:
        """Close both; an error follows from an earlier one."""
        self._curves.close()
        with suppress(OSError):
            self._file.close()


def _forget_beyond(path: Path, step: int, *, within_epoch: bool, tested: int) -> None:
    """Rewrite the log without the records past ``step``, those to come again, and torn lines."""
    if not path.exists():
        return
    last = {
        StepFigures.kind: step,
        EpochFigures.kind: step - within_epoch,
        FinalFigures.kind: tested,
    }
    records = read_log(path)
    kept = [record for record in records if record["step"] <= last.get(record["kind"], step)]
    write_text_atomically(path, "".join(to_json(record) + "\n" for record in kept))
