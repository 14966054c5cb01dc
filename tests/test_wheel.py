"""The wheel: the same bytes each time, and all that projects and bundles need."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile

from tests.runs import ROOT, Workplace, rows_of

MAX_BYTES = 2e6
PROJECT = ("train.py", "hparams/", "recipes/")
DATA_SUFFIXES = (".html", ".j2", ".css", ".js", ".toml", ".typed")

Call = Callable[..., str]


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
    """Return a function that runs a module of Python, with the wheel but without the checkout."""
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", target, wheel]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "SBKIT_CACHE": str(workplace.cache)}

    def call(*words: object, cwd: Path) -> str:
        command = [sys.executable, "-m", *map(str, words)]
        process = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        assert str(ROOT) not in process.stdout + process.stderr
        return process.stdout

    return call


@pytest.mark.slow(40)
@pytest.mark.ddp
def test_new_project_trains_and_exports_in_an_empty_folder(
    call: Call, workplace: Workplace, tmp_path: Path
) -> None:
    call("sbkit", "new", "mine", cwd=tmp_path)
    options = workplace.arguments(tmp_path / "run", "--number_of_epochs=1")
    launcher = ("torch.distributed.run", "--standalone")
    call(*launcher, "train.py", *options, cwd=tmp_path / "mine")
    call("sbkit", "export", tmp_path / "run", "--out", "model", cwd=tmp_path / "mine")
    assert (tmp_path / "mine/model/model.safetensors").exists()


@pytest.mark.slow(60)
def test_bundles_of_every_task_run_in_an_empty_folder(
    call: Call, exported: Path, task_bundles: Path, workplace: Workplace, tmp_path: Path
) -> None:
    row = rows_of(workplace.release / "test.tsv")[0]
    clip = workplace.release / "clips" / row["path"]
    text = call("sbkit", "transcribe", exported, clip, cwd=tmp_path)
    detector = ("--vad", task_bundles / "vad")
    assert call("sbkit", "transcribe", exported, clip, *detector, cwd=tmp_path) == text
    for runtime in ("torch", "onnx"):
        options = ("--runtime", runtime)
        codec, voice = (task_bundles / "codec", *options), (task_bundles / "tts", *options)
        call("sbkit", "encode", *codec, clip, "--out", "clip.codes", cwd=tmp_path)
        call("sbkit", "decode", *codec, "clip.codes", "--out", "clip.wav", cwd=tmp_path)
        assert soundfile.info(tmp_path / "clip.wav").frames == soundfile.info(clip).frames
        call("sbkit", "speak", *voice, "hello", "--out", f"{runtime}.wav", cwd=tmp_path)
        assert soundfile.info(tmp_path / f"{runtime}.wav").duration > 0.1
    label = call("sbkit", "classify", task_bundles / "language_id", clip, cwd=tmp_path)
    assert label.split()[0] in ("even", "odd")
