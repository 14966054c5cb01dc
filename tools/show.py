"""Show the folder or a clip of a run, for `tools/demo`.

python -m tools.show folder hparams/ctc.yaml [--knob=value ...]
python -m tools.show clip RUN
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

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


def main() -> None:
    """Print what the first argument names."""
    commands = {"folder": folder, "clip": clip}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("target", help="YAML of a run to come, or RUN")
    options, knobs = parser.parse_known_args()
    print(commands[options.command]([options.target, *knobs]))


if __name__ == "__main__":
    run_main(main)
