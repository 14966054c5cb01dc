"""Augmentation stays in the utterances, keeps to the declared ratios, and follows from the seed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor
from torchaudio.transforms import Resample

from sbkit.audio import augment
from sbkit.audio.augment import (
    AddNoise,
    AddPauses,
    AddReverb,
    Augmentation,
    SoftenPart,
    SpecAugment,
    SpeedGroup,
    change_speed,
    speed_perturb,
)
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import draw_for_step, draw_uniform, seeded_draws
from sbkit.base.errors import ConfigError, DataError
from sbkit.models.pretrained.blocks import mask_spans
from tests.audio.test_fbank import as_batch

TIME_ONLY = {"freq_masks": 0, "freq_width": 0}
FREQ_ONLY = {"time_masks": 0, "time_width": 0}


def tones() -> tuple[Tensor, Tensor]:
    """Make padded clips of 440 Hz that do not end at a zero crossing."""
    clips = [torch.sin(torch.arange(count) * 2 * torch.pi * 440 / 16_000) for count in (4001, 2999)]
    return as_batch(clips)


@pytest.mark.parametrize("percent", [50, 90, 97, 110])
def test_resampler_is_torchaudios(percent: int) -> None:
    clips, _ = tones()
    expected = Resample(percent, 100, dtype=torch.float32)(clips)
    assert torch.equal(change_speed(clips, percent), expected)


def test_pauses_surround_utterances_with_noise_below_them() -> None:
    audio, lengths = tones()
    add, tone = AddPauses(prob=0.5, max_seconds=0.5), audio[1, :2999]
    seconds, levels = [], []
    for epoch in range(60):
        with seeded_draws(["a", "b"], epoch=epoch):
            padded, new_lengths = add(audio, lengths)
        with seeded_draws(["b"], epoch=epoch):
            (alone,), (length,) = add(tone[None], lengths[1:])
        torch.testing.assert_close(padded[1, :length], alone)
        assert not padded[1, length:].any() and length == new_lengths[1]
        (start,) = (alone.unfold(0, 2999, 1) == tone).all(1).nonzero().flatten().tolist()
        pause = torch.cat([alone[:start], alone[start + 2999 :]])
        seconds.append(len(pause) / 16_000)
        if len(pause) > 2000:
            levels.append(10 * float((pause.square().mean() / 0.5).log10()))
    assert 20 < seconds.count(0.0) < 40 and 0.4 < max(seconds) <= 0.5
    assert -66 < min(levels) < -40 and -30 < max(levels) < -6


def test_a_part_of_an_utterance_is_softer() -> None:
    lengths = torch.tensor([1000, 600])
    audio = torch.ones(2, 1000) * length_mask(lengths, 1000, torch.device("cpu"))
    soften = SoftenPart(prob=0.5, max_db=20.0)
    sizes, decibels, is_beginning = [], [], []
    for epoch in range(80):
        with seeded_draws(["a", "b"], epoch=epoch):
            softened, new_lengths = soften(audio, lengths)
        with seeded_draws(["b"], epoch=epoch):
            (alone,), _ = soften(audio[1:, :600], lengths[1:])
        assert torch.equal(softened[1, :600], alone) and torch.equal(new_lengths, lengths)
        assert not softened[1, 600:].any()
        is_softer = alone < 1
        if is_softer.any():
            assert int((is_softer[1:] != is_softer[:-1]).sum()) == 1
            sizes.append(float(is_softer.float().mean()))
            decibels.append(-20 * float(alone.min().log10()))
            is_beginning.append(bool(is_softer[0]))
    assert 25 < len(sizes) < 55 and 10 < sum(is_beginning) < len(sizes) - 10
    assert 0.2 <= min(sizes) < 0.3 and 0.7 < max(sizes) <= 0.8
    assert 0 < min(decibels) < 3 and 17 < max(decibels) <= 20


def test_speed_of_an_utterance_does_not_depend_on_its_batch() -> None:
    audio, lengths = tones()
    groups = [SpeedGroup(90, 1, 4001), SpeedGroup(110, 1, 2999)]
    batch, new_lengths = speed_perturb(audio, lengths, groups)
    assert new_lengths.tolist() == [4445, 2726]
    for row, percent in enumerate((90, 110)):
        length = int(lengths[row])
        clip = audio[row : row + 1, :length], lengths[row : row + 1]
        single, _ = speed_perturb(*clip, [SpeedGroup(percent, 1, length)])
        new_length = new_lengths[row]
        torch.testing.assert_close(batch[row, :new_length], single[0, :new_length])
        assert not batch[row, new_length:].any()


def make_features(lengths: list[int], bins: int = 80) -> tuple[Tensor, Tensor]:
    """Make features that nowhere equal their mean."""
    features = 1 + torch.rand(len(lengths), max(lengths), bins)
    return features, torch.tensor(lengths)


@pytest.mark.parametrize("seed", range(20))
def test_masks_stay_inside_utterances_and_within_their_widths(seed: int) -> None:
    torch.manual_seed(seed)
    features, lengths = make_features([300, 100, 40, 14, 7, 4, 1, 0])
    in_time = SpecAugment(**TIME_ONLY)(features, lengths) != features  # (B, T, M)
    assert torch.equal(in_time.any(2), in_time.all(2))  # whole frames
    in_freq = SpecAugment(**FREQ_ONLY)(features, lengths) != features
    for row, bands, length in zip(in_time.any(2), in_freq, lengths.tolist(), strict=True):
        assert not row[length:].any() and not bands[length:].any()
        assert int(row.sum()) <= 2 * min(40, int(0.2 * length))
        whole_bins = bands[:length].all(0) & (length > 0)
        assert torch.equal(bands[:length].any(0), whole_bins) and int(whole_bins.sum()) <= 2 * 27


@pytest.mark.parametrize("options", [TIME_ONLY | {"time_masks": 1}, FREQ_ONLY | {"freq_masks": 1}])
def test_mask_is_one_span_of_any_width_and_position(options: dict[str, int]) -> None:
    """All are equally likely, including the first and the last; at most 3 of 6 are masked."""
    torch.manual_seed(0)
    count, frames, bins = (40_000, 2, 6) if options["time_masks"] == 0 else (40_000, 6, 1)
    features, lengths = make_features([frames] * count, bins=bins)
    part = SpecAugment(**{**options, "time_width": 3, "freq_width": 3, "max_time_fraction": 1.0})
    rows = (part(features, lengths) != features).any(1 if frames == 2 else 2).int()
    expected = {(0,) * 6: count / 4}
    for width in (1, 2, 3):
        for start in range(7 - width):
            row = tuple(int(start <= position < start + width) for position in range(6))
            expected[row] = count / 4 / (7 - width)
    assert Counter(map(tuple, rows.tolist())) == pytest.approx(expected, rel=0.1)


def test_masked_values_are_the_mean_over_the_utterance() -> None:
    torch.manual_seed(3)
    features, lengths = make_features([60, 20])
    features[1, 20:] = 1e6
    augmented = SpecAugment()(features, lengths)
    mean = torch.stack([features[0].mean(0), features[1, :20].mean(0)]).unsqueeze(1)
    masked = augmented != features
    assert masked.any()
    torch.testing.assert_close(augmented[masked], mean.expand_as(features)[masked])


@pytest.mark.parametrize("percent", [100, 90, 110])
def test_host_reads_no_tensor_of_the_device(percent: int) -> None:
    features = torch.zeros(2, 900, 80, device="meta")  # a tensor on meta has no values to read
    lengths = torch.tensor([900, 500], device="meta")
    assert SpecAugment()(features, lengths).shape == features.shape
    speed_groups = [SpeedGroup(100, 1, 900), SpeedGroup(percent, 1, 500)]
    audio, new_lengths = speed_perturb(torch.zeros(2, 900, device="meta"), lengths, speed_groups)
    assert (audio.device.type, new_lengths.device.type) == ("meta", "meta")


def test_wave_augment_applies_in_training_only() -> None:
    def louder(audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * audio, lengths

    augmentation = Augmentation(SimpleNamespace(wave_augment=louder), features=None)
    audio, lengths = tones()
    groups = [SpeedGroup(100, 2, 4001)]
    batch = SimpleNamespace(audio=audio, audio_lengths=lengths, speed_groups=groups)
    assert torch.equal(augmentation.augment_audio(batch, training=False)[0], audio)
    assert torch.equal(augmentation.augment_audio(batch, training=True)[0], 2 * audio)
    assert augmentation.feature_augmentation(training=True) is None


@pytest.mark.parametrize("key", ["wave_augment", "spec_augment"])
def test_value_that_is_no_augmentation_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}` must be an augmentation .* but is 5"):
        Augmentation(SimpleNamespace(**{key: 5}), features=None)


# -- noise and reverberation ------------------------------------------------------------------


@pytest.fixture
def noises(tmp_path: Path) -> Path:
    """Two noises: one shorter than any clip, and one in a subfolder."""
    random = np.random.default_rng(0)
    (tmp_path / "more").mkdir()
    soundfile.write(tmp_path / "short.wav", 0.1 * random.standard_normal(3000), 16_000)
    soundfile.write(tmp_path / "more" / "long.flac", 0.01 * random.standard_normal(90_000), 16_000)
    return tmp_path


@pytest.mark.parametrize("snr_db", [-3.0, 0.0, 5.0, 20.0])
def test_noise_meets_the_ratio_per_clip(snr_db: float, noises: Path, prompts: list[Tensor]) -> None:
    audio, lengths = as_batch(prompts[:6])
    part = AddNoise(folder=str(noises), snr_db=(snr_db, snr_db), prob=1.0)
    noisy_batch, same_lengths = part(audio, lengths)
    assert same_lengths is lengths
    for clean, noisy, length in zip(audio, noisy_batch, lengths.tolist(), strict=True):
        noise = (noisy - clean)[:length].double()
        measured = 10 * (clean.double().square().sum() / noise.square().sum()).log10()
        assert float(measured) == pytest.approx(snr_db, abs=0.1)
        assert not noisy[length:].any()


@pytest.mark.parametrize("snr_db", [10, [10], "ab", [1, 2, 3]])
def test_ratio_that_is_no_pair_of_numbers_is_refused(snr_db: Any, noises: Path) -> None:
    with pytest.raises(ConfigError, match=r"`snr_db` must be \[LOWEST, HIGHEST\]"):
        AddNoise(folder=str(noises), snr_db=snr_db)


def test_ratio_and_chance_of_noise_are_drawn_per_utterance_from_the_seed(noises: Path) -> None:
    audio, lengths = 1000 * torch.ones(200, 4000), torch.full((200,), 4000)
    part = AddNoise(folder=str(noises), snr_db=(5, 15), prob=0.5)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return part(audio, lengths)[0] - audio

    energy = draw(0).square().mean(1)
    is_noisy = energy > 0
    ratios = 10 * (1e6 / energy[is_noisy]).log10()
    assert 70 < int(is_noisy.sum()) < 130
    assert 4.9 < float(ratios.min()) < 6 and 14 < float(ratios.max()) < 15.1
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_noise_recorded_again_is_read_again_in_the_same_process(tmp_path: Path) -> None:
    audio, lengths = 1000 * torch.ones(1, 4000), torch.tensor([4000])
    levels = []
    for share in (0.1, 1.0):  # of the samples that are not silent
        noise = np.zeros(4000, np.int16)
        noise[: int(4000 * share) : 2] = 9000
        soundfile.write(tmp_path / "a.wav", noise, 16_000)
        noisy, _ = AddNoise(folder=str(tmp_path), prob=1.0)(audio, lengths)
        levels.append(int(((noisy - audio).abs() > 1e-3).sum()))
    assert levels[0] < 400 < levels[1]


def test_silent_utterances_and_silent_files_change_nothing(noises: Path, tmp_path: Path) -> None:
    lengths = torch.tensor([500, 0])
    noisy, _ = AddNoise(folder=str(noises), prob=1.0)(torch.zeros(2, 500), lengths)
    assert not noisy.any()
    silent = tmp_path / "silent"
    silent.mkdir()
    soundfile.write(silent / "a.wav", np.zeros(800), 16_000)
    audio = torch.ones(2, 500) * torch.tensor([[1.0], [0.0]])
    for part in (AddNoise(folder=str(silent), prob=1.0), AddReverb(folder=str(silent), prob=1.0)):
        assert torch.equal(part(audio, lengths)[0], audio)


def test_reverb_keeps_position_and_power(tmp_path: Path, prompts: list[Tensor]) -> None:
    response = np.zeros(4000)
    response[[700, 1900]] = 0.9, 0.45  # the direct sound, and one echo 1200 samples later
    soundfile.write(tmp_path / "room.wav", response, 16_000, subtype="PCM_16")
    audio, lengths = as_batch(prompts[:6])
    wet_batch, _ = AddReverb(folder=str(tmp_path), prob=1.0)(audio, lengths)
    for clean, wet, length in zip(audio, wet_batch, lengths.tolist(), strict=True):
        expected = clean.clone()
        expected[1200:] += 0.5 * clean[:-1200]
        expected = expected[:length] * (clean.norm() / expected[:length].norm())
        torch.testing.assert_close(wet[:length], expected, rtol=0.0, atol=1.0)
        assert not wet[length:].any()


def test_large_folders_are_sampled_evenly_and_empty_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        (tmp_path / f"{number}.wav").touch()
    for part in (AddNoise, AddReverb):
        monkeypatch.setattr(augment, "MAX_FILES", 3)
        assert [file.stem for file, _ in part(folder=str(tmp_path)).files] == ["0", "2", "4"]
        monkeypatch.setattr(augment, "MAX_FILES", 7)
        assert len(part(folder=str(tmp_path)).files) == 7
        with pytest.raises(DataError, match="none holds none"):
            part(folder=str(tmp_path / "none"))


# -- random numbers of an utterance


def test_draws_follow_from_seed_epoch_utterance_and_call() -> None:
    def draw(*ids: str, seed: int = 1, epoch: int = 1) -> Tensor:
        with seeded_draws(ids, seed=seed, epoch=epoch):
            return torch.cat([draw_uniform(len(ids), 2), draw_uniform(len(ids), 2)], 1)

    rows = draw("a", "b", "c")
    assert torch.equal(draw("c", "x", "a")[[2, 0]], rows[[0, 2]])
    other_rows = [draw("a", seed=2)[0], draw("a", epoch=2)[0]]
    assert len({*torch.cat([*rows, *other_rows]).tolist()}) == 4 * 5
    with seeded_draws([str(number) for number in range(1000)]):
        numbers = draw_uniform(1000, 50)
    assert 0 <= float(numbers.min()) < 1e-3 and 1 - 1e-3 < float(numbers.max()) < 1
    assert np.histogram(numbers, 10)[0].tolist() == pytest.approx([5000] * 10, rel=0.05)
    assert np.corrcoef(numbers.T) == pytest.approx(np.eye(50), abs=0.15)


def test_ranks_share_the_draws_of_a_step_and_torch_draws_for_other_rows() -> None:
    shared = []
    for ids in (["a"], ["b", "c"]):  # two ranks
        with seeded_draws(ids, seed=1, epoch=1, step=3):
            shared.append(draw_for_step(4))
            torch.manual_seed(0)
            expected = torch.rand(3, 2)
            torch.manual_seed(0)
            assert torch.equal(draw_uniform(3, 2), expected)
    assert torch.equal(*shared)
    torch.manual_seed(0)
    assert torch.equal(draw_uniform(1, 2), expected[:1])  # no batch is left behind


AUGMENTATIONS: dict[str, Callable[[str], Callable[[Tensor, Tensor], Tensor]]] = {
    "SpecAugment": lambda folder: SpecAugment(),
    "AddNoise": lambda folder: lambda x, n: AddNoise(folder=folder, prob=1.0)(x[:, :, 0], n)[0],
    "AddReverb": lambda folder: lambda x, n: AddReverb(folder=folder, prob=1.0)(x[:, :, 0], n)[0],
    "mask_spans": lambda folder: (
        lambda x, n: mask_spans(x, n, frames=(0.5, 10), channels=(0.5, 9), vector=None)
    ),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_of_an_utterance_does_not_depend_on_its_batch(name: str, noises: Path) -> None:
    part = AUGMENTATIONS[name](str(noises))
    lengths = torch.tensor([500, 200, 400])
    x = 1000 * torch.randn(3, 500, 80)
    x[1, 200:] = x[2, 400:] = 0
    with seeded_draws(["long", "short", "other"], seed=1, epoch=1):
        batch = part(x, lengths)
    assert not torch.equal(batch, x)
    for row, (id, length) in enumerate(zip(["long", "short"], [500, 200], strict=False)):
        with seeded_draws([id], seed=1, epoch=1):
            single = part(x[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(batch[row, :length], single[0], rtol=1e-5, atol=1e-2)
