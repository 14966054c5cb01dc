"""Stub until the readers are merged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions


@dataclass(frozen=True)
class AudioTable:
    """A file whose rows have their audio inside."""

    file: str
    version: str
    options: TableOptions
    partition: Mapping[str, str]
    rows: Sequence[int] | None = None

    def batches(self) -> Iterator[tuple[Manifest, list[bytes]]]:
        raise NotImplementedError
