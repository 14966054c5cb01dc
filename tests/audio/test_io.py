"""Files of every format, whole and damaged, read as 16 kHz samples."""

import os
import re
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from sbkit.audio import containers, decode, io
from sbkit.audio.channels import CANCEL, Downmixer
from sbkit.audio.containers import AudioError
from sbkit.audio.encode import FileWriter
from sbkit.audio.io import (
    AudioSpan,
    read_audio,
    read_spans,
    stream_audio,
    stream_input,
    to_samples,
)
from sbkit.base import messages
from sbkit.base.units import SAMPLE_RATE
from sbkit.data.clip_decoding import DIGEST_BYTES, DecodedFile, decode_file
from tests.audio import formats
from tests.audio.formats import (
    FFMPEG_FORMATS,
    FORMATS,
    TONE_HERTZ,
    encode,
    encode_tone,
    loudest_hertz,
)
from tests.calls import note_calls
from tests.processes import run_fresh

Signal = npt.NDArray[np.generic]
SECONDS = 4
PAGE = Path(__file__).parents[2] / "docs/guide/audio.md"
tone = partial(formats.tone, seconds=SECONDS)
AMR_IN_3GP = ("3GP", "AMR")
FILES = [*FORMATS, AMR_IN_3GP]


def write(file: Path, signal: Signal, rate: int = SAMPLE_RATE, subtype: str | None = None) -> Path:
    """Write a file in the format of its extension by libsndfile."""
    soundfile.write(file, signal, rate, subtype=subtype)
    return file


def make_file(name: tuple[str, str]) -> bytes:
    """Write a tone in a container and a codec of the page."""
    if name != AMR_IN_3GP:
        return encode_tone(name, seconds=SECONDS)
    with (  # which PyAV 19 cannot encode, but copy
        av.open(BytesIO(encode_tone(formats.AMR, seconds=SECONDS))) as source,
        av.open(file := BytesIO(), "w", "3gp") as output,
    ):
        stream = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux():
            packet.stream = stream
            output.mux(packet)
    return file.getvalue()


def read(content: bytes, **options: Any) -> npt.NDArray[np.int16]:
    return np.concatenate([*stream_audio(BytesIO(content), **options)])


