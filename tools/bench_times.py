"""Measure how far the times of words are from the truth, which a column of the data has.

python -m tools.bench_times BUNDLE|RUN DATA [--decoder greedy|beam]
python -m tools.bench_times BUNDLE DATA --fit    (and write the offsets into the bundle)
"""

import argparse
from pathlib import Path

from recipes.FestvoxRu.time_errors import compare_times, fit_offsets, time_source
from sbkit.base.process import run_main
from sbkit.commands.score import open_model


def main() -> None:
    """Measure, or fit first."""
    parser = argparse.ArgumentParser(description="How far the times of words are from the truth.")
    parser.add_argument("model", type=Path, metavar="BUNDLE|RUN")
    parser.add_argument("data", type=Path, metavar="DATA", help="a table with word_times")
    parser.add_argument("--decoder", choices=("greedy", "beam", "graph"))
    parser.add_argument("--fit", action="store_true", help="write fitted offsets into the bundle")
    options = parser.parse_args()
    if options.fit:
        print(fit_offsets(options.model, options.data))
    with open_model(options.model) as bundle:
        timed = time_source(bundle.with_decoder(options.decoder), options.data)
    for name in ("recognized", "aligned"):
        print(f"{name}: {compare_times((each.truth, getattr(each, name)) for each in timed)}")


if __name__ == "__main__":
    run_main(main)
