"""`train.py`: a YAML and its overrides on the command line, a run."""

import shlex
from collections.abc import Sequence

from sbkit.config.overrides import parse_command
from sbkit.run.run import Run


def train(arguments: Sequence[str]) -> None:
    """Train and test what ``FILE.yaml [--key=value ...]`` declares; raises SbkitError."""
    Run(*parse_command(arguments), title=shlex.join(["train.py", *arguments])).train()
