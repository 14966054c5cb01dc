"""Measure what each way of using little speech is worth, in one table.

corpus -> ten minutes with transcripts, the rest as audio and as text
       -> a recognizer of each row and seed -> a table

Every recognizer is trained on as many seconds of audio as the full corpus has in all its epochs.
Finished steps are not repeated, so the same command continues after an interruption.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from recipes.prepare import corpus_of, read_manifest
from sbkit.audio.io import declared_seconds
from sbkit.base.errors import FILES_FAILED, SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.process import run_main
from sbkit.config.hparams import read_knobs, resolve
from sbkit.config.overrides import parse_command
from sbkit.data.corpus import splits_of
from sbkit.data.manifest import Clip
from sbkit.evaluate.run_results import SUMMARY

YAML = "hparams/ctc.yaml"
CORPUS_KEYS = ("data_folder", "corpus", "manifest", "splits", "path_column", "text_column")
SUBSET_SEED = 1  # which clips keep their transcripts; the same in all runs
MAX_CLIP_SECONDS = 15.0  # as in the table of docs/results.md
MIN_CONFIDENCE = 0  # ten minutes of speech give too few right utterances to fit confidences to
SHARES = {"pseudo-labels": 0.25, "synthetic": 0.3}  # of an epoch's seconds
ROWS = {  # what each row uses besides the labeled speech
    "plain": (),
    "text": ("text",),
    "text, pseudo-labels": ("text", "pseudo-labels"),
    "text, synthetic": ("text", "synthetic"),
    "text, pseudo-labels, synthetic": ("text", "pseudo-labels", "synthetic"),
    "full labels": ("labels",),
}


def execute(*words: object) -> None:
    """Run a command with this Python, and show it; it may leave out files or lines.

    Raises SbkitError if it fails.
    """
    command = [str(word) for word in words]
    print("$ python", *command, flush=True)
    exit_code = subprocess.run([sys.executable, *command], check=False).returncode
    if exit_code not in (0, FILES_FAILED):
        raise SbkitError(f"This step failed with exit code {exit_code}: python {' '.join(command)}")


def write_table(file: Path, clips: Iterable[Clip]) -> None:
    """Write clips as a table that `--manifest` takes."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(["id", "path", "sentence"])
        table.writerows([clip.id, clip.path, clip.sentence] for clip in clips)


