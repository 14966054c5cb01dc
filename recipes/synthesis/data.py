"""The data of a TTS model: clips without the silence around them, their symbols and their pitch.

Legend: B utterances, S samples, L symbols, U frames of the features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.prepare import prepare_transcripts, print_data, with_column
from recipes.synthesis.pitch import interpolate, track_pitch
from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS_PER_SECOND, find_pauses
from sbkit.base.errors import ConfigError
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.shard import Row, read_rows
from sbkit.data.splits import Splits, take_columns
from sbkit.distributed.device import Placement
from sbkit.text.symbols import SYMBOL_TYPES, read_texts, to_symbols
from sbkit.text.vocabulary import ClassLabels, ensure_labels

SYMBOLS, PITCH = "symbols", "pitch"  # columns: the spelled-out text, and Hz of each frame
SYMBOL_FILE = "symbols.txt"
COLUMNS_VERSION = 3  # raise it when the same clips would get other symbols or another pitch
MARGIN_WINDOWS = 2  # of 20 ms, kept of the silence around a clip
REFERENCE_HZ = 150.0  # octaves are counted from here


def prepare_spoken(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio and transcripts, and add the symbols and the pitch of each clip as columns.

    Raises:
        ConfigError: `symbols` is no type of symbols, or espeak-ng cannot transcribe the language.
    """
    symbol_type, language, rate = knobs["symbols"], str(knobs["language"]), knobs["sample_rate"]
    if symbol_type not in SYMBOL_TYPES:
        raise ConfigError(
            f"`symbols` must be {' or '.join(SYMBOL_TYPES)}, but is {symbol_type!r}. Choose one."
        )
    frame = 2 * knobs["hop"]
    splits = with_column(
        prepare_transcripts(knobs),
        SYMBOLS,
        lambda split: read_texts(split["sentence"][:], language, symbol_type),
        identity=[COLUMNS_VERSION, symbol_type, language],
    )
    pitch = partial(_track_pitch, rate=rate, frame=frame)
    return with_column(splits, PITCH, pitch, identity=[COLUMNS_VERSION, rate, frame])


def _track_pitch(split: Dataset, rate: int, frame: int) -> Iterator[str]:
    for row in read_rows(split, range(len(split))):
        yield " ".join(f"{hertz:.0f}" for hertz in track_pitch(row["audio"], rate, frame))


def prepare_symbols(knobs: Mapping[str, Any], splits: Splits) -> ClassLabels:
    """List the symbols of the training set."""
    texts = take_columns(splits.train, SYMBOLS)[SYMBOLS].to_pylist()
    names = {symbol for text in texts for symbol in to_symbols(text)}
    return ensure_labels(Path(knobs["output_folder"]) / SYMBOL_FILE, names)


def make_spoken_loaders(
    hparams: Mapping[str, Any], splits: Splits, symbols: ClassLabels, placement: Placement
) -> Loaders:
    """Plan the batches of every split."""
    print_data(splits, hparams)
    collate = SpokenCollate(symbols, hparams["sample_rate"], 2 * hparams["hop"])
    return make_loaders(splits, hparams, collate=collate, placement=placement)


@dataclass(frozen=True, kw_only=True)
class SpokenBatch(Batch):
    """Clips without the silence around them; symbols (B, L), their lengths (B,), octaves (B, U).

    octaves: the pitch above `REFERENCE_HZ`, interpolated between voiced frames; voiced (B, U).
    """

    ON_DEVICE = (*Batch.ON_DEVICE, "symbols", "octaves", "voiced")

    symbols: Tensor
    symbol_lengths: Tensor
    octaves: Tensor
    voiced: Tensor


@dataclass(frozen=True)
class SpokenCollate:
    """Pad utterances to a batch, without symbols that no training clip has."""

    symbols: ClassLabels
    sample_rate: int
    frame: int

    def __call__(self, rows: Sequence[Row]) -> SpokenBatch:
        trimmed: list[Mapping[str, Any]] = []
        pitches: list[Tensor] = []
        for row in rows:
            start, end = self._trim(row["audio"])
            trimmed.append({**row, "audio": row["audio"][start:end], "samples": end - start})
            hertz = np.array(row[PITCH].split(), np.float32)
            pitches.append(torch.from_numpy(hertz[start // self.frame : -(-end // self.frame)]))
        ids = [torch.tensor(self._encode(row[SYMBOLS])) for row in rows]
        octaves = [
            torch.from_numpy(interpolate(pitch.numpy()) / REFERENCE_HZ).log2() for pitch in pitches
        ]
        return SpokenBatch(
            **collate_audio(trimmed, self.sample_rate),
            symbols=pad_sequence(ids, batch_first=True),
            symbol_lengths=torch.tensor([*map(len, ids)]),
            octaves=pad_sequence(octaves, batch_first=True),
            voiced=pad_sequence(pitches, batch_first=True) > 0,
        )

    def _encode(self, text: str) -> list[int]:
        known = set(self.symbols.names)
        return [self.symbols.encode(symbol) for symbol in to_symbols(text) if symbol in known] or [
            0
        ]

    def _trim(self, samples: Samples) -> tuple[int, int]:
        """Return the start of speech, at a whole frame, and its end, in samples."""
        window = self.sample_rate // WINDOWS_PER_SECOND
        count = len(samples) // window
        pauses = find_pauses(samples, window)
        start = pauses[0][1] - MARGIN_WINDOWS if pauses and pauses[0][0] == 0 else 0
        end = pauses[-1][0] + MARGIN_WINDOWS if pauses and pauses[-1][1] == count else count + 1
        if end - start <= 2 * MARGIN_WINDOWS:  # the whole clip is silence
            return 0, len(samples)
        first = max(0, start) * window // self.frame * self.frame
        return first, min(end * window, len(samples))
