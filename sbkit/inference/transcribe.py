"""From audio files to text, with an exported bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sbkit.audio.io import Samples, read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds
from sbkit.inference.bundle import load_bundle

LONGEST_PIECE = 30 * SAMPLE_RATE  # attention grows with the square of the length
SHORTEST_PIECE = 20 * SAMPLE_RATE
QUIET_WINDOW = SAMPLE_RATE // 10  # 100 ms, shorter than a pause between words
PIECES_AT_ONCE = 4


@dataclass(frozen=True)
class Transcript:
    """What is said in one file."""

    file: Path
    text: str
    seconds: float


def transcribe_files(bundle: Path, files: Sequence[Path]) -> Iterator[Transcript | SbkitError]:
    """Transcribe one file after the other; one that is no audio gives its error and no more."""
    loaded = load_bundle(bundle)
    for file in files:
        try:
            samples = read_audio(file)
        except SbkitError as error:
            yield error
            continue
        pieces = [torch.from_numpy(piece) for piece in cut_at_quiet(samples)]
        texts: list[str] = []
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            texts += loaded.transcribe(pieces[start : start + PIECES_AT_ONCE])
        text = " ".join(text for text in texts if text)
        yield Transcript(file, text, samples_to_seconds(len(samples)))


def cut_at_quiet(samples: Samples) -> list[Samples]:
    """Cut long audio where it is quietest, 20 to 30 s into what is left: (S,) -> [(S',), ...]."""
    pieces = []
    while len(samples) > LONGEST_PIECE:
        windows = samples[SHORTEST_PIECE:LONGEST_PIECE].reshape(-1, QUIET_WINDOW).astype(np.float64)
        quietest = int(np.argmin(np.square(windows).sum(1)))
        cut = SHORTEST_PIECE + quietest * QUIET_WINDOW + QUIET_WINDOW // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]
