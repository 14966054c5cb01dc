"""Every command of the README runs: on a small corpus, with a small model, in their order."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from tests.runs import ROOT, TINY, make_workplace

COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    for line in block.splitlines()
]
# What a machine without GPUs and without Common Voice puts in place of the README's words.
HERE = {"--nproc_per_node=8": "--nproc_per_node=2", "--language=fr": "--language=en"}
# The test's release has one language, so language_id.yaml is to tell another column.
SMALL = ("--device=cpu", "--language=[en]", "--label=half", "--d_model=16", "--nhead=2")
# tools/test runs this test, the others have tests of their own: tests/test_{tools,launch}.py.
ELSEWHERE = ("tools/demo", "tools/test", "tools/launch/several_nodes.sh", "sbatch")


@pytest.fixture(scope="module")
def checkout(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that looks like a checkout, with a corpus and two recordings beside it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "hparams", "recipes", "sbkit", "tools"):
        (folder / name).symlink_to(ROOT / name)
    workplace = make_workplace(asterisk_english, folder / "data")
    for table in workplace.release.glob("*.tsv"):
        head, *rows = table.read_text(encoding="utf-8").splitlines()
        halves = [f"{row}\t{'first' if n % 2 else 'second'}" for n, row in enumerate(rows)]
        table.write_text("\n".join([f"{head}\thalf", *halves]) + "\n", encoding="utf-8")
    clip, *_ = sorted((workplace.release / "clips").iterdir())
    audio, rate = soundfile.read(clip)
    soundfile.write(folder / "talk.mp3", audio, rate)
    soundfile.write(folder / "call.wav", audio, rate)
    (folder / "other.csv").write_text("path,text\ntalk.mp3,hello\n")
    return folder


def adapted(command: str, checkout: Path) -> list[str]:
    """Make a README command small enough to run here; its words and their order stay."""
    release = str(checkout / "data" / "release")
    words = [HERE.get(word, word) for word in shlex.split(command)]
    words = [re.sub(r"=/data/\S+", f"={release}", word) for word in words]
    if {"train.py", "check", "tools/launch/one_node.sh"} & {*words}:
        own = {word.split("=")[0] for word in words}
        sizes = SMALL if "hparams/language_id.yaml" in words else TINY
        options = [f"--data_folder={release}", *sizes, "--number_of_epochs=1"]
        if "hparams/ctc_large.yaml" in words:
            options += ["--vocab_size=45", "--num_decoder_layers=1"]
        words += [option for option in options if option.split("=")[0] not in own]
    return words


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some fifteen commands, one after the other
def test_the_commands_run_in_their_order(checkout: Path) -> None:
    here = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{here}:{os.environ['PATH']}",
        "SBKIT_CACHE": str(checkout / "cache"),
        "OMP_NUM_THREADS": "1",
        "PET_MASTER_PORT": "29530",  # another test of tools/test may use torchrun's own
        "PYTHONPATH": str(ROOT),
    }
    for command in COMMANDS:
        if command.split()[0] in ELSEWHERE:
            continue
        done = subprocess.run(
            adapted(command, checkout),
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )
        # A corpus this small is told of: its steps do not fill eight GPUs.
        expected = (0, 1) if " check " in command else (0,)
        assert done.returncode in expected, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    shutil.rmtree(checkout / "results")


def test_the_readme_has_commands() -> None:
    assert COMMANDS[:2] == list(ELSEWHERE[:2])
    assert sum("train.py" in command for command in COMMANDS) >= 3
    assert sum(command.startswith("sbkit ") for command in COMMANDS) >= 3


@pytest.mark.parametrize("tool", ELSEWHERE[:3])
def test_the_tools_are_there_to_be_run(tool: str) -> None:
    assert os.access(ROOT / tool, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / tool], check=True)


def test_every_path_that_is_named_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:sbkit|recipes|hparams|tests|tools)/[\w./-]+)`", text))
    assert len(paths) > 20
    assert not sorted(path for path in paths if not (ROOT / path).exists())
