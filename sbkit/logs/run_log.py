"""The figures of a run in ``train_log.jsonl`` and TensorBoard.

Figures are plain numbers, not tensors: reading a tensor would make the host wait for the device.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from sbkit.base.files import naming, to_json, write_text_atomically

logger = logging.getLogger(__name__)

LOG_FILE = "train_log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Record = dict[str, Any]  # a line of the log, parsed from JSON


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements at a step; ``metrics`` holds those of the recipe by name."""

    kind: ClassVar[str]
    epoch: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def as_record(self) -> Record:
        """Return the figures and metrics as one flat line of the log."""
        fields = asdict(self)
        metrics = fields.pop("metrics")
        return {"kind": self.kind, **fields, **metrics}


@dataclass(frozen=True, kw_only=True)
class StepFigures(Figures):
    """Figures of the steps since the last logged step."""

    kind: ClassVar[str] = "step"
    loss: float
    learning_rate: float
    rtfx: float  # seconds of audio per second of wall time, over all ranks
    waiting: float  # share of wall time spent waiting for data, 0 to 1
    skipped: int = 0  # steps whose loss or gradient was not finite


@dataclass(frozen=True, kw_only=True)
class EpochFigures(Figures):
    """Figures of a whole epoch; ``valid_loss`` is None if it was not validated."""

    kind: ClassVar[str] = "epoch"
    loss: float  # mean training loss over the epoch
    rtfx: float
    skipped: int = 0
    valid_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinalFigures(Figures):
    """Metrics of a test set; ``decoder`` is None if the task has none."""

    kind: ClassVar[str] = "test"
    split: str
    decoder: str | None = None


def read_log(path: Path) -> list[Record]:
    """Read a run's records, skipping a line that a killed run left incomplete.

    A missing file is an empty log.
    """
    records: list[Record] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


class RunLog:
    """Append figures to ``train_log.jsonl``, one JSON object per line, and to TensorBoard.

    ``write`` hands a line to the system before it returns, so a killed run loses at most its last
    line.

    resume_step: drop the records after this step, and all test figures, which the run measures
        again; a fresh run (0) drops all records.
    within_epoch: the run resumes before an epoch's validation; drop the record of that epoch, too.
    keep_test: keep the test figures of this step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = 0,
        within_epoch: bool = False,
        keep_test: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG_FILE
        last_steps = {
            StepFigures.kind: resume_step,
            EpochFigures.kind: resume_step - 1 if within_epoch else resume_step,
            FinalFigures.kind: resume_step if keep_test else -1,
        }
        if self._path.exists():
            log = read_log(self._path)
            records = [r for r in log if r["step"] <= last_steps.get(r["kind"], resume_step)]
            write_text_atomically(self._path, "".join(to_json(record) + "\n" for record in records))
        self._curves = _open_tensorboard(folder / TENSORBOARD_FOLDER, resume_step + 1)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, figures: Figures) -> None:
        """Add a line to the log, and a point to each curve of TensorBoard."""
        record = figures.as_record()
        with naming(self._path):
            self._file.write(to_json(record) + "\n")
        group = record.get("split", record["kind"])  # each test set has its own curves
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self._curves.add_scalar(f"{group}/{name}", value, figures.step)
        self._curves.flush()

    def close(self) -> None:
        self._curves.close()
        with suppress(OSError):  # it would hide the error that ends the run
            self._file.close()


def _open_tensorboard(folder: Path, purge_step: int) -> Any:
    if find_spec("tensorboard") is None:
        logger.info("No TensorBoard files without tensorboard: pip install 'sbkit[curves]'.")
        return SimpleNamespace(add_scalar=_do_nothing, flush=_do_nothing, close=_do_nothing)
    return import_module("torch.utils.tensorboard").SummaryWriter(folder, purge_step=purge_step)


def _do_nothing(*_: object) -> None:
    pass
