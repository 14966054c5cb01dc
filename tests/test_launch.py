"""The launchers restart dead ranks, pass signals on to all ranks, and leave no process behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml as yaml_module
from kubeflow_trainer_api import models

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from sbkit.base.machine import usable_cores
from tests.processes import Process, free_port, read_quietly
from tests.runs import ROOT, Workplace, records_of

LAUNCH = ROOT / "tools" / "launch"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a copy of ctc.yaml that saves a checkpoint every other step."""
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    text, count = re.subn(r"(?m)^ckpt_interval_minutes:.*", "ckpt_interval_steps: 2", text)
    assert count == 1
    yaml = tmp_path_factory.mktemp("yaml") / "often.yaml"
    yaml.write_text(text)
    return str(yaml)


@dataclass(frozen=True)
class Job:
    """A running launcher, its run folder, and a function that returns its output."""

    process: subprocess.Popen[bytes] | Process
    run: Path
    output: Callable[[], str]

    def ranks(self) -> dict[int, int]:
        return {
            int(match[1]): pid
            for pid in processes_about(self.run)
            if (match := re.search(r"(?m)^RANK=(\d+)$", environment_of(pid)))
        }

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, while the job runs."""
        while not condition():
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)  # less than a step; evaluating a condition takes 2 ms

    def wait(self) -> int:
        """Wait for the end; return the exit code. No process may be left."""
        code = self.process.wait(timeout=120)
        assert not processes_about(self.run)
        return code


def processes_about(run: Path) -> list[int]:
    """Return the ids of the processes whose command names a folder."""
    commands = [(file.parent, read_quietly(file)) for file in Path("/proc").glob("[0-9]*/cmdline")]
    return [int(folder.name) for folder, command in commands if str(run) in command]


def environment_of(pid: int) -> str:
    return read_quietly(Path(f"/proc/{pid}/environ")).replace("\0", "\n")


def parent_of(pid: int) -> int:
    fields = read_quietly(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if fields else 0  # it has just ended


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def started(command: Sequence[object], run: Path, **environment: object) -> Iterator[Job]:
    """Start a launcher for two ranks; kill its processes at the end of the block."""
    output = run.with_suffix(".out")
    variables = {"OMP_NUM_THREADS": 1, "PET_NPROC_PER_NODE": 2, **environment}
    with output.open("ab") as stdout:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    with killed_at_the_end(process, run):
        yield Job(process, run, output.read_text)


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes] | Process, run: Path) -> Iterator[None]:
    """Kill a launcher and the processes about its run at the end of the block."""
    try:
        yield
    finally:
        process.kill()
        for pid in processes_about(run):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def write_script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def within_epoch(run: Path, epoch: int) -> bool:
    """Return whether the run has written a checkpoint within this epoch."""
    return sum(int(record["epoch"] == epoch) for record in records_of(run, "step")) >= 3


# -- the agent -----------------------------------------------------------------------------------

RANK = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open(sys.argv[1], "a") as log:
    log.write("started\\n")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    return script


@contextmanager
def under_agent(
    script: Path, *arguments: object, ranks: int = 2, forked: bool = False
) -> Iterator[Job]:
    """Start a forked agent and its ranks; kill them at the end of the block.

    forked: fork the ranks from the agent, which has imported torch.
    """
    options = ("--standalone", "--max_restarts=1", "--monitor_interval=0.05")
    options += (f"--nproc_per_node={ranks}", "--signals_to_handle=SIGTERM,SIGUSR1")
    options += ("--run-path", "--start-method=fork") if forked else ()
    command = ["-m", "tools.launch.agent", *options, script, *arguments]
    process = Process(command, OMP_NUM_THREADS=1, PYTHONPATH=ROOT)
    with killed_at_the_end(process, script.parent):
        yield Job(process, script.parent, lambda: "".join(process.output()))


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("exit_code", "starts"),
    [(ASKED_TO_STOP, 1), (BAD_INPUT, 1), (1, 2)],
    ids=["asked", "refused", "died"],
)
def test_only_ranks_that_died_start_again(
    exit_code: int, starts: int, rank: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with under_agent(rank, log, exit_code) as job:
        assert job.wait() == exit_code
    assert starts <= len(log.read_text().splitlines()) <= 2 * starts
    assert "Traceback" not in job.output()


WORKING = """
import os, pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if sys.argv[2] == "saves":
    pathlib.Path(os.environ["SBKIT_SAVED_FILE"]).touch()
