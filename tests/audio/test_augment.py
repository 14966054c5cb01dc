"""Augmentation stays inside the utterances and inside what is declared."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.augment import Augmentation, SpecAugment, SpeedGroup, speed_perturb

TIME_ONLY = {"freq_masks": 0, "freq_width": 0}
FREQ_ONLY = {"time_masks": 0, "time_width": 0}


def tones() -> tuple[Tensor, Tensor]:
    """Make clips of 440 Hz that do not end at a zero, padded."""
    clips = [torch.sin(torch.arange(count) * 2 * torch.pi * 440 / 16_000) for count in (4001, 2999)]
    return pad_sequence(clips, batch_first=True), torch.tensor([4001, 2999])


SPEEDS = [(110, [3637, 2726]), (90, [4445, 3332]), (200, [2000, 1499]), (95, [4211, 3156])]


@pytest.mark.parametrize(("percent", "expected"), SPEEDS)
def test_another_speed_changes_length_and_pitch(percent: int, expected: list[int]) -> None:
    heard, counts = speed_perturb(*tones(), [SpeedGroup(percent, 2, 4001)])
    assert counts.tolist() == expected
    for row, count in zip(heard, counts, strict=True):
        assert not row[count:].any()
        spectrum = torch.fft.rfft(row[:count] * torch.hann_window(int(count))).abs()
        hertz = float(spectrum.argmax()) * 16_000 / float(count)
        assert hertz == pytest.approx(4.4 * percent, abs=8)


def test_each_utterance_sounds_in_its_batch_as_it_does_alone() -> None:
    audio, lengths = tones()
    together, counts = speed_perturb(
        audio, lengths, [SpeedGroup(90, 1, 4001), SpeedGroup(110, 1, 2999)]
    )
    assert counts.tolist() == [4445, 2726]
    for row, percent in enumerate((90, 110)):
        count = int(lengths[row])
        clip = audio[row : row + 1, :count], lengths[row : row + 1]
        alone, _ = speed_perturb(*clip, [SpeedGroup(percent, 1, count)])
        torch.testing.assert_close(together[row, : counts[row]], alone[0, : counts[row]])
        assert not together[row, counts[row] :].any()


def spectrogram(lengths: list[int], bins: int = 80) -> tuple[Tensor, Tensor]:
    """Make features that are nowhere the mean."""
    features = 1 + torch.rand(len(lengths), max(lengths), bins)
    return features, torch.tensor(lengths)


def hidden_by(augment: SpecAugment, features: Tensor, lengths: Tensor) -> Tensor:
    """Mark what an augmentation changes: (B, T, M)."""
    return augment(features, lengths) != features


@pytest.mark.parametrize("seed", range(20))
def test_masks_keep_to_their_widths_and_inside(seed: int) -> None:
    torch.manual_seed(seed)
    features, lengths = spectrogram([300, 100, 40, 14, 7, 4, 1, 0])
    hidden = hidden_by(SpecAugment(time_masks=2, **TIME_ONLY), features, lengths)
    assert torch.equal(hidden.any(2), hidden.all(2))  # whole frames
    bands = hidden_by(SpecAugment(freq_masks=2, freq_width=27, **FREQ_ONLY), features, lengths)
    for row, band, length in zip(hidden.any(2), bands, lengths.tolist(), strict=True):
        assert not row[length:].any() and not band[length:].any()
        assert int(row.sum()) <= 2 * min(40, int(0.2 * length))
        assert torch.equal(band[:length].any(0), band[:length].all(0) & (length > 0))  # whole bins
        assert int(band[:length].any(0).sum()) <= 2 * 27


def test_one_time_mask_is_one_stretch_of_every_width_up_to_the_declared() -> None:
    torch.manual_seed(0)
    features, lengths = spectrogram([300] * 400, bins=2)
    hidden = hidden_by(SpecAugment(time_masks=1, time_width=10, **TIME_ONLY), features, lengths)
    rows = hidden[:, :, 0].int()
    assert set(rows.sum(1).tolist()) == set(range(11))
    assert int((rows.diff(dim=1) == 1).sum(1).max()) <= 1


@pytest.mark.parametrize(
    "options", [{**TIME_ONLY, "time_masks": 1}, {**FREQ_ONLY, "freq_masks": 1}]
)
def test_every_place_of_a_mask_is_equally_likely(options: dict[str, int]) -> None:
    """Also the first and the last; of 6 places at most 3 are hidden."""
    torch.manual_seed(0)
    count, frames, bins = (40_000, 2, 6) if options["time_masks"] == 0 else (40_000, 6, 1)
    features, lengths = spectrogram([frames] * count, bins=bins)
    augment = SpecAugment(**{**options, "time_width": 3, "freq_width": 3, "max_time_fraction": 0.5})
    rows = hidden_by(augment, features, lengths).any(1 if frames == 2 else 2).int()
    places = Counter(map(tuple, rows.tolist()))
    expected = {(0,) * 6: count / 4}
    for width in (1, 2, 3):
        for first in range(7 - width):
            row = tuple(int(first <= place < first + width) for place in range(6))
            expected[row] = count / 4 / (7 - width)
    assert places == pytest.approx(expected, rel=0.1)


def test_what_is_hidden_is_the_mean_of_what_is_inside() -> None:
    torch.manual_seed(3)
    features, lengths = spectrogram([60, 20])
    features[1, 20:] = 1e6
    augmented = SpecAugment()(features, lengths)
    mean = torch.stack([features[0].mean(0), features[1, :20].mean(0)]).unsqueeze(1)
    hidden = augmented != features
    assert hidden.any()
    torch.testing.assert_close(augmented[hidden], mean.expand_as(features)[hidden])


@pytest.mark.parametrize("percent", [100, 90, 110])
def test_the_host_reads_no_tensor_of_the_device(percent: int) -> None:
    features = torch.zeros(2, 900, 80, device="meta")  # a tensor on meta has no values to read
    lengths = torch.tensor([900, 500], device="meta")
    assert SpecAugment()(features, lengths).shape == features.shape
    speed_groups = [SpeedGroup(100, 1, 900), SpeedGroup(percent, 1, 500)]
    heard, counts = speed_perturb(torch.zeros(2, 900, device="meta"), lengths, speed_groups)
    assert (heard.device.type, counts.device.type) == ("meta", "meta")


def test_audio_is_augmented_in_training_alone() -> None:
    def louder(audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * audio, lengths

    augmentation = Augmentation(SimpleNamespace(wave_augment=louder), features=None)
    audio, lengths = tones()
    groups = [SpeedGroup(100, 2, 4001)]
    batch = SimpleNamespace(audio=audio, audio_lengths=lengths, speed_groups=groups)
    assert torch.equal(augmentation.audio(batch, training=False)[0], audio)
    assert torch.equal(augmentation.audio(batch, training=True)[0], 2 * audio)
    assert augmentation.features(training=True) is None
