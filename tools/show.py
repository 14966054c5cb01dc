"""Show what a run came to: ``python -m tools.show scores RUN`` or ``... clip RUN``."""

import json
import sys
from pathlib import Path

from recipes.AsteriskPrompts.prepare import prepare_prompts
from recipes.CommonVoice.prepare import find_release
from sbkit.data.manifest import read_manifest
from sbkit.data.store import default_cache
from sbkit.machine.hparams import read_knobs
from sbkit.values.errors import SbkitError, exit_with_sentence

WORTH_HEARING = 5  # words


def scores(run: Path) -> str:
    """Say how many words and characters of the test split came out wrong."""
    test = json.loads((run / "summary.json").read_text(encoding="utf-8"))["test"]
    return f"\ntest WER {test['wer']:.1%}, CER {test['cer']:.1%} ({test['utterances']} utterances)"


def clip(run: Path) -> str:
    """Name a clip of the test split and, after a tab, its reference."""
    knobs = read_knobs(run / "hyperparams.yaml", {})
    language = str(knobs["language"])
    folder = str(
        knobs.get("data_folder") or prepare_prompts(language=language, cache_folder=default_cache())
    )
    clips = read_manifest(find_release(folder, language) / "test.tsv").clips
    long = (each for each in clips if len(each.sentence.split()) >= WORTH_HEARING)
    chosen = next(long, clips[0])
    return f"{chosen.path}\t{chosen.sentence}"


def main() -> None:
    """Print one of the two."""
    shows = {"scores": scores, "clip": clip}
    if len(sys.argv) != 3 or sys.argv[1] not in shows:
        raise SbkitError(f"Arguments must be {' or '.join(shows)} and a run folder.")
    print(shows[sys.argv[1]](Path(sys.argv[2])))


if __name__ == "__main__":
    exit_with_sentence(main)
