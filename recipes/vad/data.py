"""The data of voice activity detection: labels of clean clips, and clips in silence and noise.

The column `speech` has the start and end of each span of speech, in seconds. A window of 20 ms is
speech unless its level is that of a pause or, if a recognizer aligns the transcript, no word is
near: breath and clicks do not count. Short pauses do.

Noise is measured in the band of the features, below which pink and brown noise have most power.

Legend: B utterances, S samples, W or U windows of 20 ms, K colors, N samples of a noise.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from recipes.prepare import prepare_audio, prepare_transcripts, with_column, with_fingerprints
from sbkit.audio.augment import color
from sbkit.audio.io import Samples
from sbkit.audio.segments import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import DataError
from sbkit.base.messages import listed, plural, short_value
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.data.columns import MAX_ROUNDING
from sbkit.data.corpus import SettingValues
from sbkit.data.shard import Row, read_rows
from sbkit.data.splits import Splits, read_column, sample_counts
from sbkit.export.export import exported_bundle
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.recognized_word import Word

SPEECH = "speech"  # the column
WORD_MARGIN_SECONDS = 0.1  # around an aligned word

Windows = npt.NDArray[np.bool_]


def prepare_speech(settings: SettingValues) -> Splits:
    """Prepare audio, and label each clip that the corpus itself does not label."""
    rate = settings["sample_rate"]
    recognizer, weights = None, ""
    if settings["recognizer"] is None:
        splits = prepare_audio(settings)
    else:
        with exported_bundle(Path(settings["recognizer"])) as folder:
            recognizer = load_bundle(folder)
            weights = read_checksums(folder)[WEIGHTS_FILE]
        recognizer.task.require_prediction("text", command="transcribe")
        splits = prepare_transcripts(settings)
    labeled = {n: split for n, split in splits.named().items() if SPEECH in split.column_names}
    for name, split in labeled.items():
        check_spans(name, split, rate)
    silent = {name for name, split in labeled.items() if {*split[SPEECH]} == {""}}
    if silent and silent.issuperset(splits.valid):
        raise DataError(f"`{SPEECH}` is empty for all clips of {', '.join(splits.valid)}.")
    if not recognizer and not any(None in split[SPEECH] for split in labeled.values()):
        return with_fingerprints(splits, SPEECH)  # without any labels, levels are those of a batch

    def label(split: Dataset) -> Iterator[str]:
        for row in read_rows(split, range(len(split))):
            speech = speech_of(row, rate)
            if recognizer and row.get(SPEECH) is None:
                (words,) = recognizer.align([row["audio"]], [row["text"]])
                speech = find_speech(row["audio"], rate, words)
            changes = np.diff(np.pad(speech.astype(np.int8), 1))
            edges = np.flatnonzero(changes).reshape(-1, 2) / WINDOWS_PER_SECOND
            yield " ".join(f"{start:.2f}-{end:.2f}" for start, end in edges)

    return with_column(splits, SPEECH, label, identity=[rate, weights])


def check_spans(name: str, split: Dataset, sample_rate: int) -> None:
    """Raise DataError for spans of speech that are not within their clips."""
    faults: list[str] = []
    lengths = sample_counts(split) / sample_rate
    clips = zip(read_column(split, "id"), read_column(split, SPEECH), lengths, strict=True)
    for id, value, seconds in clips:
        try:
            spans = parse_spans(value)
        except ValueError:
            spans = [(0.0, math.inf)]
        if not all(0 <= start <= end <= seconds + MAX_ROUNDING for start, end in spans):
            faults.append(f"{id} ({short_value(value)}, of {seconds:.2f} s)")
    if faults:
        raise DataError(
            f"`{SPEECH}` must have spans within the clip, but {plural(len(faults), 'clip')} of "
            f"{name} have others: {listed(faults)}. Write the start and the end in seconds, not in "
            "milliseconds or samples: 0.24-1.52 1.80-2.10."
        )


def speech_of(row: Row, sample_rate: int) -> Windows:
    """Label the windows of a clip by its column `speech`, or else by its level: -> (W,)."""
    if row.get(SPEECH) is None:
        return find_speech(row["audio"], sample_rate)
    return read_speech(row[SPEECH], len(row["audio"]) // (sample_rate // WINDOWS_PER_SECOND))


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None = None) -> Windows:
    """Label the windows of clean audio as speech: (S,) -> (W,)."""
    window = sample_rate // WINDOWS_PER_SECOND
    speech = np.ones(len(samples) // window, np.bool_)
    for first, end in find_pauses(samples, window):
        speech[first:end] = False
    if words is not None:
        is_near_word = np.zeros_like(speech)
        for word in words:
            first = max(0, round((word.start - WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND))
            end = round((word.end + WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND)
            is_near_word[first:end] = True
        speech &= is_near_word
    spoken = np.flatnonzero(speech)
    lengths = np.diff(spoken)  # the windows of a pause, plus one
    is_bridged = (lengths > 1) & (lengths <= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND)
    for index in np.flatnonzero(is_bridged):  # such as the closure of a consonant
        speech[spoken[index] : spoken[index + 1]] = True
    return speech


def read_speech(value: str, windows: int) -> Windows:
    """Parse the column's value of a clip: -> (W,)."""
    speech = np.zeros(windows, np.bool_)
    for start, end in parse_spans(value):
        speech[round(start * WINDOWS_PER_SECOND) : round(end * WINDOWS_PER_SECOND)] = True
    return speech


