"""TensorBoard's file of events: what torch's SummaryWriter writes, without its thread.

On a full disk that thread would end with a traceback of its own, some points late.
"""

import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sbkit.base.files import naming

VERSION = "brain.Event:2"  # of the file's format
STARTED = time.time()  # in the name of the one file of this process


class EventFile:
    """Append points of curves to the file of this process in ``folder``.

    TensorBoard then shows no point of an earlier file from ``first_step`` on.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Start the file, or continue it: training and test of one process share it."""
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        records: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{STARTED:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._file = self._path.open("ab")
        self._records = records.RecordWriter(self._file)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._append(step=first_step, file_version=VERSION)
        self._append(step=first_step, session_log=start)

    def write(self, step: int, points: Mapping[str, float]) -> None:
        """Add a point to each of the curves named."""
        one = self._summaries.Summary.Value
        values = [one(tag=name, simple_value=value) for name, value in points.items()]
        self._append(step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **content)
        with naming(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()
