"""A pretrained encoder gives the same text in transformers and ONNX.

Only this file of tests/export imports transformers.
"""

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
import yaml

from sbkit.audio.io import Samples
from sbkit.base.checksums import find_damage
from sbkit.base.errors import SbkitError
from sbkit.decoding.greedy import best_tokens
from sbkit.export.export import export_run
from sbkit.export.huggingface_format import write_huggingface, write_tokenizer
from sbkit.export.onnx_format import write_onnx
from sbkit.export.parity import Case, Comparison
from sbkit.export.sherpa_format import write_sherpa
from sbkit.export.trace import WaveformModel, trained_log_probs
from sbkit.models.pretrained.transformers_encoder import CLASSES
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.tokenizer import ensure_tokenizer
from tests.models.pretrained.folders import FRAMES, tiny_config
from tests.processes import run_fresh
from tests.runtime.bundles import ROOT, make_run, parity_report

# transformers' WavLM warns about its own masks
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
YAML = ROOT / "hparams/ctc_pretrained.yaml"
SOURCE = {"name": "ann/tiny", "revision": "c0ffee", "license": "mit", "sha256": "ab12"}
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "wav2vec2": {},
    "hubert": LARGE,
    "wavlm": {"do_normalize": False, "num_hidden_layers": 1},
}
FORMATS = {
    "wav2vec2": ["onnx", "huggingface"],
    "hubert": ["huggingface"],
    "wavlm": ["onnx", "huggingface"],
}


def make_talkative(hparams: Any, scale: int = 3, blank_bias: int = 1) -> None:
    with torch.no_grad():
        hparams["ctc_lin"].weight.mul_(scale)
        hparams["ctc_lin"].bias[0] = blank_bias
        hparams["ctc_lin"].bias[1:4] = -100  # other libraries write the names of special tokens


def run_of(folder: Path, model_type: str, change: Any = make_talkative, **more: Any) -> Path:
    more_config = {**FRAMES, **MODELS[model_type]} if model_type in MODELS else {}
    config = tiny_config(model_type, **more_config, source=SOURCE)
    return make_run(folder, YAML, change, encoder_config=config, **more)


@pytest.fixture(scope="module", params=MODELS)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, asterisk_english: Path
) -> Path:
    kind = request.param
    run = run_of(tmp_path_factory.mktemp("hf") / kind / "run", kind)
    export_run(run, run.parent / "bundle", formats=FORMATS[kind])
    return run.parent / "bundle"


def with_zeros(clip: Samples) -> Samples:
    """Append zeros to a clip, as the model card tells users of transformers."""
    return np.append(clip, np.zeros(3200, np.int16))


