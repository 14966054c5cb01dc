"""The units of a split: the parts that processes decode into shards, each known by its content.

One process decodes a unit, in one order. A process that comes to it again, after it was killed or
with the same command, continues behind the shards that are finished.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np

from sbkit.data.corpora.clips import Clip, Clips
from sbkit.data.corpora.manifest import BadRow, Manifest
from sbkit.data.storage.decode import decode_clips

PROBED = 100  # clips that are decoded to learn how large the audio of the others will be


@dataclass(frozen=True)
class ShardOptions:
    """How shards are made: audio at a rate (Hz) in a store, about so many bytes of it in each."""

    sample_rate: int
    store: str
    shard_bytes: int
    seed: int

    def key(self, *content: object) -> str:
        """Return what a unit is known by, which changes with its content and with these options."""
        text = "\n".join(map(str, (self, *content)))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


@dataclass(frozen=True)
class Unit:
    """Rows that become one shard, or several of the wanted size where ``cut`` says so.

    rows: yields them in their order, from a number of rows on; key: in the names of the shards.
    """

    key: str
    rows: Callable[[int], Iterator[Clip | BadRow]]
    cut: bool


def manifest_units(manifest: Manifest, options: ShardOptions) -> list[Unit]:
    """Divide the clips of a manifest, in random order, into shards of about equal size.

    How much the audio takes is estimated from some clips, so that every process comes to the same
    division without reading all.
    """
    clips = Clips.of(manifest.clips)
    order = np.random.default_rng(options.seed).permutation(len(clips))
    facts = [_file_facts(path) for path in clips.paths]
    probed = order[:PROBED].tolist()
    paths = [clips[row].path for row in probed]
    decoded = decode_clips(paths, options.sample_rate, store=options.store)
    kept = sum(len(each.audio) for each in decoded if isinstance(each.audio, bytes))
    read = sum(facts[row][0] for row in probed)
    expected = sum(size for size, _ in facts) * kept / max(1, read)
    shards = max(1, min(round(expected / options.shard_bytes), len(clips)))  # none without a clip
    units = []
    for number, chosen in enumerate(np.array_split(order, shards)):
        bad = manifest.bad_rows if number == 0 else ()
        some = Clips(clips.own.take(chosen), clips.columns.take(chosen))
        content = [*some.own.to_pylist(), *some.columns.to_pylist()]  # another text, another shard
        key = options.key(bad, [facts[row] for row in chosen.tolist()], content)
        units.append(Unit(key, partial(_rows, some, bad), cut=False))
    return units


def _rows(clips: Clips, bad: tuple[BadRow, ...], start: int) -> Iterator[Clip | BadRow]:
    """Yield clips, behind the rows that are none, from a number of rows on."""
    return islice(chain(bad, clips), start, None)


def _file_facts(path: str) -> tuple[int, int]:
    """Return the size and time of change of a file, zeros where it cannot be reached."""
    try:
        status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns
