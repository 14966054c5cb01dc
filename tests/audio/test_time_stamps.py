"""Sound is read at the time that its container gives it: late, after gaps, without lost packets."""

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from io import BytesIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioSpan, Samples, read_audio, stream_audio
from sbkit.base import messages
from sbkit.base.units import SAMPLE_RATE
from sbkit.data.clip_decoding import DecodedFile, decode_file
from tests.audio.formats import tone

TOLERANCE = 0.08  # seconds
RATE = 48_000
Piece = tuple[float, float]  # start and end of a tone in seconds
Change = Callable[[list[av.Packet]], list[av.Packet]]
WITH_VIDEO = {"matroska": "mpeg4", "mp4": "mpeg4", "mov": "mpeg4", "mpegts": "mpeg4"}
WITH_VIDEO |= {"webm": "libvpx"}
PAIRS = [
    *(("matroska", codec) for codec in ("libopus", "aac", "pcm_s16le", "flac")),
    *(("mp4", codec) for codec in ("libopus", "aac", "flac")),
    *(("mov", codec) for codec in ("aac", "pcm_s16le", "alac")),
    *(("mpegts", codec) for codec in ("libopus", "aac")),
    *(("webm", "libopus"), ("ogg", "libopus"), ("flv", "aac"), ("mpeg", "mp2")),
]
NO_GAPS = ("mov", "pcm_s16le")  # its packets are samples of a constant length


def write(
    container: str,
    codec: str,
    pieces: Sequence[Piece],
    change: Change = list,
    *,
    is_video: bool = True,
    mute: Piece = (0, 0),
    encoder: dict[str, str] | None = None,
    file: Path | None = None,
    **options: str,
) -> bytes:
    """Write tones at the times of pieces, with a video from 0 s where the container has one.

    change: changes the packets of the sound before they are written.
    mute: where the tones are silent.
    file: for options with which FFmpeg reads again what it wrote.
    """
    with av.open(file or (content := BytesIO()), "w", container, options) as output:
        sound: Any = output.add_stream(codec, RATE, encoder, layout="mono")
        sound.codec_context.open()
        size = sound.codec_context.frame_size or 1024
        packets: list[Any] = []
        for start, end in pieces:
            signal = tone(RATE, seconds=end - start).astype(np.float32)
            signal[slice(*(max(0, round((time - start) * RATE)) for time in mute))] = 0
            signal = np.pad(signal, (0, -len(signal) % size))
            for first in range(0, len(signal), size):
                part = signal[None, first : first + size]
                frame = av.AudioFrame.from_ndarray(part, "fltp", "mono")
                frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
                frame.pts = round(start * RATE) + first
                packets += sound.encode(frame)
        packets = change([*packets, *sound.encode(None)])
        if is_video and container in WITH_VIDEO:
            video: Any = output.add_stream(WITH_VIDEO[container], 10, width=16, height=16)
            video.pix_fmt = "yuv420p"
            for index in range(round(10 * pieces[-1][1])):
                picture = av.VideoFrame(16, 16, "yuv420p")
                picture.pts = index
                packets += video.encode(picture)
            packets += video.encode(None)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            output.mux(packet)
    return file.read_bytes() if file else content.getvalue()


class Pipe(BytesIO):
    """A file that can only be read once, from its start."""

    def seekable(self) -> bool:
        return False


def read(content: bytes) -> Samples:
    return read_audio(BytesIO(content))


