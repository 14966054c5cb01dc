"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json        the parts as plain data, and where they come from
    model.safetensors  the weights of the one ModuleList
    tokenizer.model    sentencepiece
    checksums.json     SHA-256 of the other files

Loading it runs no code of its own: weights are safetensors, and only modules are built.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import CHECKSUMS, find_damage
from sbkit.checkpoint.weights import refuse_other_model
from sbkit.inference.module_spec import build
from sbkit.models.asr import AsrModel
from sbkit.models.decoding import greedy
from sbkit.text.tokenizer import Tokenizer
from sbkit.text.vocabulary import Vocabulary

FORMAT = 1
PARTS = ("CNN", "Transformer", "seq_lin", "ctc_lin")
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"


@dataclass(frozen=True)
class Bundle:
    """A model that is ready to transcribe."""

    config: dict[str, Any]
    asr_model: AsrModel
    tokenizer: Tokenizer

    @torch.inference_mode()
    def transcribe(self, clips: list[torch.Tensor]) -> list[str]:
        """Transcribe clips of 16 kHz int16 audio, (S,) each, as one batch."""
        audio = nn.utils.rnn.pad_sequence([clip.float() for clip in clips], batch_first=True)
        samples = torch.tensor([len(clip) for clip in clips])
        features, frames = self.asr_model.features(audio, samples)
        states, frames = self.asr_model.encode(features, frames)
        best = greedy(self.asr_model.ctc_log_probs(states), frames, self.tokenizer.vocabulary.blank)
        return [self.tokenizer.decode(ids) for ids in best]


def load_bundle(folder: Path) -> Bundle:
    """Load a bundle for inference.

    Raises SbkitError when a file is missing, damaged, or of another model.
    """
    config = _read_config(folder)
    damage = find_damage(folder, needed=(CONFIG, WEIGHTS, TOKENIZER))
    if damage is not None:
        raise SbkitError(f"A bundle must be whole, but in {folder} {damage}. Export it again.")
    tokenizer = Tokenizer(model_file=folder / TOKENIZER)
    asr_model = build_model(config, tokenizer.vocabulary)
    weights = _read_weights(folder / WEIGHTS)
    refuse_other_model(weights, asr_model.model.state_dict(), of=str(folder))
    asr_model.model.load_state_dict(weights)
    return Bundle(config, asr_model, tokenizer)


def build_model(config: Mapping[str, Any], vocabulary: Vocabulary) -> AsrModel:
    """Build the parts that a config describes, with fresh weights, for inference."""
    parts = {name: build(config["parts"][name]) for name in PARTS}
    model = nn.ModuleList(parts[name] for name in config["model"]).eval()
    features = build(config["parts"]["compute_features"])
    return AsrModel(model=model, compute_features=features, vocabulary=vocabulary, **parts)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SbkitError(
            f"A bundle must be a folder with {CONFIG} and {CHECKSUMS}, but {folder} is none "
            f"({error}). Make one: sbkit export RUN --out {folder}"
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise SbkitError(
            f"A bundle must be of format {FORMAT}, but {folder / CONFIG} is not. Export it again "
            "with this version of sbkit."
        )
    return config


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise SbkitError(
            f"{file} must be a safetensors file, but cannot be read ({error}). Export it again."
        ) from error
