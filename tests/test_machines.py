"""Real machines: output that cannot be written, users without a home, disks that refuse."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sbkit.base.machine import SHARED_MEMORY
from sbkit.base.user_folders import prepare_user
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import locked_folder
from sbkit.logs.run_log import read_log
from tests import processes
from tests.runs import Workplace
from tests.shortage import refusing

# Output that cannot be written

FULL_DISK = """
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1), os.dup2(full, 2)
"""
LOST_TERMINAL = """
leader, terminal = pty.openpty()
os.dup2(terminal, 1), os.dup2(terminal, 2)
sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
"""
CLOSED_PIPE = """
reader, pipe = os.pipe()
os.dup2(pipe, 1), os.dup2(pipe, 2), os.close(reader)
sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
"""
CLOSED = (
    "os.close(1), os.close(2); sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None"
)
TRAINING = """
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import TensorDataset
from sbkit.base.process import run_main
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.logs.handlers import log_to_screen
from tests.train.lines import LineBrain, brain_of, line, rows

class Printing(LineBrain):
    def on_fit_batch_end(self, *_):
        if self.optimizer_step == 2 and leader:
            os.close(leader)  # no SIGHUP comes: this process does not belong to the terminal
        print("a step")

def main():
    model, epochs, data = line(), EpochCounter(2), TensorDataset(*rows(8))
    checkpointer = Checkpointer(sys.argv[1], recoverables={"model": model, "epochs": epochs})
    brain = brain_of(Printing, model=model, hparams={"log_every": 1}, checkpointer=checkpointer)
    with log_to_screen():
        brain.fit(epochs, data, data, train_loader_kwargs={"batch_size": 2})
    sys.exit(0 if brain.optimizer_step == 8 else 1)

run_main(main)
"""


def newest_epoch(folder: Path) -> int | None:
    newest = Checkpointer(folder).find_checkpoint()
    return newest and newest.meta["epoch"]


@pytest.mark.parametrize("output", [LOST_TERMINAL, CLOSED_PIPE, CLOSED])
def test_run_goes_on_without_its_output(output: str, tmp_path: Path) -> None:
    code = f"import os, pty, sys\nleader = None\n{output}\n{TRAINING}"
    assert processes.run(["-c", code, tmp_path]).returncode == 0
    assert newest_epoch(tmp_path) == 2


@pytest.mark.slow
def test_whole_run_ends_well_though_disk_of_its_output_is_full(
    workplace: Workplace, tmp_path: Path
) -> None:
    command = workplace.arguments(tmp_path, "--number_of_epochs=1")
    code = f"import os, runpy, sys\n{FULL_DISK}\nrunpy.run_path('train.py', run_name='__main__')"
    process = processes.run(["-c", code, *command], SBKIT_CACHE=workplace.cache)
    assert process.returncode == 0
    assert len(read_log(tmp_path / "train_log.jsonl")) > 1
    assert "next: sbkit export" in (tmp_path / "train.log").read_text()


# Users without a name or a home

OPTIMIZER = """
import torch
from sbkit import Run
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
from torch._inductor.runtime.cache_dir_utils import cache_dir
from sbkit.base.user_folders import cache_folder
print(cache_dir(), cache_folder())
"""
# The right to read all files: Python and this checkout may be root's
AS_ANOTHER_USER = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
AS_ANOTHER_USER += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("home", [None, "/root"])
def test_user_that_passwd_does_not_list_has_caches(home: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        os.chown(folder, 12345, 12345)
        environment = {"PATH": os.environ["PATH"], "TMPDIR": folder}
        environment |= {} if home is None else {"HOME": home}
        process = subprocess.run(
            [*AS_ANOTHER_USER, sys.executable, "-c", OPTIMIZER],
            capture_output=True,
            text=True,
            check=True,
            cwd=processes.ROOT,
            env=environment,
        )
    assert process.stdout.split() == [
        f"{folder}/torchinductor_user-12345",
        f"{folder}/sbkit-12345/sbkit",
    ]


@pytest.mark.parametrize("can_write", [True, False])
def test_temporary_files_are_in_the_cache_or_in_memory(
    can_write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `docker run --read-only`, where torch could not be imported."""
    monkeypatch.setenv("TMPDIR", "unset")
    monkeypatch.setenv("SBKIT_CACHE", str((tmp_path if can_write else Path(__file__)) / "cache"))
    with refusing("tempfile.gettempdir", FileNotFoundError()):
        prepare_user()
    folder = Path(os.environ["TMPDIR"])
    assert folder == (tmp_path / "cache/temporary" if can_write else SHARED_MEMORY)
    assert folder.is_dir()


# File systems

