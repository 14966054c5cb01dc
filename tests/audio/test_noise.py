"""Noise has the ratio that is declared, rooms keep the power, and padding stays silent."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio import noise
from sbkit.audio.noise import AddNoise, AddReverb
from sbkit.base.errors import SbkitError


@pytest.fixture
def noises(tmp_path: Path) -> Path:
    """Two noises, one shorter than any clip, and one below another folder."""
    random = np.random.default_rng(0)
    (tmp_path / "more").mkdir()
    soundfile.write(tmp_path / "short.wav", 0.1 * random.standard_normal(3000), 16_000)
    soundfile.write(tmp_path / "more" / "long.flac", 0.01 * random.standard_normal(90_000), 16_000)
    return tmp_path


def batch(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    clips = prompts[:6]
    return pad_sequence(clips, batch_first=True), torch.tensor([len(clip) for clip in clips])


@pytest.mark.parametrize("snr", [-3.0, 0.0, 5.0, 20.0])
def test_the_ratio_is_met_over_each_utterance(
    snr: float, noises: Path, prompts: list[Tensor]
) -> None:
    audio, lengths = batch(prompts)
    noisy, same = AddNoise(folder=str(noises), snr_db=(snr, snr), prob=1.0)(audio, lengths)
    assert same is lengths
    for clean, heard, length in zip(audio, noisy, lengths.tolist(), strict=True):
        added = (heard - clean)[:length].double()
        measured = 10 * (clean.double().square().sum() / added.square().sum()).log10()
        assert float(measured) == pytest.approx(snr, abs=0.1)
        assert not heard[length:].any()


def test_ratio_noise_and_chance_are_drawn_for_each_and_by_the_seed(noises: Path) -> None:
    audio, lengths = 1000 * torch.ones(200, 4000), torch.full((200,), 4000)
    part = AddNoise(folder=str(noises), snr_db=(5, 15), prob=0.5)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        added: Tensor = part(audio, lengths)[0] - audio
        return added

    energy = draw(0).square().mean(1)
    changed = energy > 0
    ratios = 10 * (1e6 / energy[changed]).log10()
    assert 70 < int(changed.sum()) < 130
    assert 4.9 < float(ratios.min()) < 6 and 14 < float(ratios.max()) < 15.1
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_silence_stays_silence_and_finite(noises: Path, tmp_path: Path) -> None:
    lengths = torch.tensor([500, 0])
    noisy, _ = AddNoise(folder=str(noises), prob=1.0)(torch.zeros(2, 500), lengths)
    assert not noisy.any()
    silent = tmp_path / "silent"
    silent.mkdir()
    soundfile.write(silent / "a.wav", np.zeros(800), 16_000)
    audio = torch.ones(2, 500) * torch.tensor([[1.0], [0.0]])
    for part in (AddNoise(folder=str(silent), prob=1.0), AddReverb(folder=str(silent), prob=1.0)):
        assert torch.equal(part(audio, lengths)[0], audio)


def test_a_room_keeps_place_and_power(tmp_path: Path, prompts: list[Tensor]) -> None:
    room = np.zeros(4000)
    room[[700, 1900]] = 0.9, 0.45  # the direct sound, and one echo 1200 samples later
    soundfile.write(tmp_path / "room.wav", room, 16_000, subtype="PCM_16")
    audio, lengths = batch(prompts)
    wet, _ = AddReverb(folder=str(tmp_path), prob=1.0)(audio, lengths)
    for clean, heard, length in zip(audio, wet, lengths.tolist(), strict=True):
        expected = clean.clone()
        expected[1200:] += 0.5 * clean[:-1200]
        expected = expected[:length] * (clean.norm() / expected[:length].norm())
        torch.testing.assert_close(heard[:length], expected, rtol=0.0, atol=1.0)
        assert not heard[length:].any()


def test_of_a_large_folder_files_are_taken_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        (tmp_path / f"{number}.wav").touch()
    monkeypatch.setattr(noise, "MOST_FILES", 3)
    for part in (AddNoise(folder=str(tmp_path)), AddReverb(folder=str(tmp_path))):
        assert [file.stem for file in part.files] == ["0", "2", "4"]
    monkeypatch.setattr(noise, "MOST_FILES", 7)
    assert len(AddNoise(folder=str(tmp_path)).files) == 7


def test_a_folder_without_audio_is_refused(tmp_path: Path) -> None:
    for part in (AddNoise, AddReverb):
        with pytest.raises(SbkitError, match="none holds none"):
            part(folder=str(tmp_path / "none"))