sys.exit(1 if len(starts.read_text()) < 4 else 0)
"""
AGENT = "from tools.launch import agent; agent.SECONDS_OF_WORK = {}; agent.run_main(agent.main)"


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("seconds", "saves", "starts"), [(0, "saves", 4), (0, "", 2), (3600, "saves", 2)]
)
def test_restarts_are_given_back_after_an_hour_of_work(
    seconds: int, saves: str, starts: int, tmp_path: Path
) -> None:
    script, log = tmp_path / "working.py", tmp_path / "starts"
    script.write_text(WORKING)
    options = ("--standalone", "--max_restarts=1", "--monitor_interval=0.05")
    code = AGENT.format(seconds)
    process = Process(["-c", code, *options, script, log, saves], PYTHONPATH=ROOT)
    assert process.wait(120) == (0 if starts == 4 else 1), process.output()
    assert len(log.read_text()) == starts


@pytest.mark.ddp
def test_signaled_rank_takes_the_others_along(rank: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with under_agent(rank, log) as job:
        job.wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
        os.kill(job.ranks()[1], signal.SIGUSR1)
        assert job.wait() == ASKED_TO_STOP
    assert "Traceback" not in job.output()


SENTENCE = "`lr` must be a number, but is much. Correct it."
REFUSING = f"""
from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main

def main():
    raise SbkitError({SENTENCE!r})

run_main(main)
"""


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize("ranks", [1, 2])
def test_error_of_a_rank_is_the_last_line_on_the_screen(ranks: int, tmp_path: Path) -> None:
    """Torch's own torchrun prints a traceback, the sentence, and a rule."""
    script = tmp_path / "refusing.py"
    script.write_text(REFUSING)
    options = ("--standalone", f"--nproc_per_node={ranks}")
    environment = {"PYTHONPATH": ROOT, "PET_NPROC_PER_NODE": ranks}
    with started(["torchrun", *options, script], tmp_path / "run", **environment) as job:
        assert job.process.wait(timeout=120) == 1
    *_, last, rule = job.output().splitlines()
    assert last == f"  traceback : {SENTENCE}"
    assert re.search(rf"exitcode +: {BAD_INPUT} ", job.output())
    assert set(rule) == {"="}
    with under_agent(script, ranks=ranks) as agent:
        assert agent.wait() == BAD_INPUT
    assert agent.output().splitlines()[-1] == SENTENCE
    assert "FAILED" not in agent.output()


PREPARING = """
import os, sys, time
import torch
from sbkit.distributed.ranks import rank0_then_others, process_group, rank
from sbkit.base.process import run_main

def main():
    with process_group(torch.device("cpu")):
        with open(f"{sys.argv[1]}/{rank()}", "w") as file:
            file.write(str(os.getpid()))
        with rank0_then_others():
            open(f"{sys.argv[1]}/prepares-{rank()}", "w").close()
            time.sleep(60)

run_main(main)
"""


@pytest.mark.ddp
def test_signal_to_a_waiting_rank_ends_the_preparation(tmp_path: Path) -> None:
    """Rank 1 waits while rank 0 prepares."""
    script, ranks = tmp_path / "preparing.py", tmp_path / "ranks"
    ranks.mkdir()
    script.write_text(PREPARING)
    with under_agent(script, ranks, forked=True) as job:
        job.wait_until(lambda: {file.name for file in ranks.iterdir()} == {"0", "1", "prepares-0"})
        time.sleep(0.2)  # until rank 1 waits
        os.kill(int((ranks / "1").read_text()), signal.SIGTERM)
        assert job.wait() == ASKED_TO_STOP, job.output()
    assert not (ranks / "prepares-1").exists()
    assert job.output().count("Stopped") == 1
    assert not re.search("(?m)^Traceback", job.output())  # the agent's begins with a time


