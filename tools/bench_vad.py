"""Measure a detector of voice activity beside webrtcvad, frame by frame, in noise.

python -m tools.bench_vad RUN|BUNDLE [--aligner RUN|BUNDLE] [--silero]

Needs `pip install webrtcvad-wheels==2.0.14.post1`. The held-out clips are the test split of the
default corpus, whose truth is the level of the clean clips (and their words, aligned by --aligner),
and of FestvoxRu, another voice and language, whose truth are its phone labels. Each clip stands in
a second of silence before and after; noise goes on in it, so many dB below the clip's speech.
Babble is six other clips of the same split at a time. Prints miss and false alarms in percent of
the frames of 20 ms, with 95 % intervals over clips.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recipes.vad.labels import SPEECH, Frames, bridge_pauses, prepare_speech, read_speech
from recipes.vad.noise import coloured
from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS
from sbkit.base.process import require_package, run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.hparams import read_knobs
from sbkit.data.storage.audio_store import read_rows
from sbkit.inference.bundle.export import as_bundle
from sbkit.inference.silero import SILERO
from sbkit.inference.vad import SpeechRules, VoiceDetector

WINDOW = SAMPLE_RATE // WINDOWS
PADDING = 1.0  # seconds of silence before and after a clip
TALKERS, DRAWS = 6, 2000
CONDITIONS = [("clean", None)] + [(kind, db) for kind in ("pink", "babble") for db in (20, 10, 5)]

Detector = Callable[[Samples], Frames]


@dataclass(frozen=True)
class Clip:
    """Clean audio in silence (S,), and which windows are speech (W,)."""

    audio: Samples
    speech: Frames

    def noisy(self, noise: npt.NDArray[np.float32], snr_db: float) -> Samples:
        """Add noise (S,) so many dB below the speech."""
        spoken = np.repeat(self.speech, WINDOW)
        audio = self.audio.astype(np.float32)
        power = np.square(audio[spoken]).mean() / 10 ** (snr_db / 10)
        noise = noise[: len(audio)]
        mixed = audio + noise * np.sqrt(power / np.square(noise).mean())
        return mixed.clip(-32768, 32767).astype(np.int16)


def read_test(**knobs: Any) -> Iterator[Clip]:
    """Yield the clips of a test split."""
    declared = read_knobs(Path("hparams/vad.yaml"), {})
    (split,) = prepare_speech({**declared, **knobs}).test.values()
    around = round(PADDING * WINDOWS)
    for row in read_rows(split, range(len(split))):
        count = len(row["audio"]) // WINDOW
        speech = read_speech(row.get("word_times", row[SPEECH]), count)
        audio = row["audio"][: count * WINDOW]
        if speech.any():
            yield Clip(np.pad(audio, around * WINDOW), np.pad(bridge_pauses(speech), around))


def babble(clips: list[Clip], place: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return the speech of other clips, six at a time, as long as a clip."""
    total = np.zeros(len(clips[place].audio), np.float32)
    others = [n for n in range(len(clips)) if n != place]
    for _ in range(TALKERS):
        spoken = [clips[n] for n in random.permutation(others)[:20]]
        parts = [each.audio[np.repeat(each.speech, WINDOW)].astype(np.float32) for each in spoken]
        joined = np.concatenate([part / np.square(part).mean() ** 0.5 for part in parts])
        total += np.resize(np.roll(joined, random.integers(len(joined))), len(total))
    return total


def webrtc(mode: int) -> Detector:
    """Return webrtcvad of a mode."""
    package = require_package("webrtcvad", extra="webrtcvad-wheels")

    def detect(audio: Samples) -> Frames:
        vad = package.Vad(mode)
        frames = audio.reshape(-1, WINDOW)
        return np.array([vad.is_speech(each.tobytes(), SAMPLE_RATE) for each in frames])

    return detect


def frames_of(detector: VoiceDetector) -> Detector:
    """Return the frames whose probability reaches the onset, at windows of 20 ms."""

    def detect(audio: Samples) -> Frames:
        model = detector.model
        frames = (len(audio) - model.overlap) // model.step
        taken = audio[: frames * model.step + model.overlap]
        found, _ = model.advance(taken, model.start())
        windows = np.arange(len(audio) // WINDOW) * WINDOW // model.step
        return found[windows.clip(max=frames - 1)] >= detector.rules.onset

    return detect


def segments_of(detector: VoiceDetector) -> Detector:
    """Return the windows within segments, without padding."""
    bare = replace(detector, rules=replace(SpeechRules(), padding=0.0))

    def detect(audio: Samples) -> Frames:
        parts = (f"{each.start:.3f}-{each.end:.3f}" for each in bare.speech_segments(audio))
        return read_speech(" ".join(parts), len(audio) // WINDOW)

    return detect


def rate(wrong: list[int], of: list[int]) -> str:
    """Divide, with an interval over clips, in percent."""
    counts = np.array([wrong, of])
    drawn = np.random.default_rng(0).integers(len(of), size=(DRAWS, len(of)))
    rates = 100 * counts[0][drawn].sum(1) / counts[1][drawn].sum(1)
    low, high = np.percentile(rates, (2.5, 97.5))
    return f"{100 * sum(wrong) / sum(of):.1f} ({low:.1f} to {high:.1f})"


def measure(clips: list[Clip], detectors: dict[str, Detector]) -> Iterator[str]:
    """Yield a row of the table for each detector and condition."""
    random = np.random.default_rng(0)
    longest = max(len(each.audio) for each in clips)
    white = torch.randn(longest, generator=torch.Generator().manual_seed(1))
    noises = {"pink": [coloured(white, 1.0).numpy()] * len(clips)}
    noises["babble"] = [babble(clips, place, random) for place in range(len(clips))]
    for kind, db in CONDITIONS:
        audio = [each.audio for each in clips]
        if db is not None:
            audio = [c.noisy(n, db) for c, n in zip(clips, noises[kind], strict=True)]
        for name, detect in detectors.items():
            found = [(clip.speech, detect(each)) for clip, each in zip(clips, audio, strict=True)]
            miss = rate([int((s & ~f).sum()) for s, f in found], [int(s.sum()) for s, _ in found])
            alarm = rate(
                [int((~s & f).sum()) for s, f in found], [int((~s).sum()) for s, _ in found]
            )
            condition = kind if db is None else f"{kind}, {db} dB"
            yield f"| {condition} | {name} | {miss} | {alarm} |"


def main() -> None:
    """Print a table for each corpus."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--aligner", type=Path)
    parser.add_argument("--silero", action="store_true")
    options = parser.parse_args()
    with as_bundle(options.model) as folder:
        detector = VoiceDetector.load(folder)
    detectors = {"own, frames": frames_of(detector), "own, segments": segments_of(detector)}
    detectors |= {f"webrtcvad, mode {mode}": webrtc(mode) for mode in (3, 2, 1, 0)}
    if options.silero:
        detectors["silero-vad, frames"] = frames_of(VoiceDetector.load(SILERO))
    for knobs in (
        {"aligner": options.aligner},
        {"corpus": "recipes.FestvoxRu.corpus", "language": "ru"},
    ):
        clips = list(read_test(**knobs))
        speech, windows = (
            sum(x) for x in zip(*((c.speech.sum(), len(c.speech)) for c in clips), strict=True)
        )
        print(f"\n{knobs}: {len(clips)} clips, {windows} frames, {speech} of speech\n")
        print("| noise | detector | miss % | false alarm % |\n|---|---|---|---|")
        for row in measure(clips, detectors):
            print(row, flush=True)


if __name__ == "__main__":
    run_main(main)
