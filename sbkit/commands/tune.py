"""`sbkit tune`: the options of the command line, a fitted decoder."""

from argparse import Namespace
from dataclasses import fields

from sbkit.config.overrides import parse_overrides
from sbkit.run.tuning import TuningOptions, tune


def tune_model(options: Namespace) -> None:
    """Fit another decoder of a run or a bundle; raises SbkitError."""
    values = {field.name: getattr(options, field.name) for field in fields(TuningOptions)}
    if options.lm_text is not None:  # as a YAML has it: a file or a list of files
        values |= parse_overrides([f"--lm_text={options.lm_text}"])
    tune(options.model, TuningOptions(**values))
