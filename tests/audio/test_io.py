"""Real files of every format, whole and damaged, read as 16 kHz samples."""

import os
import re
import warnings
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from torchaudio.transforms import Resample

from sbkit.audio import resample
from sbkit.audio.io import (
    FORMATS,
    MAX_RATE_HZ,
    MIN_RATE_HZ,
    AudioError,
    convert_array,
    read_audio,
    stream_audio,
    to_samples,
)
from sbkit.audio.resample import END, Resampler, resample_blocks, resample_by_numpy
from sbkit.base.units import SAMPLE_RATE

Signal = npt.NDArray[np.generic]
SECONDS = 2
EXTENSIONS = ("wav", "flac", "ogg", "opus", "mp3")


def tone(rate: int, hertz: float = 440.0) -> Signal:
    """Make a sine of half amplitude."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(SECONDS * rate) / rate)


def write(file: Path, signal: Signal, rate: int = SAMPLE_RATE, subtype: str | None = None) -> Path:
    """Write a file in the format of its extension."""
    opus = {"format": "OGG", "subtype": "OPUS"} if file.suffix == ".opus" else {}
    soundfile.write(file, signal, rate, **{"subtype": subtype, **opus})
    return file


def loudest_hertz(samples: npt.NDArray[np.int16]) -> float:
    spectrum = np.abs(np.fft.rfft(samples.astype(np.float64)))
    return float(np.argmax(spectrum)) * SAMPLE_RATE / len(samples)


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_read_audio_of_any_format_and_rate_gives_the_same_tone(
    tmp_path: Path, extension: str, rate: int
) -> None:
    samples = read_audio(write(tmp_path / f"a.{extension}", tone(rate), rate))
    assert samples.dtype == np.int16
    assert len(samples) == pytest.approx(SECONDS * SAMPLE_RATE, abs=2 * 1152 * 2)
    assert loudest_hertz(samples) == pytest.approx(440, abs=2)
    inner = samples[4000:-4000].astype(np.float64)  # opus rings where a tone starts
    assert np.sqrt(np.mean(inner**2)) == pytest.approx(0.5 * 32768 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize(("old", "new"), [(3, 1), (441, 160), (1, 2), (441, 320)])
def test_resampling_by_numpy_equals_torchaudio(old: int, new: int) -> None:
    signal = np.random.default_rng(0).normal(0, 0.1, 70_001).astype(np.float32)
    expected = Resample(old, new)(torch.from_numpy(signal)).numpy()
    np.testing.assert_allclose(resample_by_numpy(signal, old, new), expected, rtol=0, atol=1e-5)


def test_resampling_of_read_only_memory_does_not_warn() -> None:
    signal = np.frombuffer(bytes(4 * 4800), np.float32)
    with warnings.catch_warnings(action="error"):
        (resampled,) = resample_blocks([signal], 48_000, 16_000)
    assert len(resampled) == 1600


def test_only_eight_kernels_are_kept_whatever_the_rates() -> None:
    """With all kept, at up to 16 MB each, 100 requests with WAVs of 4 kB took 870 MB."""
    for rate in (8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000, 768_000):
        for new in (8_000, 16_000, 24_000):
            resampler = Resampler(rate, new)
            assert Fraction(resampler._up, resampler._down) == Fraction(new, rate)
    rates = [*range(MIN_RATE_HZ, 50_000, 41), 11_127, 22_254, 767_999, MAX_RATE_HZ]
    for rate in rates:
        resampler = Resampler(rate, 16_000)
        assert resampler._up / resampler._down == pytest.approx(16_000 / rate, rel=5e-4)
        assert resampler._up * resampler._down <= 1 << 20
    for rate in rates[-10:]:
        resampler = Resampler(rate, 16_000)
        deque(resample_blocks([tone(8_000).astype(np.float32)], rate, 16_000), maxlen=0)
        resample_by_numpy(END, resampler._down, resampler._up)
    for kernels in (resample._torch_resampler, resample._kernel):
        assert (kernels.cache_info().currsize, kernels.cache_info().maxsize) == (8, 8)


@pytest.mark.parametrize("extension", ["wav", "flac"])
def test_16_bit_samples_are_read_exactly(tmp_path: Path, extension: str) -> None:
    samples = np.random.default_rng(0).integers(-32768, 32768, 5000).astype(np.int16)
    assert np.array_equal(read_audio(write(tmp_path / f"a.{extension}", samples)), samples)


def test_samples_above_full_scale_are_clipped_not_wrapped(tmp_path: Path) -> None:
    loud = 4 * tone(SAMPLE_RATE)
    samples = read_audio(write(tmp_path / "a.wav", loud, subtype="FLOAT"))
    assert (np.sign(samples[np.abs(loud) > 0.1]) == np.sign(loud[np.abs(loud) > 0.1])).all()
    assert (samples.min(), samples.max()) == (-32768, 32767)


def test_streamed_wav_without_a_declared_length_is_read(tmp_path: Path) -> None:
    """A program that writes to a pipe declares a length of 0xFFFFFFFF."""
    file = write(tmp_path / "a.wav", tone(SAMPLE_RATE))
    content = bytearray(file.read_bytes())
    start = content.index(b"data") + 4
    content[4:8] = content[start : start + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert len(read_audio(file)) == SECONDS * SAMPLE_RATE


CreateFile = Callable[[Path], object]
NOISE = np.random.default_rng(0).bytes(9999)
NOT_AUDIO: dict[str, tuple[CreateFile, str]] = {
    "missing": (lambda file: None, "does not exist"),
    "a pipe": (os.mkfifo, "does not exist or is not a file"),
    "a folder": (lambda file: file.mkdir(), "does not exist or is not a file"),
    "empty": (lambda file: file.touch(), "not recognized as audio"),
    "text": (lambda file: file.write_text("no audio at all\n" * 99), "not recognized as audio"),
    "noise": (lambda file: file.write_bytes(NOISE), "not recognized as audio"),
}


@pytest.mark.parametrize("content", NOT_AUDIO)
@pytest.mark.parametrize("extension", [*EXTENSIONS, "raw", "txt"])
def test_files_that_are_not_audio_are_refused_by_name(
    tmp_path: Path, extension: str, content: str
) -> None:
    create, message = NOT_AUDIO[content]
    file = tmp_path / f"clip.{extension}"
    create(file)
    with pytest.raises(AudioError, match=message) as caught:
        read_audio(file)
    assert str(file) in str(caught.value)


def test_empty_files_and_samples_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="has no samples"):
        read_audio(write(tmp_path / "none.wav", np.zeros(0)))
    for value in (np.nan, np.inf, 32767):  # integers would be clipped to square waves
        file = write(tmp_path / "a.wav", np.full(99, float(value)), subtype="FLOAT")
        with pytest.raises(AudioError, match=f"between -1 and 1, but .* reaches {value}") as caught:
            read_audio(file)
        assert caught.value.reason == "samples out of range"


@pytest.mark.parametrize("rate", [3_999, 768_001])
def test_sample_rates_of_no_recording_are_refused(tmp_path: Path, rate: int) -> None:
    file = write(tmp_path / "a.wav", tone(SAMPLE_RATE), rate)
    with pytest.raises(AudioError, match=f"from 4000 to 768000 Hz, but .* declares {rate} Hz"):
        read_audio(file)


def test_flac_of_unknown_length_is_read_to_its_end(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).integers(-9999, 9999, 50_000).astype(np.int16)
    file = write(tmp_path / "a.flac", samples)
    content = bytearray(file.read_bytes())
    content[21] &= 0xF0  # 36 bits of the header count the samples; 0 means unknown
    content[22:26] = bytes(4)
    file.write_bytes(content)
    assert np.array_equal(read_audio(file), samples)
    blocks = list(stream_audio(file, block_seconds=1))
    assert [len(block) for block in blocks] == [16_000, 16_000, 16_000, 2_000]
    file.write_bytes(file.read_bytes()[:40_000])
    with pytest.raises(AudioError, match="truncated"):
        read_audio(file)


@pytest.mark.parametrize("format", [*FORMATS, "OPUS", "RF64"])
def test_truncated_files_are_refused_in_every_format(tmp_path: Path, format: str) -> None:
    file, noise = tmp_path / "a", 0.1 * np.random.default_rng(0).standard_normal(80_000)
    subtype = "OPUS" if format == "OPUS" else None
    soundfile.write(file, noise, 16_000, format="OGG" if subtype else format, subtype=subtype)
    if format == "RF64":
        with pytest.raises(AudioError, match="RF64 .* truncation cannot be detected"):
            read_audio(file)
        return
    assert len(read_audio(file)) >= 80_000
    whole = file.read_bytes()
    for size in (len(whole) // 10, len(whole) // 2, len(whole) - 3_000):
        file.write_bytes(whole[:size])
        with pytest.raises(AudioError, match="a is truncated|not recognized|has no samples"):
            read_audio(file)


def test_odd_sample_rate_keeps_duration_and_pitch(tmp_path: Path) -> None:
    samples = read_audio(write(tmp_path / "a.wav", tone(22_051), 22_051))
    assert len(samples) == pytest.approx(SECONDS * SAMPLE_RATE, rel=5e-4)
    assert loudest_hertz(samples) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000])
def test_blocks_are_resampled_like_the_whole_file(tmp_path: Path, rate: int) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (5 * rate + 123, 2)).astype(np.float32)
    file = write(tmp_path / "a.wav", noise, rate, "FLOAT")
    mono = torch.from_numpy(noise.mean(axis=1))
    expected = mono if rate == SAMPLE_RATE else Resample(rate, SAMPLE_RATE)(mono)
    expected = np.rint(expected.numpy() * 32768).astype(np.int16)
    assert np.array_equal(read_audio(file), expected)
    for seconds in (0.01, 0.3, 1.0, 5.0):
        blocks = list(stream_audio(file, block_seconds=seconds))
        assert len(blocks) > 1
        assert max(map(len, blocks)) <= 2 * seconds * SAMPLE_RATE + 2_000
        np.testing.assert_allclose(np.concatenate(blocks), expected, rtol=0, atol=1)


CLIP = (np.arange(100) * 300).astype(np.int16)
FLOATS = CLIP / 32768


@pytest.mark.parametrize(
    "array",
    [
        CLIP,
        CLIP[None],  # (1, S) as from torchaudio.load
        CLIP[:, None],
        np.stack([CLIP] * 2),
        np.stack([CLIP] * 32, 1),
        FLOATS,
        FLOATS.astype(np.float32)[None],
        np.stack([1.5 * FLOATS, 0.5 * FLOATS]),
        torch.from_numpy(CLIP)[None],
        torch.from_numpy(FLOATS).float().expand(2, -1),
    ],
    ids=lambda array: f"{array.dtype} {tuple(array.shape)}",
)
def test_channels_of_an_array_are_its_short_side_and_averaged(
    array: npt.NDArray[np.generic],
) -> None:
    np.testing.assert_array_equal(to_samples(array), CLIP)
    np.testing.assert_array_equal(np.concatenate([*convert_array(array, SAMPLE_RATE)]), CLIP)


@pytest.mark.parametrize("shape", [(2, 2), (32, 2), (99, 99), (0, 99), (1, 1, 99), ()])
def test_arrays_of_ambiguous_shape_or_other_types_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AudioError, match=f"float32 with shape {re.escape(str(shape))}"):
        to_samples(np.zeros(shape, np.float32))
    for dtype in ("int32", "uint8", "bool"):
        with pytest.raises(AudioError, match=f"audio array of {dtype}"):
            to_samples(np.zeros(100, dtype))
