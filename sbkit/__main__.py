"""Run ``python -m sbkit`` as the command ``sbkit``."""

from sbkit.commands.cli import main

if __name__ == "__main__":
    main()
