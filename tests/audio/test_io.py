"""Real files of every kind, whole and damaged, read back as 16 kHz samples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from sbkit.audio.io import read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE

Signal = npt.NDArray[np.float64]
SECONDS = 2
KINDS = ("wav", "flac", "ogg", "opus", "mp3")


def tone(rate: int, hertz: float = 440.0) -> Signal:
    """Give a sine of half amplitude."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(SECONDS * rate) / rate)


def write(file: Path, signal: Signal, rate: int = SAMPLE_RATE, subtype: str | None = None) -> Path:
    """Write a file of the kind that its name says."""
    kind = "OGG" if file.suffix == ".opus" else None
    subtype = "OPUS" if kind else subtype
    soundfile.write(file, signal, rate, format=kind, subtype=subtype)
    return file


def loudest_hertz(samples: npt.NDArray[np.int16]) -> float:
    """Find the frequency that stands out."""
    spectrum = np.abs(np.fft.rfft(samples.astype(np.float64)))
    return float(np.argmax(spectrum)) * SAMPLE_RATE / len(samples)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_every_kind_and_rate_gives_the_same_tone(tmp_path: Path, kind: str, rate: int) -> None:
    samples = read_audio(write(tmp_path / f"a.{kind}", tone(rate), rate))
    assert samples.dtype == np.int16
    assert len(samples) == pytest.approx(SECONDS * SAMPLE_RATE, abs=2 * 1152 * 2)
    assert loudest_hertz(samples) == pytest.approx(440, abs=2)
    inner = samples[4000:-4000].astype(np.float64)  # opus rings where a tone starts
    assert np.sqrt(np.mean(inner**2)) == pytest.approx(0.5 * 32768 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("rate", [15_985, 16_001, 22_051, 47_999])
def test_odd_rates_cost_little_memory_and_pitch(tmp_path: Path, rate: int) -> None:
    samples = read_audio(write(tmp_path / "a.wav", tone(rate), rate))
    assert len(samples) == pytest.approx(SECONDS * SAMPLE_RATE, rel=5e-4)
    assert loudest_hertz(samples) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("rate", [11_025, 22_050, 24_000, 32_000, 44_100, 96_000])
def test_usual_rates_are_resampled_exactly(tmp_path: Path, rate: int) -> None:
    samples = read_audio(write(tmp_path / "a.wav", tone(rate), rate))
    assert len(samples) == pytest.approx(SECONDS * SAMPLE_RATE, abs=1)
    truth = 0.5 * 32768 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / SAMPLE_RATE)
    inner = slice(1000, -1000)
    assert np.abs(samples[inner] - truth[inner]).max() < 0.005 * 32768


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_sixteen_bits_come_back_exactly(tmp_path: Path, kind: str) -> None:
    truth = np.random.default_rng(0).integers(-32768, 32768, 5000).astype(np.int16)
    file = tmp_path / f"a.{kind}"
    soundfile.write(file, truth, SAMPLE_RATE)
    assert np.array_equal(read_audio(file), truth)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_every_sample_format_of_wav(tmp_path: Path, subtype: str) -> None:
    samples = read_audio(write(tmp_path / "a.wav", tone(SAMPLE_RATE), subtype=subtype))
    assert np.abs(samples - 32768 * tone(SAMPLE_RATE)).max() < 0.02 * 32768


def test_channels_are_averaged(tmp_path: Path) -> None:
    stereo = np.stack([tone(SAMPLE_RATE), np.zeros(SECONDS * SAMPLE_RATE)], axis=1)
    samples = read_audio(write(tmp_path / "a.wav", stereo))
    assert np.abs(samples - 32768 * tone(SAMPLE_RATE) / 2).max() <= 1


def test_too_loud_is_clipped_not_wrapped(tmp_path: Path) -> None:
    loud = 4 * tone(SAMPLE_RATE)
    samples = read_audio(write(tmp_path / "a.wav", loud, subtype="FLOAT"))
    assert (np.sign(samples[np.abs(loud) > 0.1]) == np.sign(loud[np.abs(loud) > 0.1])).all()
    assert (samples.min(), samples.max()) == (-32768, 32767)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.002, 0.1, 0.5, 0.9])
def test_a_file_cut_short_is_refused(tmp_path: Path, kind: str, share: float) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(5 * SAMPLE_RATE)
    file = write(tmp_path / f"a.{kind}", noise)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(SbkitError, match=rf"a\.{kind} must be"):
        read_audio(file)


def test_a_wav_whose_writer_could_not_know_its_length_is_read(tmp_path: Path) -> None:
    """A program that writes to a pipe leaves 0xFFFFFFFF where the length belongs."""
    file = write(tmp_path / "a.wav", tone(SAMPLE_RATE))
    content = bytearray(file.read_bytes())
    at = content.index(b"data") + 4
    content[4:8] = content[at : at + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert len(read_audio(file)) == SECONDS * SAMPLE_RATE


Spoil = Callable[[Path], object]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda file: None, "is missing"),
    "a folder": (lambda file: file.mkdir(), "is a folder"),
    "empty": (lambda file: file.touch(), "is empty"),
    "text": (lambda file: file.write_text("no audio at all\n" * 99), "not recognized as audio"),
    "noise": (
        lambda file: file.write_bytes(np.random.default_rng(0).bytes(9999)),
        "not recognized as audio",
    ),
    "zeros": (lambda file: file.write_bytes(bytes(9999)), "not recognized as audio"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("kind", [*KINDS, "raw", "txt"])
def test_what_is_no_audio_is_refused_by_name(tmp_path: Path, kind: str, spoiled: str) -> None:
    spoil, words = SPOILED[spoiled]
    file = tmp_path / f"clip.{kind}"
    spoil(file)
    with pytest.raises(SbkitError, match=words) as caught:
        read_audio(file)
    assert str(file) in str(caught.value)


def test_no_samples_and_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="must hold samples"):
        read_audio(write(tmp_path / "none.wav", np.zeros(0)))
    with pytest.raises(SbkitError, match="must be finite"):
        read_audio(write(tmp_path / "nan.wav", np.full(99, np.nan), subtype="FLOAT"))
