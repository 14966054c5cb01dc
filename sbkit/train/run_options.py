"""Collect SpeechBrain's run options; refuse those, and hooks, that have no effect here."""

from collections.abc import Mapping
from typing import Any

import speechbrain as sb
from speechbrain.utils.run_opts import RunOptions

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import Range
from sbkit.config.keys import KEYS, require_values

# Options and hooks without an effect here, and what to do instead
REFUSED_OPTIONS = {
    "data_parallel_backend": "Start one process per device with torchrun",
    "profile_training": "Run torch.profiler around `fit_batch`",
    "auto_mix_prec": "Set precision: fp16",
    "bfloat16_mix_prec": "Set precision: bf16",
    "compile_module_keys": "Leave it out: all modules are compiled",
    **dict.fromkeys(("jit", "jit_module_keys"), "Set compile: True"),
    **dict.fromkeys(
        ("compile_mode", "compile_using_fullgraph", "compile_using_dynamic_shape_tracing"),
        "Blocks are compiled for any shape, and for the losses of an uncompiled run",
    ),
}
UNCALLED_HOOKS = {
    "update_average": "Return the loss to average from `fit_batch` and `evaluate_batch`",
}
HOOKS_UNCALLED_BY_STEP = dict.fromkeys(  # unless the recipe's own `fit_batch` calls them
    ("check_loss_isfinite", "check_gradients"),
    "Call it in your own `fit_batch`; here steps that are not finite are skipped",
)
# Private methods of SpeechBrain's Brain that its recipes override or call, and those that a public
# method calls, which is not overridden
PRIVATE_HOOKS = ("_fit_valid", "_compile", "_wrap_distributed", "_train_loader_specifics")
INSTEAD_OF_PRIVATE = {
    "_fit_train": "Override `fit_batch`, or `on_stage_start`, `on_fit_batch_start` and "
    "`on_fit_batch_end`",
    "_should_save_intra_epoch_ckpt": "Set ckpt_interval_minutes or ckpt_interval_steps",
    "_save_intra_epoch_ckpt": "Add what it saves by `checkpointer.add_recoverable`",
    "_save": "Add what it saves by `checkpointer.add_recoverable`",
    "_recover": "Add what it loads by `checkpointer.add_recoverable`",
    "_optimizer_step_limit_exceeded": "Set optimizer_step_limit",
}

# The other keys of a SpeechBrain script may mean something else.
NUMBERS = {name: key for name, key in KEYS.items() if isinstance(key.values, Range)}


def read_run_options(
    hparams: Mapping[str, object], run_opts: RunOptions | Mapping[str, object] | None
) -> dict[str, Any]:
    """Collect the run options of a YAML; ``run_opts`` take precedence."""
    if isinstance(run_opts, RunOptions):
        overrides = {name: run_opts[name] for name in run_opts.overridden_args}
    else:
        overrides = dict(run_opts or {})
    names = RunOptions().as_dict()
    options = {**{name: hparams[name] for name in names if name in hparams}, **overrides}
    plain_types = (bool, int, float, str, list)  # an object belongs to the recipe
    plain = {name: value for name, value in hparams.items() if isinstance(value, plain_types)}
    require_values({**plain, **options}, NUMBERS)
    for name, instead in REFUSED_OPTIONS.items():
        if options.get(name):
            raise ConfigError(
                f"`{name}` must be off, but is {options[name]}. {instead}.", keys=(name,)
            )
    return options


def check_hooks(kind: type[sb.Brain], *, has_own_step: bool) -> None:
    """Raise ConfigError for a recipe that overrides a hook that is never called."""
    names = [name for name in vars(sb.Brain) if name.startswith("_") and name[:2] != "__"]
    uncalled = UNCALLED_HOOKS | {
        name: INSTEAD_OF_PRIVATE.get(name, "Override a public method")
        for name in names
        if name not in PRIVATE_HOOKS
    }
    if not has_own_step:
        uncalled |= HOOKS_UNCALLED_BY_STEP
    for name, instead in uncalled.items():
        if getattr(kind, name) is not getattr(sb.Brain, name):
            raise ConfigError(f"`{name}` of {kind.__name__} is never called. {instead}.")
