"""SpeechBrain's run options and hooks under sbkit: which take effect, and which are refused."""

from typing import Any

import speechbrain as sb
from speechbrain.utils.run_opts import RunOptions

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import require_in_range

WITHOUT_EFFECT = {  # SpeechBrain's run options that sbkit refuses, and what to do instead
    "data_parallel_backend": "Start one process per device with torchrun",
    "profile_training": "Set profile: True",
    "auto_mix_prec": "Set precision: fp16",
    "bfloat16_mix_prec": "Set precision: bf16",
    "compile_module_keys": "Leave it out: all modules are compiled",
    **dict.fromkeys(("jit", "jit_module_keys"), "Set compile: True"),
    **dict.fromkeys(
        ("compile_mode", "compile_using_fullgraph", "compile_using_dynamic_shape_tracing"),
        "Blocks are compiled for any shape, and for the losses of an uncompiled run",
    ),
}
UNCALLED = {  # hooks of SpeechBrain that have no effect here, and what to do instead
    "update_average": "Return what is to be averaged from `fit_batch` and `evaluate_batch`",
    "_should_save_intra_epoch_ckpt": "Set ckpt_interval_minutes or ckpt_interval_steps",
}
UNCALLED_BY_STEP = dict.fromkeys(  # unless a `fit_batch` of the recipe's own calls them
    ("check_loss_isfinite", "check_gradients"),
    "Call it in a `fit_batch` of your own; here steps that are not finite are skipped",
)
PLAIN = (bool, int, float, str, list)  # an object is one of the recipe's own


def declared_options(hparams: dict[str, Any] | None, run_opts: Any) -> dict[str, Any]:
    """Collect the declared options.

    Raises SbkitError for one that has no effect here, and for a number out of its range.
    """
    if isinstance(run_opts, RunOptions):
        given = {name: run_opts[name] for name in run_opts.overridden_args}
    else:
        given = dict(run_opts or {})
    known = RunOptions().as_dict()
    declared = hparams or {}
    options = {**{name: declared[name] for name in known if name in declared}, **given}
    plain = {name: each for name, each in declared.items() if isinstance(each, PLAIN)}
    require_in_range({**plain, **options})
    for name, instead in WITHOUT_EFFECT.items():
        if options.get(name):
            raise SbkitError(f"`{name}` must be off, but is {options[name]}. {instead}.")
    return options


def check_hooks(kind: type[sb.Brain], *, has_own_step: bool) -> None:
    """Raise SbkitError for a recipe that overrides what is never called."""
    for name, instead in {**UNCALLED, **({} if has_own_step else UNCALLED_BY_STEP)}.items():
        if getattr(kind, name) is not getattr(sb.Brain, name):
            raise SbkitError(
                f"`{name}` must be SpeechBrain's, because sbkit does not call it, but "
                f"{kind.__name__} overrides it. {instead}."
            )
