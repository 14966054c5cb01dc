"""Time the checks of labels, alignment and data on made-up stores without audio.

python -m tools.bench_check hparams/ctc.yaml ROWS
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recipes.asr.recipe import ASR
from sbkit.check.data.alignment import check_alignment
from sbkit.check.data.labels import check_labels
from sbkit.check.data.speech import check_speech
from sbkit.check.planned_run import PlannedRun
from sbkit.data.splits import Splits
from sbkit.data.store import Utterance, open_store, write_store

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boldly mix many potions"
SHARES = {"train": 0.96, "dev": 0.02, "test": 0.02}
HUM = bytes([0, 16]) * 100  # all audio: some sound, at an eighth of full scale


def main() -> None:
    """Write the stores, run the checks, and print what they took."""
    yaml, rows = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        splits = make_splits(Path(folder), rows)

        def prepare_splits(knobs: Mapping[str, Any]) -> Splits:
            return splits

        recipe = replace(ASR, prepare_splits=prepare_splits)
        overrides = {"output_folder": str(Path(folder, "run"))}
        with PlannedRun(yaml, overrides, recipe=recipe) as planned:
            _ = planned.hparams
            for line in measure(planned):
                print(line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{rows} rows; at most {peak:.2f} GiB of memory")


def make_splits(folder: Path, rows: int) -> Splits:
    """Write the stores; train is without every hundredth row, as after leaving some out."""
    stores = {}
    for split, share in SHARES.items():
        write_store(folder / split, utterances(split, round(share * rows)))
        stores[split] = open_store(folder / split)
    kept = np.flatnonzero(np.arange(len(stores["train"])) % 100)
    train, dev, test = stores["train"].select(kept), stores["dev"], stores["test"]
    return Splits(train, {"dev": dev}, {"test": test})


def utterances(split: str, rows: int) -> Iterator[Utterance]:
    """Make up utterances of about 50 characters and 5 s, fifty a speaker."""
    random = np.random.default_rng(list(SHARES).index(split))
    words = random.choice(WORDS.split(), (rows, 10))
    noise = random.integers(0, 16_000, rows)
    for row in range(rows):
        text = " ".join(words[row])
        samples = 1600 * len(text) + int(noise[row])
        yield Utterance(f"{split}{row}", text, text, f"{split}{row // 50}", samples, HUM)


def measure(planned: PlannedRun) -> Iterator[str]:
    """Run each check, and give a line of what it took."""
    for check in (check_labels, check_alignment, check_speech):
        wall, cpu = time.perf_counter(), time.process_time()
        found = list(check(planned))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        yield f"{check.__name__}: {wall:.1f} s, {cpu:.1f} s of CPU, {len(found)} findings"


if __name__ == "__main__":
    main()
