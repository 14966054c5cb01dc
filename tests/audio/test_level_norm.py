"""Features without the level: a microphone's setting changes nothing, and silence stays silent."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import ConfigError

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SECOND = 16_000


def features_of(clip: Tensor, level: str = "utterance") -> Tensor:
    """Compute the features of one clip: (S,) -> (T, M)."""
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
    audio = pad_sequence(prompts, batch_first=True)
    features, frames = Fbank(level=level).eval()(audio, torch.tensor([*map(len, prompts)]))
    for row, count, clip in zip(features, frames, prompts, strict=True):
        torch.testing.assert_close(row[:count], features_of(clip, level), **CLOSE)
        assert not row[count:].any()


def test_pauses_hardly_change_the_level(prompts: list[Tensor]) -> None:
    for clip in prompts:
        speech = features_of(clip)
        for pause in (torch.zeros(len(clip)), white_noise(-70).repeat(8)[: len(clip)]):
            with_pauses = features_of(torch.cat([clip, pause, pause]))[: len(speech)]
            assert (with_pauses - speech).abs().max() < 0.1


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
            sums, outputs = torch.zeros(1, 2), []
            for start in range(0, len(clip) - 400, size):
                chunk = clip[start : start + size + 240]
                x, frames, sums = fbank.forward_chunk(chunk[None], torch.tensor([len(chunk)]), sums)
                outputs.append(x[0, : frames[0]])
            whole = features_of(clip, "running")
            torch.testing.assert_close(torch.cat(outputs), whole, **CLOSE)
            louder = torch.cat([clip, scaled(clip, 20)])
            earlier = features_of(louder, "running")[: len(whole)]
            torch.testing.assert_close(earlier, whole, **CLOSE)


def test_running_level_follows_a_microphone_that_is_turned_down(prompts: list[Tensor]) -> None:
    clip = torch.cat(prompts)[: 30 * SECOND]
    after = features_of(torch.cat([clip, scaled(clip, -10)]), "running")[-500:]
    assert (after - features_of(clip, "running")[-500:]).abs().max() < 1.0


def test_another_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="`level` must be utterance, running, none, but is 'max'"):
        Fbank(level="max")
