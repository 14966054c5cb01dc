"""A user's corpus: the tables and clips of a release, read in a few lines."""

import csv
from collections.abc import Iterator
from pathlib import Path

from sbkit import Clip, Corpus


class MyCorpus(Corpus):
    def read(self, split: str) -> Iterator[Clip]:
        folder = Path(self.settings["data_folder"])
        with (folder / f"{split}.tsv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                yield Clip(row["path"], folder / "clips" / row["path"], row["sentence"])
