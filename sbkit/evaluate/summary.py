"""The page of figures that a finished run leaves: ``summary.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.machine import usable_cores
from sbkit.base.text import cpu_name, git_commit, versions

SUMMARY = "summary.json"  # in the run folder


def write_summary(
    path: Path,
    *,
    test: Mapping[str, Mapping[str, Any]],
    parameters: int,
    train_seconds: float,
    audio_seconds: float,
    device: torch.device,
) -> None:
    """Write the run's figures as JSON, those of each test set by its name.

    ``train_seconds`` is wall time; ``audio_seconds`` is all the audio trained on in it, every
    epoch and every rank counted; ``rtfx`` is their quotient, null for a run that did not train.
    """
    summary = {
        "test": test,
        "parameters": parameters,
        "train_seconds": round(train_seconds, 1),
        "audio_seconds": round(audio_seconds, 1),
        "rtfx": round(audio_seconds / train_seconds, 1) if train_seconds > 0 else None,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": _machine(device),
    }
    write_text_atomically(path, to_json(summary, indent=2) + "\n")


def _machine(device: torch.device) -> dict[str, str | int | None]:
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
