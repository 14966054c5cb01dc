"""A user's corpus: the tables and clips of a release, read in a few lines."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit import Clip, Manifest


def splits(settings: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    return {"train": ("train",), "valid": ("dev",), "test": ("test",)}


def read(settings: Mapping[str, Any], split: str) -> Manifest:
    folder = Path(settings["data_folder"])
    with (folder / f"{split}.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    clips = folder / "clips"
    return Manifest.of(Clip(row["path"], clips / row["path"], row["sentence"]) for row in rows)
