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

from sbkit.nn.decoding import greedy
from sbkit.nn.graph import Graph
from sbkit.out.plain import build
from sbkit.state.integrity import CHECKSUMS, find_damage
from sbkit.state.weights import refuse_other_model
from sbkit.tensors.tokenizer import Tokenizer
from sbkit.values.errors import SbkitError
from sbkit.values.labels import LabelSpace

FORMAT = 1
PARTS = ("CNN", "Transformer", "seq_lin", "ctc_lin")
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"


@dataclass(frozen=True)
class Bundle:
    """A model that is ready to transcribe."""

    config: dict[str, Any]
    graph: Graph
    tokenizer: Tokenizer

    @torch.inference_mode()
    def transcribe(self, clips: list[torch.Tensor]) -> list[str]:
        """Transcribe clips of 16 kHz int16 audio, (S,) each, as one batch."""
        audio = nn.utils.rnn.pad_sequence([clip.float() for clip in clips], batch_first=True)
        samples = torch.tensor([len(clip) for clip in clips])
        features, frames = self.graph.features(audio, samples)
        states, frames = self.graph.encode(features, frames)
        best = greedy(self.graph.ctc_log_probs(states), frames, self.tokenizer.labels.blank)
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
    graph = build_graph(config, tokenizer.labels)
    weights = _read_weights(folder / WEIGHTS)
    refuse_other_model(weights, graph.model.state_dict(), of=str(folder))
    graph.model.load_state_dict(weights)
    return Bundle(config, graph, tokenizer)


def build_graph(config: Mapping[str, Any], labels: LabelSpace) -> Graph:
    """Build the parts that a config describes, with fresh weights, for inference."""
    parts = {name: build(config["parts"][name]) for name in PARTS}
    model = nn.ModuleList(parts[name] for name in config["model"]).eval()
    features = build(config["parts"]["compute_features"])
    return Graph(model=model, compute_features=features, labels=labels, **parts)


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
