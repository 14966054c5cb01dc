"""Code the test clips of a run by its codec, by Opus and by codec2, and print a table of figures.

python -m tools.bench_codec RUN [--recognizer BUNDLE] [--language it] [--corpus MODULE] [--most N]

RUN is a folder of `hparams/codec.yaml`. With `--language` or `--corpus` the test clips are those of
another corpus, which the recognizer must know. Opus is libsndfile's, in an Ogg file whose bytes
count; codec2 is taken where c2enc and c2dec are installed, STOI and PESQ by the extra [metrics].
RTFx is by the seconds of one core. Each mean over clips has its 95 % interval, drawn by clips.
"""

import importlib.util
import io
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.audio.resample import resample_by_numpy
from sbkit.base.machine import cpu_name
from sbkit.base.units import samples_to_seconds
from sbkit.evaluate.wer import count_errors
from sbkit.export.export import exported_bundle
from sbkit.runtime.codec import Codec
from sbkit.runtime.torch_model import load_bundle
from tools.bench_clips import error_rate, make_parser, read_clips, table_row

Coder = Callable[[Samples], tuple[Samples, int]]  # what became of a clip, and its bytes
RATE = 16_000
OPUS = (6, 256)  # kbit/s of libsndfile's highest and lowest level of compression
MIN_CLIP_SECONDS = 0.5  # for which STOI and PESQ are defined
DRAWS = 1000


def main() -> None:
    """Code the clips with each codec, and print a row for each."""
    parser = make_parser(__doc__)
    parser.add_argument("--language")
    parser.add_argument("--corpus")
    options = parser.parse_args()
    corpus = {"language": options.language, "corpus": options.corpus}
    rows = read_clips(options.run, options.most, **corpus)
    seconds = sum(samples_to_seconds(len(row["audio"]), RATE) for row in rows)
    print(f"{len(rows)} clips, {seconds:.0f} s, {cpu_name()}")
    print("| | kbit/s | STOI | PESQ-wb | CER greedy | RTFx |\n|---|---|---|---|---|---|")
    recognize = None if options.recognizer is None else recognizer(options.recognizer)
    with exported_bundle(options.run) as folder, Codec.load(folder, device="cpu") as codec:
        for name, coder in coders(codec):
            begun = time.process_time()
            coded = [coder(row["audio"]) for row in rows]
            speed = seconds / (time.process_time() - begun)
            kbits = sum(size for _, size in coded) * 8 / seconds / 1000
            figures = judge(rows, [audio for audio, _ in coded], recognize)
            print(table_row(name, f"{kbits:.2f}", *figures, f"{speed:.0f}"), flush=True)


def coders(codec: Codec) -> Iterator[tuple[str, Coder]]:
    """Yield the name and the coder of each row of the table."""
    yield "recordings", lambda clip: (clip, clip.nbytes)
    yield "this codec", partial(by_codec, codec)
    for kbits in (6, 9):
        yield f"opus {kbits}, in Ogg", partial(by_opus, kbits)
    if shutil.which("c2enc") and shutil.which("c2dec"):
        yield "codec2 3200", by_codec2


def by_codec(codec: Codec, clip: Samples) -> tuple[Samples, int]:
    """Code and decode a clip."""
    coded = codec.encode(clip, RATE)
    bits = coded.codes.size * codec.space.bits
    return codec.decode(coded), -(-bits // 8)


def by_opus(kbits: int, clip: Samples) -> tuple[Samples, int]:
    """Write a clip as Opus, and read it."""
    lowest, highest = OPUS
    level = 1 - (kbits - lowest) / (highest - lowest)
    how = {"format": "OGG", "subtype": "OPUS", "compression_level": level}
    soundfile.write(file := io.BytesIO(), clip, RATE, **how)
    size = file.tell()
    file.seek(0)
    decoded, _ = soundfile.read(file, dtype="int16")
    return decoded[: len(clip)], size


def by_codec2(clip: Samples) -> tuple[Samples, int]:
    """Code a clip at 8 kHz by the commands of codec2."""
    narrow = np.rint(resample_by_numpy(clip.astype(np.float32), RATE, 8000)).astype(np.int16)
    coded = pipe(["c2enc", "3200", "-", "-"], narrow.tobytes())
    decoded = np.frombuffer(pipe(["c2dec", "3200", "-", "-"], coded), np.int16)
    resampled = np.rint(resample_by_numpy(decoded.astype(np.float32), 8000, RATE)).clip(
        -FULL_SCALE, 32767
    )
    return resampled.astype(np.int16)[: len(clip)], len(coded)


def pipe(command: list[str], content: bytes) -> bytes:
    """Run a command with bytes on standard input, and return its standard output."""
    return subprocess.run(command, input=content, check=True, capture_output=True).stdout


def judge(
    rows: Sequence[Mapping[str, Any]], decoded: Sequence[Samples], recognize: Any
) -> list[str]:
    """Return STOI, PESQ and CER as they are written in the table."""
    pairs = [
        (np.asarray(row["audio"][: len(audio)]), audio)
        for row, audio in zip(rows, decoded, strict=True)
        if len(audio) >= MIN_CLIP_SECONDS * RATE
    ]
    return [
        of_clips("pystoi", lambda package: [package.stoi(a, b, RATE) for a, b in pairs]),
        of_clips("pesq", lambda package: [package.pesq(RATE, a, b, "wb") for a, b in pairs]),
        "-" if recognize is None else recognize(rows, decoded),
    ]


def of_clips(package: str, measure: Callable[[Any], list[float]]) -> str:
    """Return a mean with its interval, or "-" if its package is not installed."""
    if importlib.util.find_spec(package) is None:
        return "-"
    values = np.array(measure(importlib.import_module(package)))
    draws = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def recognizer(folder: Path) -> Callable[..., str]:
    """Return a function that transcribes clips greedily and writes their CER with its interval."""
    bundle = load_bundle(folder).with_decoder("greedy")
    normalize = bundle.normalizer()

    def recognize(rows: Sequence[Mapping[str, Any]], decoded: Sequence[Samples]) -> str:
        texts = [bundle.transcribe([audio])[0] for audio in decoded]
        pairs = zip(rows, texts, strict=True)
        return error_rate([count_errors(normalize(r["text"]), t).characters for r, t in pairs])

    return recognize


if __name__ == "__main__":
    main()
