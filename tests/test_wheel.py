"""The wheel: the same bytes each time, and all that projects and bundles need."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile

from sbkit.commands.new import PROJECT_FILES
from tests.runs import ROOT, Workplace, rows_of

MAX_BYTES = 2e6
PROJECT = ("train.py", "hparams/", "recipes/", "docs/notebooks/")
DATA_SUFFIXES = (".html", ".j2", ".css", ".js", ".toml", ".typed")

# Run at the start of each process: notes connections of Python. torch's between ranks are in C++.
NOTE_CONNECTIONS = """
import sys

def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        with open({log!r}, "a") as file:
            file.write(f"{{sys.argv}}: {{event}} {{arguments}}\\n")

sys.addaudithook(note)
"""

Call = Callable[..., str]


@pytest.mark.slow
def test_build_writes_the_same_bytes_for_any_umask(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tools.build", "--out", tmp_path], check=True, umask=0o077
    )
    for file in wheel.parent.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_wheel_holds_package_and_project(wheel: Path) -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    package = {n for n in tracked if n.startswith("sbkit/") and n.endswith((".py", *DATA_SUFFIXES))}
    project = {n for n in tracked if n.startswith(PROJECT) and not n.endswith(".png")}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == package | {f"sbkit/project/{name}" for name in project}
    assert wheel.stat().st_size < MAX_BYTES


@pytest.fixture(scope="module")
def call(wheel: Path, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Return a function that runs Python, with the wheel but without the checkout.

    It fails if a process connects or asks for an address: all data is on this machine.
    """
    target = tmp_path_factory.mktemp("installed")
    connections = target / "connections"
    connections.touch()
    install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", target, wheel]
    subprocess.run(install, check=True)
    (target / "sitecustomize.py").write_text(NOTE_CONNECTIONS.format(log=str(connections)))
    environment = {**os.environ, "PYTHONPATH": str(target), "SBKIT_CACHE": str(workplace.cache)}

    def call(*words: object, cwd: Path) -> str:
        command: list[str] = [sys.executable, *map(str, words)]
        process = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        assert str(ROOT) not in process.stdout + process.stderr
        noted = connections.read_text()
        connections.write_text("")
        assert not noted
        return process.stdout

    return call


COMMANDS = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from sbkit.commands.cli import run

outputs = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as output:
        assert run(words) == 0, words
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""


@pytest.mark.slow(80)
@pytest.mark.ddp
def test_new_project_checks_trains_exports_and_scores_in_an_empty_folder(
    call: Call, workplace: Workplace, tmp_path: Path
) -> None:
    call("-m", "sbkit", "new", "mine", cwd=tmp_path)
    project = tmp_path / "mine"
    assert all(any(project.glob(pattern)) for pattern in PROJECT_FILES)
    options = workplace.arguments(tmp_path / "run", "--number_of_epochs=1")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    call(*launcher, "train.py", *options, cwd=project)
    clip = workplace.release / "clips" / rows_of(workplace.release / "test.tsv")[0]["path"]
    commands = [
        ["check", *options],
        ["export", str(tmp_path / "run"), "--out", "model"],
        ["transcribe", "model", str(clip)],
        ["score", "model", str(workplace.release / "test.tsv")],
    ]
    *_, scores = json.loads(call("-c", COMMANDS, json.dumps(commands), cwd=project))
    assert "WER" in scores
    assert (project / "model/model.safetensors").exists()
    with pytest.raises(AssertionError, match="getaddrinfo"):
        call("-c", "import socket; socket.getaddrinfo('localhost', 80)", cwd=tmp_path)


@pytest.mark.slow(40)
def test_bundles_of_every_task_run_in_an_empty_folder(
    call: Call, exported: Path, task_bundles: Path, workplace: Workplace, tmp_path: Path
) -> None:
    """One process runs all commands: to import torch for each of them takes half a minute."""
    row = rows_of(workplace.release / "test.tsv")[0]
    clip = workplace.release / "clips" / row["path"]
    transcribe = ("transcribe", exported, clip)
    commands: list[tuple[object, ...]] = [transcribe, (*transcribe, "--vad", task_bundles / "vad")]
    for name in ("torch", "onnx"):
        runtime, codes = ("--runtime", name), f"{name}.codes"
        codec, voice = (task_bundles / "codec", *runtime), (task_bundles / "tts", *runtime)
        commands += [
            ("encode", *codec, clip, "--out", codes),
            ("decode", *codec, codes, "--out", f"{name}-clip.wav"),
            ("speak", *voice, "hello", "--out", f"{name}-speech.wav"),
        ]
    words = json.dumps([[*map(str, command)] for command in commands])
    text, text_of_speech, *_ = json.loads(call("-c", COMMANDS, words, cwd=tmp_path))
    assert text == text_of_speech
    for name in ("torch", "onnx"):
        assert soundfile.info(tmp_path / f"{name}-clip.wav").frames == soundfile.info(clip).frames
        assert soundfile.info(tmp_path / f"{name}-speech.wav").duration > 0.1