# -- one node, and SLURM -------------------------------------------------------------------------

THREADS = "source tools/launch/torchrun.sh; exec() { echo $OMP_NUM_THREADS; }; start -- a.yaml"


def test_ranks_share_the_cores_that_may_be_used(tmp_path: Path) -> None:
    """A container's quota counts, which `nproc` ignores."""
    write_script(tmp_path / "nproc", "echo 128")
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PET_NPROC_PER_NODE": "2"}
    process = subprocess.run(
        ["bash", "-c", THREADS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (process.stdout, process.stderr) == (f"{max(1, usable_cores() // 2)}\n", "")


def training_arguments(workplace: Workplace, run: Path, yaml: str) -> list[str]:
    return workplace.arguments(run, "--check=False", "--number_of_epochs=4", yaml=yaml)


FORKED = {"PET_RUN_PATH": 1, "PET_START_METHOD": "fork"}  # ranks need not import torch
SRUN = """
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """
echo "$*" >>"$CALLS"
[[ $1 != show ]] || echo localhost
"""


@pytest.fixture
def slurm(tmp_path: Path, workplace: Workplace) -> dict[str, object]:
    """Return the environment of a SLURM job whose commands record their arguments."""
    write_script(tmp_path / "srun", SRUN)
    write_script(tmp_path / "scontrol", SCONTROL)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": tmp_path / "calls",
        "SLURM_JOB_ID": 20_000 + os.getpid() % 10_000,
        "SLURM_JOB_NUM_NODES": 1,
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_SUBMIT_DIR": ROOT,
        "SBKIT_CACHE": workplace.cache,
        **FORKED,
    }


@pytest.mark.slow
@pytest.mark.ddp
def test_run_survives_a_dead_rank_a_dead_agent_and_the_end_of_its_job(
    workplace: Workplace, yaml: str, slurm: dict[str, object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [LAUNCH / "one_node.sh", *training_arguments(workplace, run, yaml)]
    with started(command, run, SBKIT_CACHE=workplace.cache) as job:
        job.wait_until(lambda: within_epoch(run, 1))
        ranks = job.ranks()
        os.kill(ranks[1], signal.SIGKILL)
        job.wait_until(
            lambda: len(job.ranks()) == 2 and not {*job.ranks().values()} & {*ranks.values()}
        )
        last_checkpoint = max((run / "checkpoints").glob("CKPT*/CKPT.yaml")).read_text()
        assert "end-of-epoch: false" in last_checkpoint
        job.wait_until(lambda: within_epoch(run, 2))
        job.process.kill()
        deadline = time.monotonic() + 300
        while processes_about(run) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes_about(run)  # its ranks have saved and ended
        assert "Stopped at" in job.output()
        assert not records_of(run, "test")

    spooled = shutil.copy2(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    command = [spooled, *training_arguments(workplace, run, yaml)]
    requeue = f"requeue {slurm['SLURM_JOB_ID']}"
    with started(command, run, **slurm) as job:
        job.wait_until(lambda: within_epoch(run, 3))
        os.kill(job.process.pid, signal.SIGUSR1)
        assert job.wait() == ASKED_TO_STOP, job.output()
    assert (tmp_path / "calls").read_text().splitlines().count(requeue) == 1
    assert not records_of(run, "test")

    with started(command, run, **slurm) as job:
        assert job.wait() == 0, job.output()
    assert (tmp_path / "calls").read_text().splitlines().count(requeue) == 1
    steps = [record["step"] for record in records_of(run, "step")]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(records_of(run, "test")) == 1


# -- several nodes -------------------------------------------------------------------------------


@pytest.mark.ddp
def test_launcher_names_the_machines_that_did_not_join(tmp_path: Path) -> None:
    command = [LAUNCH / "several_nodes.sh", 2, "localhost:0", "alone", tmp_path / "no.yaml"]
    with started(command, tmp_path, PET_RDZV_CONF="join_timeout=2") as job:
        assert job.wait() == BAD_INPUT
    (sentence,) = job.output().splitlines()
    assert "2 machines must meet at localhost:0 as `alone`" in sentence


def test_kubernetes_manifest_has_the_fields_of_its_kinds() -> None:
    """Reading it by the operator's own classes and writing it again drops nothing."""
    claim, job = yaml_module.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    for document, kind in (
        (claim, models.IoK8sApiCoreV1PersistentVolumeClaim),
        (job, models.TrainerV1alpha1TrainJob),
    ):
        read = kind.from_dict(document)
        assert read is not None and read.to_dict() == document


@pytest.mark.slow(40)
@pytest.mark.ddp
def test_elastic_run_loses_a_machine_and_admits_it_again(
    workplace: Workplace, yaml: str, tmp_path: Path
) -> None:
    """Two agents with a rank each: the second is killed with its rank, and started again."""
    run, whole_run = tmp_path / "run", tmp_path / "whole"
    options = ("--dropout=0", "--check=False", "--batch_seconds=2", "--number_of_epochs=12")
    port = free_port()
    command = [
        *(LAUNCH / "several_nodes.sh", "1:2", f"localhost:{port}", "elastic"),
        *workplace.arguments(run, *options, yaml=yaml),
    ]
    environment = {
        "SBKIT_CACHE": workplace.cache,
        "PET_NPROC_PER_NODE": 1,
        "PET_RDZV_CONF": "last_call_timeout=2,keep_alive_interval=1",
        **FORKED,
    }

    def ranks_of(*agents: Job) -> list[int]:
        """Return the process ids of the living ranks, which agents have forked."""
        parents = [agent.process.pid for agent in agents]
        return [pid for pid in processes_about(run) if parent_of(pid) in parents]

    def last_step() -> int:
        return max((record["step"] for record in records_of(run, "step")), default=0)

    with started(command, run, **environment) as first:
        first.wait_until(lambda: is_listening(port))  # the first agent hosts the rendezvous
        with started(command, tmp_path / "second", **environment) as second:
            first.wait_until(lambda: len(ranks_of(first, second)) == 2 and last_step() > 20)
            (rank,) = ranks_of(second)
            second.process.kill()
            os.kill(rank, signal.SIGKILL)
        step_of_loss = last_step()
        first.wait_until(lambda: len(ranks_of(first)) == 1 and last_step() > step_of_loss + 20)
        with started(command, tmp_path / "second", **environment) as second:
            first.wait_until(lambda: len(ranks_of(first, second)) == 2)
            assert second.process.wait(300) == 0, second.output()
            assert first.wait() == 0, first.output()  # with both ended, no process is left
    assert workplace.train_here(whole_run, *options, yaml=yaml) == 0
    losses, losses_of_whole_run = (
        {record["step"]: record["loss"] for record in records_of(folder, "step")}
        for folder in (run, whole_run)
    )
    assert losses == pytest.approx(losses_of_whole_run, rel=1e-4)


def test_launcher_uses_the_environment_of_the_checkout_if_python_has_no_torch(
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    write_script(tmp_path / "bin/python", "exit 1")
    write_script(tmp_path / ".venv/bin/python", '[ "$1" = -c ] && echo 1; echo "$@" >&2')
    process = subprocess.run(
        [tmp_path / "tools/launch/one_node.sh", "own.py", "own.yaml", "--seed=1"],
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stderr.endswith("--standalone own.py own.yaml --seed=1\n"), process.stderr
