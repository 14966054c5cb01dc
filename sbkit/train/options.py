"""SpeechBrain's run options: what the caller says, before what the hparams say."""

from typing import Any

from speechbrain.utils.run_opts import RunOptions

from sbkit.base.errors import SbkitError
from sbkit.config.ranges import refuse_out_of_range

OLD_PRECISIONS = {"auto_mix_prec": "fp16", "bfloat16_mix_prec": "bf16"}
WITHOUT_EFFECT = {  # SpeechBrain's run options that sbkit refuses, and what to do instead
    "data_parallel_backend": "Start one process per device with torchrun",
    "profile_training": "Set profile: True",
    **dict.fromkeys(("jit", "jit_module_keys"), "Set compile: True"),
    **dict.fromkeys(
        ("compile_mode", "compile_using_fullgraph", "compile_using_dynamic_shape_tracing"),
        "Blocks are compiled for any shape, and for the losses of an uncompiled run",
    ),
}


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
    refuse_out_of_range({**declared, **options})
    for name, instead in WITHOUT_EFFECT.items():
        if options.get(name):
            raise SbkitError(f"`{name}` must be off, but is {options[name]}. {instead}.")
    for name, precision in OLD_PRECISIONS.items():
        if options.get(name):
            options["precision"] = precision
    return options
