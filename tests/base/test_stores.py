"""A store that is away is waited for; what a store refuses is not."""

import errno
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import Mock, patch

import fsspec
import pytest

from sbkit.base.errors import DataError, SbkitError, StoreError
from sbkit.base.stores import store_patience, wait_for_store
from sbkit.data.filesystem import Storage

LASTING = "ENOENT ENOTDIR EISDIR EEXIST EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EINVAL ENOSYS"
LASTING += " ENOTSUP ENAMETOOLONG ELOOP EBADF EMFILE ENFILE EADDRINUSE"
AWAY = "ESTALE EIO ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENETUNREACH ECONNRESET ENOTCONN EREMOTEIO EBUSY"
STALE = OSError(errno.ESTALE, "Stale file handle", "/nfs/x")


def faults() -> Iterator[tuple[Exception, type[SbkitError]]]:
    """Yield what file systems raise, and what it becomes."""
    for names, kind in ((LASTING, DataError), (AWAY, StoreError)):
        yield from ((OSError(getattr(errno, name), f"{name}."), kind) for name in names.split())
    for status in (401, 403, 404, 408, 410, 416, 425, 429, 500, 502, 503, 504):
        kind = StoreError if status >= 500 or status in (408, 425, 429) else DataError
        for name in ("status", "code", "status_code"):  # aiohttp, gcsfs, azure
            yield type("ResponseError", (Exception,), {name: status})("It failed."), kind
        hidden = FileNotFoundError("https://lake/x")  # what fsspec makes of any fault of HTTP
        hidden.__cause__ = type("ResponseError", (Exception,), {"status": status})()
        yield hidden, kind
    lasting = FileNotFoundError("x"), PermissionError("x"), ValueError("x"), OSError("Forbidden: x")
    yield from ((error, DataError) for error in lasting)
    yield from ((kind(), StoreError) for kind in (TimeoutError, ConnectionResetError, RuntimeError))


@pytest.mark.parametrize(("fault", "kind"), [*faults()], ids=repr)
def test_fault_is_temporary_till_proven_otherwise(fault: Exception, kind: type[SbkitError]) -> None:
    system = type(fsspec.filesystem("memory"))
    with (
        patch.object(system, "cat_file", side_effect=fault),
        pytest.raises(kind, match=r"^memory://lake/x cannot be reached: \w+, .*(?<!\.)\.$"),
    ):
        Storage("memory://lake").read("x")
    with patch.object(system, "sizes", side_effect=fault):
        if isinstance(fault, FileNotFoundError | NotADirectoryError) and kind is DataError:
            assert Storage("memory://lake").sizes(["x"]) == [None]
        else:
            with pytest.raises(kind):
                Storage("memory://lake").sizes(["x"])


@pytest.mark.parametrize(
    ("failures", "pauses"),
    [([], []), (3 * [STALE], [1, 2, 4]), (8 * [STALE], [1, 2, 4, 8, 16, 30, 30, 9])],
)
def test_pauses_grow_until_the_patience_is_over(
    failures: list[Exception], pauses: list[float]
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    tries: list[float] = []
    pending = [*failures]

    def read() -> str:
        tries.append(sum(slept))
        if pending:
            raise pending.pop()
        return "content"

    with patch("sbkit.base.stores.time", clock):
        with store_patience(100):
            assert wait_for_store(read) == "content"
            assert [*accumulate(pauses, initial=0)] == tries
            slept.clear()
            with pytest.raises(StoreError, match="'/nfs/x'. Retried for 100 s"):
                wait_for_store(Mock(side_effect=STALE))
            assert sum(slept) == 100
            for error in (FileNotFoundError(errno.ENOENT, "x"), MemoryError(), KeyError("x")):
                with pytest.raises(type(error)):
                    wait_for_store(Mock(side_effect=error))
        with pytest.raises(StoreError, match="'/nfs/x'.$"):
            wait_for_store(Mock(side_effect=STALE))
        assert sum(slept) == 100
