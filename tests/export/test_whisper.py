"""A whole Whisper writes the same texts in transformers, faster-whisper and onnxruntime."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.evaluate.wer import count_errors
from sbkit.export.export import export_run
from sbkit.export.huggingface_format import write_huggingface
from sbkit.export.onnx_format import write_onnx
from sbkit.export.onnx_graph import save_onnx
from sbkit.export.parity import Comparison
from sbkit.export.trace import quiet_exporters
from sbkit.models.pretrained.encoder import fill_output_layer
from sbkit.models.pretrained.folder import load_weights, read_encoder_config
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE
from tests.models.pretrained.recognizers import LANGUAGES, make_whisper, noise
from tests.runtime.bundles import ROOT, WITHOUT_DATA, make_run, parity_report

YAML = ROOT / "hparams/whisper.yaml"
library: Any = transformers  # whose annotations are incomplete
FORMATS = ("huggingface", "onnx")
CLIPS = noise(44_000, 30_000, 8_000, 3_000)


def export_whisper(
    folder: Path,
    change: Callable[[Any], Any] = lambda hparams: None,
    *,
    formats: tuple[str, ...] = (),
    languages: tuple[str, ...] = LANGUAGES,
    context_seconds: float = 3.0,
) -> Path:
    """Export a tiny Whisper with the weights of its folder, as if it was trained."""
    make_whisper(folder / "whisper", languages=languages)
    run = folder / "run"
    run.mkdir()
    (run / DECODER_TOKENIZER_FILE).write_bytes((folder / "whisper/tokenizer.json").read_bytes())

    def load(hparams: Any) -> None:
        load_weights(folder / "whisper", [hparams["CNN"], hparams["Transformer"]])
        fill_output_layer(hparams)
        change(hparams)

    config = read_encoder_config(folder / "whisper")
    settings: dict[str, Any] = {"encoder_config": config, "context_seconds": context_seconds}
    settings |= {"pretrained": str(folder / "whisper"), "language": "de" if languages else "en"}
    make_run(run, YAML, load, **settings, **WITHOUT_DATA)
    export_run(run, folder / "bundle", formats=formats)
    return folder / "bundle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_whisper(tmp_path_factory.mktemp("whisper"), formats=FORMATS)


def written_texts(bundle: AsrBundle[TorchModel]) -> list[str]:
    """Return the decoder's texts, before CTC's tokens spell them."""
    assert bundle.decoder_tokenizer is not None
    model = bundle.model
    return [
        bundle.decoder_tokenizer.decode(model.generate(encoded.states))
        for encoded in model.encode(CLIPS)
    ]


def theirs(folder: Path, **options: Any) -> list[str]:
    recognize = library.pipeline(
        "automatic-speech-recognition", model=str(folder / "huggingface"), device="cpu"
    )
    audio = ({"raw": clip / np.float32(32768), "sampling_rate": 16_000} for clip in CLIPS)
    return [recognize(clip, **options)["text"].strip() for clip in audio]


def test_transformers_writes_the_same_texts(folder: Path) -> None:
    """In the language of the run, unless another is named."""
    texts = written_texts(load_bundle(folder))
    assert theirs(folder) == texts
    assert len({*texts}) > 2 and all(texts)
    assert theirs(folder, generate_kwargs={"language": "en"}) != texts


def test_transformers_loads_its_own_classes(folder: Path) -> None:
    load = library.WhisperForConditionalGeneration.from_pretrained
    model = load(folder / "huggingface")
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    processor = library.AutoProcessor.from_pretrained(folder / "huggingface")
    assert type(processor).__name__ == "WhisperProcessor"
    own = load_bundle(folder).decoder_tokenizer
    assert own is not None
    tokens = processor.tokenizer(" Press five.", add_special_tokens=False).input_ids
    assert tokens == own.encode("Press five.")
    reference = json.loads((folder.parent / "whisper/generation_config.json").read_text())
    written = json.loads((folder / "huggingface/generation_config.json").read_text())
    assert written == {**reference, "language": "de", "task": "transcribe", "num_beams": 1}
    card = (folder / "huggingface/README.md").read_text()
    assert "model=FOLDER)" in card and "append 0.2 s" not in card


def test_formats_agree_with_the_trained_model(folder: Path) -> None:
    for name in FORMATS:
        for kind, report in parity_report(folder, name).items():
            if "int8" not in kind:  # which random weights may miss
                assert report["written"], report["reasons"]
                assert 0 < report["largest_difference"] < 1e-4


def test_onnxruntime_writes_and_scores_the_same_texts(folder: Path) -> None:
    """Also of a clip that is longer than a segment."""
    trained = load_bundle(folder, decoder="greedy")
    written = load_bundle(folder, runtime="onnx", decoder="greedy")
    clips = [*CLIPS, np.tile(CLIPS[0], 12)]
    texts = np.full((2, 40), trained.model.network.end_token)
    texts[0, :30] = texts[1, 0] = 9  # the first has more tokens than there are positions
    for expected, actual in zip(trained.encode(clips), written.encode(clips), strict=True):
        assert actual.states.shape == expected.states.shape
        tokens = trained.model.generate(expected.states)
        assert written.model.generate(actual.states) == tokens
        score = trained.model.score_texts(expected.states, texts)
        np.testing.assert_allclose(
            written.model.score_texts(actual.states, texts), score, atol=1e-3
        )
    assert written.transcribe(CLIPS) == trained.transcribe(CLIPS)


def test_int8_runs_whole_and_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(folder, bundle)
    with quiet_exporters():
        candidates = write_onnx(load_bundle(folder), bundle / "onnx")
    write_checksums(bundle / "onnx")
    decoder = next(item for item in candidates if item.name == "decoder, fp32")
    assert decoder.texts and decoder.trained_texts
    floats = [(clip / 32768).astype(np.float32) for clip in CLIPS]
    assert decoder.texts(floats, []) == decoder.trained_texts(floats, [])
    model = load_bundle(bundle, runtime="onnx", precision="int8").model
    (encoded,) = model.encode([np.zeros(16_000, np.int16)])
    assert len(model.generate(encoded.states)) > 0
    file = bundle / "onnx/decoder.onnx"
    graph = onnx.load(file)
    metadata = {item.key: item.value for item in graph.metadata_props}
    for change, words in (
        ({"weights": "others"}, "other weights"),
        ({"settings": "{}"}, "settings"),
    ):
        save_onnx(graph, file, metadata | change)
        write_checksums(bundle / "onnx")
        with pytest.raises(SbkitError, match=words):
            load_bundle(bundle, runtime="onnx")
    file.unlink()
    with pytest.raises(SbkitError, match="has no onnx/decoder.onnx"):
        load_bundle(bundle, runtime="onnx")


def test_model_of_english_with_an_output_layer_of_its_own(tmp_path: Path) -> None:
    def train_output(hparams: Any) -> None:
        weight = hparams["seq_lin"].weight.data
        weight += 0.1 * torch.randn_like(weight)

    folder = export_whisper(tmp_path, train_output, formats=("huggingface",), languages=())
    assert not json.loads((folder / "huggingface/config.json").read_text())["tie_word_embeddings"]
    assert theirs(folder) == written_texts(load_bundle(folder))


def test_model_of_shorter_context_is_told_why_transformers_differs(tmp_path: Path) -> None:
    """Its scores are compared in filled clips, and equal; its texts as each one runs."""
    bundle = load_bundle(export_whisper(tmp_path, context_seconds=0.0))
    (candidate,) = write_huggingface(bundle, tmp_path)
    comparison = Comparison(candidate, bundle)
    comparison.errors += count_errors("one", "two")
    comparison.trained_errors += count_errors("one", "one")
    (reason,) = comparison.reasons()
    assert reason.startswith("WER is 100.00 %, ")
    assert reason.endswith("train it with `context_seconds: 3`")


def test_output_layer_that_transformers_lacks_is_refused(folder: Path, tmp_path: Path) -> None:
    bundle = load_bundle(folder)
    network = bundle.model.network
    network.seq_lin = torch.nn.Linear(network.seq_lin.in_features, network.seq_lin.out_features)
    with pytest.raises(SbkitError, match="Linear without bias, but `seq_lin`"):
        write_huggingface(bundle, tmp_path)


@pytest.mark.slow
def test_faster_whisper_loads_what_its_converter_makes(folder: Path, tmp_path: Path) -> None:
    """On the same features; faster-whisper pads them with other values than transformers."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    faster_whisper = pytest.importorskip("faster_whisper")
    source = str(folder / "huggingface")
    files = ["tokenizer.json", "preprocessor_config.json"]
    converter = ctranslate2.converters.TransformersConverter(source, copy_files=files)
    converter.convert(str(tmp_path / "converted"))
    model = faster_whisper.WhisperModel(str(tmp_path / "converted"), compute_type="float32")
    extract = library.WhisperFeatureExtractor.from_pretrained(source)
    bundle = load_bundle(folder)
    start = [*bundle.model.network.start_tokens]
    for clip, encoded in zip(CLIPS, bundle.model.encode(CLIPS), strict=True):
        features = extract(clip / np.float32(32768), sampling_rate=16_000, return_tensors="np")
        view = ctranslate2.StorageView.from_array(features.input_features)
        (result,) = model.model.generate(view, [start], beam_size=1, max_length=24)
        assert result.sequences_ids[0] == bundle.model.generate(encoded.states)
