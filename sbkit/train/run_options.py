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
    "_should_save_intra_epoch_ckpt": "Set ckpt_interval_minutes or ckpt_interval_steps",
}
HOOKS_UNCALLED_BY_STEP = dict.fromkeys(  # unless the recipe's own `fit_batch` calls them
    ("check_loss_isfinite", "check_gradients"),
    "Call it in your own `fit_batch`; here steps that are not finite are skipped",
)

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
    uncalled = UNCALLED_HOOKS if has_own_step else UNCALLED_HOOKS | HOOKS_UNCALLED_BY_STEP
    for name, instead in uncalled.items():
        if getattr(kind, name) is not getattr(sb.Brain, name):
            raise ConfigError(f"`{name}` of {kind.__name__} is never called. {instead}.")
