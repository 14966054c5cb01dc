"""`compile: True` compiles the repeated blocks of the model, each class once, for any sizes."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sbkit.base.torch_internals import leave_uncompiled, set_recompile_limit

logger = logging.getLogger(__name__)
# A function with more variants runs uncompiled. torch's default of 8 is too few for training,
# validation, two precisions, and sizes of one, which it compiles separately.
MAX_VARIANTS = 64


def compile_blocks(modules: Iterable[nn.Module], device: torch.device) -> Counter[str]:
    """Compile the blocks of modules, or of the parts in a ModuleList, in place; count each class.

    SpeechBrain compiles each of the Brain's modules instead, but a ModuleList is never called.
    """
    lists = (m if isinstance(m, nn.ModuleList) else [m] for m in modules)
    all_blocks = (block for part in chain.from_iterable(lists) for block in find_blocks(part))
    blocks = [
        block
        for block in all_blocks  # one with only modules of torch is not worth compiling
        if not all(type(m).__module__.startswith("torch.") for m in block.modules())
    ]
    set_recompile_limit(MAX_VARIANTS)
    if device.type == "cpu":
        # torch 2.11 compiles the strides of the first batch into the gradient of its attention, so
        # the second batch fails. torch warns of code that it does not compile.
        warnings.filterwarnings("ignore", ".*builtin .torch._C._nn.scaled_dot_product_attention")
        leave_uncompiled(scaled_dot_product_attention)
    for block in blocks:
        # Random numbers are PyTorch's own, so that a compiled run has the losses of a plain one.
        block.compile(dynamic=True, options={"fallback_random": True})
    counts = Counter(type(block).__name__ for block in blocks)
    logger.info(f"compiling {', '.join(f'{n} {name}' for name, n in counts.items()) or 'nothing'}")
    return counts


def find_blocks(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the part's outermost module lists, or the part if it has none."""
    yield from list(_members(part)) or [part]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _members(child)
