"""`sbkit tune`: choose the weights of a trained run's decoder again, with another decoder."""

from collections.abc import Mapping
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.declaration import RESOLVED
from sbkit.checkpoint.folder import hold
from sbkit.config.hparams import parse_command
from sbkit.distributed.ranks import main_rank_first, process_group, rank
from sbkit.logs.log import log
from sbkit.train.run import Run


def tune_run(folder: Path, changes: Mapping[str, object]) -> None:
    """Choose the weights of a trained run's decoder, with changes to the YAML of the run.

    Raises SbkitError: the folder holds no trained run, or was moved.
    """
    yaml_file = folder / RESOLVED
    options = [f"--{key}={value}" for key, value in changes.items()]
    run = Run(*parse_command([str(yaml_file), *options])) if yaml_file.is_file() else None
    if run is None or not (run.is_begun and run.folder.samefile(folder)):
        raise SbkitError(
            "A run must be trained, and where it was trained, for its decoder to be tuned, but "
            f"{folder} {'holds no run' if run is None else f'was trained as {run.folder}'}. Name a "
            "run folder as training printed it, from the folder that it was trained from."
        )
    with process_group(run.placement.device):
        with main_rank_first():
            if rank() == 0:
                hold(run.folder)
            if note := run.declare().check_continues(run.folder):
                log(note)
            _ = run.labels  # and the language models
        brain = run.make_brain()
        if not hasattr(brain, "decoding"):  # which chooses the weights once the best is loaded
            raise SbkitError(
                f"A run must be of a recognizer to be tuned, but {folder} is none. Leave it."
            )
        brain.loaders = run.loaders
        brain.load_best(run.loaders.valid)
