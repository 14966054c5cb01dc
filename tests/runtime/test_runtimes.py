"""A model that does not run as requested is an error that names the cause."""

import gc
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import av
import onnx
import onnxruntime
import pytest
import torch

from sbkit.base import machine
from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.machine import PRECISIONS, NvidiaDriver
from sbkit.bundle.protocols import EffectiveRuntime
from sbkit.commands.cli import run
from sbkit.commands.doctor import machine_facts
from sbkit.commands.trials import ONNX_SQUARE
from sbkit.distributed.device import DTYPES
from sbkit.runtime import runtimes
from sbkit.runtime.onnx_model import MODEL_FILES, OnnxModel
from sbkit.runtime.runtimes import load_in_thread, require_as_requested
from tests.processes import run_fresh
from tests.runtime.bundles import edit_weights

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
NEW, OLD = NvidiaDriver("580.65.06", "13.0"), NvidiaDriver("535.104.05", "12.2")


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def runs_on(bundle: Path, runtime: str = "onnx", **options: str) -> Any:
    model = load_in_thread(bundle, runtime=runtime, **options).model  # type: ignore[arg-type]
    model.close()
    return model.runs_on


def test_model_whose_provider_runs_no_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime runs the nodes on the CPU instead, without a word."""
    monkeypatch.setitem(machine.PROVIDERS, "cuda", "AzureExecutionProvider")  # every wheel has it
    with pytest.raises(SbkitError, match=f"Azure.* must run all 1 .* but runs 0 .1 by {CPU}"):
        OnnxModel(ONNX_SQUARE, device="cuda")


def test_onnx_model_preloads_cuda_and_disables_tf32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only torch finds the libraries of CUDA's wheels by itself, and this runtime has none."""
    arguments: list[Any] = []

    def refuse(session: Any, content: bytes, options: object, **more: Any) -> None:
        arguments.extend([*more["providers"], more["enable_fallback"]])
        raise RuntimeError("no GPU")

    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("loaded"))
    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", refuse)
    with pytest.raises(SbkitError, match="no GPU"):
        OnnxModel(b"graph", device="cuda:1")
    assert arguments == [(CUDA, {"device_id": "1", "use_tf32": "0"}), 0]  # errors move it nowhere
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "loaded\n")


def test_closed_model_is_freed_while_its_bundle_is_kept(plain_bundle: Path) -> None:
    """It used to stay in the memory of the GPU, held by the bundle that was taken over."""
    bundle = load_in_thread(plain_bundle, device="cpu")
    network = bundle.model.call(lambda model: weakref.ref(model.network))
    assert network() is not None
    bundle.model.close()
    gc.collect()
    assert network() is None


def test_model_that_runs_elsewhere_than_requested_is_refused() -> None:
    runs_on = EffectiveRuntime(runtime="onnx", device="cuda:0", precision="fp32", nodes={CUDA: 1})
    require_as_requested(runs_on, device="cuda:0", precision="fp32")
    with pytest.raises(SbkitError, match="cuda:1 was requested, but the model runs on cuda:0"):
        require_as_requested(runs_on, device="cuda:1", precision="fp32")


def test_load_in_thread_reads_back_the_precision_of_nodes(bundle: Path) -> None:
    for requested, actual in (("fp32", "fp32"), ("int8", "int8 and fp32")):
        assert runs_on(bundle, device="cpu", precision=requested).precision == actual
    files = [bundle / "onnx" / name for name in MODEL_FILES.values()]
    fp32, int8 = (file.read_bytes() for file in files)
    for file, content in zip(files, (int8, fp32), strict=True):
        file.write_bytes(content)
    write_checksums(bundle / "onnx")
    for requested, actual in (("fp32", "int8 and fp32"), ("int8", "fp32")):
        with pytest.raises(SbkitError, match=f"{requested} was requested, .* with {actual}"):
            runs_on(bundle, device="cpu", precision=requested)


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
@pytest.mark.parametrize("cuda", ["13.0", None])  # of the wheel
@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "there is no NVIDIA driver. Install one"),
        (replace(NEW, cuda="", failure="no file"), "there is no NVIDIA driver.*no file"),
        (replace(NEW, failure="no device"), "NVIDIA's driver shows no GPU.*no device; C.* empty"),
        (OLD, "NVIDIA's driver is too old for .*for CUDA 12 .driver 535.104.05 supports CUDA 12.2"),
        (replace(NEW, version="unusable"), "torch finds no GPU, but NVIDIA's driver does"),
        (NEW, ""),
    ],
)
def test_doctor_errors_and_auto_say_why_no_gpu_is_used(
    driver: NvidiaDriver | None,
    reason: str,
    runtime: str,
    cuda: str | None,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    providers = [CUDA, CPU] if cuda else [CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "cuda_version", cuda, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "read_driver", lambda: driver)
    runtimes.warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not reason)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if cuda is None and driver and driver.cuda and not driver.failure:
        reason = f"there is no .* with CUDA.*for CUDA {driver.cuda[:2]} "
    elif runtime == "onnx" and reason.startswith("torch"):
        reason = ""
    usable, _, printed = machine_facts()[f"CUDA with {runtime}"].partition(", because ")
    assert usable == ("not usable" if reason else "usable")
    assert re.match(reason, printed)
    if reason:
        with pytest.raises(SbkitError, match=f"The device cuda:0 needs a GPU .*{reason}"):
            runs_on(bundle, device="cuda:0", runtime=runtime)
        assert [runs_on(bundle, runtime=runtime).device for _ in range(2)] == ["cpu", "cpu"]
    is_told = reason != "" and driver is not None
    assert caplog.messages == [f"No GPU is used, because {printed}."] * is_told
    assert not re.search(r"\d", printed.partition(". ")[0])  # which `/health/ready` shows


