"""The encoders equal those of transformers on single clips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCTC,
    ParakeetForTDT,
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


@pytest.mark.parametrize("name", ["wav2vec2-bert", "parakeet_tdt"])
def test_saved_encoders_that_transformers_runs_are_loaded(name: str, tmp_path: Path) -> None:
    """Their states are compared in tests/export/test_huggingface.py."""
    if name == "parakeet_tdt":
        extractor, sizes = PREPROCESSORS["parakeet_encoder"], CONFIGS["parakeet_encoder"] | TDT
        head = {"vocab_size": 7, "blank_token_id": 6, "decoder_hidden_size": 8}
        model = ParakeetForTDT(AutoConfig.for_model(name, encoder_config=sizes, **head))
    else:
        extractor, sizes = PREPROCESSORS[name], CONFIGS[name]
        model = AutoModelForCTC.from_config(AutoConfig.for_model(name, **sizes, vocab_size=7))
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor))
    config = read_encoder_config(tmp_path)
    assert sizes.items() <= config.items()
    line = load_weights(tmp_path, make_parts(config))
    unused = "decoder." if name == "parakeet_tdt" else "lm_head.bias, lm_head.weight"
    assert f"; not used: {unused}" in line


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
