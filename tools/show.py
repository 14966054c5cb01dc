"""Show the folder, a clip, or the results of a run.

python -m tools.show folder hparams/ctc.yaml [--knob=value ...]
python -m tools.show clip RUN
python -m tools.show row RUN    (a row of the tables of results)
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbkit.base.process import run_main
from sbkit.config.hparams import read_knobs
from sbkit.config.overrides import parse_command
from sbkit.text.normalization import normalize


def folder(arguments: Sequence[str]) -> str:
    """Name the folder that a training command will write to."""
    return str(read_knobs(*parse_command(arguments))["output_folder"])


def clip(arguments: Sequence[str]) -> str:
    """Name the test clip with the longest text and, after a tab, this text, normalized."""
    # Only this command needs torch and datasets, whose imports take seconds.
    from recipes.AsteriskPrompts.corpus import prepare_prompts
    from recipes.CommonVoice.corpus import find_release
    from sbkit.data.cache import default_cache
    from sbkit.data.tables import TableOptions, read_release

    knobs = read_knobs(Path(arguments[0]) / "hyperparams.yaml", {})
    language = knobs["language"]
    release = knobs["data_folder"] or prepare_prompts(
        language=language, cache_folder=default_cache()
    )
    test = find_release(release, language) / "test.tsv"
    clips = read_release(test, TableOptions(language=language))
    longest = max(clips, key=lambda clip: len(clip.sentence))
    return f"{longest.path}\t{normalize(longest.sentence, language)}"


def row(arguments: Sequence[str]) -> str:
    """Write a run's rows of the tables of results, for each test set and decoder."""
    from sbkit.run.results import require_current_results  # imports torch

    require_current_results(Path(arguments[0]))
    summary = json.loads((Path(arguments[0]) / "summary.json").read_text(encoding="utf-8"))
    rows: list[str] = []
    for test in summary["test"].values():
        if "greedy" in test:
            rows.append(_row(summary, test, test["decoder"]))
        rows.append(_row(summary, test.get("greedy", test), "greedy"))
    return "\n".join(rows)


def _row(summary: dict[str, Any], test: dict[str, Any], decoder: str) -> str:
    machine = summary["machine"]
    units = {"CER": "character", "WER": "word"}
    rates = {
        rate: f"{test[rate]:.1%} ({sum(test[f'{unit}_errors'].values())} / {test[f'{unit}s']})"
        for rate, unit in units.items()
        if rate in test
    }
    cells = [
        f"{summary['parameters'] / 1e6:.1f} M",
        decoder,
        rates["CER"],
        rates.get("WER", "none"),
        f"{summary['train_seconds'] / 60:.1f} min",
        f"{summary['rtfx']:.0f}",
        f"{machine['accelerator'] or machine['cpu']}, {machine['cores']} cores",
        f"`{(summary['git_commit'] or 'none')[:8]}`",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print what the first argument names."""
    commands = {"folder": folder, "clip": clip, "row": row}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("target", help="YAML of a run to come, or RUN")
    options, knobs = parser.parse_known_args()
    print(commands[options.command]([options.target, *knobs]))


if __name__ == "__main__":
    run_main(main)
