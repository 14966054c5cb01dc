"""Train what a YAML declares: ``python train.py hparams/ctc.yaml [--key=value ...]``."""

import shlex
import sys

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.process import run_main
from sbkit.logs.handlers import log_to_screen


def main() -> None:
    """Run ``train.py`` with the arguments of the process."""
    keep_freed_memory()
    from sbkit.config.overrides import parse_command
    from sbkit.run.run import Run  # imports torch, once `run_main` set how threads wait

    arguments = sys.argv[1:]
    with log_to_screen():
        Run(*parse_command(arguments), title=shlex.join(["train.py", *arguments])).train()


if __name__ == "__main__":
    run_main(main)
