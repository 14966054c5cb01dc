"""Whole runs on a few real prompts, for the tests that walk the road from end to end."""

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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import soundfile
import torch

import train
from recipes.asr.recipe import AsrBrain
from sbkit.base.process import run_main
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.data.batch import Batch
from sbkit.logs import curves
from sbkit.logs.curves import curves_of, draw_png
from sbkit.logs.metric import Metrics
from sbkit.logs.run_log import Record
from tests import processes

ROOT = processes.ROOT
COUNTS = {"train": 16, "dev": 4, "test": 4}
TINY = (
    "--device=cpu",
    "--cnn_channels=32",
    "--d_model=32",
    "--nhead=2",
    "--d_ffn=64",
    "--num_encoder_layers=2",
    "--num_decoder_layers=1",
    "--ctc_weight=0.85",
    "--batch_seconds=6",
    "--number_of_epochs=4",
    "--log_every=1",
    "--word_lm_order=0",
    "--token_lm_order=0",
    "--attention_rescoring=False",
)
TINY_VOICE = (
    "--device=cpu",
    "--d_model=16",
    "--d_ffn=32",
    "--d_align=16",
    *(f"--num_{each}_layers=1" for each in ("encoder", "adaptor", "decoder", "vocoder", "fine")),
    "--batch_seconds=6",
    "--number_of_epochs=2",
    "--log_every=1",
)


@dataclass(frozen=True)
class Workplace:
    """A release to train on, and the cache that keeps its stores."""

    release: Path
    cache: Path

    def arguments(self, output: Path, *options: str, yaml: str = "hparams/ctc.yaml") -> list[str]:
        """Write the command after ``train.py``; later options win."""
        folders = (f"--data_folder={self.release}", f"--output_folder={output}")
        return [yaml, *folders, *TINY, *options]

    def command(self, output: Path, *options: str, **more: Any) -> list[str]:
        """Write the command after ``python``."""
        return ["train.py", *self.arguments(output, *options, **more)]

    def train_forked(
        self, output: Path, *options: str, ranks: int = 1, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command in processes of their own that need not import anything."""
        command = self.command(output, *options, **more)
        return processes.run(command, ranks=ranks, SBKIT_CACHE=self.cache)

    def train_here(self, output: Path, *options: str, **more: Any) -> int:
        """Run the command in this process, which spares its imports; give its exit code."""
        return train_here(self.command(output, *options, **more), self.cache)


def train_here(command: list[str], cache: Path) -> int:
    """Run a command in this process, which spares its imports; give its exit code."""
    with (
        patch.object(sys, "argv", command),
        patch.dict(os.environ, {"SBKIT_CACHE": str(cache)}),
        patch.object(curves, "draw_png", drawn_once),
        one_thread(),
        pytest.raises(SystemExit) as left,
    ):
        run_main(train.main)
    return int(left.value.code or 0)


def drawn_once(runs: Sequence[Sequence[Record]], metrics: Metrics) -> bytes:
    """Draw curves as a run does, but those of one form only once: a fifth of a run this small."""
    form = repr([[(c.panel, c.style, c.color) for c in curves_of(each, metrics)] for each in runs])
    if form not in _drawn:
        _drawn[form] = draw_png(runs, metrics)
    return _drawn[form]


_drawn: dict[str, bytes] = {}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as the real command does here, which is also quicker for a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Ask a recognizer that trains in this process to stop, as a job's end does."""
    fit_batch = AsrBrain.fit_batch

    def stopping(brain: AsrBrain, batch: Batch) -> Any:
        if brain.optimizer_step == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return fit_batch(brain, batch)

    with patch.object(AsrBrain, "fit_batch", stopping):
        yield


def rows_of(tsv: Path) -> list[dict[str, str]]:
    with tsv.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def prompts(asterisk: Path, split: str) -> Iterator[tuple[Path, str]]:
    """Give the clips of one to two seconds, with what is said in them."""
    for row in rows_of(asterisk / f"{split}.tsv"):
        clip = asterisk / "clips" / row["path"]
        if 1.0 < soundfile.info(clip).duration < 2.0:
            yield clip, row["sentence"]


def make_workplace(asterisk: Path, folder: Path, counts: dict[str, int] = COUNTS) -> Workplace:
    """Cut a small release out of the default corpus."""
    clips = folder / "release" / "clips"
    clips.mkdir(parents=True)
    for split, count in counts.items():
        chosen = [pair for _, pair in zip(range(count), prompts(asterisk, split), strict=False)]
        write_tsv(folder / "release", split, [(clip.name, text) for clip, text in chosen])
        for clip, _ in chosen:
            shutil.copy2(clip, clips)
    return Workplace(folder / "release", folder / "cache")


def write_tsv(release: Path, split: str, rows: list[tuple[str, str]]) -> None:
    lines = ["client_id\tpath\tsentence", *(f"allison\t{name}\t{text}" for name, text in rows)]
    (release / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def with_sgd(name: str, folder: Path) -> Path:
    """Write a YAML of hparams/ with SGD for AdamW, which shows the scale of gradients."""
    text = (ROOT / f"hparams/{name}.yaml").read_text(encoding="utf-8")
    text = text.replace("torch.optim.AdamW", "torch.optim.SGD")
    yaml = folder / "sgd.yaml"
    yaml.write_text(re.sub(r"^ +(betas|fused|weight_decay): .+\n", "", text, flags=re.M))
    return yaml


def last_parameters(run: Path) -> dict[str, torch.Tensor]:
    """Read the model of the last checkpoint."""
    last = Checkpointer(run / "checkpoints").find_checkpoint()
    assert last is not None
    weights: dict[str, torch.Tensor] = torch.load(last.paramfiles["model"], weights_only=True)
    return weights
