"""Ask the kernel for GPUs on the CPU, by Triton's interpreter; TRITON_INTERPRET=1 must be set.

The interpreter is chosen where Triton is imported, so that this is a program of its own.
"""

import json
import sys

import torch
from torch import Tensor

from sbkit.models.ctc_triton import ctc_on_gpu
from sbkit.models.loss import Kernel, compare, ctc_of_torch

CASES = {  # frames, labels of each utterance
    "lengths that differ": ([20, 13, 9, 1], [[1, 2, 2, 5, 4], [3, 3], [4, 1, 4, 1], []]),
    "no labels at all": ([7, 3], [[], []]),
    "no frames": ([0, 4, 0], [[1], [1, 2], []]),
    "too few frames": ([2, 2, 3], [[1, 2, 3], [1, 1], [1, 1]]),
    "one label over and over": ([31, 22], [[2] * 15, [2, 2, 3] * 5]),
    "more states than lanes": ([72], [[1, 2, 3, 4, 5] * 14]),
}


def answer(
    kernel: Kernel, scores: Tensor, frames: list[int], labels: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Give the losses and the gradient of the scores, each utterance weighed differently."""
    counts = torch.tensor([len(each) for each in labels])
    padded = [each + [0] * (int(counts.max()) - len(each)) for each in labels]
    tokens = torch.tensor(padded, dtype=torch.long)
    losses = kernel(scores.log_softmax(-1), tokens, torch.tensor(frames), counts, blank=0)
    weighed = losses * torch.arange(1.0, 1 + len(labels))
    return losses.detach(), torch.autograd.grad(weighed.sum(), scores)[0]


def differ(frames: list[int], labels: list[list[int]]) -> list[float]:
    """Tell by how much the kernel is off PyTorch's, in loss and in gradient."""
    torch.manual_seed(0)
    scores = torch.randn(len(frames), max(frames), 6, requires_grad=True)
    (losses, gradient), (wanted, slope) = (
        answer(kernel, scores, frames, labels) for kernel in (ctc_on_gpu, ctc_of_torch)
    )
    return [float((losses - wanted).abs().max()), float((gradient - slope).abs().max())]


def tell_of_nan() -> bool:
    """Tell whether a score that is no number reaches the loss of its utterance, and no other's."""
    scores = torch.randn(2, 5, 4, requires_grad=True)
    scores.data[0, 2] = torch.nan
    losses, gradient = answer(ctc_on_gpu, scores, [5, 5], [[1, 2], [3]])
    clean = bool(losses[1].isfinite()) and bool(gradient[1].isfinite().all())
    return clean and bool(losses[0].isnan()) and bool(gradient[0].isnan().any())


if __name__ == "__main__":
    answers: dict[str, object] = {name: differ(*case) for name, case in CASES.items()}
    answers["nan"] = tell_of_nan()
    answers["compare"] = compare(ctc_on_gpu, ctc_of_torch, torch.device("cpu"))
    json.dump(answers, sys.stdout)
