"""Decode audio files: bytes -> blocks (S,) of float32, of one channel, at the file's own rate.

PyAV, which brings FFmpeg's libraries, reads every format but one: libsndfile reads PCM in WAV four
times as fast, because FFmpeg cuts it into packets of 4 kB.

Legend: S samples, C channels.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from sbkit.audio.channels import Downmixer
from sbkit.audio.containers import (
    TAG_PREFIXES,
    AudioError,
    Header,
    cut_short,
    ends_early,
    read_header,
)
from sbkit.base.files import pointer_sentence
from sbkit.base.messages import note_once
from sbkit.base.ranges import HOUR
from sbkit.base.units import seconds_to_samples

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame, AudioStream, Packet
    from av.container import InputContainer

SCALED_NOTE = "exceeds full scale. Such files are scaled to it, each as a whole"
CUT_NOTE = "exceeds full scale, where live audio is cut"
EARLY_END_NOTE = "Such files are read up to their last sample"

Signal = npt.NDArray[np.float32]  # (S,)

MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 768_000  # at lower rates a file of kilobytes can last for days
AV_TIME_BASE = 1_000_000  # FFmpeg's unit of the duration of a file
MAX_PEAK = 16.0  # 24 dB above full scale: no recording reaches it, but integers in floats do
MAX_OVERSHOOT = 2.0  # of lossy decoders, 6 dB
MAX_BLOCK_FRAMES = 30_000  # frames of FFmpeg in a block; Opus has up to 400 a second
MAX_BLOCK_VALUES = 1 << 24  # samples of all channels in a block; 64 MB
# Formats that contain sound. Playlists and formats that name other files are excluded, and so are
# raw formats, which only the file's extension could identify.
DEMUXERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dsf,dts,dtshd,eac3,flac,flv,ircam,loas,matroska,mov,mp3,"
    "mpc,mpc8,mpeg,mpegts,nistsphere,nut,ogg,sox,tak,tta,voc,w64,wav,wv,xwma"
)
# Formats that declare a duration, by FFmpeg's names. It estimates the duration of others.
MP4 = "mov,mp4,m4a,3gp,3g2,mj2"
FORMATS_WITH_DURATION = {
    *("aiff", "ape", "asf", "au", "caf", "flac", "flv", "matroska,webm", "nistsphere", "tta", "wv"),
    MP4,
}
FORMATS_WITH_ESTIMATE = {"mp3", "aac"}  # from the first packets
# Formats that declare the duration of all streams, which may start before the sound or end after.
FORMATS_WITH_FILE_DURATION = {"asf", "caf", "flv", "matroska,webm"}
# Formats whose packets have time stamps. FFmpeg derives those of others from the packets before.
# ASF has some, too, but they count frames that the decoders of WMA hold back.
FORMATS_WITH_TIME_STAMPS = {"flv", "matroska,webm", MP4, "mpeg", "mpegts", "nut", "ogg"}
# Formats whose tracks are known from their first packets. FFmpeg looks for them in 5 MB and 5 s;
# sound that starts later would be no track.
FORMATS_WITH_LATE_TRACKS = {"mpeg", "mpegts"}
LONG_PROBE = {"probesize": str(1 << 26), "analyzeduration": str(HOUR * AV_TIME_BASE)}  # 64 MB
# Codecs that derive positions from the number of channels, even for microphone arrays.
CODECS_WITHOUT_POSITIONS = {"flac", "vorbis"}
# Frames of AMR of this mode or above are 20 ms of a pause, which FFmpeg's decoders refuse.
AMR_PAUSE_MODES = {"amrnb": 8, "amrwb": 9}
AMR_FRAMES_PER_SECOND = 50
ROUNDING = 0.003  # seconds; of durations that a file declares
# Sound may deviate from its time stamps: they are rounded, and browsers take them from a clock.
MAX_HOLE_SECONDS, MAX_OVERLAP_SECONDS = 0.05, 1.0
MAX_UNDECLARED_SECONDS = HOUR  # of silence at once in a file that declares no duration
OGG_SERIAL = 14  # position of the serial number in a page


class Block(NamedTuple):
    """Consecutive samples (S,) and their rate in Hz.

    peak: the peak of all channels for lossless floats, else 0. Decoders of MP3, AAC or Opus
        overshoot as they round, and are cut as in players: to scale a file, it would have to be
        decoded twice. Only a peak above MAX_OVERSHOOT comes from the recording; it is reported, and
        the file is scaled from that block on.
    """

    rate: int
    samples: Signal
    peak: float = 0.0


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read."""

    downmixer: Downmixer  # reduces the file's channels to one
    block_seconds: float  # approximately
    keep_truncated: bool = False  # whether files that end too early are read, not refused


