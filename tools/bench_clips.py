"""The test clips of a run and their error rates: shared by `bench_codec` and `bench_synthesis`."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sbkit.audio.io import Samples
from sbkit.checkpoint.run_config import RUN_YAML, folder_override
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import UtteranceDataset
from sbkit.evaluate.intervals import Grouping, intervals_of
from sbkit.evaluate.wer import ErrorCounts, TextErrors, count_errors
from sbkit.runtime.torch_model import TorchBundle
from sbkit.train.recipe import load_recipe

Rows = Sequence[Mapping[str, Any]]  # of clips, with `audio` (S,) int16 and `text`


def make_parser(docstring: str) -> argparse.ArgumentParser:
    """Make a parser with the options of both benchmarks."""
    parser = argparse.ArgumentParser(description=docstring.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recognizer", type=Path, metavar="BUNDLE")
    parser.add_argument("--max-clips", type=int, default=1000)
    return parser


def read_clips(run: Path, max_clips: int, **overrides: object) -> Rows:
    """Return the first test clips of a run; overrides that are None do not count."""
    given = {name: value for name, value in overrides.items() if value is not None}
    knobs = read_knobs(run / RUN_YAML, folder_override(run / RUN_YAML) | given)
    test_sets = load_recipe(knobs, run / RUN_YAML).prepare_splits(knobs).test
    readers = map(UtteranceDataset, test_sets.values())
    rows = (reader[index] for reader in readers for index in range(len(reader)))
    return [*islice(rows, max_clips)]


def score_clips(bundle: TorchBundle, rows: Rows, clips: Sequence[Samples]) -> list[TextErrors]:
    """Transcribe clips one by one, and count the errors against the texts of their rows."""
    normalize = bundle.normalizer()
    texts = [bundle.transcribe([clip])[0] for clip in clips]
    return [
        count_errors(normalize(row["text"]), text) for row, text in zip(rows, texts, strict=True)
    ]


def error_rate(counts: Sequence[ErrorCounts]) -> str:
    """Write an error rate with its counts and its 95 % interval over clips."""
    total = sum(counts, ErrorCounts())
    clips = Grouping("clip", tuple(map(str, range(len(counts)))))
    interval = intervals_of({"WER": counts}, clips)["WER"]
    return f"{100 * total.rate:.1f} % ({total}; {interval})"
