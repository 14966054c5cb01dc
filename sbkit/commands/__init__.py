"""The commands of `sbkit`, from arguments to an exit code; `cli.py` runs one of them."""
