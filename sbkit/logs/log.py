"""What a run tells: facts on the screen, and its figures in ``train_log.jsonl`` and TensorBoard.

Figures are plain numbers, given every few steps, never tensors: reading a tensor would make
the host wait for the device.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from sbkit.base.files import naming, to_json, write_text_atomically
from sbkit.base.text import printable
from sbkit.logs.events import EventFile

LOG_FILE = "train_log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TEXTS = ("kind", "split")  # of a record; all else are numbers, or null
LARGEST = 1e18  # of them

Record = dict[str, Any]  # a line of the log, as JSON gives it


def is_first_rank() -> bool:
    """Return whether this process is the one that prints and writes, by torchrun's RANK."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Print one fact, once: on rank 0 of a run of many processes.

    What it quotes, such as the name of a folder, cannot move the cursor.
    """
    if is_first_rank() and not _unsaid:
        keep(message)  # first: a terminal may be gone
        print("\n".join(map(printable, message.split("\n"))), flush=True)


def keep(message: str) -> None:
    """Write a message to the text log of the run, where one is kept."""
    for listener in _listeners:
        listener(message)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Let ``listener`` get every message that is said."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


_listeners: list[Callable[[str], None]] = []
_unsaid: list[object] = []  # who asked for quiet


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `say` silent meanwhile, as `sbkit check` does with the steps of a run that it tries."""
    _unsaid.append(None)
    try:
        yield
    finally:
        _unsaid.pop()


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
    """Metrics of a test set."""

    kind: ClassVar[str] = "test"
    split: str


def own_fields() -> frozenset[str]:
    """Name the fields of records that are not metrics: no metric may be called so."""
    kinds = (StepFigures, EpochFigures, FinalFigures)
    return frozenset({"kind", *(each.name for kind in kinds for each in fields(kind))})


def read_log(path: Path) -> list[Record]:
    """Read a run's records in order, past what is none, as a line that a killed run half wrote.

    A missing file is an empty log. Raises OSError for a pipe, a device or a folder.
    """
    if not os.path.lexists(path):
        return []
    if not path.is_file():
        raise OSError(errno.EEXIST, "no regular file", str(path))
    records = map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [record for record in records if record is not None]


class QuietLog:
    """The log of every rank but the first: it keeps nothing."""

    def write(self, figures: Figures) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Do nothing."""


class RunLog(QuietLog):
    """Append figures to ``train_log.jsonl``, a JSON object a line; mirror them to TensorBoard.

    A run that resumes at ``resume_step`` forgets what it had logged beyond, and its test figures,
    for it will measure them again; a fresh one (0) forgets all. ``within_epoch``: it stands before
    the validation of an epoch, and forgets that of this very step too. A line is on its way to the
    disk before ``write`` returns, so a killed run loses at most its last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int = 0,
        within_epoch: bool = False,
        keep_test: bool = False,
    ) -> None:
        """Open the log of the run in ``folder``; ``keep_test``: it may have nothing left to do."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._folder = folder / LOG_FILE, folder
        tested = resume_step if keep_test else -1
        _forget_beyond(self._path, resume_step, within_epoch=within_epoch, tested=tested)
        self._curves = EventFile(folder / TENSORBOARD_FOLDER, first_step=resume_step + 1)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, figures: Figures) -> None:
        """Add one line, and one point to each of TensorBoard's curves."""
        record = figures.as_record()
        with naming(self._path):
            self._file.write(to_json(record) + "\n")
        self._mirror(record, step=figures.step)

    def close(self) -> None:
        """Finish both files; what fails is only said, since it may follow from an error before."""
        for close in (self._file.close, self._curves.close):
            try:
                close()
            except OSError as error:
                say(f"The log in {self._folder} may lack its end ({error.strerror}).")

    def _mirror(self, record: Record, *, step: int) -> None:
        group = record.get("split", record["kind"])  # each test set has curves of its own
        points = {
            f"{group}/{name}": float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }
        self._curves.write(step, points)


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(_is_figure(*each) for each in record.items()):
        return None
    texts = TEXTS if record.get("kind") == FinalFigures.kind else TEXTS[:1]
    is_whole = all(isinstance(record.get(name), str) for name in texts)
    is_placed = all(type(record.get(name)) is int for name in ("step", "epoch"))
    return record if is_whole and is_placed else None


def _is_figure(name: str, value: object) -> bool:
    """Check that a value can be drawn, and written again; of no other a record was made."""
    if isinstance(value, str):
        return name in TEXTS and value.isprintable()
    is_number = isinstance(value, int | float) and abs(value) <= LARGEST
    return name.isprintable() and (value is None or is_number)


def _forget_beyond(path: Path, step: int, *, within_epoch: bool, tested: int) -> None:
    """Rewrite the log without the records past ``step``, those to come again, and torn lines."""
    if not os.path.lexists(path):
        return
    last = {
        StepFigures.kind: step,
        EpochFigures.kind: step - within_epoch,
        FinalFigures.kind: tested,
    }
    records = read_log(path)
    kept = [record for record in records if record["step"] <= last.get(record["kind"], step)]
    write_text_atomically(path, "".join(to_json(record) + "\n" for record in kept))
