"""The data of voice activity detection: labels of clean clips, and clips in silence and noise.

Noise is measured in the band of the features, below which pink and brown noise have most power.

Legend: B utterances, S samples, W or U windows of 20 ms, K colors, N samples of a noise.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from recipes.prepare import prepare_audio, prepare_transcripts, with_column, with_fingerprints
from sbkit.audio.augment import Augmentation, color, make_colored
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import draw_uniform
from sbkit.audio.segments import WINDOWS_PER_SECOND
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import DataError
from sbkit.base.messages import listed, note_once, plural, short_value
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE
from sbkit.data.batch import Batch, collate_audio
from sbkit.data.corpus import SettingValues
from sbkit.data.shard import Row, read_rows
from sbkit.data.splits import Splits, read_column, sample_counts
from sbkit.export.export import exported_bundle
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.bundle import as_recognizer
from sbkit.tasks.vad.task import (
    LABEL_COLUMNS,
    SPANS_ADVICE,
    SPEECH,
    find_speech,
    is_no_speech,
    parse_spans,
    speech_of,
)


def prepare_speech(settings: SettingValues) -> Splits:
    """Prepare audio, and label each clip that the corpus itself does not label."""
    rate = settings["sample_rate"]
    recognizer, made_from = None, {}
    if settings["recognizer"] is None:
        splits = prepare_audio(settings)
    else:
        with exported_bundle(Path(settings["recognizer"])) as folder:
            recognizer = as_recognizer(load_bundle(folder))
            checksums = read_checksums(folder)
        files = (CONFIG_FILE, WEIGHTS_FILE, recognizer.task.label_file)
        made_from = {name: checksums[name] for name in filter(None, files)}
        splits = prepare_transcripts(settings)
    for split in splits.named().values():
        is_labeled = SPEECH in split.column_names and None not in split.unique(SPEECH)
        for column in () if is_labeled else split.column_names:
            if column.lower() in LABEL_COLUMNS:
                if sum(is_no_speech(column, value) for value in split.unique(column)):
                    note_once(f"note: `{column}` says which clips have no speech.")
                splits = with_fingerprints(splits, column)
    labeled = {n: split for n, split in splits.named().items() if SPEECH in split.column_names}
    for name, split in labeled.items():
        check_spans(name, split, rate)
    silent = {name for name, split in labeled.items() if {*split[SPEECH]} == {""}}
    if silent and silent.issuperset(splits.valid):
        raise DataError(f"`{SPEECH}` is empty for all clips of {', '.join(splits.valid)}.")

    def as_tested(splits: Splits) -> Splits:
        return replace(splits, as_tested=NoisyClips(settings, splits.train).add_to_rows)

    if not recognizer and not any(None in split[SPEECH] for split in labeled.values()):
        # without any labels, levels are those of a batch
        return as_tested(with_fingerprints(splits, SPEECH))

    def label(split: Dataset) -> Iterator[str]:
        for row in read_rows(split, range(len(split))):
            speech = speech_of(row, rate)
            if recognizer and row.get(SPEECH) is None and speech.any():
                (words,) = recognizer.align([row["audio"]], [row["text"]])
                speech = find_speech(row["audio"], rate, words)
            changes = np.diff(np.pad(speech.astype(np.int8), 1))
            edges = np.flatnonzero(changes).reshape(-1, 2) / WINDOWS_PER_SECOND
            yield " ".join(f"{start:.2f}-{end:.2f}" for start, end in edges)

    return as_tested(with_column(splits, SPEECH, label, identity=[rate, made_from, SPEECH_VERSION]))


def check_spans(name: str, split: Dataset, sample_rate: int) -> None:
    """Raise DataError for spans of speech that are not within their clips."""
    faults: list[str] = []
    lengths = sample_counts(split) / sample_rate
    clips = zip(read_column(split, "id"), read_column(split, SPEECH), lengths, strict=True)
    for id, value, seconds in clips:
        try:
            parse_spans(value, seconds)
        except ValueError:
            faults.append(f"{id} ({short_value(value)}, of {seconds:.2f} s)")
    if faults:
        raise DataError(
            f"`{SPEECH}` must have spans within the clip, but {plural(len(faults), 'clip')} of "
            f"{name} have others: {listed(faults)}. {SPANS_ADVICE}"
        )


@dataclass(frozen=True, kw_only=True)
class SpeechBatch(Batch):
    """Audio, with a label for each window of 20 ms: speech or not."""

    ON_DEVICE = (*Batch.ON_DEVICE, SPEECH)

    speech: Tensor  # (B, U)

    def rows(self) -> list[Row]:
        labels = self.speech.cpu().numpy()
        return [{**row, SPEECH: speech} for row, speech in zip(super().rows(), labels, strict=True)]


def collate(rows: Sequence[Row], *, sample_rate: int) -> SpeechBatch:
    """Pad utterances to a batch of whole windows, with the labels of the windows."""
    labels = [torch.from_numpy(speech_of(row, sample_rate)) for row in rows]
    speech = pad_sequence(labels, batch_first=True)
    return SpeechBatch(**collate_audio(rows, sample_rate), speech=speech)


# Silence and noise, on the device of the audio

MIN_TALKERS, MAX_TALKERS = 4, 12  # of babble
SPEECH_VERSION = 2  # raised with each change of labels
BABBLE_SHARE = 0.6  # of noises
NOISE_DRAWS = 2 + MAX_TALKERS  # random numbers of a clip
NUM_BABBLE_CLIPS = 500  # training clips that babble is made from

# An evaluation draws the same noise for an utterance each time. With one kind of noise, the best
# checkpoint was an early one that knew little about the others.
EVALUATION_NOISE = (10, 10), (0, 0), 1  # snr_db, gain_db and noise_prob
CPU = torch.device("cpu")


class NoisyClips:
    """Put clips into silence and noise, on a device.

    train: the training set, whose speech becomes babble, the same on every rank.
    """

    def __init__(
        self, settings: SettingValues, train: Dataset | None, device: torch.device = CPU
    ) -> None:
        self._settings = settings
        self._rate = settings["sample_rate"]
        self._silence = round(settings["silence_seconds"] * WINDOWS_PER_SECOND)
        self._train = train
        self._device = device

    @cached_property
    def _voices(self) -> Tensor:
        if self._train is None:
            return torch.zeros(0)
        clips: list[Tensor] = []
        stride = -(-len(self._train) // NUM_BABBLE_CLIPS)
        for row in read_rows(self._train, range(0, len(self._train), stride)):
            speech = np.repeat(speech_of(row, self._rate), self._rate // WINDOWS_PER_SECOND)
            clips.append(torch.from_numpy(row["audio"][: len(speech)][speech]).float())
        return make_voices(clips, self._rate).to(self._device)

    def add_to(self, batch: SpeechBatch, augmentation: Augmentation | None = None) -> SpeechBatch:
        """Return the audio, as floats, and the labels of a batch in silence and noise.

        augmentation: of training, whose noise and level are drawn; None for an evaluation.
        """
        snr_db, gain_db, noise_prob = EVALUATION_NOISE
        if augmentation is not None:
            names = ("snr_db", "gain_db", "noise_prob")
            snr_db, gain_db, noise_prob = (self._settings[name] for name in names)
        window = self._rate // WINDOWS_PER_SECOND
        draws = draw_uniform(len(batch), 4 + NOISE_DRAWS)
        if augmentation is None:
            draws[:, 0] = 0.5  # equal silence before and after a clip
        lead, gain, ratio, chance = draws.T[:4].to(batch.audio.device, non_blocking=True)
        start = (lead * (self._silence + 1)).long()
        audio, speech = add_silence(
            batch.audio, batch.speech, start, total=self._silence, window=window
        )
        lengths = batch.audio_lengths + self._silence * window
        batch = replace(batch, audio=audio, audio_lengths=lengths, speech=speech)
        audio = audio.float()
        if augmentation is not None:
            audio, lengths = augmentation.augment_audio(batch, training=True)
        audio = audio * 10 ** (_between(*gain_db, gain) / 20).unsqueeze(1)
        ratio = torch.where(chance < noise_prob, _between(*snr_db, ratio), torch.inf)
        mask = length_mask(lengths, audio.shape[1], audio.device)
        colored = make_colored(self._rate, self._device)
        noise = take_noise(colored, self._voices, draws[:, 4:], audio.shape[1])
        noisy = add_noise(audio, speech, noise, ratio, mask)
        return replace(batch, audio=noisy, audio_lengths=lengths)

    def add_to_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows in the noise of an evaluation, with windows as labels."""
        noisy = self.add_to(collate(rows, sample_rate=self._rate))
        clips = zip(
            rows, noisy.audio.numpy(), noisy.audio_lengths, noisy.speech.numpy(), strict=True
        )
        return [
            {**row, "audio": clip[:count], SPEECH: speech} for row, clip, count, speech in clips
        ]


def _between(low: float, high: float, share: Tensor) -> Tensor:
    return low + share * (high - low)


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
    stretch = noise[start : start + samples]
    missing = samples - len(stretch)
    return torch.cat([stretch, _cut(noise, 0, missing)]) if missing else stretch


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