def parse_spans(value: str) -> list[tuple[float, float]]:
    """Return the start and the end of each span; raise ValueError for another value."""
    pairs = (span.split("-") for span in value.split())
    return [(float(start), float(end)) for start, end in pairs]


# Silence and noise, on the device of the audio

MIN_TALKERS, MAX_TALKERS = 4, 12  # of babble
BABBLE_SHARE = 0.6  # of noises
NOISE_DRAWS = 2 + MAX_TALKERS  # random numbers of a clip


def add_silence(
    audio: Tensor, speech: Tensor, lead: Tensor, *, total: int, window: int
) -> tuple[Tensor, Tensor]:
    """Add ``total`` windows of silence to each clip, ``lead`` (B,) of them before it.

    Takes and returns audio (B, S) and speech (B, U), zero past each length; ``window``: samples of
    a window.
    """
    audio = pad(audio, (0, total * window + -audio.shape[1] % window))
    windows = audio.view(len(audio), -1, window)  # (B, U', 320)
    speech = pad(speech, (0, windows.shape[1] - speech.shape[1]))
    sources = torch.arange(windows.shape[1], device=audio.device) - lead.unsqueeze(1)
    sources = sources % windows.shape[1]
    shifted = windows.gather(1, sources.unsqueeze(2).expand_as(windows)).flatten(1)
    return shifted, speech.gather(1, sources)


def make_voices(clips: Iterable[Tensor], sample_rate: int) -> Tensor:
    """Concatenate the speech (S,) of clips at one level: -> (N,)."""
    parts = [color(clip, 0.0, sample_rate) for clip in clips if len(clip)]
    return torch.cat([torch.zeros(0), *parts])


def take_noise(colored: Tensor, voices: Tensor, draws: Tensor, samples: int) -> Tensor:
    """Take colored noise or babble for each clip: (K, N), (N',), (B, NOISE_DRAWS) -> (B, S).

    draws: from 0 to 1, on the CPU. Without voices, no noise is babble.
    """
    noises = []
    for babble, choice, *starts in draws.tolist():
        if len(voices) and babble < BABBLE_SHARE:
            talkers = MIN_TALKERS + int(choice * (MAX_TALKERS - MIN_TALKERS + 1))
            parts = [_cut(voices, int(start * len(voices)), samples) for start in starts[:talkers]]
            noises.append(reduce(torch.add, parts))
        else:
            noise = colored[int(choice * len(colored))]
            noises.append(_cut(noise, int(starts[0] * len(noise)), samples))
    return torch.stack(noises)


def _cut(noise: Tensor, start: int, samples: int) -> Tensor:
    """Cut samples out of a noise, which is repeated after its end."""
    part = noise[start : start + samples]
    missing = samples - len(part)
    return torch.cat([part, _cut(noise, 0, missing)]) if missing else part


def add_noise(audio: Tensor, speech: Tensor, noise: Tensor, snr_db: Tensor, mask: Tensor) -> Tensor:
    """Add noise (B, S) at a ratio (B,) to the speech (B, U) in audio (B, S): -> (B, S).

    mask (B, S): true within a clip. The power of speech excludes the mean of each window, as the
    features do.
    """
    levels = audio.view(*speech.shape, -1).var(2, correction=0)  # (B, U)
    power = (levels * speech).sum(1) / speech.sum(1).clamp(min=1)
    noise = noise * mask
    noise_power = noise.square().sum(1) / mask.sum(1)
    gain = (power / 10 ** (snr_db / 10) / noise_power.clamp(min=1e-9)).sqrt()
    return audio + gain.unsqueeze(1) * noise
