"""What a checkpoint holds goes back into the objects that it was saved from."""

from typing import Any

from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    Checkpoint,
    Checkpointer,
    get_default_hook,
    torch_recovery,
)
from speechbrain.utils.epoch_loop import EpochCounter
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import reading
from sbkit.checkpoint.optimizer import load_optimizer
from sbkit.checkpoint.rng import check_count

MOST_EPOCHS = 10**6


def needed_of(checkpointer: Checkpointer) -> list[str]:
    """Name the recoverables that a checkpoint must hold, as SpeechBrain has it."""
    if checkpointer.allow_partial_load:
        return []
    optional = checkpointer.optional_recoverables
    return [
        name
        for name in checkpointer.recoverables
        if not optional.get(name, False) and "dataloader" not in name
    ]


def recover(checkpointer: Checkpointer, checkpoint: Checkpoint) -> list[str]:
    """Load every recoverable from its file; give what there is to be said about it.

    Raises SbkitError when a file is missing, cannot be read, or is of another optimizer.
    """
    facts = []
    for name, recoverable in checkpointer.recoverables.items():
        if name in checkpoint.paramfiles:
            hook = checkpointer.custom_load_hooks.get(name)
            facts += _load(name, recoverable, checkpoint, hook)
        elif name in needed_of(checkpointer):
            raise SbkitError(
                f"{checkpoint.path} must hold every recoverable, but has no `{name}`. Use the YAML "
                "that it was trained with, or another output_folder."
            )
        else:
            facts.append(f"{checkpoint.path} has no `{name}`, which begins afresh.")
    return facts


def _load(name: str, recoverable: Any, checkpoint: Checkpoint, hook: Any) -> list[str]:
    file = checkpoint.paramfiles[name]
    hook = hook or get_default_hook(recoverable, DEFAULT_LOAD_HOOKS)
    if hook is torch_recovery and isinstance(recoverable, Optimizer):
        differences = load_optimizer(recoverable, file)
        goes_on = f"`{name}` goes on as it is declared now ({'; '.join(differences)})."
        return [goes_on] if differences else []
    with reading(file):
        if hook is None:
            raise TypeError(f"there is no way to load {type(recoverable).__name__}")
        hook(recoverable, file, checkpoint.meta.get("end-of-epoch", True))
        if isinstance(recoverable, EpochCounter):
            check_count("epoch", recoverable.current, MOST_EPOCHS)
    return []