def test_page_lists_the_formats_that_are_tested_here() -> None:
    rows = re.findall(r"^\| `\.[^|]*\| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    listed = {(container, codec) for container, codecs in rows for codec in codecs.split(", ")}
    assert listed == {*FILES}


@pytest.mark.parametrize("name", FILES, ids="-".join)
def test_every_format_gives_the_same_tone(
    name: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    messages.logged_notes.clear()
    samples = read(make_file(name))
    assert not caplog.messages  # such as that it ends early
    assert samples.dtype == np.int16
    assert SECONDS - 0.02 < len(samples) / SAMPLE_RATE < SECONDS + 0.15
    assert loudest_hertz(samples) == pytest.approx(TONE_HERTZ, abs=2)
    inner = samples[4000:-4000].astype(np.float64)  # opus rings where a tone starts
    assert np.sqrt(np.mean(inner**2)) == pytest.approx(0.5 * 32768 / np.sqrt(2), rel=0.15)


# ---- lengths

DECLARED = {"WAV", "FLAC", "MP4", "QuickTime", "3GP", "WebM, Matroska", "AIFF", "AU", "CAF"}
DECLARED |= {"W64, RF64", "WavPack", "TTA", "NIST SPHERE", "FLV"}
CUT_SHORT = r"is truncated( or damaged|: it declares 4\.\d+ s, has [0-3]\.\d+ s)"


@pytest.mark.parametrize("name", FILES, ids="-".join)
def test_truncated_files_are_refused_where_the_format_declares_a_length(
    name: tuple[str, str],
) -> None:
    whole = make_file(name)
    for share in (0.4, 0.8):
        content = whole[: round(share * len(whole))]
        if name[0] in DECLARED or name == ("MP3", "MP3"):  # which has a Xing tag
            with pytest.raises(AudioError, match=CUT_SHORT) as caught:
                read(content)
            assert caught.value.reason == "cut short or damaged"
        elif name != ("Ogg", "Vorbis"):  # whose header is as long as the sound here
            seconds = len(read(content)) / SAMPLE_RATE
            assert seconds == pytest.approx(share * SECONDS, abs=0.9)  # an Ogg page lasts 1 s


@pytest.mark.parametrize(
    ("start", "speech", "pause"),
    [
        (b"#!AMR\n", formats.AMR_FRAME, bytes([8 << 3, *bytes(5)]) + 7 * bytes([15 << 3])),
        # A frame of 6.6 kbit/s that libvo-amrwbenc wrote
        (
            b"#!AMR-WB\n",
            bytes.fromhex("04e9d300e6e745e673d31d5a422797a8d330"),
            bytes([9 << 3, *bytes(5)]) + 7 * bytes([15 << 3]),
        ),
    ],
    ids=["narrowband", "wideband"],
)
def test_pauses_of_amr_last_as_long_as_they_are(start: bytes, speech: bytes, pause: bytes) -> None:
    """A telephone sends no speech in a pause, but its noise every eighth frame of 20 ms."""
    samples = read(start + speech * 50 + pause * 10 + speech * 50)
    assert len(samples) == round((1 + 10 * 8 * 0.02 + 1) * SAMPLE_RATE)
    assert not samples[SAMPLE_RATE + 640 : SAMPLE_RATE + 20_000].any()


@pytest.mark.parametrize("size", [0, 2_000_000_000, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW"])
def test_streamed_wav_is_read_to_its_end(size: int, subtype: str) -> None:
    soundfile.write(file := BytesIO(), tone(16_000), 16_000, subtype, format="WAV")
    content = bytearray(file.getvalue())
    start = content.index(b"data") + 4
    content[4:8] = content[start : start + 4] = size.to_bytes(4, "little")
    assert len(read(bytes(content))) == SECONDS * SAMPLE_RATE


@pytest.mark.parametrize("tagged", [True, False], ids=["Xing", "no tag"])
@pytest.mark.parametrize("prefix", [b"", b"ID3\4\0\0\0\0\3\0" + bytes(384)], ids=["", "ID3"])
@pytest.mark.parametrize("suffix", [b"", b"TAG" + bytes(125), b"APETAGEX" + bytes(24)])
def test_mp3_is_read_whole_whatever_its_tags(tagged: bool, prefix: bytes, suffix: bytes) -> None:
    loud = tone(44_100) * np.linspace(0, 1, SECONDS * 44_100) ** 4  # the bit rate varies
    content = encode("mp3", "libmp3lame", loud, 44_100, write_xing=str(int(tagged)))
    samples = read(prefix + content + suffix)
    assert len(samples) / SAMPLE_RATE == pytest.approx(SECONDS, abs=0.06)


# Formats whose header declares the length in bytes or samples, by libsndfile's names.
SAMPLE_FORMATS = ["WAV", "W64", "RF64", "CAF", "AIFF", "AU", "NIST"]
# Others, whose packets are lost as wholes: FFmpeg's container and codec, and how many seconds
# encoders add to the sound.
PACKET_FORMATS = {
    "FLAC": ("flac", "flac", 0.0),
    "MP3": ("mp3", "libmp3lame", 0.15),
    "MP4": ("mp4", "aac", 0.1),
    "Matroska": ("matroska", "flac", 0.0),
    "WebM": ("webm", "libopus", 0.01),
}
EARLY_RATE = 8_000
MISSING_LIMITS = [(4, 0.1), (40, 0.4), (130, 1.0)]  # of files of so many seconds


@pytest.mark.parametrize(("seconds", "limit"), MISSING_LIMITS)
@pytest.mark.parametrize("format", SAMPLE_FORMATS)
def test_file_that_ends_a_little_early_is_read_and_noted(
    format: str, seconds: int, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A recorder's files promised 23 ms more than they had, and were refused."""
    noise = np.random.default_rng(0).normal(0, 0.1, seconds * EARLY_RATE)
    soundfile.write(file := BytesIO(), noise, EARLY_RATE, "PCM_16", format=format)
    content, whole = file.getvalue(), read(file.getvalue(), sample_rate=EARLY_RATE)
    for missing in (0, 184, round(limit * EARLY_RATE), round(limit * EARLY_RATE) + 1):
        messages.logged_notes.clear()
        caplog.clear()
        early = content[: len(content) - 2 * missing]
        samples = read(early, sample_rate=EARLY_RATE, keep_truncated=missing > limit * EARLY_RATE)
        assert np.array_equal(samples, whole[: len(whole) - missing])
        note = f"note: the file ends {missing / EARLY_RATE:.3f} s before its declared end."
        assert caplog.messages == [f"{note} {decode.EARLY_END_NOTE}."] * (missing > 0)
    has = len(samples) / EARLY_RATE
    with pytest.raises(AudioError, match=f"it declares {seconds}.0 s, has {has:.1f} s"):
        read(early, sample_rate=EARLY_RATE)


@pytest.mark.parametrize(("seconds", "limit"), MISSING_LIMITS)
@pytest.mark.parametrize("format", PACKET_FORMATS)
def test_packets_that_are_missing_at_the_end_count_as_seconds(
    format: str, seconds: int, limit: float
) -> None:
    container, codec, added = PACKET_FORMATS[format]
    noise = np.random.default_rng(0).normal(0, 0.1, seconds * EARLY_RATE)
    # Its tables before its sound, in a single fragment.
    options = {"movflags": "empty_moov", "frag_duration": str(10**9)} if format == "MP4" else {}
    content = encode(container, codec, noise, EARLY_RATE, **options)
    whole = len(read(content))
    outcomes = []
    for share in (0, 0.4, 0.8, 1.2, 1.6, 2, 3):
        early = content[: round(len(content) * (1 - share * limit / seconds))]
        missing = (whole - len(read(early, keep_truncated=True))) / SAMPLE_RATE
        try:
            assert (whole - len(read(early))) / SAMPLE_RATE == missing
            outcomes.append("read")
            assert missing <= limit + added
        except AudioError as error:
            outcomes.append("refused")
            assert missing > limit - added, error
    assert outcomes[0] == "read" and outcomes[-1] == "refused"


JOINED = ["MP3-MP3", "FLAC-FLAC", "Ogg-Opus", "Ogg-FLAC", "Ogg-Vorbis", "AAC (ADTS)-AAC"]
JOINED += ["WebM, Matroska-Opus", "AC-3-AC-3", "MPEG-AAC"]


def test_sound_may_start_late_or_end_before_the_picture() -> None:
    codecs = (
        ("matroska", "mpeg4", "libopus"),
        ("webm", "libvpx", "libopus"),
        ("flv", "flv", "aac"),
    )
    for container, video_codec, codec in codecs:
        with av.open(file := BytesIO(), "w", container) as output:
            video: Any = output.add_stream(video_codec, rate=10)
            video.width = video.height = 64
            video.pix_fmt = "yuv420p"
            sound: Any = output.add_stream(codec, rate=48_000, layout="mono")
            for index in range(90):
                picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
                picture.pts = index
                output.mux(video.encode(picture))
            output.mux(video.encode())
            for index in range(48, 48 * 4):  # from second 1, which is silence before, to 4
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), "fltp", "mono")
                frame.sample_rate, frame.pts = 48_000, 1000 * index
                output.mux(sound.encode(frame))
            output.mux(sound.encode())
        assert len(read(file.getvalue())) / SAMPLE_RATE == pytest.approx(4, abs=0.1), container


@pytest.mark.parametrize(("subtype", "width"), [("ULAW", 1), ("PCM_16", 2)])
@pytest.mark.parametrize("excess", [-44, -1, 1, 8, 43, 44, 58])
def test_wav_whose_size_is_odd_or_counts_its_header_is_read(
    excess: int, subtype: str, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    messages.logged_notes.clear()
    soundfile.write(file := BytesIO(), tone(8000), 8000, subtype, format="WAV")
    content = bytearray(file.getvalue())
    start = content.index(b"data") + 4
    size = int.from_bytes(content[start : start + 4], "little") + excess
    content[start : start + 4] = size.to_bytes(4, "little")
    num_samples = SECONDS * 8000 + min(excess // width, 0)
    assert len(read(bytes(content), sample_rate=8000)) == num_samples
    assert not caplog.messages


STRAY_NOISE = np.random.default_rng(0).integers(-3000, 3000, 4 * EARLY_RATE, np.int16).tobytes()
CHUNK = b"LIST" + len(STRAY_NOISE).to_bytes(4, "little") + STRAY_NOISE
TRAILERS = {
    "a block of a disk": STRAY_NOISE[:4096],
    "zeros": bytes(len(STRAY_NOISE)),
    "a tag": b"ID3\4\0\0" + STRAY_NOISE,
    "padding": b"\xff" * len(STRAY_NOISE),
    "a tag after zeros": bytes(7) + b"ID3\4\0\0" + STRAY_NOISE,
    "XML": b"<?xml?>" + b"<a/>" * 2000,
    "XML after line breaks": b"\r\n\n<a>" + b"<a/>" * 2000,
    "XML after a mark": b"\0\xef\xbb\xbf<!-- -->" + b"<a/>" * 2000,
    "UTF-16": ("<a/>" * 2000).encode("utf-16"),
    "JSON": b'\0{\n "a": 1}' + b" " * 5000,
    "a chunk": CHUNK,
    "a chunk that is aligned": b"\0" + CHUNK,
    "a chunk that is aligned by another byte": b"\1" + CHUNK,
    "a chunk after zeros": bytes(8) + CHUNK,
    "a chunk that is cut short": b"\0\0" + CHUNK[:-100],
    "a chunk of a wrong size": b"id3 \xff\xff\xff\xff" + STRAY_NOISE,
    "a chunk that is cut in its header": bytes(5000) + b"LIST",
}


@pytest.mark.parametrize("format", [*SAMPLE_FORMATS, "ULAW"])
def test_file_that_goes_on_behind_its_declared_end_is_refused_or_read(format: str) -> None:
    """Of a WAV whose size counted samples, half was trained on with the whole transcript."""
    subtype, container = ("ULAW", "WAV") if format == "ULAW" else ("PCM_16", format)
    noise = np.random.default_rng(0).normal(0, 0.1, SECONDS * EARLY_RATE)
    soundfile.write(file := BytesIO(), noise, EARLY_RATE, subtype, format=container)
    content = file.getvalue() + STRAY_NOISE
    if format in ("AU", "NIST"):
        assert len(read(content, sample_rate=EARLY_RATE)) == len(noise) + len(STRAY_NOISE) // 2
        return
    with pytest.raises(AudioError, match="goes on for 64,000 bytes behind its declared end"):
        read(content)
    kept = read(content, sample_rate=EARLY_RATE, keep_truncated=True)
    assert len(kept) == len(noise)


@pytest.mark.parametrize("trailer", TRAILERS)
def test_other_bytes_behind_the_sound_of_a_wav_are_left_out(trailer: str) -> None:
    samples = tone(8000)[: 8001 if "aligned" in trailer else None]  # an odd number of bytes
    soundfile.write(file := BytesIO(), samples, 8000, "ULAW", format="WAV")
    content = file.getvalue().removesuffix(b"\0" if "aligned" in trailer else b"")
    assert len(read(content + TRAILERS[trailer], sample_rate=8000)) == len(samples)


@pytest.mark.parametrize("name", FILES, ids="-".join)
def test_joined_files_are_read_whole_or_refused(name: tuple[str, str]) -> None:
    content = make_file(name)
    if "-".join(name) in JOINED:
        assert len(read(content * 2)) / SAMPLE_RATE == pytest.approx(2 * SECONDS, abs=0.2)
    elif name[0] in ("WAV", "MP4", "QuickTime", "3GP", "AIFF", "CAF", "W64, RF64"):
        with pytest.raises(AudioError, match="several files that were joined byte by byte"):
            read(content * 2)


def test_joined_files_that_the_decoder_cannot_follow_are_refused() -> None:
    with pytest.raises(AudioError, match=r"is damaged at 4\.\d s"):
        read(make_file(("Ogg", "Opus")) + make_file(("Ogg", "Vorbis")))


def make_flac(
    num_samples: int, rate: int = SAMPLE_RATE, channels: int = 1, bits: int = 16
) -> bytes:
    """Write noise by libsndfile, in blocks of 4,096 samples."""
    noise = np.random.default_rng(num_samples).normal(0, 0.1, (num_samples, channels))
    soundfile.write(file := BytesIO(), noise, rate, f"PCM_{bits}", format="FLAC")
    return file.getvalue()


ID3_TAG = b"ID3\4\0\0\0\0\3\0" + bytes(384)
FLACS_OF_OTHER_FORMS = [make_flac(9000, 8000, 2), make_flac(4097, bits=24), make_flac(5000, 44_100)]


@pytest.mark.parametrize("first", [1, 20, 4095, 4096, 4097, 8191, 8192, 10_000])
@pytest.mark.parametrize("scanned_bytes", [1 << 20, 97])
def test_joined_flacs_lose_nothing_at_their_seams(
    first: int, scanned_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg lost 4,096 samples there, without a word."""
    monkeypatch.setattr(containers, "SCANNED_BYTES", scanned_bytes)
    head = make_flac(first)
    for second in (make_flac(2), make_flac(4096), make_flac(6000), *FLACS_OF_OTHER_FORMS):
        for parts, between in (((head, second), b""), ((head, second, head), ID3_TAG)):
            joined = between.join((b"", *parts, b""))
            assert np.array_equal(read(joined), np.concatenate([*map(read, parts)]))


@pytest.mark.parametrize("follows", [b"", b"\0\0\0\x22", b"\x80\0\0\x22", make_flac(5)[4:50]])
def test_start_of_a_flac_within_another_is_no_seam(follows: bytes) -> None:
    """Noise is stored as it is, big-endian; a tag may hold a picture."""
    random = np.random.default_rng(0)
    start = b"fLaC" + follows
    noise = np.frombuffer(random.bytes(5000) + start + random.bytes(5000), ">i2").astype(np.int16)
    soundfile.write(file := BytesIO(), noise, SAMPLE_RATE, format="FLAC")
    content = file.getvalue()
    assert start in content[len(make_flac(0)) :]
    picture = b"\6" + (len(content)).to_bytes(3, "big") + content
    tagged = content[:42] + picture + content[42:]
    assert np.array_equal(read(content), noise)
    assert np.array_equal(read(tagged + content), np.concatenate([noise, noise]))


def test_fault_in_a_joined_flac_names_the_part_and_the_second() -> None:
    head, second = make_flac(20_000), bytearray(make_flac(30_000))
    early = second[: -len(second) // 4]
    with pytest.raises(
        AudioError, match=r"part 2 of the file is truncated: it declares 1\.9 s, has"
    ):
        read(head + early + head)
    second[len(second) // 2] ^= 1
    with pytest.raises(AudioError, match=r"part 2 of the file is damaged at 0\.\d s"):
        read(head + second)


def test_spans_of_joined_flacs_are_slices_of_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(make_flac(20_000) + make_flac(30_000))
    whole = read_audio(tmp_path / "a.flac")
    times = [(0, 1_000_000), (1_000_000, 2_000_000), (3_000_000, None)]
    spans = [AudioSpan(str(tmp_path / "a.flac"), *span) for span in times]
    for samples, (start, end) in zip(read_spans(spans, SAMPLE_RATE), times, strict=True):
        stop = end and end * SAMPLE_RATE // 1_000_000
        assert np.array_equal(samples, whole[start * SAMPLE_RATE // 1_000_000 : stop])


def test_rate_and_channels_may_change_in_the_middle() -> None:
    mono = encode("mp3", "libmp3lame", tone(44_100), 44_100, write_xing="0", id3v2_version="0")
    stereo = np.stack([tone(48_000)] * 2)
    samples = read(mono + encode("mp3", "libmp3lame", stereo, 48_000, write_xing="0"))
    assert len(samples) / SAMPLE_RATE == pytest.approx(2 * SECONDS, abs=0.15)
    for half in np.split(samples, [len(samples) // 2]):
        assert loudest_hertz(half) == pytest.approx(TONE_HERTZ, abs=2)


@pytest.mark.parametrize(
    "name", ["FLAC-FLAC", "MP3-MP3", "MP4-AAC", "Ogg-Opus", "WebM, Matroska-Opus", "AAC (ADTS)-AAC"]
)
@pytest.mark.parametrize("damage", [bytes(400), np.random.default_rng(0).bytes(400), b""])
def test_damage_in_the_middle_is_an_error_that_names_the_second(name: str, damage: bytes) -> None:
    whole = make_file((*name.split("-"),))  # type: ignore[arg-type]
    middle = len(whole) // 2
    if name == "MP4-AAC" and not damage:
        return  # the positions in its tables are wrong then: it is truncated or damaged
    # A damaged cluster of Matroska hides all the sound after it.
    sentence = r"the file is (damaged at|truncated: it declares 4.0 s, has) [12]\.\d s"
    with pytest.raises(AudioError, match=sentence):
        read(whole[:middle] + damage + whole[middle + 400 :])


# ---- untrusted files

PLAYLISTS = {
    "m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
    "ffconcat": "ffconcat version 1.0\nfile '{}'\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=audio 5004 RTP/AVP 0\na={}\n",
    "mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period>'
    "<AdaptationSet><Representation><BaseURL>{}</BaseURL></Representation></AdaptationSet>"
    "</Period></MPD>",
}


@pytest.mark.parametrize("extension", ["", "wav"])
@pytest.mark.parametrize("kind", PLAYLISTS)
def test_playlists_are_refused_without_opening_what_they_name(
    tmp_path: Path, kind: str, extension: str
) -> None:
    secret = write(tmp_path / "secret.wav", tone(SAMPLE_RATE))
    file = tmp_path / f"list.{extension or kind}"
    file.write_text(PLAYLISTS[kind].format(secret))
    with pytest.raises(AudioError, match="not recognized as audio"):
        read_audio(file)
    with file.open("rb") as open_file, pytest.raises(AudioError, match="not recognized as audio"):
        list(stream_audio(open_file))


def test_damaged_files_print_nothing(tmp_path: Path) -> None:
    content = make_file(("MP3", "MP3"))
    (tmp_path / "a.mp3").write_bytes(content[:9000] + bytes(999) + content[9999:])
    code = (
        "import sys; from sbkit.audio.io import read_audio\ntry: read_audio(sys.argv[1])\nexcept "
    )
    code += "Exception as error: print(error)"
    process = run_fresh(code, tmp_path / "a.mp3")
    assert re.fullmatch(r".*a\.mp3 is damaged at .* s\.\n", process.stdout)
    assert process.stderr == ""


# ---- channels


def test_channel_is_selected_and_must_exist(tmp_path: Path) -> None:
    sides = [tone(SAMPLE_RATE, 440), tone(SAMPLE_RATE, 880)]
    wav = write(tmp_path / "a.wav", np.stack(sides, 1))
    (tmp_path / "a.m4a").write_bytes(encode("ipod", "alac", np.stack(sides), SAMPLE_RATE))
    for file in (wav, tmp_path / "a.m4a"):
        for channel, hertz in enumerate((440, 880)):
            samples = read_audio(file, SAMPLE_RATE, Downmixer(channel))
            assert loudest_hertz(samples) == hertz
        for channel in (2, -1):
            with pytest.raises(AudioError, match=f"no channel {channel}: it has 2, counted from 0"):
                read_audio(file, SAMPLE_RATE, Downmixer(channel))


def test_speech_in_the_center_of_surround_sound_keeps_its_level() -> None:
    channels = np.zeros((6, 48_000 * SECONDS))
    channels[2] = tone(48_000)  # FL, FR, FC, LFE, SL, SR
    for container, codec in (("wav", "pcm_s16le"), ("ac3", "ac3"), ("ipod", "aac")):
        samples = read(encode(container, codec, channels))[4000:-4000]
        assert np.sqrt(np.mean((samples / 32768) ** 2)) == pytest.approx(0.5**1.5, rel=0.02)
    array = encode("flac", "flac", np.stack([tone(48_000)] * 6))  # of microphones, in FLAC
    assert np.abs(read(array)).max() == pytest.approx(0.5 * 32768, rel=0.01)


def test_channels_that_cancel_each_other_out_are_noticed() -> None:
    random = np.random.default_rng(0)
    speech = random.normal(0, 0.1, 4 * SAMPLE_RATE).astype(np.float32)
    turns = np.repeat(random.permutation(8) % 2, SAMPLE_RATE // 2)
    for pair, fault in (
        ([speech * turns, speech * (1 - turns)], ""),
        ([speech, -speech], CANCEL),
        ([speech, 0.5 * speech], ""),
        ([speech, 0 * speech], ""),
        ([0 * speech, 0 * speech], ""),
    ):
        downmixer = Downmixer()
        downmixer.downmix("the file", np.stack(pair, 1), ())
        assert downmixer.fault == fault


# ---- spans and blocks


@pytest.mark.parametrize("container", ["WAV", "FLAC", "MP3", "MP4", "Ogg", "AC-3"])
def test_spans_far_into_a_file_are_slices_of_the_whole_file(tmp_path: Path, container: str) -> None:
    file = tmp_path / "a"
    noise = np.random.default_rng(0).normal(0, 0.1, 500_000)
    name = next(name for name in FFMPEG_FORMATS if name[0] == container)
    muxer, codec, rate = FFMPEG_FORMATS[name]
    file.write_bytes(encode(muxer, codec, np.resize(noise, 100 * rate), rate))
    whole = read_audio(file)
    for times in ([(3_300_001, 4_000_000), (41_234_567, 42_234_567)], [(99_500_000, None)]):
        spans = [AudioSpan(str(file), start, end) for start, end in times]
        clips = decode_file(spans, SAMPLE_RATE, "pcm", result := DecodedFile())
        for span, clip in zip(spans, clips, strict=True):
            assert isinstance(clip.audio, bytes)
            samples = soundfile.read(BytesIO(clip.audio), dtype="int16")[0]
            assert len(samples) == clip.samples
            end = None if span.end is None else round(span.end * SAMPLE_RATE / 1e6)
            assert np.array_equal(samples, whole[round(span.start * SAMPLE_RATE / 1e6) : end])
        assert result.digest == blake2b(file.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()


def test_spans_are_decoded_once_up_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.flac"
    file.write_bytes(encode("flac", "flac", tone(8_000, seconds=600), 8_000))
    decoded = note_calls(monkeypatch, Downmixer, "downmix", lambda downmixer, name, x, *_: len(x))
    spans = [AudioSpan(str(file), 1_000_000 * start, 1_000_000 * start + 1) for start in (10, 150)]
    assert [len(samples) for samples in read_spans(spans, SAMPLE_RATE)] == [0, 0]
    assert 150 <= sum(decoded) / 8_000 <= 150 + 61  # a block after the last


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("flac", "flac", 8_000), ("flac", "flac", 48_000), ("w64", "pcm_f32le", 48_000)],
)
def test_spans_before_damage_are_read(
    tmp_path: Path, container: str, codec: str, rate: int
) -> None:
    """Of floats, the largest is looked for first."""
    file = tmp_path / "a"
    noise = np.random.default_rng(0).normal(0, 0.1, 4 * rate)
    content = encode(container, codec, noise, rate)
    file.write_bytes(content)
    samples = read_audio(file)
    middle = len(content) // 2
    damaged = content[:middle] + bytes(400) + content[middle + 400 :]
    file.write_bytes(damaged if codec == "flac" else content[:middle])
    with pytest.raises(AudioError, match="is (damaged|truncated)") as error:
        read_audio(file)
    (second,) = re.findall(r"(?:at|has) ([\d.]+) s", str(error.value))
    end = 1e6 * float(second) - 50_000
    times = [(0, 3e6), (1e5, 2e5), (0.9e6, end), (1.5e6, None), (3e6, 3.5e6)]
    spans = [AudioSpan(str(file), int(start), end and int(end)) for start, end in times]
    for span, clip in zip(spans, read_spans(spans, SAMPLE_RATE), strict=True):
        if span.end is None or span.end > end:
            assert str(clip) == str(error.value), span
        else:
            expected = samples[16 * span.start // 1000 : 16 * span.end // 1000]
            np.testing.assert_allclose(clip, expected, rtol=0, atol=10)  # resampled without more


def test_span_may_end_after_its_file_as_late_as_a_file_may_end_early(tmp_path: Path) -> None:
    file = write(tmp_path / "a.wav", tone(SAMPLE_RATE, seconds=30))
    cases = [(0, 30.3), (0, 30.31), (20, 30.1), (20, 30.11), (29, 30.1), (29, 30.11), (30, 30.1)]
    for start, end in cases:
        span = AudioSpan(str(file), start * 1_000_000, round(end * 1_000_000))
        (samples,) = read_spans([span], SAMPLE_RATE)
        if end in (30.1, 30.3) and start < 30:
            assert len(samples) == (30 - start) * SAMPLE_RATE
        else:
            assert isinstance(samples, AudioError) and samples.reason == io.BEYOND_END


def test_table_reads_a_file_that_ends_a_little_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages.logged_notes.clear()
    whole = write(tmp_path / "a.wav", tone(SAMPLE_RATE)).read_bytes()
    spans = [AudioSpan(str(tmp_path / "a.wav"), 1_000_000 * i, 1_000_000 * (i + 2)) for i in (0, 2)]
    for missing, num_read in ((0.09, 2), (0.11, 1)):
        (tmp_path / "a.wav").write_bytes(whole[: -2 * round(missing * SAMPLE_RATE)])
        clips = [*decode_file(spans, SAMPLE_RATE, "pcm", DecodedFile())]
        assert [isinstance(clip.audio, bytes) for clip in clips] == [True, num_read == 2]
    assert "truncated: it declares 4.0 s, has 3.9 s" in str(clips[1].audio)
    (note,) = caplog.messages
    assert note.startswith(f"note: {tmp_path / 'a.wav'} ends 0.090 s before its declared end.")


@pytest.mark.parametrize("place", ["here", "at a URL", "in a table"])
def test_file_is_hashed_whole_and_named_by_its_path_wherever_it_is(
    tmp_path: Path, place: str
) -> None:
    file = write(tmp_path / "a.wav", tone(SAMPLE_RATE))
    content = file.read_bytes() + b"more"
    file.write_bytes(content)
    path = f"file://{file}" if place == "at a URL" else str(file)
    inner = content if place == "in a table" else None
    if inner:
        file.unlink()
    (clip,) = decode_file([AudioSpan(path)], SAMPLE_RATE, "pcm", read := DecodedFile(), inner)
    assert clip.samples == SECONDS * SAMPLE_RATE
    assert read.digest == blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
    (clip,) = decode_file([AudioSpan(path, channel=1)], SAMPLE_RATE, "pcm", DecodedFile(), inner)
    assert str(clip.audio).startswith(f"{path} has no channel 1")


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 22_051, 44_100, 48_000])
@pytest.mark.parametrize("format", ["wav", "flac"])
def test_blocks_equal_the_whole_file(tmp_path: Path, rate: int, format: str) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (5 * rate + 123, 2))
    file = write(tmp_path / f"a.{format}", noise, rate, "PCM_16")
    whole = read_audio(file)
    assert len(whole) == pytest.approx((5 * rate + 123) * SAMPLE_RATE / rate, abs=1)
    for seconds in (0.3, 1.0, 5.0):
        blocks = list(stream_audio(file, block_seconds=seconds))
        assert len(blocks) > 1
        assert np.array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize("rate", [8_000, 22_051, 44_100, 48_000])
def test_resampling_keeps_tones_and_removes_aliases(rate: int) -> None:
    highest = min(rate, SAMPLE_RATE) / 2
    for hertz in (440, 0.9 * highest):
        soundfile.write(file := BytesIO(), tone(rate, hertz), rate, "FLOAT", format="WAV")
        expected = tone(SAMPLE_RATE, hertz)[2000:-2000]
        np.testing.assert_allclose(
            read(file.getvalue())[2000:-2000] / 32768, expected, rtol=0, atol=5e-4
        )
    if rate > SAMPLE_RATE:
        soundfile.write(file := BytesIO(), tone(rate, 1.1 * highest), rate, format="WAV")
        assert np.abs(read(file.getvalue())[2000:-2000]).max() <= 1


FLOAT_FORMATS = [("WAV", "FLOAT"), ("WAV", "DOUBLE"), ("RF64", "FLOAT"), ("W64", "FLOAT")]
FLOAT_FORMATS += [("AIFF", "FLOAT"), ("CAF", "DOUBLE"), ("AU", "FLOAT")]


@pytest.mark.parametrize(("format", "subtype"), FLOAT_FORMATS)
def test_floats_beyond_full_scale_are_scaled_by_their_file(
    tmp_path: Path, format: str, subtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They were cut; the loudest sample is the last, and a span before it has the same factor."""
    wave, file = tone(SAMPLE_RATE) * np.linspace(0.1, 1, SECONDS * SAMPLE_RATE), tmp_path / "a"
    messages.logged_notes.clear()
    for peak in (0.5, 1, 4, 12):
        signal = peak * wave / np.abs(wave).max()
        soundfile.write(file, signal, SAMPLE_RATE, subtype, format=format)
        samples = read_audio(file)
        assert np.abs(samples - 32768 * signal / max(1, peak)).max() <= 1
        assert np.array_equal(np.concatenate([*stream_audio(file, block_seconds=0.1)]), samples)
        (span,) = read_spans([AudioSpan(str(file), 1_000_000, 2_000_000)], SAMPLE_RATE)
        assert np.array_equal(span, samples[SAMPLE_RATE : 2 * SAMPLE_RATE])
        (trained,) = decode_file([AudioSpan(str(file))], SAMPLE_RATE, "pcm", DecodedFile())
        assert np.array_equal(soundfile.read(BytesIO(trained.audio), dtype="int16")[0], samples)
        array = np.concatenate([*stream_input((signal, SAMPLE_RATE), None, SAMPLE_RATE)])
        assert np.abs(array.astype(int) - samples).max() <= 1
        cut = to_samples(signal, is_live=True)
        assert np.abs(cut - (32768 * signal).clip(-32768, 32767)).max() <= 1
    notes = [record.getMessage() for record in caplog.records]
    assert notes == [f"note: {file} {decode.SCALED_NOTE}.", f"note: the array {decode.CUT_NOTE}."]


@pytest.mark.parametrize(("gain", "is_cut"), [(1, False), (3, True), (8, False), (24, False)])
def test_loud_recording_in_a_lossy_format_is_scaled_no_overshoot(gain: float, is_cut: bool) -> None:
    soundfile.write(file := BytesIO(), gain * tone(SAMPLE_RATE), SAMPLE_RATE, format="OGG")
    assert ((np.abs(read(file.getvalue()).astype(int)) > 32766).mean() > 0.1) == is_cut


def test_video_without_sound_says_so_and_of_several_tracks_one_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = av.AudioFrame.from_ndarray(np.ones((1, 16_000), np.int16), "s16", "mono")
    sound.sample_rate = 16_000
    with av.open(tmp_path / "a.mkv", "w") as video:
        for stream in [video.add_stream("pcm_s16le", 16_000) for _ in range(2)]:
            video.mux(stream.encode(sound))
    assert len(read_audio(tmp_path / "a.mkv")) == 16_000
    assert "a.mkv has 2 audio tracks. The default one is used." in caplog.text
    with av.open(tmp_path / "b.mkv", "w") as video:
        pictures = video.add_stream("mpeg4", 25, width=16, height=16)
        video.mux([*pictures.encode(av.VideoFrame(16, 16, "yuv420p")), *pictures.encode()])
    with pytest.raises(AudioError, match=r"b\.mkv has no audio track\."):
        read_audio(tmp_path / "b.mkv")


PCM_TAG = b"fmt \x10\0\0\0\1\0"  # of a WAV file
NOT_AUDIO: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: None, "does not exist"),
    "a pipe": (os.mkfifo, "does not exist or is not a file"),
    "text": (lambda file: file.write_text("no audio at all\n" * 99), "not recognized as audio"),
    "on a broken disk": (
        lambda file: file.symlink_to("/proc/self/mem"),
        "cannot be read: .*put error",
    ),
    "integers of 64 bits, which NumPy's frames lack": (
        lambda file: file.write_bytes(encode("wav", "pcm_s64le", tone(16_000), 16_000)),
        "not recognized as audio",
    ),
    "of a codec that FFmpeg does not know": (
        lambda file: file.write_bytes(
            io.encode_audio(to_samples(tone(16_000)), 16_000, "WAV").replace(
                PCM_TAG, PCM_TAG[:-1] + b"\x12"
            )
        ),
        "FFmpeg has no decoder for the audio of",
    ),
}


@pytest.mark.parametrize("content", NOT_AUDIO)
@pytest.mark.parametrize("extension", ["wav", "txt"])
def test_files_of_no_sound_are_told_by_name(tmp_path: Path, extension: str, content: str) -> None:
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
        np.stack([1.1 * FLOATS, 0.9 * FLOATS]),
        torch.from_numpy(CLIP)[None],
        torch.from_numpy(FLOATS).float().expand(2, -1),
    ],
    ids=lambda array: f"{array.dtype} {tuple(array.shape)}",
)
def test_channels_of_an_array_are_its_short_side_and_averaged(
    array: npt.NDArray[np.generic],
) -> None:
    np.testing.assert_array_equal(to_samples(array), CLIP)
    np.testing.assert_array_equal(
        np.concatenate([*stream_input(array, SAMPLE_RATE, SAMPLE_RATE)]), CLIP
    )


@pytest.mark.parametrize("shape", [(2, 2), (32, 2), (99, 99), (0, 99), (1, 1, 99), ()])
def test_arrays_of_ambiguous_shape_or_other_types_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(AudioError, match=f"float32 with shape {re.escape(str(shape))}"):
        to_samples(np.zeros(shape, np.float32))
    for dtype in ("int32", "uint8", "bool"):
        with pytest.raises(AudioError, match=f"audio array of {dtype}"):
            to_samples(np.zeros(100, dtype))


def test_clip_longer_than_a_day_is_refused_but_not_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of a pause in AMR are one byte: a megabyte lasts for six hours."""
    monkeypatch.setattr(io, "MAX_CLIP_SECONDS", 60)  # of 50 frames
    file = tmp_path / "clip.amr"
    file.write_bytes(b"#!AMR\n" + 3000 * b"\x7c")
    assert len(read_audio(file)) == 60 * SAMPLE_RATE
    file.write_bytes(b"#!AMR\n" + 7500 * b"\x7c")
    with pytest.raises(AudioError, match="a day") as error:
        read_audio(file)
    assert error.value.reason == "longer than a day"
    assert sum(map(len, stream_audio(file))) == 150 * SAMPLE_RATE
    late, open_span = AudioSpan(str(file), 80_000_000, 83_000_000), AudioSpan(str(file), 80_000_000)
    assert len(next(read_spans([late], SAMPLE_RATE))) == 3 * SAMPLE_RATE
    assert isinstance(next(read_spans([open_span], SAMPLE_RATE)), AudioError)


@pytest.mark.parametrize("format", ["mp3", "opus"])
def test_file_writer_clips_loud_samples(format: str) -> None:
    """16-bit formats clip anyway; a clipped tone has a mean square below 1."""
    writer = FileWriter(format, 24_000)
    tone = 3 * np.sin(np.arange(24_000, dtype=np.float32) / 10)
    content = writer.push(tone) + writer.finish()
    decoded, _ = soundfile.read(BytesIO(content), dtype="float32")
    assert 0.5 < np.square(decoded).mean() < 1
    assert writer.seconds == 1.0
