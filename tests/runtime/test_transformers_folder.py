"""A recognizer of transformers is scored and transcribes like a bundle, or is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from safetensors.torch import load_file, save_file
from transformers import pipeline

from sbkit.audio.io import FULL_SCALE
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate.run_results import read_results
from sbkit.evaluate.wer_report import read_utterances
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.normalization import language_table
from tests.attacks.hostile import watched
from tests.models.pretrained.folders import change_json
from tests.models.pretrained.recognizers import make_ctc, make_whisper, noise

RATE = 16_000
LENGTHS = (16_000, 40_000, 9_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a Whisper, one of English only, and a CTC model."""
    folder = tmp_path_factory.mktemp("models")
    make_whisper(folder / "whisper", seconds=30)
    make_whisper(folder / "whisper.en", languages=(), seconds=30)
    make_ctc(folder / "ctc")
    return folder


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for index, clip in enumerate(noise(*LENGTHS)):
        soundfile.write(f"{index}.wav", clip, RATE)
    rows = "".join(f"{index}.wav,Room {index}\n" for index in range(len(LENGTHS)))
    Path("test.csv").write_text(f"path,sentence\n{rows}")
    return tmp_path / "test.csv"


@pytest.mark.parametrize("name", ["whisper", "whisper.en", "ctc"])
def test_texts_equal_transformers(name: str, models: Path) -> None:
    bundle = load_bundle(models / name, language="en")
    clips = noise(*LENGTHS)
    theirs: Any = pipeline("automatic-speech-recognition", model=str(models / name), device="cpu")
    options: dict[str, object] = {"num_beams": 1}
    options |= {"language": "en", "task": "transcribe"} if name == "whisper" else {}
    texts = [theirs(clip / FULL_SCALE, generate_kwargs=options)["text"] for clip in clips]
    assert len({*texts}) == len(clips)
    assert bundle.model.predict(clips) == texts
    assert bundle.transcribe(clips) == [*map(bundle.normalizer(), texts)]
    long = np.concatenate(noise(*[16_000] * 31))
    assert len(bundle.transcribe([long, long[:0]])) == 2  # longer than 30 s, and empty


def test_language_chooses_the_prompt_and_the_text_table(models: Path) -> None:
    clips = noise(*LENGTHS)
    english, spanish, welsh = (
        load_bundle(models / name, language=language)
        for name, language in (("whisper", "en"), ("whisper", "es-MX"), ("ctc", "cy"))
    )
    assert english.model.predict(clips) != spanish.model.predict(clips)
    assert spanish.normalizer()("El 2%") == "el dos por ciento"
    assert welsh.config.text_table == language_table("cy")  # whose numbers cannot be spelled


def test_commands_score_compare_and_transcribe(
    models: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whisper", "ctc"):
        command = ["score", f"{models / name}", str(table), "--language", "en"]
        assert sbkit([*command, "--out", name, "--precision", "bf16"]) == 0
    figures = read_results(Path("whisper"))
    assert figures["test"]["test"]["words"] == 6
    assert figures["values"] == {"sample_rate": RATE, "language": "en"}
    utterances = read_utterances(Path("ctc/utterances_test.jsonl"))
    assert [utterance.reference for utterance in utterances] == [
        "room zero",
        "room one",
        "room two",
    ]
    assert sbkit(["compare", "whisper", "ctc"]) == 0
    assert "test: 3 utterances, 6 words" in capsys.readouterr().out
    command = ["transcribe", str(models / "whisper"), "0.wav", "--language", "en", "--quiet"]
    assert sbkit([*command, "--device", "cpu", "--format", "json"]) == 0
    transcript = json.loads(capsys.readouterr().out)
    (text,) = load_bundle(models / "whisper", language="en").transcribe(noise(LENGTHS[0]))
    assert (transcript["text"], transcript["effective"]["precision"]) == (text, "fp32")
    assert sbkit([*command, "--format", "srt"]) != 0
    assert "--format srt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("whisper", [], "Only `sbkit score` and `sbkit transcribe` run it, with --language TAG"),
        ("whisper", ["--language=cy"], "does not support the language cy"),
        ("whisper", ["--language=xx"], "`language` .*xx"),
        ("whisper.en", ["--language=es"], "is an English-only Whisper; it cannot write es"),
        ("ctc", ["--language=en", "--runtime=onnx"], "The runtime onnx is not supported for"),
        ("ctc", ["--language=en", "--compile=default"], "`compile` is not supported for models"),
        ("ctc", ["--language=en", "--live"], "Streaming is not supported for models of trans"),
        ("ctc", ["--language=en", "--decoder=beam"], "The decoder beam needs a model that is"),
        ("ctc", ["--language=en", "--hotwords=fox"], "`hotwords` need a decoder with language"),
        ("ctc", ["--language=en", "--precision=fp16"], "`precision` .* fp16"),
    ],
)
def test_unsupported_options_are_named(
    model: str, options: list[str], error: str, models: Path, table: Path
) -> None:
    with pytest.raises(SbkitError, match=error):
        sbkit(["transcribe", str(models / model), "0.wav", "--device=cpu", *options])


def test_language_of_a_bundle_is_its_own(plain_bundle: Path) -> None:
    with pytest.raises(SbkitError, match="stores its language. Leave out `language`"):
        load_bundle(plain_bundle, language="en")


CODE_SETTINGS: dict[str, Any] = {  # with which transformers loads code or other weights
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "stranger/kernel"),
    "experts_implementation": "stranger/kernel",
    "transformers_weights": "other.safetensors",
    "use_kernels": True,
}


@pytest.mark.parametrize("name", ["whisper", "ctc"])
def test_settings_that_load_code_are_ignored(name: str, models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / name, tmp_path / name)
    change_json(folder / "config.json", **CODE_SETTINGS)
    with watched(tmp_path / "canary"):
        bundle = load_bundle(folder, language="en")
    clips = noise(*LENGTHS)
    assert bundle.model.predict(clips) == load_bundle(models / name, language="en").model.predict(
        clips
    )
    assert not CODE_SETTINGS.keys() & vars(bundle.model.network.model[0].config).keys()


def drop_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change(file: str, **values: object) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / file, **values)


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "`auto_map` in .* is not supported": ("ctc", change("config.json", auto_map={"x": "y"})),
    "`quantization_config` in .* is not": ("ctc", change("config.json", quantization_config={})),
    "`adapter_attn_dim` in .* is not": ("ctc", change("config.json", adapter_attn_dim=16)),
    "adapter_config.json is not supported": (
        "ctc",
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
    ),
    "is EncoderModel, but only": ("ctc", change("config.json", architectures=["EncoderModel"])),
    "is None, but only recognizers": ("ctc", change("config.json", architectures=None)),
    "lacks weights of its Wav2Vec2ForCTC: lm_head.weight": ("ctc", drop_head),
    "model.safetensors.* pytorch_model.bin": (
        "ctc",
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    ),
    "transformers cannot open .*Error": ("ctc", change("config.json", vocab_size=7)),
    "has no generation_config.json with `is_multilingual`": (
        "whisper",
        lambda folder: (folder / "generation_config.json").unlink(),
    ),
}


@pytest.mark.parametrize("error", CHANGES)
def test_folder_that_cannot_be_run_safely_and_right_is_refused(
    error: str, models: Path, tmp_path: Path
) -> None:
    name, damage = CHANGES[error]
    folder = shutil.copytree(models / name, tmp_path / name)
    damage(folder)
    with pytest.raises(SbkitError, match=error):
        load_bundle(folder, language="en")
