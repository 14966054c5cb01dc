"""The encoders equal those of transformers on single clips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCTC,
    ParakeetFeatureExtractor,
    ParakeetForTDT,
    Wav2Vec2BertModel,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from sbkit.audio.io import FULL_SCALE
from sbkit.models.pretrained.encoder import (
    PretrainedEncoder,
    PretrainedFeatures,
    PretrainedFrontEnd,
)
from sbkit.models.pretrained.folder import (
    DEFAULTS,
    WHISPER_NAMES,
    load_weights,
    read_encoder_config,
)
from tests.models.pretrained.folders import CONFIGS, PREPROCESSORS, encode, make_folder, make_parts

LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("wav2vec2", {}),
    ("wav2vec2", LARGE),
    ("wav2vec2", {"feat_extract_norm": "layer"}),
    ("hubert", {}),
    ("hubert", LARGE),
    ("hubert", {"feat_proj_layer_norm": False}),
    ("wavlm", {}),
    ("wavlm", LARGE),
]
TDT = {  # the keys of parakeet-tdt-0.6b-v3 that differ from the defaults
    **dict.fromkeys(("scale_input", "attention_bias", "convolution_bias"), False),
    "num_mel_bins": 128,
}


def clip(samples: int) -> Tensor:
    return torch.randn(1, samples, generator=torch.Generator().manual_seed(samples)) * 0.1


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    is_whisper = model_type == "whisper"
    make_extractor = WhisperFeatureExtractor if is_whisper else Wav2Vec2FeatureExtractor
    extractor = make_extractor().to_dict()
    theirs = extractor | AutoConfig.for_model(model_type).to_dict()
    if is_whisper:
        theirs |= {key: theirs[name] for key, name in WHISPER_NAMES.items()}
    extra = {"do_normalize": True, "sample_rate": theirs["sampling_rate"]}  # not in all of theirs
    assert DEFAULTS[model_type].items() <= (extra | theirs).items()


@pytest.mark.parametrize(("model_type", "config"), VARIANTS)
@torch.no_grad()
def test_states_equal_transformers(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, model_type, **config)
    theirs = AutoModel.from_pretrained(folder).eval()
    theirs.save_pretrained(folder)
    full = read_encoder_config(folder)
    parts = [part(config=full).eval() for part in (PretrainedFrontEnd, PretrainedEncoder)]
    assert load_weights(folder, parts).endswith(f"loaded {len(theirs.state_dict())} tensors.")
    for samples in (1000, 4321):
        audio = clip(samples)
        normal = (audio - audio.mean()) / (audio.var(correction=0) + 1e-7).sqrt()
        states, expected = encode(full, parts, audio, samples), theirs(normal).last_hidden_state
        torch.testing.assert_close(states, expected, rtol=0.0, atol=1e-5)


def save_model(path: Path, name: str, **config: Any) -> Any:
    """Save a tiny model with random weights in shards, and return its encoder."""
    model_type = "wav2vec2-bert" if name.startswith("wav2vec2-bert") else "parakeet_encoder"
    sizes = {**CONFIGS[model_type], **config}
    extractor = PREPROCESSORS[model_type]
    if name == "wav2vec2-bert, no head":  # the form of w2v-BERT 2.0
        model = Wav2Vec2BertModel(AutoConfig.for_model(model_type, **sizes))
    elif name == "parakeet_tdt":  # Parakeet TDT v3, with its 128 mel bins
        head = {"vocab_size": 7, "blank_token_id": 6, "decoder_hidden_size": 8}
        model = ParakeetForTDT(AutoConfig.for_model(name, encoder_config=sizes, **head))
        extractor = ParakeetFeatureExtractor(feature_size=sizes["num_mel_bins"]).to_dict()
    elif name == "parakeet_ctc":
        model_config = AutoConfig.for_model(name, encoder_config=sizes, vocab_size=7)
        model = AutoModelForCTC.from_config(model_config)
    else:
        model = AutoModelForCTC.from_config(AutoConfig.for_model(name, **sizes, vocab_size=7))
    torch.manual_seed(0)
    for tensor in model.eval().state_dict().values():  # including the statistics of batch norm
        tensor += (0.1 * torch.randn(tensor.shape)).to(tensor.dtype)
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "preprocessor_config.json").write_text(json.dumps(extractor))
    return getattr(model, "encoder", None) if "parakeet" in name else model.base_model


@pytest.mark.parametrize(
    ("name", "config", "unused"),
    [
        ("wav2vec2-bert", {}, "lm_head.bias, lm_head.weight"),
        ("wav2vec2-bert, no head", {}, None),
        ("parakeet_ctc", {}, "ctc_head.bias, ctc_head.weight"),
        ("parakeet_tdt", TDT, "decoder."),
    ],
)
@torch.no_grad()
def test_saved_encoders_that_transformers_runs_are_loaded(
    name: str, config: dict[str, Any], unused: str | None, tmp_path: Path
) -> None:
    theirs = save_model(tmp_path, name, **config)
    extract = AutoFeatureExtractor.from_pretrained(tmp_path)
    encoder_config = read_encoder_config(tmp_path)
    parts = make_parts(encoder_config)
    line = load_weights(tmp_path, parts)
    assert (f"; not used: {unused}" in line) if unused else line.endswith(" tensors."), line
    samples = 24_321
    audio = clip(samples) * torch.linspace(1, 30, samples).sin()
    inputs = extract(audio[0].numpy(), sampling_rate=16_000, return_tensors="pt")
    output = theirs(**inputs)
    num_frames = output.get("attention_mask", inputs["attention_mask"]).sum()
    states = encode(encoder_config, parts, audio, samples)
    expected = output.last_hidden_state[:, :num_frames]
    torch.testing.assert_close(states[:, :num_frames], expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("bins", [80, 128])
@torch.no_grad()
def test_whisper_equals_transformers_on_padded_clips(bins: int, tmp_path: Path) -> None:
    """In float64: their two forms of attention differ by more than 1e-5 in float32."""
    sizes = {**CONFIGS["whisper"], "num_mel_bins": bins, "vocab_size": 7, "decoder_layers": 1}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids)).eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    extract = WhisperFeatureExtractor(feature_size=bins, chunk_length=3)
    extract.save_pretrained(tmp_path)
    config = read_encoder_config(tmp_path)
    features = PretrainedFeatures(config=config)  # in training, features are float32 like theirs
    front_end, encoder = make_parts(config)
    assert "not used: model.decoder." in load_weights(tmp_path, [front_end, encoder])
    theirs = model.get_encoder().double()
    for samples in (5000, 5120, 48_000):
        audio = clip(samples) * torch.linspace(1, 30, samples).sin()
        inputs = extract(audio[0].numpy(), sampling_rate=16_000, return_tensors="pt")
        mel = inputs["input_features"].transpose(1, 2)
        for length in (samples, 48_000):
            padded = torch.nn.functional.pad(audio, (0, length - samples))
            ours, frames = features(FULL_SCALE * padded, torch.tensor([length]))
            torch.testing.assert_close(ours, mel[:, : int(frames)], rtol=0.0, atol=1e-5)
        x, frames = front_end.double()(mel.double(), frames)
        states, _ = encoder.double()(x, frames)
        expected = theirs(mel.double().transpose(1, 2)).last_hidden_state
        torch.testing.assert_close(states, expected, rtol=0.0, atol=1e-10)
