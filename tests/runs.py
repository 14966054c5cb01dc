"""Whole runs on a few real prompts."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import soundfile
import torch

import train
from recipes.asr.brain import AsrBrain
from sbkit.base.process import run_main
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import load_hparams
from sbkit.config.overrides import parse_overrides
from sbkit.data.batch import Batch
from sbkit.logs import curves
from sbkit.logs.curves import curves_of, draw_png
from sbkit.logs.metric import Metrics
from sbkit.logs.run_log import Record, read_log
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from tests import processes

ROOT = processes.ROOT
COUNTS = {"train": 16, "dev": 4, "test": 4}
TINY = (
    *("--device=cpu", "--check=False"),  # tests/check has it
    *("--cnn_channels=32", "--d_model=32", "--nhead=2", "--d_ffn=64"),
    *("--num_encoder_layers=2", "--num_decoder_layers=1", "--ctc_weight=0.85"),
    *("--batch_seconds=6", "--number_of_epochs=4", "--log_every=1"),
    *("--word_lm_order=0", "--token_lm_order=0", "--attention_rescoring=False"),
)
SHORT = (
    *("--device=cpu", "--check=False", "--batch_seconds=6", "--number_of_epochs=2"),
    "--log_every=1",
)
TINY_CODEC = (
    *SHORT,
    *("--d_model=16", "--d_ffn=32", "--discriminator_channels=2", "--groups=2"),
    *(f"--num_{part}_layers=1" for part in ("encoder", "decoder", "fine")),
)
TINY_VAD = SHORT
TINY_VOICE = (
    *SHORT,
    *("--d_model=16", "--d_ffn=32", "--d_align=16"),
    *(f"--num_{part}_layers=1" for part in ("encoder", "adaptor", "decoder", "vocoder", "fine")),
)


@dataclass(frozen=True)
class Workplace:
    """A release to train on, and the cache of its decoded audio."""

    release: Path
    cache: Path

    def arguments(
        self,
        output: Path,
        *options: str,
        yaml: str | Path = "hparams/ctc.yaml",
        tiny: Sequence[str] = TINY,
    ) -> list[str]:
        """Return the arguments of ``train.py``; later options win."""
        folders = (f"--data_folder={self.release}", f"--output_folder={output}")
        return [str(yaml), *folders, *tiny, *options]

    def train_forked(
        self, output: Path, *options: str, ranks: int = 1, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        command = ["train.py", *self.arguments(output, *options, **more)]
        return processes.run(command, ranks=ranks, SBKIT_CACHE=self.cache)

    def train_here(self, output: Path, *options: str, **more: Any) -> int:
        """Train in this process, which saves the imports; return the exit code."""
        return train_here(["train.py", *self.arguments(output, *options, **more)], self.cache)

    def sbkit(self, *words: object) -> int:
        """Run a command of sbkit in this process, which saves the imports; return the exit code."""
        with patch.dict(os.environ, {"SBKIT_CACHE": str(self.cache)}), one_thread():
            return sbkit([*map(str, words)])

    def parameters_by_ranks(
        self, folder: Path, *options: str, **more: Any
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Train an epoch on one rank, then on two; yield the parameters of each run."""
        once = ("--number_of_epochs=1", *options)
        assert self.train_here(folder / "1", *once, **more) == 0
        yield last_parameters(folder / "1")
        process = self.train_forked(folder / "2", *once, ranks=2, **more)
        assert process.returncode == 0, process.stderr
        yield last_parameters(folder / "2")


def train_here(command: list[str], cache: Path) -> int:
    """Run a command in this process, which saves the imports; return the exit code."""
    with (
        patch.object(sys, "argv", command),
        patch.dict(os.environ, {"SBKIT_CACHE": str(cache)}),
        patch.object(curves, "draw_png", draw_png_once),
        one_thread(),
        pytest.raises(SystemExit) as exit_info,
    ):
        run_main(train.main)
    return int(exit_info.value.code or 0)


def draw_png_once(records: Sequence[Record], metrics: Metrics) -> bytes:
    """Draw each set of panels only once: drawing takes a fifth of a run this small."""
    panels = repr([(c.panel, c.style, c.color) for c in curves_of(records, metrics)])
    if panels not in _png_by_panels:
        _png_by_panels[panels] = draw_png(records, metrics)
    return _png_by_panels[panels]


