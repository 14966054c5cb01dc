"""`compile: True` compiles the repeated blocks of the model, each class once, for any sizes."""

from collections.abc import Iterable, Iterator

from torch import nn

from sbkit.base.torch_internals import set_recompile_limit

# A function with more variants runs uncompiled. torch's default of 8 is too few for training,
# validation, two precisions, and sizes of one, which it compiles separately.
MAX_VARIANTS = 64


def compile_blocks(modules: Iterable[nn.Module]) -> None:
    """Compile the blocks of modules in place.

    SpeechBrain compiles each of the Brain's modules instead, but a ModuleList is never called.
    """
    set_recompile_limit(MAX_VARIANTS)
    for block in find_blocks(modules):
        # Random numbers are PyTorch's own, so that a compiled run has the losses of a plain one.
        block.compile(dynamic=True, options={"fallback_random": True})


def find_blocks(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists in each part; a part without lists is a block.

    The parts are the modules, or the members of a module that is a ModuleList.
    """
    for module in modules:
        for part in module if isinstance(module, nn.ModuleList) else [module]:
            yield from list(_members(part)) or [part]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _members(child)
