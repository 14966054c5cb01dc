"""The commands of `sbkit`, from arguments to an exit code; `cli.py` has the parser."""
