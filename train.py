"""Train what a YAML declares: ``python train.py hparams/ctc.yaml [--key=value ...]``."""

import shlex
import sys

from sbkit.base.process import run_main
from sbkit.base.threads_and_memory import keep_freed_memory
from sbkit.logs.handlers import log_to_screen


def main() -> int:
    """Run ``train.py`` with the arguments of the process; return the exit code."""
    keep_freed_memory()
    from sbkit.config.overrides import parse_command
    from sbkit.run.run import Run  # imports torch, once `run_main` set how threads wait
    from sbkit.train.stopping import train_restartably

    arguments = sys.argv[1:]
    with log_to_screen():
        run = Run(*parse_command(arguments), title=shlex.join(["train.py", *arguments]))
        return train_restartably(
            run.train,
            run.folder,
            patience=run.settings["store_patience"],  # sbkit/base/ranges.py has its default
            position=lambda: run.position,
        )


if __name__ == "__main__":
    run_main(main)
