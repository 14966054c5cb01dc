"""Check, before the first step, that all processes of a run share the folder and the code."""

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError
from sbkit.base.libraries import is_library
from sbkit.base.messages import listed
from sbkit.base.versions import versions
from sbkit.distributed.ranks import POLL_SECONDS, gather_over_ranks, rank, world_size

VISIBLE_SECONDS = 10.0  # for a file to appear on another machine
NUM_CHECKSUM_DIGITS = 6


def require_shared(folder: Path) -> None:
    """Refuse, on all ranks, a rank that does not see rank 0's run folder.

    Rank 0 writes a file into it, and the others look for it.
    """
    if world_size() == 1:
        return
    name = gather_over_ranks(f".seen-by-all-{uuid4().hex}")[0]
    file = folder / name
    if rank() == 0:
        file.touch()
    deadline = time.monotonic() + VISIBLE_SECONDS
    # `os.path.exists` is False for a disk that fails; `Path.exists` raises an error.
    while not (is_seen := os.path.exists(file)) and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(POLL_SECONDS)
    answers = gather_over_ranks((is_seen, describe_rank()))
    if rank() == 0:
        file.unlink(missing_ok=True)
    if missing_ranks := [description for is_seen, description in answers if not is_seen]:
        raise ConfigError(
            f"All processes must share the run folder, but {folder} of rank 0 is not visible to "
            f"{listed(missing_ranks)}. Choose an --output_folder that all machines mount."
        )


def require_same_code() -> None:
    """Refuse, on all ranks, a rank whose code differs from rank 0's: weights would drift apart."""
    if world_size() == 1:
        return
    (first, first_rank), *other_ranks = gather_over_ranks((_describe_code(), describe_rank()))
    for code, other_rank in other_ranks:
        differences = [
            f"{name} ({first[name]}, {version})"
            for name, version in code.items()
            if first.get(name, version) != version  # only one may have imported it
        ]
        if differences:
            raise ConfigError(
                f"All processes must run the same code, but {first_rank} and {other_rank} differ "
                f"in {listed(differences)}."
            )


def describe_rank() -> str:
    """Name this rank and its machine."""
    return f"rank {rank()} on {socket.gethostname()}"


def _describe_code() -> dict[str, str | None]:
    """Return versions of packages, and checksums of the modules of sbkit, recipes and the user."""
    code = versions()
    for name, module in list(sys.modules.items()):
        # SpeechBrain's lazy modules import themselves when an attribute is read.
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        is_ours = name.partition(".")[0] in ("sbkit", "recipes")
        if file.endswith(".py") and (is_ours or not is_library(file)):
            with suppress(OSError):
                code[name] = checksum(Path(file))[:NUM_CHECKSUM_DIGITS]
    return code
