"""Features equal Kaldi's in any batch and in exported graphs, unless their level is removed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor
from torch.export import Dim, export
from torch.nn.utils.rnn import pad_sequence
from torchaudio.compliance.kaldi import fbank as kaldi_fbank
from torchaudio.compliance.kaldi import get_mel_banks

from sbkit.audio.fbank import (
    EPSILON,
    MIN_HZ,
    PREEMPHASIS,
    Fbank,
    fft_samples,
    mel_filters,
    povey_window,
)
from sbkit.base.errors import ConfigError
from sbkit.export.onnx_graph import make_onnx, save_onnx
from sbkit.export.trace import quiet_exporters, trace

CPU = torch.device("cpu")
CLOSE = {"rtol": 0.0, "atol": 1e-4}
SECOND = 16_000


def kaldi(clip: Tensor, n_mels: int = 80, rate: int = 16_000) -> Tensor:
    """Compute features like deployed runtimes: (S,) -> (T, M)."""
    return kaldi_fbank(clip[None], num_mel_bins=n_mels, dither=0.0, sample_frequency=float(rate))


def as_batch(clips: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(clips, batch_first=True), torch.tensor([len(clip) for clip in clips])


def test_batch_of_real_speech_equals_kaldi(prompts: list[Tensor]) -> None:
    features, frames = Fbank()(*as_batch(prompts))
    assert len(set(frames.tolist())) > 20
    for row, count, clip in zip(features, frames, prompts, strict=True):
        torch.testing.assert_close(row[:count], kaldi(clip), **CLOSE)
        assert not row[count:].any()


def by_definition(clip: Tensor) -> Tensor:
    """Compute in float64 with the windows and filters of float32, and numpy's FFT."""
    window, filters = povey_window(16_000, CPU).double(), mel_filters(80, 16_000, CPU)[::2].double()
    frames = clip.double().unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    previous = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    power = np.abs(np.fft.rfft((frames - PREEMPHASIS * previous) * window[:400], 512)) ** 2
    return (torch.from_numpy(power) @ filters).clamp(min=EPSILON).log().float()


def test_trained_model_avoids_the_rounding_of_float32(prompts: list[Tensor]) -> None:
    """The quietest bins next to loud ones differ in every library that computes in float32."""
    trained, rounding = Fbank().eval(), 0.0
    for clip in prompts:
        expected, lengths = by_definition(clip), torch.tensor([len(clip)])
        torch.testing.assert_close(trained(clip[None], lengths)[0][0], expected, rtol=0, atol=1e-5)
        rounding = max(rounding, float((kaldi(clip) - expected).abs().max()))
    assert rounding > 1e-4


@pytest.mark.parametrize(("rate", "mels"), [(8000, 23), (16_000, 126), (22_050, 40), (48_000, 40)])
def test_other_sample_rates_and_numbers_of_bins_equal_kaldi(rate: int, mels: int) -> None:
    torch.manual_seed(0)
    clips = [scale * torch.randn(rate) for scale in (0.3, 100.0, 32_767.0)]
    features, frames = Fbank(n_mels=mels, sample_rate=rate)(*as_batch(clips))
    for row, count, clip in zip(features, frames, clips, strict=True):
        torch.testing.assert_close(row[:count], kaldi(clip, mels, rate), **CLOSE)
    filters, _ = get_mel_banks(mels, fft_samples(rate), rate, MIN_HZ, rate / 2, 100.0, -500.0, 1.0)
    assert torch.equal(mel_filters(mels, rate, CPU)[:-2:2], filters.T)


@pytest.mark.parametrize("samples", [0, 1, 399])
def test_clip_shorter_than_a_window_has_no_frame_but_padding(samples: int) -> None:
    features, frames = Fbank()(torch.ones(1, samples), torch.tensor([samples]))
    assert (features.shape, frames.tolist()) == ((1, 1, 80), [0])
    assert not features.any()


