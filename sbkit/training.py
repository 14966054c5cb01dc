"""A training run from its YAML to its results: the list of steps that train.py starts."""

from collections.abc import Sequence

from sbkit.check.check import check_before_training
from sbkit.config.hparams import parse_command, save_resolved
from sbkit.distributed.ranks import main_rank_first, process_group, rank
from sbkit.logs.log import say
from sbkit.train.run import Run


def train(arguments: Sequence[str]) -> None:
    """Train what ``FILE.yaml [--key=value ...]`` declares.

    Raises:
        SbkitError: bad input.
    """
    run = Run(*parse_command(arguments))
    run.refuse_out_of_range()
    with process_group(run.placement.device):
        with main_rank_first():
            if run.knobs.get("check", True) and rank() == 0:
                check_before_training(run)
            _ = run.splits, run.labels
        _ = run.hparams, run.loaders
        run.hparams["checkpointer"].refuse_other_model()
        with main_rank_first():
            save_resolved(run.folder / "hyperparams.yaml", run.yaml_file, run.overrides)
        brain = run.make_brain()
        brain.loaders = run.loaders
        brain.fit(run.hparams["epoch_counter"], run.loaders.train, run.loaders.valid)
        brain.evaluate(run.loaders.test)
    say(f"run folder: {run.folder}")
