"""Show the folder or a clip of a run, for `tools/demo`.

python -m tools.show folder hparams/ctc.yaml [--setting=value ...]
python -m tools.show clip RUN
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from sbkit.base.process import run_main
from sbkit.config.hparams import read_spec
from sbkit.config.overrides import parse_command
from sbkit.text.normalization import normalize


def folder(arguments: Sequence[str]) -> str:
    """Name the folder that a training command will write to."""
    return str(read_spec(*parse_command(arguments)).settings["output_folder"])


def clip(arguments: Sequence[str]) -> str:
    """Name the test clip with the longest text and, after a tab, this text, normalized."""
    # Only this command needs torch and datasets, whose imports take seconds.
    from sbkit.data.corpus import corpus_of

    settings = read_spec(Path(arguments[0]) / "hyperparams.yaml").settings
    longest = max(corpus_of(settings).clips("test"), key=lambda clip: len(clip.sentence))
    return f"{longest.path}\t{normalize(longest.sentence, settings['language'])}"


def main() -> None:
    """Print what the first argument names."""
    command, *arguments = sys.argv[1:]
    print({"folder": folder, "clip": clip}[command](arguments))


if __name__ == "__main__":
    run_main(main)