def test_load_in_thread_refuses_unsupported_options_of_onnx(exported: Path) -> None:
    for name, value, says in (
        ("device", "mps", "must be auto, cpu, cuda or cuda:N"),
        ("precision", "bf16", "bf16 is not supported by the runtime onnx"),
        ("compile", "default", "does not support `compile`"),
    ):
        with pytest.raises(SbkitError, match=says):
            runs_on(exported, **{name: value})


def test_precisions_of_help_and_errors_are_those_of_the_runtimes() -> None:
    assert {"torch": (*DTYPES,), "onnx": (*MODEL_FILES,)} == PRECISIONS


def test_load_in_thread_refuses_an_onnx_model_of_other_weights(bundle: Path) -> None:
    assert runs_on(bundle, device="cpu").device == "cpu"
    edit_weights(bundle, lambda weights: {name: w + 1 for name, w in weights.items()})
    with pytest.raises(SbkitError, match="has other weights"):
        runs_on(bundle, device="cpu")


def test_doctor_tries_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path))
    assert run(["doctor"]) == 0
    report = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert report["torch"].startswith("2.")
    assert report["onnxruntime's providers"].endswith(CPU)
    for package in ("PyAV", "soundfile"):
        assert report[f"trial of {package}"] == "reads what was written"
    assert report["trial of the cache"] == f"reads what was written in {tmp_path}"
    assert [*tmp_path.iterdir()] == []
    assert report["trial of onnxruntime"] == f"runs on onnx, cpu, fp32, 1 nodes on {CPU}"
    onnx.checker.check_model(onnx.load_from_string(ONNX_SQUARE), full_check=True)


def test_doctor_notices_packages_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """PyAV 19 dropped a keyword: no file could be read, and `doctor` printed its version only."""
    dropped = TypeError("open() got an unexpected keyword argument 'metadata_errors'")
    monkeypatch.setattr(av, "open", Mock(side_effect=dropped))
    monkeypatch.setattr(OnnxModel, "run", lambda _, matrix: [-matrix])
    (tmp_path / "file").touch()
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "file"))
    assert run(["doctor"]) == 2
    report = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert report["trial of PyAV"] == f"TypeError: {dropped}"
    assert report["trial of soundfile"] == "reads what was written"
    assert report["trial of the cache"].startswith("FileExistsError: ")
    assert report["trial of onnxruntime"].endswith("was computed as [[-1.0, -2.0], [-3.0, -4.0]]")


def test_old_onnxruntime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", object)
    with pytest.raises(SbkitError, match=r"^onnxruntime \S+ cannot say"):
        OnnxModel(ONNX_SQUARE)


def test_transcribe_without_torch_names_onnx(exported: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sbkit.commands.cli import main, run\n"
        "assert run(['doctor']) == 0\n"
        "sys.argv[1:] = ['transcribe', sys.argv[1], 'talk.wav']; main()"
    )
    process = run_fresh(code, exported)
    missing = "CUDA with torch: not usable, because torch is not installed"
    assert missing in process.stdout, process.stderr
    assert process.returncode == 2 and "use the runtime onnx" in process.stderr, process.stderr