# Shims in the place of real disks: what a call answers there.
LOCAL_LOCKS_OF_FOLDERS = """
flock = fcntl.flock
def lock_on_nfs(descriptor, operation):  # another machine does not see the lock
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        flock(descriptor, operation)
fcntl.flock = lock_on_nfs
"""
NO_LOCKS = """
def refuse_lock(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse_lock
"""
NO_FSYNC_OF_FOLDERS = """
fsync = os.fsync
def fsync_on_cifs(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    fsync(descriptor)
os.fsync = fsync_on_cifs
"""
ONE_FAILED_FSYNC = """
fsync, failures = os.fsync, []
def fail_once(descriptor):
    fsync(descriptor)
    if not failures:
        failures.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")
os.fsync = fail_once
"""
NO_RENAMED_FOLDERS = """
rename = os.rename
def rename_on_store(source, target, **options):
    if os.path.isdir(source):
        raise OSError(errno.ENOTSUP, "Operation not supported")
    rename(source, target, **options)
os.rename = rename_on_store
"""
SHIMMED = "import errno, fcntl, os, pty, stat, sys\nleader = None\n"


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        (NO_LOCKS, "has no locks. Start only one run there."),
        (NO_FSYNC_OF_FOLDERS, "epoch 2/2"),
        (ONE_FAILED_FSYNC, "Trying once more."),
    ],
)
def test_run_does_without_what_its_disk_refuses(disk: str, message: str, tmp_path: Path) -> None:
    process = processes.run(["-c", f"{SHIMMED}{disk}{TRAINING}", tmp_path])
    assert process.returncode == 0, process.stderr
    assert message in process.stdout + process.stderr
    assert newest_epoch(tmp_path) == 2


def test_disk_without_renamed_folders_is_refused_before_the_first_step(tmp_path: Path) -> None:
    process = processes.run(["-c", f"{SHIMMED}{NO_RENAMED_FOLDERS}{TRAINING}", tmp_path])
    assert process.returncode == 2
    assert "must be on a file system that can rename folders" in process.stderr
    assert "a step" not in process.stdout
    assert not list(tmp_path.iterdir())


def test_second_run_is_refused_where_locks_of_folders_hold_on_one_machine(tmp_path: Path) -> None:
    with locked_folder(tmp_path):
        code = f"{SHIMMED}{LOCAL_LOCKS_OF_FOLDERS}{TRAINING}"
        process = processes.run(["-c", code, tmp_path])
    assert (process.returncode, f"{tmp_path}, " in process.stderr) == (2, True)


# Workers

LOADING = """
import errno, os, sys
from torch.utils.data import DataLoader
from sbkit.base.process import run_main
from sbkit.data.batch import begin_worker

class Clip:
    def __reduce__(self):  # what a full /dev/shm, or a socket with a long path, raises here
        raise OSError(errno.ENOSPC, "No space left on device")

class Clips:
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return Clip() if sys.argv[1] == "full" else os.kill(os.getpid(), 9)

def main():
    print(*DataLoader(Clips(), num_workers=1, batch_size=None, worker_init_fn=begin_worker))

run_main(main)
"""


@pytest.mark.parametrize(
    ("fault", "beginnings"),
    [
        ("full", ["A worker cannot pass on a batch ([Errno 28]", "A worker"]),
        ("killed", ["A worker"]),
    ],
)
def test_run_ends_with_the_cause_if_a_worker_is_lost(fault: str, beginnings: list[str]) -> None:
    process = processes.run(["-c", LOADING, fault], timeout=60)
    assert process.returncode == 1
    sentences = process.stderr.splitlines()
    assert len(sentences) == len(beginnings)
    assert all(map(str.startswith, sentences, beginnings))


# Machines of one run

RANK_ELSEWHERE = """
import os, runpy, sys
script = os.path.abspath("train.py")
os.chdir(os.environ["ELSEWHERE"] if os.environ["RANK"] == "1" else os.environ["HERE"])
{more}
runpy.run_path(script, run_name="__main__")
"""
OTHER_CODE = """
sys.path.insert(0, os.getcwd())
import my_module
"""


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize(
    ("more", "output", "sentence"),
    [
        ("", "run", "run of rank 0 is not visible to rank 1 on {host}. Choose an --output_folder"),
        (OTHER_CODE, None, "rank 0 on {host} and rank 1 on {host} differ in my_module ("),
    ],
)
def test_machine_that_does_not_share_folder_or_code_is_named_before_the_first_step(
    more: str, output: str | None, sentence: str, workplace: Workplace, tmp_path: Path
) -> None:
    places = {"HERE": tmp_path / "here", "ELSEWHERE": tmp_path / "elsewhere"}
    for name, place in places.items():
        place.mkdir()
        (place / "my_module.py").write_text(f"PLACE = {name!r}")
    options = workplace.arguments(Path(output or tmp_path / "run"), "--check=false")
    options[0] = str(processes.ROOT / options[0])
    words = ["-c", RANK_ELSEWHERE.format(more=more), *options]
    process = processes.run(words, ranks=2, SBKIT_CACHE=workplace.cache, **places)
    assert process.returncode == 2
    assert sentence.format(host=socket.gethostname()) in process.stderr
    assert not list(tmp_path.rglob("CKPT*"))
