"""Compare a voice activity detector with webrtcvad, frame by frame, in noise.

python -m tools.bench_vad RUN|BUNDLE [--recognizer RUN|BUNDLE] [--languages en,it] [--silero]

Needs `pip install webrtcvad-wheels==2.0.14.post1`. The clips are the test splits of the default
corpora, whose truth is the level of the clean clips (near words that --recognizer aligns), and
that of FestvoxRu, another voice and language, whose truth are phone labels. Each clip has a second
of silence before and after it, in noise at a ratio to the clip's speech. Babble is the
speech of six other clips of the split at a time. Prints misses and false alarms in percent of the
windows of 20 ms, with 95 % intervals over clips. A detector says speech where its probability
reaches the onset.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recipes.vad.data import (
    SPEECH,
    Windows,
    add_noise,
    bridge_pauses,
    color,
    prepare_speech,
    speech_of,
)
from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS_PER_SECOND
from sbkit.base.imports import require_package
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.hparams import read_knobs
from sbkit.data.shard import read_rows
from sbkit.export.export import exported_bundle
from sbkit.runtime.voice_detector import SILERO, VoiceDetector
from tools.bench_times import TIMES_COLUMN

WINDOW = SAMPLE_RATE // WINDOWS_PER_SECOND
PADDING = 1.0  # seconds of silence before and after a clip
TALKERS, DRAWS = 6, 2000
NOISES = [("clean", 99)] + [(kind, db) for kind in ("pink", "babble") for db in (20, 10, 5)]
FESTVOX = {"corpus": "recipes.FestvoxRu.corpus", "language": "ru"}

Detector = Callable[[Samples], Windows]
Signal = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LabeledClip:
    """Clean audio in silence (S,), and which windows are speech (W,)."""

    audio: Samples
    speech: Windows

    @property
    def spoken(self) -> Signal:
        """The samples of speech, one after the other."""
        return self.audio[np.repeat(self.speech, WINDOW)].astype(np.float32)

    def noisy(self, noise: Signal, snr_db: float) -> Samples:
        """Add noise (S,) at a given level in dB below the speech, in the band of the features."""
        audio = torch.from_numpy(self.audio.astype(np.float32))[None]
        speech = torch.from_numpy(self.speech)[None]
        in_band = color(torch.from_numpy(noise)[: len(self.audio)], 0.0, SAMPLE_RATE)[None]
        mask = torch.ones_like(audio, dtype=torch.bool)
        mixed = add_noise(audio, speech, in_band, torch.tensor([snr_db]), mask)[0].numpy()
        clipped: Samples = mixed.clip(-32768, 32767).astype(np.int16)
        return clipped


def read_test(**knobs: Any) -> Iterator[LabeledClip]:
    """Yield the clips of a test split."""
    declared = read_knobs(Path("hparams/vad.yaml"), {})
    (split,) = prepare_speech({**declared, **knobs}).test.values()
    around = round(PADDING * WINDOWS_PER_SECOND)
    for row in read_rows(split, range(len(split))):
        count = len(row["audio"]) // WINDOW
        times = {SPEECH: row[TIMES_COLUMN]} if TIMES_COLUMN in row else {}
        speech = bridge_pauses(speech_of({**row, **times}, SAMPLE_RATE))
        if speech.any():
            audio = np.pad(row["audio"][: count * WINDOW], around * WINDOW)
            yield LabeledClip(audio, np.pad(speech, around))


def babble(clips: Sequence[LabeledClip], place: int, random: np.random.Generator) -> Signal:
    """Mix the speech of six other clips to the length of a clip."""
    total = np.zeros(len(clips[place].audio), np.float32)
    other_clips = [n for n in range(len(clips)) if n != place]
    for _ in range(TALKERS):
        parts = [clips[n].spoken for n in random.permutation(other_clips)[:20]]
        joined = np.concatenate([part / np.square(part).mean() ** 0.5 for part in parts])
        total += np.resize(np.roll(joined, random.integers(len(joined))), len(total))
    return total


def webrtc(mode: int, audio: Samples) -> Windows:
    """Run webrtcvad."""
    vad = require_package("webrtcvad", extra="webrtcvad-wheels").Vad(mode)
    windows = audio.reshape(-1, WINDOW)
    return np.array([vad.is_speech(window.tobytes(), SAMPLE_RATE) for window in windows], np.bool_)


def frames_of(detector: VoiceDetector, audio: Samples) -> Windows:
    """Run a detector, and map its frames to windows of 20 ms."""
    model = detector.model
    padded = np.pad(audio, (0, (model.delay + 2) * model.step + model.overlap))
    frames = (len(padded) - model.overlap) // model.step
    outputs, _ = model.advance(padded[: frames * model.step + model.overlap], model.start())
    places = np.arange(len(audio) // WINDOW) * WINDOW // model.step + model.delay
    is_speech: Windows = outputs[places] >= detector.rules.onset
    return is_speech


def rate(pairs: Sequence[tuple[Windows, Windows]]) -> str:
    """Return the percentage of wrong windows, with its interval over clips."""
    counts = np.array([(int((wrong & of).sum()), int(of.sum())) for of, wrong in pairs]).T
    drawn = np.random.default_rng(0).integers(len(pairs), size=(DRAWS, len(pairs)))
    rates = 100 * counts[0][drawn].sum(1) / counts[1][drawn].sum(1)
    low, high = np.percentile(rates, (2.5, 97.5))
    return f"{100 * counts[0].sum() / counts[1].sum():.1f} ({low:.1f} to {high:.1f})"


def measure(clips: Sequence[LabeledClip], detectors: dict[str, Detector]) -> Iterator[str]:
    """Yield a table row for each noise and detector."""
    random, longest = np.random.default_rng(0), max(len(clip.audio) for clip in clips)
    white = torch.randn(longest, generator=torch.Generator().manual_seed(1))
    noises = {"pink": [color(white, 1.0, SAMPLE_RATE).numpy()] * len(clips)}
    noises["babble"] = [babble(clips, place, random) for place in range(len(clips))]
    for kind, db in NOISES:
        audio = [clip.audio for clip in clips]
        if kind in noises:
            audio = [c.noisy(n, db) for c, n in zip(clips, noises[kind], strict=True)]
        for name, detect in detectors.items():
            detections = [
                (clip.speech, detect(samples)) for clip, samples in zip(clips, audio, strict=True)
            ]
            miss, alarm = (
                rate([(s, ~f) for s, f in detections]),
                rate([(~s, f) for s, f in detections]),
            )
            condition = f"{kind}, {db} dB" if kind in noises else kind
            yield f"| {condition} | {name} | {miss} | {alarm} |"


def main() -> None:
    """Print a table for each corpus."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--recognizer", type=Path)
    parser.add_argument("--languages", default="en")
    parser.add_argument("--silero", action="store_true")
    options = parser.parse_args()
    with exported_bundle(options.model) as folder:
        detectors: dict[str, Detector] = {"own": partial(frames_of, VoiceDetector.load(folder))}
    detectors |= {f"webrtcvad, mode {mode}": partial(webrtc, mode) for mode in (3, 2, 1)}
    if options.silero:
        detectors["silero-vad"] = partial(frames_of, VoiceDetector.load(SILERO))
    languages = options.languages.split(",")
    for knobs in [*({"recognizer": options.recognizer, "language": x} for x in languages), FESTVOX]:
        clips = list(read_test(**knobs))
        print(f"\n{knobs}: {len(clips)} clips\n\n| noise | detector | miss % | false alarm % |")
        print("|---|---|---|---|", *measure(clips, detectors), sep="\n", flush=True)


if __name__ == "__main__":
    run_main(main)
