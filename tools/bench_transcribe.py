"""Transcribe with a bundle's formats in alternating rounds, and compare their speeds.

python -m tools.bench_transcribe BUNDLE DATA [--rounds 5]

BUNDLE has the formats of `sbkit export RUN --out BUNDLE --formats onnx,sherpa-onnx`;
DATA is a table as for `sbkit score`. All decode the same clips greedily, in batches of similar
lengths: sbkit forms its own, sherpa-onnx gets batches of BATCH_SECONDS. Prints seconds of audio per
second (RTFx), and their ratio to torch's.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench import Figures, answer, start_worker, take_turns

TORCH = "torch"
SIDES = (TORCH, "onnx", "onnx-int8", "sherpa-onnx")
RATE, FULL_SCALE = 16_000, 32_768
BATCH_SECONDS = 60.0  # of padded audio
Clips = Sequence[npt.NDArray[np.int16]]
Transcribe = Callable[[Clips], list[str]]


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options)
        return
    arguments = [str(options.bundle), str(options.data)]
    with ExitStack() as stack:
        started = (start_worker("tools.bench_transcribe", name, arguments) for name in SIDES)
        sides = [stack.enter_context(side) for side in started]
        take_turns({side.name: side.measure for side in sides}, options.rounds, TORCH)


def run_side(options: argparse.Namespace) -> None:
    """Transcribe all clips in each round."""
    clips, expected = read_clips(options.bundle, options.data)
    transcribe = load(options.side, options.bundle)
    seconds = sum(map(len, clips)) / RATE

    def measure() -> Figures:
        start = time.perf_counter()
        texts = transcribe(clips)
        rtfx = seconds / (time.perf_counter() - start)
        pairs = zip(texts, expected, strict=True)
        different = sum(text.split() != expected_text.split() for text, expected_text in pairs)
        return {"RTFx": rtfx, "clips": len(clips), "with other words": different}

    answer({}, measure)


def read_clips(folder: Path, data: Path) -> tuple[Clips, list[str]]:
    """Read all clips of the data, the shortest first, and transcribe them with the bundle."""
    from sbkit.runtime.runtimes import load_bundle
    from sbkit.runtime.score_sets import prepare_user_set, read_whole_clips
    from sbkit.tasks.asr.bundle import as_recognizer

    bundle = as_recognizer(load_bundle(folder, decoder="greedy"))
    rows = prepare_user_set(bundle, data)
    clips = [row["audio"] for batch in read_whole_clips(rows, RATE) for row in batch.values()]
    return clips, in_batches(bundle.transcribe)(clips)


def in_batches(transcribe: Transcribe) -> Transcribe:
    """Cut clips, sorted by length, into batches of at most BATCH_SECONDS of padded audio."""

    def transcribe_batches(clips: Clips) -> list[str]:
        batches: list[list[npt.NDArray[np.int16]]] = [[]]
        for clip in clips:
            if batches[-1] and len(clip) * (len(batches[-1]) + 1) > BATCH_SECONDS * RATE:
                batches.append([])
            batches[-1].append(clip)
        return [text for batch in batches for text in transcribe(batch)]

    return transcribe_batches


def load(side: str, folder: Path) -> Transcribe:
    """Load the format of a side; return a function that transcribes clips with it."""
    if side == "sherpa-onnx":
        return in_batches(load_sherpa(folder / "sherpa-onnx"))
    from sbkit.tasks.asr.predict import Transcriber

    runtime, _, precision = side.partition("-")
    options: Any = {"decoder": "greedy", "device": "cpu", "times": False}
    loaded = Transcriber.load(folder, runtime=runtime, precision=precision or "fp32", **options)
    return lambda clips: [*map(str, loaded.stream(clips, RATE))]


def load_sherpa(folder: Path) -> Transcribe:
    """Load sherpa-onnx, which computes the features itself."""
    from sbkit.base.imports import require_package

    sherpa = require_package("sherpa_onnx", extra="export")
    recognizer = sherpa.OfflineRecognizer.from_fire_red_asr_ctc(
        model=str(folder / "model.onnx"), tokens=str(folder / "tokens.txt"), num_threads=2
    )

    def transcribe(batch: Clips) -> list[str]:
        streams = [recognizer.create_stream() for _ in batch]
        for stream, clip in zip(streams, batch, strict=True):
            stream.accept_waveform(RATE, clip / np.float32(FULL_SCALE))
        recognizer.decode_streams(streams)
        return [stream.result.text for stream in streams]

    return transcribe


if __name__ == "__main__":
    main()