class LittleSpeechStudy:
    """The folder of a comparison: its tables, recognizers and results."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        *,
        yaml: str = YAML,
        minutes: float,
        voice_epochs: int,
    ) -> None:
        """Use a folder.

        overrides: of the YAML, for every recognizer.
        yaml: of the recognizers.
        minutes: the amount of speech with transcripts.
        voice_epochs: epochs of each voice.
        """
        self._folder = folder
        self._minutes = minutes
        self._voice_epochs = voice_epochs
        self._unlabeled: list[Path] = []  # audio whose transcripts are not used
        self._seconds: dict[str, float] = {}  # of the tables to train on
        file, values = parse_command([yaml, *overrides])
        self._knobs = read_knobs(file, values)
        folder.mkdir(parents=True, exist_ok=True)
        # The tables of this folder take the place of the corpus.
        values = {key: value for key, value in values.items() if key not in CORPUS_KEYS}
        self._yaml = folder / file.name
        write_text_atomically(self._yaml, resolve(file, values).one_file)

    def prepare(self) -> None:
        """Write the tables of labeled and full speech, a list of the other audio, and the text."""
        corpus = corpus_of(self._knobs)
        clips: dict[str, list[Clip]] = {
            role: [clip for name in names for clip in read_manifest(corpus, self._knobs, name)]
            for role, names in splits_of(corpus, self._knobs).items()
        }
        seconds = {clip.id: declared_seconds(clip.path) for clip in clips["train"]}
        train = [clip for clip in clips["train"] if seconds[clip.id] <= MAX_CLIP_SECONDS]
        labeled: list[Clip] = []
        for index in np.random.default_rng(SUBSET_SEED).permutation(len(train)):
            if sum(seconds[clip.id] for clip in labeled) < 60 * self._minutes:
                labeled.append(train[index])
        labeled_ids = {clip.id for clip in labeled}
        unlabeled = [clip for clip in train if clip.id not in labeled_ids]
        tables = {"full": train, "labeled": labeled, "dev": clips["valid"], "test": clips["test"]}
        for name, table in tables.items():
            write_table(self._folder / f"{name}.csv", table)
        for name, table in (("text", train), ("new", unlabeled)):
            text = "".join(f"{clip.sentence}\n" for clip in table)
            write_text_atomically(self._folder / f"{name}.txt", text)
        self._unlabeled = [clip.path for clip in unlabeled]
        for name in ("full", "labeled"):
            self._seconds[name] = sum(seconds[clip.id] for clip in tables[name])

    def train(self, row: str, seed: int) -> None:
        """Train and test the recognizer of a row, after the tables that it needs."""
        run = self._run(row, seed)
        if (run / SUMMARY).exists():
            return
        uses = ROWS[row]
        table = "full" if "labels" in uses else "labeled"
        sources = [name for name in SHARES if name in uses]
        mix = {f"train-{name}": SHARES[name] for name in sources}
        seconds_per_epoch = self._seconds[table] / (1 - sum(mix.values()))
        epochs = self._knobs["number_of_epochs"] * self._seconds["full"] / seconds_per_epoch
        options = self._manifests(table)
        for name in sources:
            source = self._pseudo_labels(seed) if name == "pseudo-labels" else self._synthetic(seed)
            options.append(f"--manifest=train-{name}={source}")
        if mix:
            options.append(f"--mix={json.dumps(mix)}")
        if "text" in uses:
            options.append(f"--lm_text={self._folder / 'text.txt'}")
        options += [f"--number_of_epochs={max(1, round(epochs))}", f"--seed={seed}"]
        execute("train.py", self._yaml, *options, f"--output_folder={run}")

    def _pseudo_labels(self, seed: int) -> Path:
        """Transcribe the speech without transcripts with the recognizer of the row `text`."""
        self.train("text", seed)
        table = self._folder / f"pseudo-{seed}.csv"
        options = ["--format=manifest", f"--out={table}", f"--min-confidence={MIN_CONFIDENCE}"]
        model = self._run("text", seed)
        execute("-m", "sbkit", "transcribe", model, *self._unlabeled, *options, "--quiet")
        return table

    def _synthetic(self, seed: int) -> Path:
        """Speak the text without speech with a voice that is trained on the labeled speech."""
        voice = self._folder / f"voice-{seed}"
        options = [*self._manifests("labeled"), f"--seed={seed}"]
        options.append(f"--language={self._knobs['language']}")
        options += [f"--number_of_epochs={self._voice_epochs}", f"--output_folder={voice}"]
        if not (voice / SUMMARY).exists():
            execute("train.py", "hparams/tts.yaml", *options)
        lines = self._folder / "new.txt"
        clips = self._folder / f"synthetic-{seed}"
        speeds = ["--speeds", "0.9", "1.1"]
        execute("-m", "sbkit", "speak", voice, "--lines", lines, "--out-dir", clips, *speeds)
        return clips / "new.csv"

    def _manifests(self, train: str) -> list[str]:
        """Return the options that name the tables of this folder, with one to train on."""
        tables = {"train": train, "dev": "dev", "test": "test"}
        return [f"--manifest={split}={self._folder / name}.csv" for split, name in tables.items()]

    def _run(self, row: str, seed: int) -> Path:
        return self._folder / f"{row.replace(', ', '-').replace(' ', '-')}-{seed}"

    def table(self, rows: Iterable[str], seeds: Sequence[int]) -> str:
        """Return the mean error rates of each row over the seeds, and each seed's, in Markdown."""
        lines = ["| row | decoder | CER | WER | minutes |", "|---|---|---|---|---|"]
        for row in rows:
            files = [self._run(row, seed) / SUMMARY for seed in seeds]
            summaries = [json.loads(file.read_text()) for file in files if file.exists()]
            if not summaries:
                continue
            minutes = f"{mean(summary['train_seconds'] for summary in summaries) / 60:.0f}"
            tests = [summary["test"]["test"] for summary in summaries]
            figures = {"beam": tests, "greedy": [test.get("greedy", test) for test in tests]}
            for decoder, results in figures.items():
                cells = [row, decoder, _rates("CER", results), _rates("WER", results), minutes]
                lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def _rates(metric: str, results: Sequence[Any]) -> str:
    rates = [100 * result[metric] for result in results]
    listed = ", ".join(f"{rate:.1f}" for rate in rates)
    return f"{mean(rates):.1f} ({listed})"


def main() -> None:
    """Run all rows and seeds, and print the table after each of them."""
    description = (__doc__ or "").partition("\n")[0]
    # Without abbreviations: --seed is an option of the YAML.
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--yaml", default=YAML, help="of the recognizers")
    parser.add_argument("--out", type=Path, default=Path("results/little_speech"))
    parser.add_argument("--minutes", type=float, default=10.0, help="of speech with transcripts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--voice-epochs", type=int, default=80, help="of each voice")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    options, overrides = parser.parse_known_args()
    study = LittleSpeechStudy(
        options.out.absolute(),
        overrides,
        yaml=options.yaml,
        minutes=options.minutes,
        voice_epochs=options.voice_epochs,
    )
    study.prepare()
    for seed in options.seeds:
        for row in options.rows:
            study.train(row, seed)
            print(study.table(options.rows, options.seeds), flush=True)


if __name__ == "__main__":
    run_main(main)