def decode(file: BinaryIO, name: str, options: ReadOptions) -> Iterator[Block]:
    """Yield the blocks of an open file, as they arrive if it is a pipe; choose the reader."""
    header = Header()
    if file.seekable():
        file.seek(0)
        header = read_header(file, name)
        file.seek(0)
        if header.end is not None and not options.keep_truncated:
            raise cut_short(name)
        if header.stray_bytes and not options.keep_truncated:
            raise AudioError(
                "longer than declared",
                f"{name} goes on for {header.stray_bytes:,} bytes behind its declared end. Write "
                "its header anew; of a WAV, ffmpeg -ignore_length 1 -i OLD NEW reads all of it.",
            )
    for number, (start, end) in enumerate(pairwise(header.flac_bounds), 1):
        file.seek(start)
        part = BytesIO(file.read(end - start))
        yield from _PacketReader(part, f"part {number} of {name}", Header(), options).read()
    if header.flac_bounds:
        return
    reader = partial(_PcmReader if header.is_pcm_wav else _PacketReader, file, name, header)
    downmixer = options.downmixer
    for block in reader(options).read():
        if block.peak and not downmixer.peak and file.seekable():
            position = file.tell()
            file.seek(0)
            blocks = reader(replace(options, downmixer=Downmixer(0))).read()
            downmixer.peak = 1.0
            with suppress(AudioError):  # raised below, after the blocks before it
                for other in blocks:
                    downmixer.peak = max(downmixer.peak, other.peak)
            file.seek(position)
        if block.peak > 1:
            note = SCALED_NOTE if downmixer.peak else CUT_NOTE
            note_once(f"note: {name} {note}.", key=note, level=logging.WARNING)
        yield (
            block._replace(samples=block.samples / downmixer.peak) if downmixer.peak > 1 else block
        )


def declared_seconds(file: BinaryIO) -> float:
    """Return the duration that an open file declares, 0 if there is none; may raise anything."""
    file.seek(0)
    header = read_header(file, "the file")
    file.seek(0)
    with _open(file, header.end) as container:
        is_estimate = container.format.name in FORMATS_WITH_ESTIMATE and not header.mp3_frames
        return 0.0 if is_estimate else (container.duration or 0) / AV_TIME_BASE


def file_errors() -> tuple[type[Exception], ...]:
    """Return the libraries' errors for a damaged file. Any other error is a fault of sbkit."""
    import av
    import soundfile

    # PyAV raises the last two for formats that NumPy lacks, and for streams that come late.
    return av.FFmpegError, soundfile.SoundFileError, ValueError, LookupError


def check_rate(name: str, rate: int) -> None:
    """Raise AudioError for a rate in Hz that no recording has; ``name`` says what declares it."""
    if not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
        limits = f"from {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
        fault = f"A sample rate must be {limits}, but {name} declares {rate} Hz."
        raise AudioError("sample rate out of range", fault)


def check_values(name: str, block: npt.NDArray[np.float32]) -> float:
    """Return the largest sample; raises AudioError if it is far beyond 1, or not finite."""
    peak = float(np.abs(block).max(initial=0))
    if not peak < MAX_PEAK:  # also true for NaN
        fault = f"Samples stored as floats must lie between -1 and 1, but {name} reaches {peak:g}."
        raise AudioError("samples out of range", fault)
    return peak


