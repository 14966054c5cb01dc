"""Train on eight clips: a model that does not learn them will not learn more from all data.

    python docs/examples/overfit.py hparams/ctc.yaml [--key=value ...]

It takes two minutes at most, and keeps nothing. Dropout and masks are those of the YAML.
"""

import sys
from tempfile import TemporaryDirectory

import numpy as np
from torch.utils.data import DataLoader, Subset

from sbkit import Run
from sbkit.base.messages import plural
from sbkit.config.overrides import parse_command
from sbkit.data.splits import sample_counts

NUM_CLIPS, STEPS_PER_EPOCH = 8, 10
OPTIONS = {"number_of_epochs": 40, "max_minutes": 2, "ema_decay": 0.0, "check": False}


def main(*arguments: str) -> None:
    """Train on clips that are longer than a quarter of the corpus, and print what they learn."""
    yaml, overrides = parse_command(arguments)
    with TemporaryDirectory() as folder:
        run = Run(yaml, {**OPTIONS, **overrides, "output_folder": folder})
        loaders = run.make_loaders()
        by_length = np.argsort(sample_counts(loaders.splits.train))
        clips = by_length[len(by_length) // 4 :][:NUM_CLIPS].tolist()
        train, valid = (
            DataLoader(
                Subset(loaders.train.dataset, clips * times),
                batch_size=NUM_CLIPS,
                collate_fn=loaders.train.collate_fn,
            )
            for times in (STEPS_PER_EPOCH, 1)
        )
        brain = run.make_brain()
        brain.fit(brain.hparams.epoch_counter, train, valid)
        first, last = run.history[0], run.history[-1]
    losses = [record["valid_loss"] for record in (first, last)]  # without masks and dropout
    verb = "falls" if losses[1] < losses[0] else "does not fall"
    epochs = plural(last["epoch"], "epoch")
    print(f"The loss {verb} in {epochs}: {losses[0]:.3g} -> {losses[1]:.3g}")
    if "CER" in last:
        print(f"CER of the clips: {last['CER']:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
