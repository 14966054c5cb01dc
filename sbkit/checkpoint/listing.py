"""List the checkpoints of a folder, sbkit's and SpeechBrain's, damaged ones included."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import CKPT_PREFIX, METAFNAME, Checkpoint, Checkpointer
from yaml import YAMLError

from sbkit.checkpoint.integrity import CHECKSUMS

# The file, what it is written in, or what it holds: no mapping, or no date.
UNREADABLE = (OSError, ValueError, YAMLError, RecursionError, LookupError, TypeError)


def describe(folder: Path) -> Checkpoint | None:
    """Read a checkpoint's meta file; None when that, or its date, cannot be read."""
    if not (folder / METAFNAME).is_file():
        return None
    try:
        (described,) = Checkpointer._construct_checkpoint_objects([folder])
        return described if math.isfinite(described.meta["unixtime"]) else None
    except PermissionError:  # it is no damage: training would go on from the one before
        raise
    except UNREADABLE:
        return None


def newest_described(folder: Path) -> Checkpoint | None:
    """Find the newest checkpoint by its meta file alone, whether it is whole or damaged."""
    described = filter(None, map(describe, sorted(folder.glob(f"{CKPT_PREFIX}+*"))))
    return max(described, key=lambda each: each.meta["unixtime"], default=None)


def by_number(
    *, max_key: str | None = None, min_key: str | None = None, **keys: Any
) -> dict[str, Any]:
    """Return options that make `find_checkpoints` rank by a number of the meta file.

    It passes over checkpoints without one; NaN, as of a validation set without labels, ranks last.
    """
    key = max_key or min_key
    if key is None or (max_key and min_key):
        return {"max_key": max_key, "min_key": min_key, **keys}
    sign = 1 if max_key else -1
    also = keys.pop("ckpt_predicate", None)

    def has_number(each: Checkpoint) -> bool:
        return key in each.meta and (also is None or also(each))

    def rank(each: Checkpoint) -> float:
        value = sign * each.meta[key]
        return -math.inf if math.isnan(value) else float(value)

    return {**keys, "importance_key": rank, "ckpt_predicate": has_number}


def without_meta(folder: Path) -> Iterator[Path]:
    """Find the checkpoints that cannot be described, which no order has a place for."""
    for each in sorted(folder.glob(f"{CKPT_PREFIX}+*")):
        if each.is_dir() and describe(each) is None:
            yield each


def has_checksums(checkpoint: Checkpoint) -> bool:
    """Return whether sbkit wrote it; SpeechBrain writes none."""
    return Path(checkpoint.path, CHECKSUMS).exists()
