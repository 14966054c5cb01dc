"""Fine-tune encoders with every random option, and parts frozen for a time, on one rank or more.

`torchrun -m tests.train.fine_tuning`. Each micro-batch has a seed of its own.
"""

import json
import sys
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sbkit.distributed.ranks import process_group, rank, world_size
from sbkit.models.loss import Loss
from sbkit.models.pretrained.encoder import PretrainedFeatures
from sbkit.train.brain import Brain
from tests.models.pretrained.folders import make_parts, tiny_config
from tests.train.lines import brain_of

STEPS, PARTS, FROZEN = 5, 2, 2  # PARTS: micro-batches of a step
FREEZE = {"CNN": "always", "Transformer": FROZEN}
SAMPLES = {"wavlm": 1000, "wav2vec2-bert": 3600, "parakeet_encoder": 9000}
SAMPLES |= {"whisper": 3600}  # some ten frames
SETTINGS = {
    **{"layerdrop": 0.5, "dropout": 0.1, "mask_time_length": 2, "mask_channel_length": 4},
    **{"gradient_checkpointing": True},
}


class EncoderBrain(Brain):
    """The loss is the sum of squares of what a head makes of the states."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """Encode: (B, S), (B,) -> (B, U, D)."""
        audio, lengths, seed = batch
        torch.manual_seed(seed)
        front_end, encoder, head = self.modules["model"]
        x, frames = front_end(*self.hparams.compute_features(audio, lengths))
        scores: Tensor = head(encoder(x, frames)[0])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Loss:
        return Loss(predictions.square().sum((1, 2)), torch.ones(len(predictions)))


def train() -> dict[str, list[float]]:
    """Return the parameters after a few steps: of whole encoders, and of adapters and a CNN."""
    trained = {}
    for model_type in SAMPLES:
        names = ["linear_q", "linear_v"] if model_type == "wav2vec2-bert" else ["q_proj", "v_proj"]
        lora = {"rank": 2, "projections": names}
        trained |= train_one(model_type, FREEZE)
        trained |= train_one(model_type, {"CNN": [1, FROZEN + 1]}, lora)
    return trained


def train_one(
    model_type: str,
    freeze: dict[str, Any],
    lora: dict[str, Any] | None = None,
    *,
    num_layers: int = 3,
    **options: Any,
) -> dict[str, list[float]]:
    """Return the parameters of one encoder after a few steps."""
    config = tiny_config(model_type, num_hidden_layers=num_layers)
    samples = SAMPLES[model_type]
    front_end, encoder = make_parts(config, **SETTINGS, lora=lora)
    parts = {"CNN": front_end, "Transformer": encoder, "head": nn.Linear(24, 3)}
    model = nn.ModuleList(parts.values())
    audio = torch.randn(STEPS * PARTS, 2, samples)
    lengths = torch.tensor([samples, samples * 7 // 10])
    batches = [(clips, lengths, seed) for seed, clips in enumerate(audio)]
    features = PretrainedFeatures(config=config)
    brain = brain_of(
        EncoderBrain,
        model=model,
        lr=0.01,
        hparams={**parts, "compute_features": features, "model": model, "freeze": freeze},
        find_unused_parameters=False,
        noprogressbar=True,
        grad_accumulation_factor=PARTS // world_size(),
        **options,
    )
    mine = batches[rank() :: world_size()]
    brain.fit(range(1), DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
    return {
        f"{name} of {model_type} by {freeze}": parameter.flatten().tolist()
        for name, parameter in model.named_parameters()
    }


if __name__ == "__main__":
    with process_group(torch.device("cpu")):
        trained = train()
        if rank() == 0:
            json.dump(trained, sys.stdout)
