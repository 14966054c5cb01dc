"""Whisper whole: the untrained model writes what transformers writes, token by token."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from sbkit.audio.io import FULL_SCALE
from sbkit.base.errors import ConfigError, DataError
from sbkit.models.pretrained.encoder import (
    PretrainedFeatures,
    PretrainedFrontEnd,
    PretrainedTransformer,
    fill_output_layer,
)
from sbkit.models.pretrained.folder import load_weights, read_encoder_config
from sbkit.run.run import Run
from sbkit.runtime.score_sets import read_whole_clips
from sbkit.tasks.asr.model import AsrModel
from sbkit.text.vocabulary import Vocabulary
from tests.models.pretrained.folders import make_folder
from tests.models.pretrained.recognizers import MAX_TOKENS, make_whisper, noise
from tests.runs import ROOT

RATE = 16_000


def make_model(folder: Path, *, language: str = "en", seconds: float = 3.0) -> AsrModel:
    """Make a recognizer of a Whisper, with its weights."""
    config = read_encoder_config(folder)
    parts: dict[str, Any] = {
        "CNN": PretrainedFrontEnd(config=config),
        "Transformer": PretrainedTransformer(
            config=config, language=language, context_seconds=seconds
        ),
        "seq_lin": nn.Linear(config["hidden_size"], config["vocab_size"], bias=False),
        "ctc_lin": nn.Linear(config["hidden_size"], 12),
    }
    load_weights(folder, parts.values())
    fill_output_layer(parts)
    model = nn.ModuleList(parts.values()).eval()
    features = PretrainedFeatures(config=config).eval()
    vocabulary = Vocabulary(12)
    return AsrModel(model=model, vocabulary=vocabulary, compute_features=features, **parts)


def theirs(model: Any, extract: Any, clip: Tensor, **options: str) -> list[int]:
    """Return the tokens that transformers generates, without the special ones."""
    inputs = extract(clip.numpy(), sampling_rate=RATE, return_tensors="pt")
    tokens = model.generate(inputs["input_features"], num_beams=1, do_sample=False, **options)[0]
    end = model.generation_config.eos_token_id
    return [token for token in tokens.tolist() if token < end]


def ours(model: AsrModel, *clips: Tensor) -> list[list[int]]:
    """Return the tokens that the model writes for clips in one batch."""
    lengths = torch.tensor([len(clip) for clip in clips])
    audio = nn.utils.rnn.pad_sequence([FULL_SCALE * clip for clip in clips], batch_first=True)
    return model.generate(*model.encode(audio, lengths))


def clips_of_noise() -> list[Tensor]:
    clips = noise(44_000, 30_000, 8_000, 3_000, 400)
    return [torch.from_numpy(clip / np.float32(FULL_SCALE)) for clip in clips]


@torch.no_grad()
def test_texts_equal_generate_of_transformers(tmp_path: Path) -> None:
    """With a cache, in a batch of clips of different lengths."""
    reference = make_whisper(tmp_path)
    extract = WhisperFeatureExtractor.from_pretrained(tmp_path)
    spoken = {"language": "de", "task": "transcribe"}
    model = make_model(tmp_path, language="de-CH")
    clips = clips_of_noise()
    texts = [theirs(reference, extract, clip, **spoken) for clip in clips]
    assert ours(model, *clips) == texts
    assert len({*map(tuple, texts)}) > 2
    assert min(map(len, texts)) < MAX_TOKENS - len(model.start_tokens)


@torch.no_grad()
def test_decoder_scores_texts_as_transformers_does(tmp_path: Path) -> None:
    reference = make_whisper(tmp_path)
    model = make_model(tmp_path, language="es")
    clip = clips_of_noise()[1]
    states, lengths = model.encode(FULL_SCALE * clip.unsqueeze(0), torch.tensor([len(clip)]))
    tokens = torch.tensor([[9, 40, 200, 11]])
    start = torch.tensor([model.start_tokens])
    encoded = (states,)
    logits = reference(
        encoder_outputs=encoded, decoder_input_ids=torch.cat([start, tokens], 1)
    ).logits
    expected = logits[:, start.shape[1] - 1 :].log_softmax(-1)
    actual = model.decoder_log_probs(tokens, states, lengths)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4)
    padded = np.array([[9, 40, 200, 11, model.end_token, model.end_token]])
    (score,) = model.score_texts(states[0], padded)
    target = [*tokens[0].tolist(), model.end_token]
    assert score == pytest.approx(
        sum(float(expected[0, i, t]) for i, t in enumerate(target)), abs=1e-3
    )


def test_models_and_languages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_whisper(tmp_path / "all")
    make_whisper(tmp_path / "en", languages=())
    make_folder(tmp_path / "encoder", "whisper")
    every, english, encoder = (
        {"config": read_encoder_config(tmp_path / name), "language": "en"}
        for name in ("all", "en", "encoder")
    )
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({**every, "language": "it"}, "language", "de, en, es"),
        ({**english, "language": "es"}, "language", "only en"),
        ({**english, "decoder_task": "translate"}, "decoder_task", "only transcribes"),
        (encoder, "pretrained", "generation_config.json"),
    ]
    for options, key, words in refused:
        with pytest.raises(ConfigError, match=words) as caught:
            PretrainedTransformer(**options)
        assert caught.value.keys == (key,)
    model = make_model(tmp_path / "all")
    with pytest.raises(DataError, match=f"up to {MAX_TOKENS - 4} tokens .* b has 21"):
        model.check_text_lengths([20, 21], ["a", "b"])
    parts = {**model.encoder.modules, "ctc_lin": model.ctc_lin, "seq_lin": nn.Linear(24, 300)}
    with pytest.raises(ConfigError, match="encoder_config\\[vocab_size\\]") as caught:
        AsrModel(model=nn.ModuleList(parts.values()), vocabulary=model.vocabulary, **parts)
    assert caught.value.keys == ("seq_lin",)


@pytest.mark.slow
@torch.no_grad()
def test_texts_of_real_speech_equal_generate_of_transformers(tmp_path: Path) -> None:
    """`SBKIT_WHISPER=FOLDER` names a Whisper with its weights, such as openai/whisper-base."""
    if (name := os.environ.get("SBKIT_WHISPER")) is None:
        pytest.skip("SBKIT_WHISPER names no folder of a Whisper")
    reference = WhisperForConditionalGeneration.from_pretrained(name)
    extract = WhisperFeatureExtractor.from_pretrained(name)
    model = make_model(Path(name), seconds=30.0)
    is_multilingual = reference.generation_config.is_multilingual
    spoken = {"language": "en", "task": "transcribe"} if is_multilingual else {}
    rows = Run(ROOT / "hparams/ctc.yaml", {"output_folder": str(tmp_path)}).prepare_splits()
    for batch in read_whole_clips(rows.test["test"], RATE):
        for row in batch.values():
            clip = torch.from_numpy(row["audio"] / np.float32(FULL_SCALE))
            texts = ours(model, clip)
            assert texts == [theirs(reference, extract, clip, **spoken)], row["id"]
