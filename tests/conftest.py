"""Fixtures and scheduling that all tests share."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import soundfile
import torch
from torch import Tensor

from recipes.AsteriskPrompts.corpus import prepare_prompts
from sbkit.base.user_folders import cache_folder
from tests.runs import ROOT, Workplace, make_workplace
from tests.runtime.bundles import export_all, export_streaming, export_tasks, make_bundle

USERS_CACHE = cache_folder()

# Imports create a million objects that are never garbage. Scanning them took 4.5 s during the
# imports, and a tenth of the time of tests that train.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but scan only the objects that tests create."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "skip the tests that need a package that is not installed"
    parser.addoption("--skip-missing", action="store_true", help=help)


def skip_if_missing(report: Any, call: Any, config: pytest.Config) -> Any:
    """Make a failure a skip if its cause is a package that is not installed."""
    is_meant = report.failed and call.excinfo and config.getoption("skip_missing")
    error = call.excinfo.value if is_meant else None
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    missing = getattr(error, "name", None) or ""
    if missing and not (ROOT / missing.partition(".")[0]).exists():
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, None, f"Skipped: needs {missing}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return skip_if_missing(report, report.call, collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    return skip_if_missing((yield), call, item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze what earlier tests have imported, too.

    A scan of these objects takes 0.3 s, and `sbkit check` collects garbage nine times.
    """
    if item.get_closest_marker("slow"):
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest modules first, so that no worker of xdist finishes late.

    The modules with tests of several processes come before them: one worker runs them all.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    ddp_modules = {item.path for item in items if item.get_closest_marker("ddp")}
    seconds = Counter[Path]()
    for item in items:
        for slow in item.iter_markers("slow"):
            seconds[item.path] += slow.args[0] if slow.args else 10
    items.sort(key=lambda item: (item.path not in ddp_modules, -seconds[item.path]))


@cache
def scope_of(file: Path) -> str:
    """Name what one worker runs: a module, or all modules with tests of several processes."""
    return "ddp" if "mark.ddp" in file.read_text() else str(file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each module in one worker, which makes its fixtures once.

    Only one worker runs tests of several processes, because each of them keeps two cores busy.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(config.rootpath / nodeid.partition("::")[0])

    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> None:
    """Restore Ctrl-C and SIGHUP, which processes in the background and under `nohup` ignore."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(autouse=True, scope="session")
def _own_cache(shared_folder: Path) -> Iterator[None]:
    """Use a cache of this session, which shares only the default corpus with the user's."""
    cache, prompts = shared_folder / "cache", USERS_CACHE / "asterisk-prompts"
    with locked(shared_folder / "cache.lock"):
        if not cache.exists():
            cache.mkdir()
            prompts.mkdir(parents=True, exist_ok=True)
            (cache / prompts.name).symlink_to(prompts)
    with patch.dict(os.environ, {"SBKIT_CACHE": str(cache)}):
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache of its own, empty."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other worker holds the lock ``file``, and hold it."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def asterisk_english(shared_folder: Path) -> Path:
    """Return the release folder of the English prompts, which one worker prepares."""
    with locked(shared_folder / "asterisk_english.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBKIT_CACHE", str(USERS_CACHE))
        return prepare_prompts(language="en")


def exported_once(folder: Path, export: Callable[[Path], object]) -> Path:
    """Return the bundle in a folder, which one worker exports and no test changes."""
    with locked(folder.with_suffix(".lock")):
        if not (folder / "tiny").exists():
            export(folder)
    return folder / "tiny"


@pytest.fixture(scope="session")
def exported(shared_folder: Path, asterisk_english: Path) -> Path:
    return exported_once(shared_folder / "exported", export_all)


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle for torch of an untrained model, which no test changes."""
    return make_bundle(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def streaming(shared_folder: Path) -> Path:
    """Return a bundle of a streaming model, for torch and onnxruntime."""
    return exported_once(shared_folder / "streaming", export_streaming)


@pytest.fixture(scope="session")
def task_bundles(shared_folder: Path, workplace: Workplace) -> Path:
    """Return a folder of bundles by the name of their YAML, one for each task but recognition."""
    bundles = shared_folder / "task_bundles"
    with locked(shared_folder / "task_bundles.lock"):
        if not bundles.exists():
            export_tasks(workplace, bundles)
    return bundles


@pytest.fixture(scope="session")
def wheel(shared_folder: Path) -> Path:
    """Return the wheel of the tracked files, which one worker builds."""
    folder = shared_folder / "dist"
    with locked(shared_folder / "wheel.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "tools.build", "--out", folder]
            subprocess.run(command, check=True, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def workplace(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Make a release of 24 prompts, which no test changes, and a cache."""
    return make_workplace(asterisk_english, tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="session")
def prompts(asterisk_english: Path) -> list[Tensor]:
    """Load 32 real prompts of many lengths, (S,) each, in the scale of int16."""
    files = sorted((asterisk_english / "clips").glob("*.flac"))[:320:10]
    clips = [torch.from_numpy(soundfile.read(file, dtype="int16")[0]) for file in files]
    return [clip[: 16_000 * 8].float() for clip in clips]
