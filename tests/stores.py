"""Prepared splits that a test makes up."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import datasets

FEATURES = datasets.Features(
    {
        **dict.fromkeys(("id", "text", "sentence", "speaker"), datasets.Value("string")),
        "samples": datasets.Value("int64"),
        "audio": datasets.Value("binary"),
    }
)


@dataclass(frozen=True)
class Utterance:
    """One row of a split; ``audio`` is little-endian int16, mono."""

    id: str
    text: str
    sentence: str
    speaker: str
    samples: int
    audio: bytes


def make_store(utterances: Iterable[Utterance]) -> datasets.Dataset:
    """Return a split of these rows."""
    return datasets.Dataset.from_list([asdict(each) for each in utterances], features=FEATURES)
