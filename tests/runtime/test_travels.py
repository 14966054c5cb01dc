"""Models travel to other processes, and say there why they cannot be loaded."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from sbkit import Transcriber
from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.bundle import read_bundle
from sbkit.runtime.runtimes import load_bundle, load_in_thread
from sbkit.tasks.asr.session import Event, StreamingRecognizer
from tests.runs import ROOT
from tests.runtime.tones import RATE, noise, run
from tests.test_readme import blocks

CLIP = noise(2.0)[0]
SMALL_PICKLE = 2000  # bytes; the weights take 50 kB


def transcribe(transcriber: Transcriber, clip: Samples) -> tuple[str, int]:
    transcript = transcriber.transcribe(clip, RATE)
    return transcript.text, len(transcript.words)


def listen(recognizer: StreamingRecognizer, clip: Samples) -> list[Event]:
    return run(recognizer, [clip])


def recognize(bundle: Any, clip: Samples) -> list[str]:
    texts: list[str] = bundle.transcribe([clip])
    return texts


LOADED: Mapping[str, tuple[Callable[[Path], Any], Callable[[Any, Samples], object]]] = {
    "transcriber": (lambda folder: Transcriber.load(folder, times=False, device="cpu"), transcribe),
    "recognizer": (lambda folder: StreamingRecognizer.load(folder, device="cpu"), listen),
    "torch": (load_bundle, recognize),
    "onnx": (lambda folder: load_in_thread(folder, runtime="onnx", device="cpu"), recognize),
}


@pytest.fixture(params=LOADED)
def loaded(
    request: pytest.FixtureRequest, streaming: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Callable[[Any, Samples], object]]]:
    """Return an object that was loaded from a relative folder, and a function that uses it."""
    load, use = LOADED[request.param]
    monkeypatch.chdir(streaming.parent)
    yield load(Path(streaming.name)), use


@pytest.fixture(scope="module")
def other_process() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.slow(20)
def test_loaded_objects_pickle_by_loading_again(
    loaded: tuple[Any, Callable[[Any, Samples], object]],
    other_process: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, use = loaded
    expected = use(original, CLIP)
    assert expected
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    assert use(copy.deepcopy(original), CLIP) == expected
    assert torch.equal(torch.get_rng_state(), state)
    content = cloudpickle.dumps(original)  # as joblib and Ray pickle
    assert len(content) < SMALL_PICKLE
    assert use(pickle.loads(content), CLIP) == expected
    assert other_process.apply(use, (original, CLIP)) == expected


def test_closed_objects_say_so(streaming: Path) -> None:
    transcriber = Transcriber.load(streaming, device="cpu")
    recognizer = StreamingRecognizer.load(streaming, device="cpu")
    copy.deepcopy(transcriber).close()
    transcribe(transcriber, CLIP)
    transcriber.close()
    recognizer.close()
    with pytest.raises(SbkitError, match="closed"):
        transcriber.transcribe(CLIP, RATE)
    with pytest.raises(SbkitError, match="closed"):
        listen(recognizer, CLIP)


def test_bundle_travels_with_what_was_replaced_in_it(streaming: Path) -> None:
    bundle = replace(load_bundle(streaming), refused_hotwords=("cheese",))
    copied = pickle.loads(pickle.dumps(bundle))
    assert copied.refused_hotwords == ("cheese",) and copied.labels is not bundle.labels
    assert pickle.loads(pickle.dumps(copied)).refused_hotwords == ("cheese",)


def test_model_of_a_bundle_is_a_module_with_the_names_of_its_weights(streaming: Path) -> None:
    model = load_bundle(streaming).model
    weights = load_file(streaming / "model.safetensors")
    assert model.state_dict().keys() == weights.keys() and not model.training
    audio = torch.from_numpy(CLIP).float()[None]
    log_probs, frames = model(audio, torch.tensor([len(CLIP)]))
    (expected,) = model.encode([CLIP])
    np.testing.assert_allclose(log_probs[0].detach(), expected.log_probs, atol=1e-5)
    assert frames.tolist() == [len(expected.log_probs)]
    log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in model[-1].parameters())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert not np.allclose(model.encode([CLIP])[0].log_probs, expected.log_probs)
    model.load_state_dict(weights)
    np.testing.assert_array_equal(model.encode([CLIP])[0].log_probs, expected.log_probs)


def test_objects_describe_themselves_in_a_line(streaming: Path) -> None:
    with Transcriber.load(streaming, device="cpu") as transcriber:
        for described in (transcriber, load_bundle(streaming), read_bundle(streaming)):
            text = repr(described)
            assert text.startswith(type(described).__name__) and len(text) < 500
            assert "language='en'" in text


def test_page_builds_the_model_of_a_bundle_and_of_a_checkpoint_in_plain_torch(
    streaming: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-model").symlink_to(streaming)
    (tmp_path / "results/ctc/en").mkdir(parents=True)
    (tmp_path / "results/ctc/en/3407").symlink_to(streaming.parent / "run")
    monkeypatch.chdir(tmp_path)
    outputs = []
    page = ROOT / "docs/guide/python.md"
    for block in blocks(page.read_text("utf-8"), "python")[-2:]:
        names: dict[str, Any] = {}
        exec(block, names)
        outputs.append(names["log_probs"].detach())
    torch.testing.assert_close(*outputs)


def test_guide_transcribes_from_python(
    streaming: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my-model").symlink_to(streaming)
    soundfile.write(tmp_path / "talk.mp3", CLIP, RATE)
    soundfile.write(tmp_path / "call.wav", CLIP, RATE)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/guide/transcribe.md"
    results, alternatives = blocks(page.read_text("utf-8"), "python")
    exec(results, {})
    assert capsys.readouterr().out.endswith("gone.wav failed\n")
    exec(alternatives, {})
    *texts, encoded = capsys.readouterr().out.splitlines()
    assert len(texts) == 5 and encoded.startswith("(15, ")
