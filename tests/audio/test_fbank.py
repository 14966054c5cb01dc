"""The features are Kaldi's, whatever they are batched with."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchaudio.compliance.kaldi import fbank as kaldi_fbank

from sbkit.audio.fbank import AT_ONCE, EPSILON, Fbank, frame_counts, mel_filters, povey_window

CPU = torch.device("cpu")
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def kaldi(clip: Tensor, n_mels: int = 80, rate: int = 16_000) -> Tensor:
    """Compute what deployed runtimes compute: (S,) -> (T, M)."""
    return kaldi_fbank(clip[None], num_mel_bins=n_mels, dither=0.0, sample_frequency=float(rate))


def batch(clips: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad clips to the longest."""
    return pad_sequence(clips, batch_first=True), torch.tensor([len(clip) for clip in clips])


def test_real_prompts_in_one_batch_are_as_kaldi_has_them(prompts: list[Tensor]) -> None:
    features, frames = Fbank()(*batch(prompts))
    assert len(set(frames.tolist())) > 20  # of many lengths indeed
    for row, count, clip in zip(features, frames, prompts, strict=True):
        torch.testing.assert_close(row[:count], kaldi(clip), **CLOSE)
        assert not row[count:].any()


def by_definition(clip: Tensor) -> Tensor:
    """Compute in float64 with the windows and filters of float32, and numpy's FFT."""
    window, filters = (
        each.double() for each in (povey_window(16_000, CPU), mel_filters(80, 16_000, CPU)[::2])
    )
    frames = clip.double().unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    before = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    power = np.abs(np.fft.rfft((frames - 0.97 * before) * window[:400], 512)) ** 2
    return (torch.from_numpy(power) @ filters).clamp(min=EPSILON).log().float()


def test_a_trained_model_has_them_without_the_rounding_of_float32(prompts: list[Tensor]) -> None:
    """The quietest bins beside loud ones differ in every library that computes in float32."""
    trained, rounded = Fbank().eval(), 0.0
    for clip in prompts:
        expected, lengths = by_definition(clip), torch.tensor([len(clip)])
        torch.testing.assert_close(trained(clip[None], lengths)[0][0], expected, rtol=0, atol=1e-5)
        rounded = max(rounded, float((kaldi(clip) - expected).abs().max()))
    assert rounded > 1e-4


def test_windows_in_parts_give_what_all_at_once_give(
    prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    fbank, given = Fbank().eval(), batch(prompts[:8])
    found, _ = fbank(*given)
    assert 8 * found.shape[1] > 2 * AT_ONCE
    monkeypatch.setattr("sbkit.audio.fbank.AT_ONCE", 1 << 30)
    assert torch.equal(found, fbank(*given)[0])


@pytest.mark.parametrize(
    ("rate", "n_mels"), [(8000, 23), (16_000, 128), (22_050, 40), (48_000, 40)]
)
def test_other_rates_and_sizes_are_as_kaldi_has_them(rate: int, n_mels: int) -> None:
    torch.manual_seed(0)
    clips = [scale * torch.randn(rate) for scale in (0.3, 100.0, 32_767.0)]
    features, frames = Fbank(n_mels=n_mels, sample_rate=rate)(*batch(clips))
    for row, count, clip in zip(features, frames, clips, strict=True):
        torch.testing.assert_close(row[:count], kaldi(clip, n_mels, rate), **CLOSE)


def test_frames_are_the_whole_windows_in_the_samples() -> None:
    counted = frame_counts(torch.arange(2000)).tolist()
    assert counted == [max(0, 1 + (samples - 400) // 160) for samples in range(2000)]


@pytest.mark.parametrize("samples", [0, 1, 399])
def test_a_clip_shorter_than_one_window_has_no_frame_but_a_place(samples: int) -> None:
    features, frames = Fbank()(torch.ones(1, samples), torch.tensor([samples]))
    assert features.shape == (1, 1, 80)
    assert not features.any()
    assert frames.tolist() == [0]


def test_neither_autocast_nor_int16_changes_anything(prompts: list[Tensor]) -> None:
    audio, lengths = batch(prompts[:2])
    plain, _ = Fbank()(audio, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = Fbank()(audio.to(torch.int16), lengths)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)