def heard(samples: Samples) -> list[Piece]:
    """Return the pieces of samples in which there is a tone."""
    blocks = np.abs(samples[: len(samples) // 160 * 160].astype(int)).reshape(-1, 160).max(1)
    edges = np.flatnonzero(np.diff(blocks > 3000, prepend=False, append=False)) / 100
    return [(float(start), float(end)) for start, end in edges.reshape(-1, 2)]


def assert_heard(samples: Samples, pieces: Iterable[Piece]) -> None:
    np.testing.assert_allclose(heard(samples), [*pieces], rtol=0, atol=TOLERANCE)


def lose(start: float, end: float) -> Change:
    """Return a change that drops the packets which begin between two times."""
    return lambda packets: [p for p in packets if not start <= p.pts * p.time_base < end]


# By the name of a case: what is written, how its packets are changed, and what is heard.
CASES: dict[str, tuple[Sequence[Piece], Change, Sequence[Piece]]] = {
    "late": ([(4, 5)], list, [(4, 5)]),
    "gap": ([(0, 1), (6, 7)], list, [(0, 1), (6, 7)]),
    "lost packets": ([(0, 3)], lose(1, 1.3), [(0, 1), (1.3, 3)]),
}
SILENCE = {"late": 4.0, "gap": 5.0, "lost packets": 0.3}
EXAMPLES = [
    (container, codec, case)
    for (container, codec), case in product(PAIRS, CASES)
    if (container in WITH_VIDEO if case == "late" else (container, codec) != NO_GAPS)
]


@pytest.mark.parametrize(("container", "codec", "case"), EXAMPLES)
def test_tone_is_heard_where_it_was_put(
    container: str, codec: str, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Subtitles of a video were early, and a muted participant made a file "damaged"."""
    written, change, expected = CASES[case]
    file = tmp_path / "a"
    file.write_bytes(write(container, codec, written, change))
    messages.logged_notes.clear()
    caplog.set_level("INFO")
    samples = read_audio(file)
    assert_heard(samples, expected)
    assert np.array_equal(np.concatenate([*stream_audio(file, block_seconds=0.1)]), samples)
    (note,) = caplog.messages
    assert (match := re.fullmatch(f"note: {file} has no sound for (.*) s by its .*", note))
    assert float(match[1]) == pytest.approx(SILENCE[case], abs=0.11)
    if container not in ("mp4", "mov"):  # whose tables stand at the end
        assert np.array_equal(read_audio(Pipe(file.read_bytes())), samples)
    # Spans of a table
    times = [(max(0, start - 0.25), start + 0.5) for start, _ in expected]
    spans = [AudioSpan(str(file), *(round(1e6 * time) for time in span)) for span in times]
    clips = decode_file(spans, SAMPLE_RATE, "pcm", DecodedFile())
    for clip, (begin, end), (start, _) in zip(clips, times, expected, strict=True):
        assert isinstance(clip.audio, bytes)
        assert clip.samples == (end - begin) * SAMPLE_RATE
        *_, tone = heard(soundfile.read(BytesIO(clip.audio), dtype="int16")[0])
        np.testing.assert_allclose(tone, (start - begin, end - begin), rtol=0, atol=TOLERANCE)


def with_edits(content: bytes, edits: Sequence[tuple[int, int]]) -> bytes:
    """Replace the edit list of an MP4: milliseconds, and the first sample or -1 for silence."""
    start = content.index(b"elst") - 4
    (size,) = struct.unpack_from(">I", content, start)
    entries = [struct.pack(">IiI", *edit, 1 << 16) for edit in edits]
    box = struct.pack(">I4sII", 16 + 12 * len(edits), b"elst", 0, len(edits)) + b"".join(entries)
    changed = bytearray(content[:start] + box + content[start + size :])
    for name in (b"moov", b"trak", b"edts"):
        (size_before,) = struct.unpack_from(">I", content, content.index(name) - 4)
        struct.pack_into(">I", changed, content.index(name) - 4, size_before + len(box) - size)
    return bytes(changed)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([(4000, -1), (2000, 0)], [(4, 6)]),
        ([(500, -1), (1000, RATE)], [(0.5, 1.5)]),  # was "truncated"
        ([(1000, RATE)], [(0, 1)]),
    ],
)
@pytest.mark.parametrize(
    ("container", "codec"), [pair for pair in PAIRS if pair[0] in ("mp4", "mov")]
)
def test_edit_list_delays_and_cuts_the_sound(
    container: str, codec: str, edits: Sequence[tuple[int, int]], expected: Sequence[Piece]
) -> None:
    content = write(container, codec, [(4, 6)], is_video=False)
    assert_heard(read(content), [(4, 6)])
    assert_heard(read(with_edits(content, edits)), expected)


@pytest.mark.parametrize("is_video", [True, False])
@pytest.mark.parametrize(
    ("container", "codec"), [pair for pair in PAIRS if pair[0] in ("mp4", "mov")]
)
def test_sound_that_starts_late_is_still_refused_if_it_ends_early(
    container: str, codec: str, is_video: bool, tmp_path: Path
) -> None:
    """An MP4 declares the duration of a track without its delay, which hid what was missing."""
    options = {"file": tmp_path / "a", "movflags": "faststart"}  # its tables come first
    content = write(container, codec, [(4, 14)], is_video=is_video, **options)
    assert_heard(read(content), [(4, 14)])
    early = content[: len(content) * 4 // 5]
    with pytest.raises(AudioError, match=r"14\.\d s, .* 1[12]\.\d s"):
        read(early)
    (piece,) = heard(np.concatenate([*stream_audio(BytesIO(early), keep_truncated=True)]))
    assert piece[0] == pytest.approx(4, abs=TOLERANCE) and 11 < piece[1] < 13


@pytest.mark.parametrize(("container", "codec"), [("mpegts", "aac"), ("mpegts", "mp2")])
def test_sound_that_starts_long_after_the_video_is_found(container: str, codec: str) -> None:
    """FFmpeg looked for tracks in the first seconds, and the file had "no audio track"."""
    assert_heard(read(write(container, codec, [(20, 21)])), [(20, 21)])


def test_start_of_sound_alone_is_its_first_time_stamp() -> None:
    """A recording of a broadcast, or a part of a stream, may begin after hours."""
    for container in ("matroska", "mpegts", "ogg"):
        assert_heard(read(write(container, "libopus", [(4, 5)], is_video=False)), [(0, 1)])
    day = 24 * 60 * 60_000
    content = write("mp4", "aac", [(4, 6)], is_video=False)
    assert_heard(read(with_edits(content, [(day, -1), (2000, 0)])), [(0, 2)])


def test_fragments_of_an_mp4_are_placed_although_only_the_first_is_declared() -> None:
    pieces = [(0, 1), (6, 7)]
    options = {"movflags": "empty_moov", "frag_duration": "500000"}
    content = write("mp4", "aac", pieces, is_video=False, **options)
    for file in (BytesIO(content), Pipe(content), SimpleNamespace(read=BytesIO(content).read)):
        assert_heard(read_audio(file), pieces)
    dash = write("mp4", "aac", [(4, 5)], is_video=False, movflags="delay_moov+frag_keyframe")
    assert_heard(read(dash), [(0, 1)])


@pytest.mark.parametrize("is_video", [True, False])
def test_mp4_cut_in_the_table_of_a_fragment_is_read_up_to_it_if_asked(is_video: bool) -> None:
    options = {"movflags": "empty_moov", "frag_duration": "500000"}
    content = write("mp4", "aac", [(0, 6)], is_video=is_video, **options)
    table = content.rindex(b"moof") - 4
    (size,) = struct.unpack_from(">I", content, table)
    whole = read(content[:table])
    assert 5 < len(whole) / SAMPLE_RATE < 6
    for cut in (8, size // 2, size - 1):
        early = content[: table + cut]
        with pytest.raises(AudioError, match="is truncated"):
            read(early)
        kept = np.concatenate([*stream_audio(BytesIO(early), keep_truncated=True)])
        assert np.array_equal(kept, whole)


# ---- time stamps that are not exact, or wrong


@pytest.mark.parametrize("container", ["matroska", "webm", "mp4", "mpegts"])
def test_jitter_of_time_stamps_inserts_nothing(container: str) -> None:
    """Browsers take them from a clock, and containers round them."""

    def jitter(packets: list[Any]) -> list[Any]:
        for index, packet in enumerate(packets):
            packet.pts = packet.dts = packet.pts + round(index % 3 * 0.009 * RATE)
        return packets

    plain, jittered = (
        read(write(container, "libopus", [(0, 20)], change, is_video=False))
        for change in (list, jitter)
    )
    assert np.array_equal(plain, jittered[: len(plain)])


def test_packets_that_are_late_now_and_then_do_not_add_up() -> None:
    def delay(packets: list[Any]) -> list[Any]:
        for index, packet in enumerate(packets):
            packet.pts = packet.dts = packet.pts + round(max(0, 0.07 - index % 50 * 0.018) * RATE)
        return packets

    samples = read(write("matroska", "libopus", [(0, 20), (24, 25)], delay))
    assert heard(samples)[-1] == pytest.approx((24, 25), abs=TOLERANCE)


@pytest.mark.parametrize("speed", [0.999, 1.0025])
def test_sound_follows_a_clock_that_is_fast(speed: float) -> None:
    """Gaps that are too short to be filled add up."""

    def stretch(packets: list[Any]) -> list[Any]:
        for packet in packets:
            packet.pts = packet.dts = round(packet.pts * speed)
        return packets

    content = write("matroska", "libopus", [(0, 60)], stretch)
    assert len(read(content)) / SAMPLE_RATE == pytest.approx(max(60, 60 * speed), abs=TOLERANCE)


def test_pauses_in_which_opus_sends_nothing_keep_their_length() -> None:
    def drop_pauses(packets: list[Any]) -> list[Any]:
        sent = [packet for packet in packets if packet.size > 3]
        assert len(sent) < len(packets) - 50
        return sent

    options = {"application": "voip", "dtx": "1"}
    for container in ("webm", "ogg"):
        content = write(container, "libopus", [(0, 5)], drop_pauses, mute=(1, 4), encoder=options)
        assert_heard(read(content), [(0, 1), (4, 5)])


def declare(content: bytes, seconds: float) -> bytes:
    """Change the duration that a Matroska declares."""
    start = content.index(b"\x44\x89\x88") + 3
    return content[:start] + struct.pack(">d", 1000 * seconds) + content[start + 8 :]


def test_time_stamp_beyond_what_the_file_declares_inserts_no_silence() -> None:
    pieces = [(0, 1), (6, 7)]
    content = write("matroska", "aac", pieces, is_video=False)
    assert_heard(read(declare(content, 7)), pieces)
    assert_heard(read(declare(content, 5.9)), [(0, 2)])
    three = write("matroska", "aac", [*pieces, (1e6, 1e6 + 1), (1e6 + 3, 1e6 + 4)], is_video=False)
    assert_heard(read(declare(three, 15)), [(0, 1), (6, 8), (10, 11)])


@pytest.mark.parametrize("container", ["webm", "mpegts", "ogg"])
def test_silence_of_an_hour_is_the_longest_that_no_duration_confirms(container: str) -> None:
    options = {"live": "1"} if container == "webm" else {}
    for end, expected in ((3500, 3501), (3700, 2)):
        content = write(container, "libopus", [(0, 1), (end, end + 1)], is_video=False, **options)
        assert len(read(content)) / SAMPLE_RATE == pytest.approx(expected, abs=TOLERANCE)


def test_joined_recordings_have_their_own_clocks() -> None:
    first, second = (
        write("webm", "libopus", pieces, is_video=False, live="1")
        for pieces in ([(0, 2)], [(0, 1), (4, 5)])
    )
    assert_heard(read(first + second), [(0, 3), (6, 7)])


def test_frames_that_a_decoder_holds_back_are_no_hole() -> None:
    """The first two packets of WMA give no frames, and an ASF declares them."""
    content = write("asf", "wmav2", [(0, 3)], encoder={"b": "64000"})
    assert len(read(content)) / SAMPLE_RATE == pytest.approx(3, abs=0.02)


def test_error_in_a_file_with_gaps_still_refuses_it() -> None:
    """Only the decoder, or a checksum, tells damage; an Ogg lacks the pages that FFmpeg dropped."""
    for container, codec in (("matroska", "flac"), ("ogg", "libopus"), ("mpeg", "mp2")):
        content = write(container, codec, [(0, 1), (6, 10)], is_video=False)
        middle = len(content) * 2 // 3
        with pytest.raises(AudioError, match=r"is damaged at [6-9]\.\d s"):
            read(content[:middle] + bytes(400) + content[middle + 400 :])
