"""Train what a YAML declares: ``python train.py hparams/ctc.yaml [--key=value ...]``."""

import sys

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.process import run_main
from sbkit.logs.handlers import log_to_screen


def main() -> None:
    """Run ``train.py`` with the arguments of the process."""
    keep_freed_memory()
    from sbkit.commands.train import train  # imports torch, once `run_main` set how threads wait

    with log_to_screen():
        train(sys.argv[1:])


if __name__ == "__main__":
    run_main(main)