@dataclass(frozen=True)
class _Reader:
    file: BinaryIO
    name: str
    header: Header
    options: ReadOptions

    def block_frames(self, rate: int, channels: int) -> int:
        check_rate(self.name, rate)
        return max(1, min(round(self.options.block_seconds * rate), MAX_BLOCK_VALUES // channels))


class _PcmReader(_Reader):
    """Read a WAV of PCM by libsndfile."""

    def read(self) -> Iterator[Block]:
        import soundfile

        with soundfile.SoundFile(self.file) as sound:
            rate, channels = sound.samplerate, sound.channels
            block_frames = self.block_frames(rate, channels)
            frames_read = 0
            while len(samples := sound.read(block_frames, np.float32, always_2d=True)):
                frames_read += len(samples)
                peak = check_values(self.name, samples)
                names = ("FL", "FR")[:channels]
                downmixed = self.options.downmixer.downmix(self.name, samples, names)
                yield Block(rate, downmixed, peak if sound.subtype in ("FLOAT", "DOUBLE") else 0.0)
        if not frames_read:
            raise _no_samples(self.name)


class _PacketReader(_Reader):
    """Read any other file by PyAV."""

    def read(self) -> Iterator[Block]:
        import av

        try:
            container = _open(self.file, self.header.end)
            may_be_late = container.format.name in FORMATS_WITH_LATE_TRACKS
            if may_be_late and not container.streams.best("audio") and self.file.seekable():
                container.close()
                self.file.seek(0)
                container = _open(self.file, probe=LONG_PROBE)
        except (av.FFmpegError, ValueError) as error:
            if self.header.is_chunked:
                raise cut_short(self.name) from error
            raise not_audio(self.name) from error
        with container:
            stream = container.streams.best("audio")
            if not isinstance(stream, av.AudioStream):
                if container.streams:
                    raise AudioError("no audio track", f"{self.name} has no audio track.")
                raise not_audio(self.name)
            if (count := len(container.streams.audio)) > 1:
                note = f"has {count} audio tracks. The default one is used"
                note_once(f"note: {self.name} {note}.", key=note, level=logging.WARNING)
            decoder = stream.codec_context
            if decoder is None:
                fault = f"FFmpeg has no decoder for the audio of {self.name}. Convert it first."
                raise AudioError("no decoder", fault)
            if stream.codec.lossless:
                decoder.options = {"err_detect": "crccheck+explode"}
            decoder.open()  # PyAV 19 crashes if it uses a decoder that could not be opened
            pending: list[AudioFrame] = []  # frames of one form
            num_samples = block_frames = 0
            form: tuple[int, int, str, str] | None = None  # rate, channels, layout, sample type
            damage: AudioError | None = None
            try:
                for num_silent, frames in self._decode(container, stream, decoder):
                    layout, sample_type = frames[0].layout, frames[0].format.name
                    new_form = (frames[0].rate, layout.nb_channels, layout.name, sample_type)
                    if new_form != form or num_silent:
                        if pending:
                            yield self._join(pending, stream)
                        form, pending, num_samples = new_form, [], 0
                        block_frames = self.block_frames(form[0], form[1])
                    for start in range(0, num_silent, block_frames):
                        size = min(block_frames, num_silent - start)
                        yield Block(frames[0].rate, np.zeros(size, np.float32))
                    pending += frames
                    num_samples += sum([frame.samples for frame in frames])
                    if num_samples >= block_frames or len(pending) >= MAX_BLOCK_FRAMES:
                        yield self._join(pending, stream)
                        pending, num_samples = [], 0
            except AudioError as error:
                damage = error
            if pending:
                yield self._join(pending, stream)
            if damage is not None:
                raise damage

    def _join(self, frames: "list[AudioFrame]", stream: "AudioStream") -> Block:
        """Make a block of frames of one form."""
        layout = frames[0].layout
        planes = np.concatenate([frame.to_ndarray() for frame in frames], 1)
        is_planar = frames[0].format.is_planar
        samples = planes.T if is_planar else planes.reshape(-1, layout.nb_channels)
        type = samples.dtype
        with np.errstate(over="ignore", invalid="ignore"):  # `check_values` finds these values
            floats = samples.astype(np.float32, order="C")
        if type.kind in "iu":
            floats *= np.float32(2.0 ** (1 - 8 * type.itemsize))
        if type.kind == "u":
            floats -= np.float32(1)
        peak = check_values(self.name, floats) if type.kind == "f" else 0.0
        has_positions = stream.codec.name not in CODECS_WITHOUT_POSITIONS
        names = tuple(channel.name for channel in layout.channels) if has_positions else ()
        rate = frames[0].rate
        downmixed = self.options.downmixer.downmix(self.name, floats, names)
        return Block(
            rate, downmixed, peak if stream.codec.lossless or peak > MAX_OVERSHOOT else 0.0
        )

    def _decode(
        self, container: "InputContainer", stream: "AudioStream", decoder: "AudioCodecContext"
    ) -> "Iterator[tuple[int, list[AudioFrame]]]":
        """Yield the frames of packets, each with the number of silent samples before them.

        An error in the middle of the sound is damage. At the end of the sound, the length tells
        whether the file is complete.
        """
        import av

        num_errors = num_packets = 0
        has_failed = False
        packets = _PacketClock(container, stream)
        format = container.format.name
        page = 0  # position of the latest packet's page in an Ogg
        try:
            for packet in packets:
                try:
                    frames = _frames_of(decoder, packet)
                except av.FFmpegError:
                    is_sound = not bytes(packet).startswith(TAG_PREFIXES)
                    num_errors += is_sound and packets.seconds > 0
                    continue
                num_packets += packet.size > 0
                if not frames:
                    continue
                hole = packets.hole_before(frames[0])
                is_lost = hole > 0 and format not in FORMATS_WITH_TIME_STAMPS
                if format == "ogg" and packet.pos not in (None, page):
                    is_lost = self._has_lost_pages(page, packet.pos)
                    page = packet.pos
                if num_errors or is_lost:
                    raise _damaged(self.name, packets.seconds)
                yield packets.place(hole, frames), frames
        except (av.InvalidDataError, av.BlockingIOError):
            pass  # other data after the sound
        except av.FFmpegError:
            has_failed = True
        if packets.silence:
            silence = f"no sound for {packets.silence:.1f} s by its time stamps"
            note_once(f"note: {self.name} has {silence}. They are read as silence.")
        share = self.header.declared_share
        declared = self._declared_seconds(container, stream) if share else 0.0
        if format == MP4:  # it may declare the duration of a track without the delay before it
            declared = max(declared, min(declared + packets.delay, packets.last_start))
        if not packets.seconds:
            raise cut_short(self.name) if declared or share > 1 else _no_samples(self.name)
        # Decoders drop what an encoder adds before the sound and, to fill the last packet, after.
        seconds = max(
            packets.seconds + decoder.delay / stream.rate,
            packets.silence + num_packets * decoder.frame_size / stream.rate,
        )
        if format in FORMATS_WITH_FILE_DURATION:
            seconds = max(seconds, packets.file_end)
        if share > 1:
            declared, seconds = packets.seconds * share, packets.seconds
        if seconds + ROUNDING < declared:
            self._check_missing(declared, seconds)
        if num_errors > 1 or has_failed:  # a truncated packet is one error
            raise _damaged(self.name, packets.seconds)

    def _check_missing(self, declared: float, seconds: float) -> None:
        """Note that the file ends early; raises AudioError if too much is missing."""
        missing = declared - seconds
        if ends_early(declared, missing) and not self.options.keep_truncated:
            raise cut_short(self.name, declared, seconds)
        note = f"note: {self.name} ends {missing:.3f} s before its declared end."
        note_once(f"{note} {EARLY_END_NOTE}.", key=EARLY_END_NOTE, level=logging.WARNING)

    def _has_lost_pages(self, first: int, second: int) -> bool:
        """Check whether pages of an Ogg are missing between two; FFmpeg drops damaged ones."""
        if not first or not self.file.seekable():
            return False
        position = self.file.tell()
        pages: list[tuple[bytes, int]] = []  # the serial number of the stream, and the page's
        for start in (first, second):
            self.file.seek(start + OGG_SERIAL)
            pages.append((self.file.read(4), int.from_bytes(self.file.read(4), "little")))
        self.file.seek(position)
        return pages[0][0] == pages[1][0] and pages[1][1] > pages[0][1] + 1

    def _declared_seconds(self, container: "InputContainer", stream: "AudioStream") -> float:
        if self.header.mp3_frames:
            return self.header.mp3_frames * stream.codec_context.frame_size / stream.rate
        if container.format.name not in FORMATS_WITH_DURATION:
            return 0.0
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        return (container.duration or 0) / AV_TIME_BASE


class _PacketClock:
    """Yield the packets of a stream, and place their frames in the time of the file.

    A player shows the start of the container as 0: the earliest time stamp of any stream, but in an
    MP4 the start of its edit lists, which may delay all streams. A hole is filled if it lies in the
    duration that the container declares. Where it declares none, a longer one than an hour is a
    clock that was set anew. Time stamps of other lossy formats place nothing.
    """

    def __init__(self, container: "InputContainer", stream: "AudioStream") -> None:
        self._container = container
        self._stream = stream
        self._start = (container.start_time or 0) / AV_TIME_BASE  # the time stamp at 0 s
        self._end: float | None = None  # the declared end
        format = container.format.name
        # Only the fragments of an MP4 without samples in its tables declare their durations.
        is_declared = format in FORMATS_WITH_DURATION and (format != MP4 or stream.frames)
        if is_declared and container.duration is not None:
            self._end = container.duration / AV_TIME_BASE
            if format == MP4 and 0 < self._start <= MAX_UNDECLARED_SECONDS:
                self._end += self._start
                self._start = 0.0
        self.last_start = 0.0  # of the last packet in the index of the file
        if stream.index_entries and stream.time_base is not None:
            last = stream.index_entries[-1].timestamp
            self.last_start = float(last * stream.time_base) - self._start
        is_exact = format in FORMATS_WITH_TIME_STAMPS or stream.codec.lossless
        self._max_hole = MAX_HOLE_SECONDS if is_exact else math.inf
        self.file_end = 0.0  # of the latest packet of any stream
        self.seconds = 0.0  # the end of the sound so far, with the silence in it
        self.silence = 0.0  # its seconds
        self.delay = 0.0  # those before the sound

    def __iter__(self) -> "Iterator[Packet[AudioStream]]":
        if self._container.format.name in FORMATS_WITH_FILE_DURATION:
            return self._demux_all()
        return self._container.demux(self._stream)

    def _demux_all(self) -> "Iterator[Packet[AudioStream]]":
        """Yield the packets of the stream, and note the end of each stream."""
        for packet in self._container.demux():
            if packet.pts is not None and packet.time_base is not None:
                end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                self.file_end = max(self.file_end, end)
            if packet.stream is self._stream:
                yield cast("Packet[AudioStream]", packet)

    def hole_before(self, frame: "AudioFrame") -> float:
        """Return the seconds of silence before a frame.

        After a time stamp that cannot be true, the sound continues without silence.
        """
        if frame.time is None:
            return 0.0
        start = frame.time - self._start
        hole = start - self.seconds
        if -MAX_OVERLAP_SECONDS <= hole <= self._max_hole:
            return 0.0
        is_possible = hole <= MAX_UNDECLARED_SECONDS if self._end is None else start <= self._end
        if hole > 0 and is_possible:
            return hole
        self._start += hole
        return 0.0

    def place(self, hole: float, frames: "list[AudioFrame]") -> int:
        """Place the frames of a packet after a hole, and return its number of samples."""
        rate = frames[0].rate
        num_silent = seconds_to_samples(hole, rate)
        if not self.seconds:
            self.delay = hole
        self.silence += num_silent / rate
        self.seconds += (num_silent + sum([frame.samples for frame in frames])) / rate
        return num_silent


def _open(
    file: BinaryIO, end: int | None = None, probe: Mapping[str, str] = MappingProxyType({})
) -> "InputContainer":
    """Open a file up to its end; raises av.FFmpegError or ValueError if it is not audio.

    probe: options of FFmpeg for how far it looks for tracks.
    """
    import av

    def read(size: int) -> bytes:
        return file.read(size if end is None else max(0, min(size, end - file.tell())))

    # Hide the file's name, because FFmpeg would trust its extension.
    stream = SimpleNamespace(read=read, seek=file.seek, tell=file.tell, seekable=file.seekable)
    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": "", **probe}
    # PyAV 18 raises UnicodeDecodeError for tags in another encoding; PyAV 19 never does.
    tags: dict[str, Any] = {} if av.__version__ >= "19" else {"metadata_errors": "ignore"}
    container: InputContainer = av.open(stream, "r", options=options, **tags)
    return container


def _frames_of(decoder: "AudioCodecContext", packet: "Packet[AudioStream]") -> "list[AudioFrame]":
    """Decode a packet; raises av.FFmpegError if it is damaged."""
    import av

    pause_mode = AMR_PAUSE_MODES.get(decoder.name)
    if pause_mode and packet.size and bytes(packet)[0] >> 3 & 15 >= pause_mode:
        silence = np.zeros((1, decoder.sample_rate // AMR_FRAMES_PER_SECOND), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, "fltp", "mono")
        frame.sample_rate = decoder.sample_rate
        return [frame]
    return decoder.decode(packet)


def _no_samples(name: str) -> AudioError:
    return AudioError("no samples", f"{name} has no samples.")


def _damaged(name: str, seconds: float) -> AudioError:
    return AudioError("cut short or damaged", f"{name} is damaged at {seconds:.1f} s.")


def not_audio(name: str) -> AudioError:
    """Return the error of a file that is not audio."""
    fault = f"The content of {name} is not recognized as audio (wav, flac, ogg, mp3, m4a ...)."
    return AudioError("not audio", pointer_sentence(name) or fault)
