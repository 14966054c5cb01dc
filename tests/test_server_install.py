"""The installation of a server: the wheel, and the few packages that run a bundle with ONNX."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.audio.formats import encode_tone

ROOT = Path(__file__).parents[1]
MAX_INSTALL_BYTES = 320e6  # the image of Python adds some 130 MB
DOCKERFILE = (ROOT / "tools/serve.Dockerfile").read_text()
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
READ_ALL_FORMATS = """import sys; sys.path.append(sys.argv[1])
from sbkit.audio.io import read_audio
from tests.audio.formats import FORMATS, encode_tone
for name in FORMATS: read_audio(encode_tone(name))"""
HEAVY = ("torch", "speechbrain", "datasets", "tensorboard", "matplotlib")


def test_packages_of_a_server_are_those_of_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    for name, required in (
        ("runtime", setup["options"]["install_requires"] + extras["export"]),
        ("serve", extras["serve"]),
    ):
        lines = (ROOT / f"tools/{name}.txt").read_text().splitlines()
        packages = {line for line in lines if not line.startswith("#")}
        assert packages <= {line.partition("#")[0].strip() for line in required.splitlines()}
        assert not {line.partition(" ")[0] for line in packages} & {*HEAVY}


def call(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(word) for word in command]
    return subprocess.run(
        arguments, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def copy_source(folder: Path) -> Path:
    """Copy the image's sources, because the build writes into their folder."""
    (folder / "tools").mkdir(parents=True)
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        name = line.removeprefix("!")
        if name != line and (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        elif name != line:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow(40)
def test_server_install_runs_and_serves_bundles_without_torch(
    exported: Path, task_bundles: Path, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 44_100)
    soundfile.write(tmp_path / "talk.flac", noise, 44_100)
    source = copy_source(tmp_path / "source")
    built = call(sys.executable, "-m", "pip", "wheel", "--no-deps", source, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"sbkit"}
    assert any(name.endswith("page.js") for name in names)
    assert "sbkit/serve/page.html" in names

    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "server", cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "server")
    scripts = tmp_path / "server/bin"
    lists = ["-c", "/tools/constraints.txt", "-r", "/tools/runtime.txt", "-r", "/tools/serve.txt"]
    assert f"pip install --no-cache-dir {' '.join(lists)}\n" in DOCKERFILE
    assert "pip install --no-cache-dir --no-deps /wheels/*.whl\n" in DOCKERFILE
    shutil.copy(source / "constraints.txt", source / "tools")
    requirements = [word.replace("/tools", f"{source}/tools") for word in lists]
    for packages_args in (requirements, ["--no-deps", wheel]):
        installed = call(*pip, "install", "-q", *packages_args, cwd=tmp_path)
        assert installed.returncode == 0, installed.stderr
    (packages,) = (tmp_path / "server/lib").glob("python*/site-packages")
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file())
    assert size < MAX_INSTALL_BYTES
    assert not [name for name in HEAVY if (packages / name).exists()]

    command = [scripts / "sbkit", "transcribe", exported, tmp_path / "talk.flac"]
    result = call(*command, "--runtime", "onnx", "--format", "json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["effective"]["runtime"] == "onnx"
    command = [scripts / "sbkit", "encode", task_bundles / "codec", tmp_path / "talk.flac"]
    result = call(*command, "--runtime", "onnx", "--out", "talk.codes", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    refused = call(scripts / "sbkit", "check", "run.yaml", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "needs the package" in refused.stderr
    assert "Traceback" not in refused.stderr
    bundles = [exported, task_bundles / "tts"]
    serve_without_torch(scripts / "sbkit", bundles, tmp_path / "talk.flac")
    print(f"{size / 1e6:.0f} MB")


def newest_python() -> str:
    """Return the newest Python of this machine that sbkit supports, as `tools/test` finds it."""
    find = "for python in 3.13 3.12 3.11; do (find_python 2>/dev/null) && exit; done"
    command = ["bash", "-c", f"source tools/environment.sh; {find}"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.release  # others release the newest versions at any time
@pytest.mark.slow(60)
def test_newest_versions_read_and_serve_without_torch(
    exported: Path, task_bundles: Path, wheel: Path, tmp_path: Path
) -> None:
    """Users get the newest versions: with PyAV 19, which the pinned ones hid, no file was read."""
    newest = tmp_path / "newest"
    call(newest_python(), "-m", "venv", "--without-pip", newest, cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", newest, "install", "-q")
    lists = [word for name in ("runtime", "serve") for word in ("-r", ROOT / f"tools/{name}.txt")]
    for packages_args in ([*lists, "datasets"], ["--no-deps", wheel]):
        installed = call(*pip, *packages_args, cwd=tmp_path)
        if "NewConnectionError" in installed.stderr:
            pytest.skip("The newest versions are not tried, because no index can be reached.")
        assert installed.returncode == 0, installed.stderr
    sbkit = newest / "bin/sbkit"
    read = call(newest / "bin/python", "-c", READ_ALL_FORMATS, ROOT, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    tried = call(sbkit, "doctor", cwd=tmp_path)
    assert tried.returncode == 0, tried.stdout
    talk = tmp_path / "talk.m4a"
    talk.write_bytes(encode_tone(("MP4", "AAC")))
    result = call(sbkit, "transcribe", exported, talk, "--runtime", "onnx", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    serve_without_torch(sbkit, [exported, task_bundles / "tts"], talk)
    print(tried.stdout)


def serve_without_torch(sbkit: Path, bundles: Sequence[Path], audio: Path) -> None:
    """Serve a recognizer and a voice with the entry point of the image until SIGTERM."""
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE)
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in json.loads(entry)]
    words += [*map(str, bundles), "--port", "0"]
    environment = ENVIRONMENT | {"PATH": f"{sbkit.parent}:{os.environ['PATH']}"}
    gpu = subprocess.run(
        words, env=environment | {"DEVICE": "cuda"}, capture_output=True, text=True, check=False
    )
    assert (gpu.returncode, "Traceback" in gpu.stderr) == (2, False), gpu.stderr
    assert "cuda" in gpu.stderr  # the image declared a GPU, which is not here: speaches 255
    environment["DEVICE"] = "auto"
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        url = server.stderr.readline().split()[-1]
        while subprocess.run(["curl", "-sf", f"{url}/health/ready"], check=False).returncode:
            assert server.poll() is None
        ask = ["curl", "-sS", f"{url}/v1/audio/transcriptions", "-F", f"file=@{audio}"]
        answer = subprocess.run(ask, capture_output=True, check=True)
        assert set(json.loads(answer.stdout)) == {"text", "usage"}
        speech = {"input": "hello", "model": "tts-1", "voice": "alloy", "response_format": "wav"}
        ask = ["curl", "-sS", f"{url}/v1/audio/speech", "--json", json.dumps(speech)]
        answer = subprocess.run(ask, capture_output=True, check=True)
        assert answer.stdout[:4] == b"RIFF", answer.stdout[:200]
        server.terminate()
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.communicate()
