"""What all tests share, also where several workers run them."""

import fcntl
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import soundfile
import torch
from torch import Tensor

from recipes.AsteriskPrompts.prepare import prepare_prompts
from sbkit.data.audio_cache import default_cache

LONG = ("slow", "ddp")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the modules with the most long tests to the front, so that no worker ends late.

    Those with tests of several processes wait for one another (`_one_group_at_a_time`): between
    two of them come two others, for the other worker.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    long = Counter(item.path for item in items if any(map(item.get_closest_marker, LONG)))
    paths = sorted(dict.fromkeys(item.path for item in items), key=lambda path: -long[path])
    waiting = {item.path for item in items if item.get_closest_marker("ddp")}
    places = {path: 3 * n for n, path in enumerate(each for each in paths if each in waiting)}
    others = (each for each in paths if each not in waiting)
    places |= {path: 3 * (n // 2) + 1 + n % 2 for n, path in enumerate(others)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> None:
    """Hear Ctrl-C and SIGHUP, which a shell's background and `nohup` make a process ignore."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this session have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other worker holds the lock ``file``, and hold it."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def _one_group_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests of several processes one after another: one of them keeps two cores busy."""
    if request.node.get_closest_marker("ddp") is None:
        yield
        return
    with locked(request.getfixturevalue("shared_folder") / "ddp.lock"):
        yield


@pytest.fixture(scope="session")
def asterisk_english(shared_folder: Path) -> Path:
    """Return the release folder of the English prompts, which one worker fetches."""
    with locked(shared_folder / "asterisk_english.lock"):
        return prepare_prompts(language="en", cache_folder=default_cache())


@pytest.fixture(scope="session")
def prompts(asterisk_english: Path) -> list[Tensor]:
    """Load 32 real prompts of many lengths, (S,) each, in the scale of int16."""
    files = sorted((asterisk_english / "clips").glob("*.flac"))[:320:10]
    clips = [torch.from_numpy(soundfile.read(file, dtype="int16")[0]) for file in files]
    return [clip[: 16_000 * 8].float() for clip in clips]
