"""Transcribe with a bundle's formats and with SpeechBrain in alternating rounds, and compare them.

python -m tools.bench_transcribe BUNDLE DATA [--rounds 5]

BUNDLE has the formats (`sbkit export RUN --out BUNDLE --formats onnx,sherpa-onnx,speechbrain`),
DATA is a table as `sbkit score` takes it. All decode greedily, the same clips, in batches of like
length: sbkit in its own, the others in those of BATCH_SECONDS. Each side is a process of its own
that is stopped when it has not its turn. Prints seconds of audio per second by round, the medians,
and their ratio to SpeechBrain's `EncoderASR.transcribe_batch`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench_train import Side, take_turns

MODULE = "tools.bench_transcribe"
BASE = "speechbrain"
SIDES = ("torch", "onnx", "onnx-int8", "sherpa-onnx", BASE)
RATE, FULL_SCALE = 16_000, 32_768
BATCH_SECONDS = 60.0  # of padded audio
Clips = Sequence[npt.NDArray[np.int16]]
Transcribe = Callable[[Clips], list[str]]


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options)
        return
    arguments = [str(options.bundle), str(options.data)]
    sides = [Side(name, arguments, {}, MODULE) for name in SIDES]
    try:
        take_turns(sides, options.rounds)
        base = next(side for side in sides if side.name == BASE).median("rtfx")
        for side in sides:
            rtfx = side.median("rtfx")
            print(
                f"{side.name:12} {rtfx:8.0f} RTFx {rtfx / base:6.2f} x {BASE}'s, "
                f"{side.facts['other']} of {side.facts['clips']} clips with other words"
            )
    finally:
        for side in sides:
            side.close()


def serve(options: argparse.Namespace) -> None:
    """Transcribe all clips for each line of standard input, and print the speed."""
    clips, expected = read_clips(options.bundle, options.data)
    transcribe = MAKERS[options.side](options.bundle)
    texts = transcribe(clips)
    other = sum(one.split() != two.split() for one, two in zip(texts, expected, strict=True))
    print(json.dumps({"clips": len(clips), "other": other}), flush=True)
    seconds = sum(map(len, clips)) / RATE
    for _ in sys.stdin:
        began = time.perf_counter()
        transcribe(clips)
        print(json.dumps({"rtfx": seconds / (time.perf_counter() - began)}), flush=True)


def read_clips(folder: Path, data: Path) -> tuple[Clips, list[str]]:
    """Read all clips of the data, and transcribe them with the bundle itself."""
    from sbkit.commands.score import prepare_source
    from sbkit.export.test_sets import read_whole_clips
    from sbkit.runtime.torch_model import load_bundle

    bundle = load_bundle(folder).with_decoder("greedy")
    rows = prepare_source(bundle, data)
    clips = [row["audio"] for batch in read_whole_clips(rows, RATE) for row in batch.values()]
    return clips, [text for batch in batches(clips) for text in bundle.transcribe(batch)]


def batches(clips: Clips) -> list[Clips]:
    """Group clips by length into batches of at most BATCH_SECONDS of padded audio."""
    groups: list[list[npt.NDArray[np.int16]]] = [[]]
    for clip in clips:
        if groups[-1] and len(clip) * (len(groups[-1]) + 1) > BATCH_SECONDS * RATE:
            groups.append([])
        groups[-1].append(clip)
    return list(groups)


def of_sbkit(runtime: str, precision: str, folder: Path) -> Transcribe:
    """Transcribe as `sbkit transcribe` does."""
    from sbkit.runtime.transcriber import Transcriber

    loaded = Transcriber.load(
        folder, runtime=runtime, precision=precision, decoder="greedy", device="cpu", times=False
    )
    return lambda clips: [
        transcript.text for transcript in loaded.transcribe_batch(list(clips), RATE)
    ]


def of_sherpa(folder: Path) -> Transcribe:
    """Transcribe by sherpa-onnx, features included, in batches."""
    from sbkit.base.imports import require_package

    here, sherpa = folder / "sherpa-onnx", require_package("sherpa_onnx", extra="export")
    recognizer = sherpa.OfflineRecognizer.from_fire_red_asr_ctc(
        model=str(here / "model.onnx"), tokens=str(here / "tokens.txt"), num_threads=2
    )

    def transcribe(clips: Clips) -> list[str]:
        texts = []
        for batch in batches(clips):
            streams = [recognizer.create_stream() for _ in batch]
            for stream, clip in zip(streams, batch, strict=True):
                stream.accept_waveform(RATE, clip / np.float32(FULL_SCALE))
            recognizer.decode_streams(streams)
            texts += [stream.result.text for stream in streams]
        return texts

    return transcribe


def of_speechbrain(folder: Path) -> Transcribe:
    """Transcribe by SpeechBrain's `EncoderASR`, with the same weights."""
    import torch
    from speechbrain.inference.ASR import EncoderASR

    from sbkit.audio.lengths import to_relative

    recognizer: Any = EncoderASR.from_hparams(source=str(folder / "speechbrain"), savedir=None)

    def transcribe(clips: Clips) -> list[str]:
        texts: list[str] = []
        for batch in batches(clips):
            rows = [torch.from_numpy(clip / np.float32(FULL_SCALE)) for clip in batch]
            audio = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(clip) for clip in batch])
            texts += recognizer.transcribe_batch(audio, to_relative(lengths, audio.shape[1]))[0]
        return texts

    return transcribe


MAKERS: dict[str, Callable[[Path], Transcribe]] = {
    "torch": lambda folder: of_sbkit("torch", "fp32", folder),
    "onnx": lambda folder: of_sbkit("onnx", "fp32", folder),
    "onnx-int8": lambda folder: of_sbkit("onnx", "int8", folder),
    "sherpa-onnx": of_sherpa,
    BASE: of_speechbrain,
}

if __name__ == "__main__":
    main()
