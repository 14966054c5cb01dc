"""Time the checks of labels, alignment and data on made-up splits that share a few audio files.

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

import datasets
import numpy as np
import pyarrow as pa
import soundfile
from datasets.table import InMemoryTable

from recipes.asr.recipe import ASR
from sbkit.check.data.alignment import check_alignment
from sbkit.check.data.labels import check_labels
from sbkit.check.data.speech import check_speech
from sbkit.check.planned_run import PlannedRun
from sbkit.data.corpora.splits import Splits
from sbkit.data.storage.audio_store import AUDIO, PLACE

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards boldly mix many potions"
SHARES = {"train": 0.96, "dev": 0.02, "test": 0.02}
SAMPLE_RATE = 16_000  # Hz
SAMPLES_OF_CHARACTER = 1600


def main() -> None:
    """Make up the splits, run the checks, and print what they took."""
    yaml, rows = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        splits = make_splits(rows, Path(folder))

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


def make_splits(rows: int, folder: Path) -> Splits:
    """Make up the splits; train is without every hundredth row, as after leaving some out."""
    stores = {split: make_up(split, round(share * rows), folder) for split, share in SHARES.items()}
    kept = np.flatnonzero(np.arange(len(stores["train"])) % 100)
    train, dev, test = stores["train"].select(kept), stores["dev"], stores["test"]
    return Splits(train, {"dev": dev}, {"test": test})


def make_up(split: str, rows: int, folder: Path) -> datasets.Dataset:
    """Make up utterances of about 50 characters and 5 s, fifty a speaker, and a file a length."""
    random = np.random.default_rng(list(SHARES).index(split))
    texts = [" ".join(words) for words in random.choice(WORDS.split(), (rows, 10))]
    samples = SAMPLES_OF_CHARACTER * np.fromiter(map(len, texts), np.int64, rows)
    files = {count: folder / f"{count}.wav" for count in np.unique(samples).tolist()}
    for count, file in files.items():  # some sound, at an eighth of full scale
        soundfile.write(file, np.full(count, 4096, np.int16), SAMPLE_RATE)
    columns = {
        "id": [f"{split}{row}" for row in range(rows)],
        "text": texts,
        "sentence": texts,
        "speaker": [f"{split}{row // 50}" for row in range(rows)],
        "samples": samples,
        AUDIO: pa.array(
            [{"file": str(files[n]), "sample_rate": SAMPLE_RATE} for n in samples.tolist()], PLACE
        ),
    }
    return datasets.Dataset(InMemoryTable(pa.table(columns)))


def measure(planned: PlannedRun) -> Iterator[str]:
    """Run each check, and give a line of what it took."""
    for check in (check_labels, check_alignment, check_speech):
        wall, cpu = time.perf_counter(), time.process_time()
        found = list(check(planned))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        yield f"{check.__name__}: {wall:.1f} s, {cpu:.1f} s of CPU, {len(found)} findings"


if __name__ == "__main__":
    main()