def test_autocast_and_int16_change_nothing(prompts: list[Tensor]) -> None:
    audio, lengths = as_batch(prompts[:2])
    plain, _ = Fbank()(audio, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = Fbank()(audio.to(torch.int16), lengths)
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


@pytest.mark.slow
def test_exported_graph_equals_the_trained_model_at_any_length(
    prompts: list[Tensor], tmp_path: Path
) -> None:
    fbank, names = Fbank().eval(), (["audio", "lengths"], ["features", "frames"])
    example = 1000 * torch.randn(3, 16_000), torch.tensor([16_000, 9_000, 400])
    with quiet_exporters():
        save_onnx(make_onnx(trace(fbank, *example), *names), tmp_path / "fbank.onnx", {})
    graph = InferenceSession(tmp_path / "fbank.onnx")
    for clips in (prompts[:2], *([clip] for clip in prompts[2:])):
        audio, lengths = as_batch(clips)
        outputs = graph.run(None, {"audio": audio.numpy(), "lengths": lengths.numpy()})
        expected = fbank(audio, lengths)
        torch.testing.assert_close(torch.from_numpy(outputs[0]), expected[0], rtol=0, atol=1e-5)
        assert outputs[1].tolist() == expected[1].tolist()


# ---- the level: a microphone's setting changes nothing, and silence stays silent


def features_of(clip: Tensor, level: str = "utterance") -> Tensor:
    return Fbank(level=level).eval()(clip[None], torch.tensor([len(clip)]))[0][0]


def scaled(clip: Tensor, decibels: float) -> Tensor:
    return clip * 10 ** (decibels / 20)


def white_noise(decibels: float) -> Tensor:
    """Make a second of noise of that RMS, in dB of full scale."""
    noise = torch.randn(SECOND, generator=torch.Generator().manual_seed(0))
    return scaled(32_768 * noise, decibels)


def test_features_of_real_speech_are_equal_at_any_level(prompts: list[Tensor]) -> None:
    for clip in prompts:
        for decibels in (6, -12, -30):
            quiet = scaled(clip, decibels)
            torch.testing.assert_close(features_of(quiet), features_of(clip), **CLOSE)
        steps = features_of(scaled(clip, -30).round())  # as in a file
        assert (steps - features_of(clip)).abs().mean() < 0.5
    assert (features_of(quiet, "none") - features_of(clip, "none")).abs().mean() > 6


@pytest.mark.parametrize("level", ["utterance", "running"])
def test_padding_changes_nothing(prompts: list[Tensor], level: str) -> None:
    features, frames = Fbank(level=level).eval()(*as_batch(prompts))
    for row, count, clip in zip(features, frames, prompts, strict=True):
        torch.testing.assert_close(row[:count], features_of(clip, level), **CLOSE)
        assert not row[count:].any()


def sine(hertz: float, seconds: float) -> Tensor:
    return torch.sin(torch.arange(round(seconds * SECOND)) * (2 * torch.pi * hertz / SECOND))


SOUNDS = {  # at full scale
    "click": torch.ones(80),
    "bang": white_noise(0)[: SECOND // 5] / 32_768 * torch.linspace(0, -12, SECOND // 5).exp(),
    "typing": torch.cat([torch.ones(80), torch.zeros(SECOND // 5)]).repeat(10),
    "beep": sine(1000, 0.25),
    "noise": white_noise(-10)[: SECOND // 5] / 32_768,
    "tone": sine(440, 1.0),
    "chord": sum((sine(hertz, 1.0) for hertz in (262, 330, 392)), torch.zeros(SECOND)) / 3,
    "hum": sum((sine(50 * n, 2.0) / n for n in range(1, 8)), torch.zeros(2 * SECOND)) / 2,
}


@pytest.mark.parametrize("level", ["utterance", "running"])
@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_that_are_short_or_tones_hardly_move_the_level(
    prompts: list[Tensor], name: str, level: str
) -> None:
    sound, gap = 32_767 * SOUNDS[name], torch.zeros(SECOND // 3)
    for clip in [clip for clip in prompts if len(clip) > SECOND][::6]:
        for peak in (0, -10, -30):
            speech = scaled(clip / clip.abs().max() * 32_767, peak)
            for start in (0, len(sound) + len(gap)):
                parts = [speech, gap, sound] if start == 0 else [sound, gap, speech]
                expected = features_of(torch.cat([torch.zeros(start), speech]), level)
                changes = features_of(torch.cat(parts), level)[: len(expected)] - expected
                settled = start // 160 + 60 if level == "running" else start // 160
                assert changes[settled:].abs().max() < 0.75


def test_tone_of_any_frequency_hardly_moves_the_level(prompts: list[Tensor]) -> None:
    """One between the halves of the spectrum, at 1.6 to 2 kHz, silenced the speech beside it."""
    clip = next(clip for clip in prompts if len(clip) > SECOND)
    speech = scaled(clip / clip.abs().max() * 32_767, -20)
    expected = features_of(speech)
    for hertz in range(100, 8000, 100):
        parts = [speech, torch.zeros(SECOND // 3), 32_767 * sine(hertz, 1.0)]
        changes = features_of(torch.cat(parts))[: len(expected)] - expected
        assert changes.abs().max() < 0.75, hertz


@pytest.mark.parametrize("decibels", [-30, -50])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_noise_around_rare_speech_hardly_moves_the_level(
    prompts: list[Tensor], share: float, decibels: float
) -> None:
    for clip in [clip for clip in prompts if SECOND / 2 < len(clip) < 4 * SECOND][::4]:
        size = round(len(clip) / share)
        noise = white_noise(0).repeat(size // SECOND + 1)[:size] / 32_768
        noise = scaled(noise * clip.square().mean().sqrt(), decibels)
        noisy = features_of(noise + torch.nn.functional.pad(clip, (0, size - len(clip))))
        alone = features_of(noise[: len(clip)] + clip)
        assert (noisy[: len(alone)] - alone).abs().max() < 0.75


def test_pauses_hardly_change_the_level(prompts: list[Tensor]) -> None:
    for clip in prompts:
        speech = features_of(clip)
        for pause in (torch.zeros(len(clip)), white_noise(-70).repeat(8)[: len(clip)]):
            with_pauses = features_of(torch.cat([clip, pause, pause]))[: len(speech)]
            assert (with_pauses - speech).abs().max() < 0.3


@pytest.mark.parametrize("level", ["utterance", "running"])
def test_silence_and_faint_noise_are_not_raised_to_speech(level: str) -> None:
    loud = features_of(white_noise(-20), level).mean()
    assert features_of(torch.zeros(SECOND), level).count_nonzero() == 0
    assert features_of(white_noise(-90), level).mean() < 0.5 * loud
    assert features_of(torch.zeros(100), level).count_nonzero() == 0  # shorter than a window


def test_running_level_is_the_same_in_chunks_and_ignores_what_follows(
    prompts: list[Tensor],
) -> None:
    fbank = Fbank(level="running").eval()
    for size in (320, 10_240):  # of a detector and a recognizer, which overlap by 240
        clips = [clip for clip in prompts if len(clip) > 2 * size][:4]
        for clip in clips:
            state, outputs = fbank.start(), []
            for start in range(0, len(clip) - 400, size):
                chunk = clip[start : start + size + 240]
                length = torch.tensor([len(chunk)])
                x, frames, state = fbank.forward_chunk(chunk[None], length, state)
                outputs.append(x[0, : frames[0]])
            whole = features_of(clip, "running")
            torch.testing.assert_close(torch.cat(outputs), whole, **CLOSE)
            louder = torch.cat([clip, scaled(clip, 20)])
            earlier = features_of(louder, "running")[: len(whole)]
            torch.testing.assert_close(earlier, whole, **CLOSE)


def test_running_level_follows_a_microphone_that_is_turned_down(prompts: list[Tensor]) -> None:
    clip = torch.cat(prompts)[: 30 * SECOND]
    quiet = scaled(clip[: 15 * SECOND], -20)
    after = features_of(torch.cat([clip, quiet]), "running")[-100:]
    assert (after - features_of(quiet, "running")[-100:]).abs().max() < 0.2


@pytest.mark.slow
def test_running_level_of_two_hours_is_that_of_the_last_minutes() -> None:
    """Its weights grew until they overflowed after 58 minutes; also in an exported graph."""
    fbank = Fbank(level="running").eval()
    fbank.forward = fbank.remove_level  # type: ignore[method-assign]
    hours = 25 * torch.rand(1, 720_000, 3, generator=torch.Generator().manual_seed(0))
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    example = hours[:, :2000].repeat(2, 1, 1), torch.tensor([2000, 1500])
    exported = export(fbank, example, dynamic_shapes=shapes, strict=False).module()
    for remove_level in (fbank, exported):
        whole, _ = remove_level(hours, torch.tensor([720_000]))
        last, _ = remove_level(hours[:, -17_003:], torch.tensor([17_003]))
        torch.testing.assert_close(whole[:, -1000:], last[:, -1000:], rtol=0, atol=1e-6)
        assert last[:, -1000:].std() > 1


def test_another_level_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="`level` must be utterance or running or none, but is 'max'"
    ):
        Fbank(level="max")