@pytest.mark.slow
def test_transformers_writes_the_same_text_and_spaces(
    folder: Path, clips: list[Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so if it is used as the model card says, and the bundle as by `transcribe`."""
    bundle = load_bundle(folder)
    monkeypatch.chdir(tmp_path)
    card = (folder / "huggingface/README.md").read_text()
    code = re.findall(r"^    (.+)$", card.split("## Use")[1].split("## Data")[0], re.M)
    names: dict[str, Any] = {"FOLDER": str(folder / "huggingface")}
    exec("import numpy, soundfile, transformers\n" + code[0], names)
    use = "\n".join([*code[1:-1], f"text = {code[-1]}"])
    texts = set()
    for clip in clips[::4]:
        soundfile.write("talk.wav", clip, 16_000)
        exec(use, names)
        assert [names["text"]] == bundle.transcribe([clip])
        texts.add(names["text"])
    assert len(texts) > 10


@pytest.mark.slow
def test_transformers_times_words(folder: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(folder / "huggingface")
    characters = transformers.Wav2Vec2CTCTokenizer.from_pretrained(folder / "huggingface")
    ids = processor.tokenizer("other there").input_ids
    assert ids == characters("other there").input_ids
    output = characters.decode([0, *ids[:5], 0, 0, *ids[5:]], output_word_offsets=True)
    word = output.word_offsets[0]
    assert (word["word"], word["start_offset"], word["end_offset"]) == ("other", 1, 6)


@pytest.mark.slow
def test_formats_are_written_if_they_can_equal_the_model(folder: Path) -> None:
    for name in FORMATS[folder.parent.name]:
        assert find_damage(folder / name) is None
        report = next(iter(parity_report(folder, name).values()))  # int8 of random weights may fail
        assert report["written"], report["reasons"]
        # Random weights have near ties, which fall in another way on some kinds of CPU.
        assert report["largest_difference"] < 1e-4


@pytest.mark.slow
def test_model_cards_name_the_pretrained_encoder(folder: Path) -> None:
    for card, library in (("README.md", "sbkit"), ("huggingface/README.md", "transformers")):
        text = (folder / card).read_text()
        head = yaml.safe_load(text.split("---\n")[1])
        assert (head["base_model"], head["library_name"]) == ("ann/tiny", library)
        assert "- pretrained encoder: ann/tiny, commit c0ffee, license: mit, SHA-256" in text
        assert "SHA-256 of its weights: ab12" in text
        assert "append 0.2 s of zeros" in text or "the 0.2 s of zeros" in text


@pytest.mark.slow
def test_bundle_runs_without_transformers(tmp_path: Path) -> None:
    export_run(run_of(tmp_path / "run", "wav2vec2"), tmp_path / "bundle")
    clip = (3000 * np.random.default_rng(0).standard_normal(32_000)).astype(np.int16)
    soundfile.write(tmp_path / "clip.wav", clip, 16_000)
    code = "import sys; sys.modules['transformers'] = None; "
    code += "from sbkit.commands.cli import run; run(sys.argv[1:])"
    words = ["transcribe", tmp_path / "bundle", tmp_path / "clip.wav", "--device=cpu"]
    process = run_fresh(code, *words)
    (expected,) = load_bundle(tmp_path / "bundle").transcribe([clip])
    assert expected and process.stdout.strip() == expected, process.stderr


def test_write_huggingface_refuses_further_parts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "wav2vec2", num_linear_layers=1)
    export_run(run, tmp_path / "bundle")
    with pytest.raises(SbkitError, match="has further layers after the encoder"):
        write_huggingface(load_bundle(tmp_path / "bundle"), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("wav2vec2", {"layers": 2}),
        ("wav2vec2-bert", {}),
        ("parakeet_encoder", {}),
        ("whisper", {"layers": 2}),
    ],
)
def test_other_encoders_are_written(model_type: str, settings: Any, tmp_path: Path) -> None:
    export_run(run_of(tmp_path / "run", model_type, **settings), tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    (candidate,) = write_huggingface(bundle, tmp_path)
    if model_type in CLASSES:
        with pytest.raises(SbkitError, match=f"type {model_type} cannot be written as ONNX"):
            write_onnx(bundle, tmp_path)
    with pytest.raises(SbkitError, match="sherpa-onnx computes the features of a model itself"):
        write_sherpa(bundle, tmp_path)
    assert candidate.tail_samples == (0 if model_type in CLASSES else 3200)
    assert candidate.run_trained is None
    audio = np.random.default_rng(0).standard_normal((2, 16_400)).astype(np.float32) / 10
    lengths = np.array([16_400, 16_160])  # an even and an odd number of windows
    audio[1, 16_160:] = 0
    trained = WaveformModel(bundle.model.network).eval()
    comparison = Comparison(candidate, bundle)
    comparison.add(Case(audio, lengths, ""), trained_log_probs(trained, audio, lengths))
    assert (comparison.failure, comparison.difference < 1e-4) == ("", True)
    without = Comparison(replace(candidate, tail_samples=0), bundle)
    without.add(Case(audio, lengths, ""), trained_log_probs(trained, audio, lengths))
    assert ("shape" in without.failure) == (model_type not in CLASSES)


@pytest.mark.slow
def test_whisper_is_loaded_without_sbkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no class for Whisper with CTC, so the folder has one."""
    config = tiny_config("whisper", max_source_positions=1500, source=SOURCE)
    bundle = tmp_path / "bundle"
    make_chatty = partial(make_talkative, scale=9, blank_bias=-1)
    run = make_run(tmp_path / "run", YAML, make_chatty, encoder_config=config)
    export_run(run, bundle, formats=["onnx", "huggingface"])
    for name in ("onnx", "huggingface"):
        assert next(iter(parity_report(bundle, name).values()))["written"]
    assert "model=FOLDER, trust_remote_code=True" in (bundle / "huggingface/README.md").read_text()
    dice = np.random.default_rng(0)
    phase = np.repeat(dice.uniform(0.05, 1.5, 28), 1600).cumsum()  # another tone each 0.1 s
    clip = (3000 * np.sin(phase[:42_300])).astype(np.int16)
    (expected,) = load_bundle(bundle).transcribe([clip])
    soundfile.write(tmp_path / "clip.wav", with_zeros(clip), 16_000)
    code = (
        "import sys; sys.modules['sbkit'] = None; import soundfile, transformers; "
        "recognizer = transformers.pipeline('automatic-speech-recognition', model=sys.argv[1], "
        "trust_remote_code=True, device='cpu'); "
        "audio = soundfile.read(sys.argv[2], dtype='float32')[0]; "
        "assert recognizer.model.config.inputs_to_logits_ratio == 320; "  # for chunks and times
        "print(recognizer({'raw': audio, 'sampling_rate': 16_000})['text'])"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    process = run_fresh(code, bundle / "huggingface", tmp_path / "clip.wav", cwd=tmp_path)
    assert expected and process.stdout.strip() == expected, process.stderr


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("bpe", 60), ("unigram", 36)])
def test_written_tokenizer_equals_ours(kind: str, size: int | None, tmp_path: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog", "she sells sea shells by the sea shore"]
    file, folder = tmp_path / "tokenizer.model", tmp_path / "out"
    ours = ensure_tokenizer(
        model_file=file, token_type=kind, vocab_size=size, texts=lambda: texts * 5
    )
    folder.mkdir()
    write_tokenizer(ours, folder)
    (folder / "config.json").write_text('{"model_type": "wav2vec2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.choice([0, draw.randrange(ours.vocab_size)]) for _ in range(30)]
        log_probs = np.eye(ours.vocab_size, dtype=np.float32)[ids]
        text = ours.decode(best_tokens(log_probs, ours.vocabulary.blank))
        assert theirs.decode(ids) == text
    for text in (*texts, "a zebra ran", "lazy shells"):
        assert theirs(text).input_ids == ours.encode(text)
