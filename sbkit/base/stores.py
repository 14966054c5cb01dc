"""Wait while a store of files, on a disk, a network or in a cloud, is temporarily away."""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sbkit.base.errors import LASTING_FAULTS, SbkitError, StoreError

logger = logging.getLogger(__name__)

MAX_PAUSE = 30.0  # seconds between two tries; the first is one second
NOT_WRITABLE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of a store that answers, or of a limit of this process; any other means it is away.
LASTING_ERRORS = (
    *(None, errno.ENOENT, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EBADF, errno.EMFILE, errno.ENFILE, errno.EADDRINUSE),
    *(*NOT_WRITABLE_ERRORS, *DISK_FULL_ERRORS),
)
REFUSALS = {*range(400, 500)} - {408, 425, 429}  # of HTTP, without the codes that mean "later"

T = TypeVar("T")

_patience = 0.0


@contextmanager
def store_patience(seconds: float) -> Iterator[None]:
    """Let `wait_for_store` wait up to ``seconds``, in the block and in workers forked by it."""
    global _patience
    before, _patience = _patience, seconds
    try:
        yield
    finally:
        _patience = before


def is_temporary(error: BaseException | None, *, of_store: bool = False) -> bool:
    """Return whether the same call may succeed later: a store is away, or memory is short.

    of_store: whether a file system raised it; such errors are temporary until proven otherwise.
    """
    if isinstance(error, SbkitError):
        return isinstance(error, StoreError) or is_temporary(error.__cause__)
    number = getattr(error, "errno", None)
    if number is not None or not of_store:
        return isinstance(error, MemoryError) or number not in LASTING_ERRORS
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return is_temporary(error.__cause__, of_store=True)  # fsspec's HTTP wraps every error so
    names = ("status", "code", "status_code")  # aiohttp, gcsfs, azure
    status = next(filter(None, (getattr(error, name, None) for name in names)), 0)
    is_refused = status in REFUSALS or str(error).startswith("Forbidden")  # gcsfs gives no code
    lasting = (FileNotFoundError, PermissionError, *LASTING_FAULTS)
    return not is_refused and not isinstance(error, lasting)


def wait_for_store(work: Callable[[], T]) -> T:
    """Return the result of ``work``; while a store is away, call it again, with growing pauses.

    Raises StoreError when the patience is over, and any other error at once.
    """
    seconds = _patience
    end, pause = 0.0, 1.0
    while True:
        try:
            return work()
        except (OSError, SbkitError) as error:
            if not is_temporary(error):
                raise
            reason = str(error).removesuffix(".")
            end = end or time.monotonic() + seconds
            seconds_left = end - time.monotonic()
            if seconds_left <= 0:
                retries = f" Retried for {seconds:g} s (`store_patience`)." if seconds else ""
                raise StoreError(f"{reason}.{retries}") from error
        if pause == 1:
            logger.warning(f"{reason}. Retrying for up to {seconds:g} s.")
        time.sleep(min(pause, seconds_left))
        pause = min(2 * pause, MAX_PAUSE)
