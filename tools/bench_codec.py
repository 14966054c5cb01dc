"""Compare a codec with Opus on the test clips of its run.

python -m tools.bench_codec RUN [--recognizer BUNDLE] [--language it] [--corpus MODULE]
    [--max-clips N]

RUN is a run of `hparams/codec.yaml`. --language and --corpus choose the test clips of another
corpus, whose language the recognizer must know. Opus is libsndfile's; the bytes of its Ogg file
count. STOI and PESQ need the extra [metrics]. RTFx is seconds of audio per second of processor
time. Means and rates have 95 % intervals over clips.
"""

import importlib.util
import io
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import soundfile

from sbkit.audio.io import Samples
from sbkit.base.machine import cpu_name
from sbkit.base.process import run_main
from sbkit.base.units import samples_to_seconds
from sbkit.export.export import exported_bundle
from sbkit.runtime.codec import Codec
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from tools.bench import Figures, measure_once
from tools.bench_clips import Rows, error_rate, make_parser, read_clips, score_clips

RoundTrip = Callable[[Samples], tuple[Samples, int]]  # a clip -> the decoded clip, coded bytes
RATE = 16_000
OPUS_KBITS = (6, 256)  # at libsndfile's highest and lowest level of compression
MIN_CLIP_SECONDS = 0.5  # STOI and PESQ are not defined for shorter clips
NUM_DRAWS = 1000


def main() -> None:
    """Print a row for the recordings and for each codec."""
    parser = make_parser(__doc__)
    parser.add_argument("--language")
    parser.add_argument("--corpus")
    options = parser.parse_args()
    corpus = {"language": options.language, "corpus": options.corpus}
    rows = read_clips(options.run, options.max_clips, **corpus)
    seconds = sum(samples_to_seconds(len(row["audio"]), RATE) for row in rows)
    print(f"{len(rows)} clips, {seconds:.0f} s, {cpu_name()}")
    recognizer = options.recognizer and load_bundle(options.recognizer).with_decoder("greedy")

    def measure(round_trip: RoundTrip) -> Figures:
        start = time.process_time()
        decoded, sizes = zip(*(round_trip(row["audio"]) for row in rows), strict=True)
        rtfx = seconds / (time.process_time() - start)
        kbits = sum(sizes) * 8 / seconds / 1000
        return {"kbit/s": kbits, **measure_quality(rows, decoded, recognizer), "RTFx": rtfx}

    with exported_bundle(options.run) as folder, Codec.load(folder, device="cpu") as codec:
        sides: dict[str, RoundTrip] = {
            "recordings": lambda clip: (clip, clip.nbytes),
            "this codec": partial(by_codec, codec),
            **{f"opus {kbits}, in Ogg": partial(by_opus, kbits) for kbits in (6, 9)},
        }
        measure_once({name: partial(measure, sides[name]) for name in sides})


def by_codec(codec: Codec, clip: Samples) -> tuple[Samples, int]:
    """Encode and decode a clip with the codec of the run."""
    coded = codec.encode(clip, RATE)
    return codec.decode(coded), math.ceil(coded.codes.size * codec.space.bits / 8)


def by_opus(kbits: int, clip: Samples) -> tuple[Samples, int]:
    """Write a clip as Opus, and read it."""
    lowest, highest = OPUS_KBITS
    level = 1 - (kbits - lowest) / (highest - lowest)
    opus: dict[str, Any] = {"format": "OGG", "subtype": "OPUS", "compression_level": level}
    soundfile.write(file := io.BytesIO(), clip, RATE, **opus)
    size = file.tell()
    file.seek(0)
    decoded, _ = soundfile.read(file, dtype="int16")
    return decoded[: len(clip)], size


def measure_quality(
    rows: Rows, decoded: Sequence[Samples], recognizer: TorchBundle | None
) -> Figures:
    """Return STOI, PESQ and the greedy CER."""
    pairs = [
        (row["audio"][: len(audio)], audio)
        for row, audio in zip(rows, decoded, strict=True)
        if len(audio) >= MIN_CLIP_SECONDS * RATE
    ]
    cer = "-"
    if recognizer is not None:
        cer = error_rate([errors.characters for errors in score_clips(recognizer, rows, decoded)])
    stoi = mean_cell("pystoi", lambda package: [package.stoi(a, b, RATE) for a, b in pairs])
    pesq = mean_cell("pesq", lambda package: [package.pesq(RATE, a, b, "wb") for a, b in pairs])
    return {"STOI": stoi, "PESQ-wb": pesq, "CER greedy": cer}


def mean_cell(package: str, measure: Callable[[Any], list[float]]) -> str:
    """Return a mean over clips with its interval, or "-" if its package is not installed."""
    if importlib.util.find_spec(package) is None:
        return "-"
    values = np.array(measure(importlib.import_module(package)))
    draws = np.random.default_rng(0).integers(len(values), size=(NUM_DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    run_main(main)