_png_by_panels: dict[str, bytes] = {}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the real command does here; a model this small is faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stopped_after(steps: int, kind: type[Brain] = AsrBrain) -> Iterator[None]:
    """Send SIGTERM to a Brain that trains in this process, as the end of a job does."""
    fit_batch = kind.fit_batch

    def fit_batch_or_stop(brain: Brain, batch: Batch) -> Any:
        if brain.optimizer_step == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return fit_batch(brain, batch)

    with patch.object(kind, "fit_batch", fit_batch_or_stop):
        yield


def rows_of(tsv: Path) -> list[dict[str, str]]:
    with tsv.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def prompts(asterisk: Path, split: str) -> Iterator[tuple[Path, str]]:
    """Yield clips of one to two seconds with their sentences."""
    for row in rows_of(asterisk / f"{split}.tsv"):
        clip = asterisk / "clips" / row["path"]
        if 1.0 < soundfile.info(clip).duration < 2.0:
            yield clip, row["sentence"]


def make_workplace(asterisk: Path, folder: Path, counts: dict[str, int] = COUNTS) -> Workplace:
    """Write a small release with clips of the default corpus."""
    clips = folder / "release" / "clips"
    clips.mkdir(parents=True)
    for split, count in counts.items():
        pairs = list(islice(prompts(asterisk, split), count))
        write_tsv(folder / "release", split, [(clip.name, text) for clip, text in pairs])
        for clip, _ in pairs:
            shutil.copy2(clip, clips)
    return Workplace(folder / "release", folder / "cache")


def train_overfitted(asterisk: Path, folder: Path, *options: str) -> None:
    """Train and test on the same eight prompts; write the run and its release into the folder."""
    workplace = make_workplace(asterisk, folder, {"train": 8})
    for split in ("dev", "test"):
        shutil.copy(workplace.release / "train.tsv", workplace.release / f"{split}.tsv")
    sizes = ("--d_model=96", "--d_ffn=192", "--cnn_channels=96", "--number_of_epochs=40")
    plain = (
        "--dropout=0.0",
        "--speeds=[1.0]",
        "--pause_prob=0",
        "--soften_prob=0",
        "--time_masks=0",
    )
    more = ("--freq_masks=0", "--average_checkpoints=1", *options)
    assert workplace.train_here(folder / "run", *sizes, *plain, *more) == 0


def write_tsv(release: Path, split: str, rows: list[tuple[str, str]]) -> None:
    lines = ["client_id\tpath\tsentence", *(f"allison\t{name}\t{text}" for name, text in rows)]
    (release / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def contents_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    files = (file for file in folder.rglob(pattern) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def times_of(folder: Path, pattern: str = "*") -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob(pattern)}


def row_of(id: str, audio: np.ndarray, **columns: Any) -> dict[str, Any]:
    """Return a row as it is collated, with the speed and the weight of an evaluation."""
    return {"id": id, "audio": audio, "samples": len(audio), "percent": 100, "weight": 1, **columns}


def losses_of(run: Path) -> list[float]:
    records = read_log(run / "train_log.jsonl")
    return [record[name] for record in records for name in ("loss", "valid_loss") if name in record]


def records_of(run: Path, kind: str) -> list[Record]:
    return [record for record in read_log(run / "train_log.jsonl") if record["kind"] == kind]


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def with_sgd(name: str, folder: Path) -> Path:
    """Copy a YAML of hparams/ with SGD instead of AdamW, which shows the scale of gradients."""
    text = (ROOT / f"hparams/{name}.yaml").read_text(encoding="utf-8")
    text = text.replace("torch.optim.AdamW", "torch.optim.SGD")
    yaml = folder / "sgd.yaml"
    yaml.write_text(re.sub(r"^ +(betas|fused|weight_decay): .+\n", "", text, flags=re.M))
    return yaml


def load_brain(recipe: type[Recipe], yaml: str, *options: str) -> Any:
    """Build the Brain of a recipe and a YAML of hparams/, on the CPU."""
    hparams = load_hparams(ROOT / f"hparams/{yaml}.yaml", parse_overrides(options))
    hparams = hparams.with_values({"recipe": recipe()})
    options = {"hparams": hparams, "run_opts": {"device": "cpu"}}
    return recipe().brain_class()(modules={"model": hparams["model"]}, **options)


def last_parameters(run: Path) -> dict[str, torch.Tensor]:
    last = Checkpointer(run / "checkpoints").find_checkpoint()
    assert last is not None
    weights: dict[str, torch.Tensor] = torch.load(last.paramfiles["model"], weights_only=True)
    return weights
