"""Every format is what the trained model is: whoever loads it hears the same words, or it is not
there.

The consumers are the real ones: onnxruntime, torch, sherpa-onnx and SpeechBrain's EncoderASR;
transformers is in tests/export/test_huggingface.py.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import soundfile

from sbkit.audio.io import Samples
from sbkit.base.checksums import find_damage
from sbkit.bundle.bundle import Bundle
from sbkit.decoding.decoder import BeamDecoder
from sbkit.export.export import export_run
from sbkit.export.held_out import find_held_out, read_whole_clips
from sbkit.export.sherpa_format import FIRE_RED, load_with_graph
from sbkit.export.write import HUGGINGFACE, WRITERS
from sbkit.runtime.onnx_model import OnnxModel
from sbkit.runtime.torch_model import load_bundle
from tests.decoding.spoken import train_models
from tests.runtime.bundles import ROOT, parity_report
from tools import bench_transcribe
from tools.bench_transcribe import BASE, SIDES

pytestmark = pytest.mark.slow
FORMATS = [name for name in WRITERS if name != HUGGINGFACE]
Clips = list[Samples]


@pytest.fixture(scope="module")
def bundle(exported: Path) -> Bundle:
    return load_bundle(exported)


@pytest.fixture(scope="module")
def clips(exported: Path) -> Clips:
    """Load every clip of the test set, the shortest first."""
    (rows,) = find_held_out(exported.parent / "run").values()
    return [row["audio"] for batch in read_whole_clips(rows, 16_000) for row in batch.values()]


@pytest.fixture(scope="module")
def expected(bundle: Bundle, clips: Clips) -> list[str]:
    texts = [bundle.transcribe([clip])[0] for clip in clips]
    assert len(set(texts)) > 50
    return texts


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_written_with_its_parity_report(exported: Path, name: str) -> None:
    assert find_damage(exported / name) is None
    for precision, found in parity_report(exported, name).items():
        assert found["written"] and not found["reasons"]
        assert found["grid"]["utterances"] == 1 * 2 * 2 + 3 * 2 * 3
        assert found["held_out"]["utterances"] == sum(found["held_out"]["sets"].values()) == 65
        rates = found["held_out"]["error_rates"]
        if precision != "int8":
            assert found["grid"]["largest_difference"] < 1e-4
            assert not found["grid"]["utterances_with_other_tokens"]
            assert rates == found["held_out"]["error_rates_of_the_trained_model"]
            assert not found["held_out"]["transcripts_with_other_words"]


def test_onnxruntime_hears_the_same_words(
    exported: Path, bundle: Bundle, clips: Clips, expected: list[str]
) -> None:
    model, tokenizer = OnnxModel.load(exported), bundle.tokenizer
    short = np.zeros(10, np.int16)
    texts = [*expected, *bundle.transcribe([short])]
    for clip, text in zip([*clips, short], texts, strict=True):
        log_probs, lengths = model.log_probs(clip[None], np.array([len(clip)]))
        best = [int(each) for each in log_probs[0, : lengths[0]].argmax(-1)]
        ids = [one for one, before in zip(best, [0, *best], strict=False) if one not in (before, 0)]
        assert tokenizer.decode(ids) == text


def test_the_command_runs_onnx_without_importing_torch(
    exported: Path, bundle: Bundle, clips: Clips, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "clip.wav", clips[-1], 16_000)
    code = (
        "import sys; from sbkit.commands.cli import run; run(sys.argv[1:]); "
        "assert not {'torch', 'speechbrain', 'datasets'} & set(sys.modules)"
    )
    words = ["transcribe", exported, tmp_path / "clip.wav", "--runtime", "onnx"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout.strip()) == (0, bundle.transcribe(clips[-1:])[0])
    assert done.stderr.startswith("running on onnx, cpu, fp32, ")


def test_sherpa_onnx_hears_the_same_words_with_the_graph(
    exported: Path, bundle: Bundle, clips: Clips, expected: list[str], tmp_path: Path
) -> None:
    """Of a language model whose words the model hears by chance; the graph is the bundle's."""
    tokenizer = bundle.tokenizer
    models = tmp_path / "lm.safetensors"
    train_models(models, tokenizer, expected[::2], tokens=0)
    decoder = BeamDecoder(
        tokenizer=tokenizer,
        language_models=models,
        weights={"word": 1.0, "unknown": 0.0},
        decoder_type="graph",
    )
    for name in ("model.onnx", "tokens.txt"):
        shutil.copyfile(exported / "sherpa-onnx" / name, tmp_path / name)
    decoder.graph_decoder.graph.write(str(tmp_path / "HLG.fst"))
    recognizer, decoding = load_with_graph(tmp_path, FIRE_RED), replace(bundle, decoder=decoder)
    heard = [decoding.transcribe([clip])[0] for clip in clips]
    assert sum(one != other for one, other in zip(heard, expected, strict=True)) > 10
    for clip, text in zip(clips, heard, strict=True):
        stream = recognizer.create_stream()
        stream.accept_waveform(16_000, clip / np.float32(32768))
        recognizer.decode_stream(stream)
        assert stream.result.text.split() == text.split()


@pytest.fixture
def data(asterisk_english: Path, tmp_path: Path) -> Path:
    """A table of eight clips."""
    (tmp_path / "clips").symlink_to(asterisk_english / "clips")
    lines = (asterisk_english / "test.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "test.tsv").write_text("".join(lines[:9]))
    return tmp_path / "test.tsv"


def test_sides_are_timed_in_turns(
    exported: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them, each a process of its own."""
    sides = ("torch", BASE)
    monkeypatch.setattr(bench_transcribe, "SIDES", sides)
    monkeypatch.setattr(sys, "argv", ["bench", str(exported), str(data), "--rounds=1"])
    bench_transcribe.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [f"round 1 {name}" for name in sides]
    for name, line in zip(sides, lines[2:], strict=True):
        figures = rf"{name} +\d+ RTFx +\d+\.\d\d x .* 0 of 8 clips with other words"
        assert re.fullmatch(figures, line)


@pytest.mark.parametrize("name", SIDES)
def test_every_side_that_is_timed_hears_the_same_words(
    name: str, exported: Path, data: Path
) -> None:
    clips, expected = bench_transcribe.read_clips(exported, data)
    heard = bench_transcribe.MAKERS[name](exported)(clips)
    assert len(heard) == 8
    same = [one.split() == two.split() for one, two in zip(heard, expected, strict=True)]
    assert all(same) or name == "onnx-int8"


def test_a_hub_folder_is_a_bundle_with_its_card(exported: Path, clips: Clips) -> None:
    hub = load_bundle(exported / "hub")
    assert hub.transcribe(clips[:3]) == load_bundle(exported).transcribe(clips[:3])
    assert (exported / "hub/README.md").read_text() == (exported / "README.md").read_text()
    assert "*.safetensors filter=lfs" in (exported / "hub/.gitattributes").read_text()


def test_no_path_of_this_machine_is_in_a_format(exported: Path) -> None:
    here = str(Path(__file__).parents[3]).encode()
    for file in exported.rglob("*"):
        if file.suffix == ".pt2":
            with ZipFile(file) as archive:
                assert not [name for name in archive.namelist() if here in archive.read(name)]
        assert not file.is_file() or here not in file.read_bytes(), file


def test_all_is_replaced(exported: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(exported, tmp_path / "bundle"))
    export_run(exported.parent / "run", again)
    assert not (again / "onnx").exists()
