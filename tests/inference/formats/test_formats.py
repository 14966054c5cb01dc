"""Every format is what the trained model is: whoever loads it hears the same words, or it is not
there.

The consumers are the real ones: onnxruntime, torch, sherpa-onnx and SpeechBrain's EncoderASR.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sherpa_onnx
import torch
from speechbrain.inference.ASR import EncoderASR
from torch import Tensor, nn

from sbkit.audio.lengths import to_relative
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import find_damage
from sbkit.cli import run as sbkit
from sbkit.inference.bundle import Bundle, load_bundle
from sbkit.inference.export import Wanted, export_run
from sbkit.inference.formats import write
from sbkit.inference.formats.candidate import EXACT, Candidate
from sbkit.inference.formats.grid import Grid, noise
from sbkit.inference.formats.held_out import find_held_out
from sbkit.inference.formats.onnx_format import save_onnx
from sbkit.inference.formats.source import Source
from sbkit.inference.formats.traced import trace
from sbkit.inference.formats.write import WRITERS
from sbkit.inference.onnx_runtime import LogProbs, OnnxModel
from sbkit.inference.place import FOLDERS
from tests.inference.bundles import make_run

SMALL = Grid(batches=(1, 3), seconds=(0.3, 2.0))
Clips = list[Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, asterisk_english: Path) -> Path:
    """Make a run whose model says something: its head is louder than that of a new one."""
    return make_run(tmp_path_factory.mktemp("formats") / "run", change=louder)


def louder(hparams: Any) -> None:
    with torch.no_grad():
        hparams["ctc_lin"].weight.mul_(30)
        hparams["ctc_lin"].bias[1:4] = -100  # sherpa-onnx writes special tokens by their names


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    """Export all formats; the exporter compares them with the clips, too."""
    export_run(run, run.parent / "bundle", Wanted(formats=[*WRITERS], grid=SMALL))
    return run.parent / "bundle"


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


@pytest.fixture(scope="module")
def clips(run: Path) -> Clips:
    """Load every clip of the test set, the shortest first."""
    batches = find_held_out(run, own=frozenset()).batches()
    return [clip for batch in batches for clip in batch.audio]


@pytest.fixture(scope="module")
def expected(bundle: Bundle, clips: Clips) -> list[str]:
    texts = bundle.transcribe(clips)
    assert len(set(texts)) > 50
    return texts


def certificate(folder: Path, name: str) -> dict[str, Any]:
    said = json.loads((folder / name / "parity.json").read_text())
    found: dict[str, Any] = said["compared_with_the_trained_model"]
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_is_written_with_its_certificate(folder: Path, name: str) -> None:
    assert find_damage(folder / name) is None
    for precision, found in certificate(folder, name).items():
        assert found["written"] and not found["reasons"]
        assert found["grid"]["utterances"] == 1 * 2 * 2 + 3 * 2 * 3
        assert found["held_out"]["utterances"] == sum(found["held_out"]["sets"].values()) == 65
        rates = found["held_out"]["error_rates"]
        if precision != "int8":
            assert found["grid"]["largest_difference"] < 1e-4
            assert not found["grid"]["utterances_with_other_tokens"]
        if precision == "fp32":
            assert rates == found["held_out"]["error_rates_of_the_trained_model"]
            assert not found["held_out"]["transcripts_with_other_words"]


def test_onnxruntime_hears_the_same_words(folder: Path, bundle: Bundle, clips: Clips) -> None:
    model, tokenizer = OnnxModel.load(folder, threads=1), bundle.require_asr()
    for clip in [*clips, torch.zeros(10, dtype=torch.int16)]:
        log_probs, lengths = model.log_probs(clip.numpy()[None], np.array([len(clip)]))
        best = [int(each) for each in log_probs[0, : lengths[0]].argmax(-1)]
        ids = [one for one, before in zip(best, [0, *best], strict=False) if one not in (before, 0)]
        assert tokenizer.decode(ids) == bundle.transcribe([clip])[0]


def test_sherpa_onnx_hears_the_same_words(folder: Path, clips: Clips, expected: list[str]) -> None:
    """From the waveform, with features of its own; of the other two types the card tells."""
    recognizer = sherpa_onnx.OfflineRecognizer.from_fire_red_asr_ctc(
        model=str(folder / "sherpa-onnx/model.onnx"), tokens=str(folder / "sherpa-onnx/tokens.txt")
    )
    for clip, text in zip(clips, expected, strict=True):
        stream = recognizer.create_stream()
        stream.accept_waveform(16_000, clip.numpy() / np.float32(32768))
        recognizer.decode_stream(stream)
        assert stream.result.text.split() == text.split()


def test_speechbrain_hears_the_same_words(folder: Path, clips: Clips, expected: list[str]) -> None:
    """In batches of clips of very different lengths, whose relative lengths are rounded."""
    recognizer = EncoderASR.from_hparams(source=str(folder / "speechbrain"), savedir=None)
    lengths = torch.tensor([len(clip) for clip in clips])
    audio = nn.utils.rnn.pad_sequence([clip / 32768 for clip in clips], batch_first=True)
    words, _ = recognizer.transcribe_batch(audio, to_relative(lengths, audio.shape[1]))
    assert [each.split() for each in words] == [text.split() for text in expected]


def test_a_hub_folder_is_a_bundle_with_its_card(folder: Path, clips: Clips) -> None:
    hub = load_bundle(folder / "hub")
    assert hub.transcribe(clips[:3]) == load_bundle(folder).transcribe(clips[:3])
    assert (folder / "hub/README.md").read_text() == (folder / "README.md").read_text()
    assert "*.safetensors filter=lfs" in (folder / "hub/.gitattributes").read_text()


def test_no_path_of_this_machine_is_in_a_format(folder: Path) -> None:
    here = str(Path(__file__).parents[3]).encode()
    for file in folder.rglob("*"):
        assert not file.is_file() or file.suffix == ".pt2" or here not in file.read_bytes(), file


def test_all_is_replaced_and_nothing_of_others(run: Path, folder: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(folder, tmp_path / "bundle"))
    (mine / "onnx/notes.txt").touch()
    with pytest.raises(SbkitError, match=r"something else \(onnx/notes.txt\)"):
        export_run(run, mine)
    (mine / "onnx/notes.txt").unlink()
    (mine / "README.md").write_text("an edited card")
    with pytest.raises(SbkitError, match=r"something else \(README.md\)"):
        export_run(run, mine)
    shutil.copyfile(folder / "README.md", mine / "README.md")
    export_run(run, mine)
    assert not (mine / "onnx").exists()


def off_by(difference: float) -> Callable[[Source, Path], Sequence[Candidate]]:
    """Make a writer whose format differs from the model."""

    def write(source: Source, folder: Path) -> Sequence[Candidate]:
        def log_probs(audio: Any, lengths: Any) -> LogProbs:
            with torch.inference_mode():
                found, frames = source.waveform(torch.from_numpy(audio), torch.from_numpy(lengths))
            return LogProbs(found.numpy() + np.float32(difference), frames.numpy())

        (folder / "model.onnx").touch()
        return [Candidate(name="fp32", files=["model.onnx"], limits=EXACT, log_probs=log_probs)]

    return write


@pytest.mark.parametrize(("difference", "kept"), [(5e-5, True), (2e-4, False), (np.nan, False)])
def test_a_format_beyond_its_limits_is_not_written(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    difference: float,
    kept: bool,
) -> None:
    monkeypatch.setattr(write, "WRITERS", {"onnx": off_by(difference)})
    monkeypatch.setattr("sbkit.inference.export.Grid", lambda: SMALL)
    code = sbkit(["export", str(run), "--out", str(tmp_path / "out"), "--formats", "onnx"])
    printed = capsys.readouterr().err
    load_bundle(tmp_path / "out")
    assert (tmp_path / "out/onnx/model.onnx").exists() == kept == (code == 0)
    found = certificate(tmp_path / "out", "onnx")["fp32"]
    assert found["written"] == kept
    assert kept or "log-probabilities differ by" in found["reasons"][0] in printed


def test_without_its_test_data_a_format_is_compared_on_noise(run: Path, tmp_path: Path) -> None:
    lost = Path(shutil.copytree(run, tmp_path / "run"))
    yaml = lost / "hyperparams.yaml"
    lines = yaml.read_text().splitlines()
    yaml.write_text(
        "\n".join("data_folder: /nowhere" if "data_folder:" in each else each for each in lines)
    )
    export_run(lost, tmp_path / "out", Wanted(formats=["hub"], grid=SMALL))
    found = certificate(tmp_path / "out", "hub")["fp32"]
    assert found["grid"]["audio"] == "noise" and found["written"]
    assert "/nowhere is not a folder" in found["held_out"]["not_compared"]


def test_an_unknown_format_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match=r"`--formats` must name some of onnx, .* 'tflite'"):
        export_run(run, tmp_path / "out", Wanted(formats=["onnx", "tflite"]))


def test_a_place_of_a_bundle_knows_the_folders_of_all_formats() -> None:
    assert tuple(WRITERS) == FOLDERS


class Fixed(nn.Module):
    """Take the length of its example for a constant."""

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return audio[:, : len(audio[0])].reshape(-1, 100, 1), audio_lengths


def test_a_model_of_one_length_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="for any batch and length"):
        trace(Fixed(), torch.zeros(3, 100), torch.tensor([100, 100, 50]))


class Summed(nn.Module):
    """Drop the axis of time."""

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return audio.sum(1, keepdim=True), audio_lengths


def test_a_graph_with_a_fixed_axis_is_refused(tmp_path: Path) -> None:
    program = trace(Summed(), torch.zeros(3, 100), torch.tensor([100, 100, 50]))
    with pytest.raises(SbkitError, match="`y` has a fixed size of 1"):
        save_onnx(program, tmp_path / "x.onnx", names=(["a", "b"], ["y", "n"]), metadata={})


def test_a_grid_pads_as_it_says() -> None:
    cases = {
        case.what: case for case in Grid(batches=(1, 2), seconds=(1.0,)).cases(noise(100), 100)
    }
    assert len(cases) == 2 + 3
    ragged = cases["2 x 1 s, padding: ragged"]
    assert ragged.lengths.tolist() == [100, 40] and not ragged.audio[1, 40:].any()
    assert cases["1 x 1 s, padding: beyond"].audio.shape == (1, 200)
