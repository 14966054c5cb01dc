"""Steps of pretrained encoders that ranks share: `torchrun -m tests.models.pretrained.sharing`."""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sbkit.distributed.ranks import process_group, rank
from tests.models.pretrained.folders import make_parts, tiny_config

STEPS = 3
KNOBS = {"layerdrop": 0.5, "dropout": 0.2, "mask_channel_length": 4, "gradient_checkpointing": True}
ADAPTED = "wavlm with adapters"


class Step(nn.Module):
    """The sum of the squares of an encoder's states, of clips that a rank draws."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        lora = {"rank": 2, "projections": ["q_proj", "v_proj"]} if kind == ADAPTED else None
        config = tiny_config(kind.split()[0])
        self.front_end, self.encoder = make_parts(config, **KNOBS, lora=lora)
        self.train()

    def forward(self, seed: int) -> Tensor:
        """Draw clips, layers, masks and dropout."""
        torch.manual_seed(seed)
        x, frames = self.front_end(torch.randn(2, 2000, 1), torch.tensor([2000, 1500]))
        states: Tensor = self.encoder.encode(x, frames)
        return states.square().sum()


def gradients(model: nn.Module, seed: int) -> list[Any]:
    """Add up the gradients of some steps."""
    model.zero_grad()
    for step in range(STEPS):
        model(seed + step).backward()
    return [each.grad.flatten().tolist() for each in model.parameters() if each.grad is not None]


def main() -> None:
    """Print the gradients of all families, as they are after all-reduce, on rank 0."""
    with process_group(torch.device("cpu")):
        shared = {
            each: gradients(DistributedDataParallel(Step(each)), 10 * rank())
            for each in ("wav2vec2", "wavlm", ADAPTED)
        }
        if rank() == 0:
            json.dump(shared, sys.stdout)


if __name__ == "__main__":
    main()
