"""Train a speech recognizer: ``torchrun train.py hparams/ctc.yaml [--knob=value ...]``."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.CommonVoice.brain import AsrBrain
from recipes.CommonVoice.data import Loaders, make_loaders, prepare_splits, prepare_tokenizer
from recipes.CommonVoice.ranges import RANGES as RECIPE_RANGES
from sbkit.base.exit import run_main
from sbkit.check.check import check_before_training
from sbkit.check.planned_run import Recipe
from sbkit.checkpoint.declaration import CHECKPOINTS, Declaration
from sbkit.checkpoint.listing import newest_described
from sbkit.checkpoint.lock import hold
from sbkit.config.hparams import load_hparams, parse_command, read_knobs, save_resolved
from sbkit.config.ranges import RANGES, refuse_out_of_range
from sbkit.data.fingerprint import fingerprints_of
from sbkit.distributed.device import resolve
from sbkit.distributed.ranks import main_rank_first, process_group, rank
from sbkit.logs.log import say
from sbkit.train.finished import is_finished, may_write_results
from sbkit.train.initialize import initialize_from

RECIPE = Recipe(
    prepare_splits=prepare_splits,
    prepare_tokenizer=prepare_tokenizer,
    make_loaders=make_loaders,
    brain=AsrBrain,
    script=Path(__file__),
    ranges=RECIPE_RANGES,
)


def start_weights(run_folder: Path, hparams: Mapping[str, Any]) -> None:
    """Load what fits of `init_from`, unless the run has weights of its own."""
    if hparams.get("init_from") and newest_described(run_folder / CHECKPOINTS) is None:
        for line in initialize_from(Path(hparams["init_from"]), hparams).lines():
            say(line)


def finish(brain: AsrBrain, loaders: Loaders, run_folder: Path, was_finished: bool) -> None:
    """Test, unless the run was finished before and has its results."""
    if may_write_results(run_folder, was_finished=was_finished):
        brain.evaluate(loaders.test, min_key="CER")
    else:
        say(f"All epochs were trained before; the results in {run_folder} stay as they are.")


def main() -> None:
    """Run the steps of a training run in their order."""
    yaml_file, overrides = parse_command(sys.argv[1:])
    knobs = read_knobs(yaml_file, overrides)
    refuse_out_of_range(knobs, {**RANGES, **RECIPE.ranges})
    placement = resolve(knobs["device"], knobs["precision"])
    run_folder = Path(knobs["output_folder"])

    with process_group(placement.device):
        with main_rank_first():
            if rank() == 0:
                hold(run_folder)  # before anything in it is written
            if knobs.get("check", True) and rank() == 0:
                check_before_training(yaml_file, overrides, RECIPE)
            splits = prepare_splits(knobs)
            data = fingerprints_of({"train": splits.train, "dev": splits.dev, "test": splits.test})
            Declaration.of(yaml_file, overrides, data=data).refuse_other(run_folder)
            tokenizer = prepare_tokenizer(knobs, splits)
        torch.manual_seed(knobs["seed"])
        hparams = load_hparams(yaml_file, overrides)
        declaration = Declaration.of(
            yaml_file, overrides, data=data, tokenizer_file=tokenizer.model_file, hparams=hparams
        )
        if told := declaration.refuse_other(run_folder):
            say(told)
        loaders = make_loaders(hparams, splits, tokenizer, placement)
        hparams["checkpointer"].refuse_other_model()
        start_weights(run_folder, hparams)
        was_finished = is_finished(run_folder, number_of_epochs=knobs["number_of_epochs"])
        with main_rank_first():
            hparams["checkpointer"].declaration = declaration.begin(run_folder)
            save_resolved(run_folder / "hyperparams.yaml", yaml_file, overrides)
        brain = AsrBrain(
            modules={"model": hparams["model"]},
            opt_class=hparams["opt_class"],
            hparams=hparams,
            run_opts={"device": placement.device},
            checkpointer=hparams["checkpointer"],
            measure_set=loaders.measure,
        )
        brain.fit(hparams["epoch_counter"], loaders.train, loaders.dev)
        finish(brain, loaders, run_folder, was_finished)
    say(f"run folder: {run_folder}")


if __name__ == "__main__":
    run_main(main)
