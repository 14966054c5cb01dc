"""Compare a voice activity detector with webrtcvad in noise, by windows of 20 ms.

python -m tools.bench_vad RUN|BUNDLE [--recognizer RUN|BUNDLE] [--languages en,it]

Needs `pip install webrtcvad-wheels==2.0.14.post1`. The clips are the test splits of the default
corpora and of FestvoxRu, another voice and language. The truth of the default corpora follows from
the level of the clean clips (with --recognizer, speech is only near the words that it aligns), that
of FestvoxRu from phone labels. Each clip has a second of silence before and after it, and noise at
a given ratio to its speech. Babble is the speech of six other clips of the split at a time. A
detector says speech where its probability reaches the onset. Prints misses and false alarms in
percent of the windows, with 95 % intervals over clips.
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
    prepare_speech,
    speech_of,
)
from sbkit.audio.augment import color
from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS_PER_SECOND
from sbkit.base.imports import require_package
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.config.hparams import read_knobs
from sbkit.data.shard import read_rows
from sbkit.evaluate.intervals import Grouping, rate_intervals
from sbkit.export.export import exported_bundle
from sbkit.runtime.voice_detector import VoiceDetector
from tools.bench import Figures, measure_once
from tools.bench_times import TIMES_COLUMN

WINDOW = SAMPLE_RATE // WINDOWS_PER_SECOND
PADDING = WINDOWS_PER_SECOND  # windows of silence before and after a clip
NUM_TALKERS = 6  # of babble
NUM_DRAWS = 2000
SNRS_DB = (20, 10, 5)
FESTVOX = {"corpus": "recipes.FestvoxRu.corpus", "language": "ru"}

Detector = Callable[[Samples], Windows]
Signal = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LabeledClip:
    """Clean audio (S,) with silence around it, and whether each window is speech (W,)."""

    audio: Samples
    speech: Windows

    @property
    def spoken(self) -> Signal:
        """The samples of the speech windows, joined."""
        return self.audio[np.repeat(self.speech, WINDOW)].astype(np.float32)

    def noisy(self, noise: Signal, snr_db: float) -> Samples:
        """Add noise (S,) at a ratio to the speech in dB, in the band of the features."""
        audio = torch.from_numpy(self.audio.astype(np.float32))[None]
        speech = torch.from_numpy(self.speech)[None]
        in_band = color(torch.from_numpy(noise)[: len(self.audio)], 0.0, SAMPLE_RATE)[None]
        mask = torch.ones_like(audio, dtype=torch.bool)
        mixed = add_noise(audio, speech, in_band, torch.tensor([snr_db]), mask)[0].numpy()
        clipped: Samples = mixed.clip(-32768, 32767).astype(np.int16)
        return clipped


def read_test(**overrides: Any) -> Iterator[LabeledClip]:
    """Yield the clips of a test split that have speech."""
    knobs = read_knobs(Path("hparams/vad.yaml"), {})
    (split,) = prepare_speech({**knobs, **overrides}).test.values()
    for row in read_rows(split, range(len(split))):
        num_windows = len(row["audio"]) // WINDOW
        times = {SPEECH: row[TIMES_COLUMN]} if TIMES_COLUMN in row else {}
        speech = bridge_pauses(speech_of({**row, **times}, SAMPLE_RATE))
        if speech.any():
            audio = np.pad(row["audio"][: num_windows * WINDOW], PADDING * WINDOW)
            yield LabeledClip(audio, np.pad(speech, PADDING))


def babble(clips: Sequence[LabeledClip], index: int, random: np.random.Generator) -> Signal:
    """Mix the speech of six other clips at a time, as long as the clip at an index."""
    total = np.zeros(len(clips[index].audio), np.float32)
    other_clips = [n for n in range(len(clips)) if n != index]
    for _ in range(NUM_TALKERS):
        parts = [clips[n].spoken for n in random.permutation(other_clips)[:20]]
        joined = np.concatenate([part / np.square(part).mean() ** 0.5 for part in parts])
        total += np.resize(np.roll(joined, random.integers(len(joined))), len(total))
    return total


def detect_by_webrtc(mode: int, audio: Samples) -> Windows:
    """Run webrtcvad on each window."""
    vad = require_package("webrtcvad", extra="webrtcvad-wheels").Vad(mode)
    windows = audio.reshape(-1, WINDOW)
    return np.array([vad.is_speech(window.tobytes(), SAMPLE_RATE) for window in windows], np.bool_)


def detect(detector: VoiceDetector, audio: Samples) -> Windows:
    """Run a detector, and map its frames to windows of 20 ms."""
    model = detector.model
    padded = np.pad(audio, (0, (model.delay + 2) * model.step + model.overlap))
    frames = (len(padded) - model.overlap) // model.step
    outputs, _ = model.advance(padded[: frames * model.step + model.overlap], model.start())
    frame_of_window = np.arange(len(audio) // WINDOW) * WINDOW // model.step + model.delay
    is_speech: Windows = outputs[frame_of_window] >= detector.rules.onset
    return is_speech


def error_cell(errors: Sequence[Windows], relevant: Sequence[Windows]) -> str:
    """Return the percentage of the relevant windows that are errors, with its interval."""
    counts, totals = (np.array([[*map(np.sum, masks)]]) for masks in (errors, relevant))
    clips = Grouping("clip", tuple(f"{number:06}" for number in range(len(errors))))
    (interval,) = rate_intervals(counts, totals, clips, draws=NUM_DRAWS)
    return f"{100 * counts.sum() / totals.sum():.1f} ({interval.format_ends()})"


def conditions(clips: Sequence[LabeledClip]) -> Iterator[tuple[str, list[Samples]]]:
    """Yield the name of each noise with its level, and the clips in it."""
    yield "clean", [clip.audio for clip in clips]
    random = np.random.default_rng(0)
    longest = max(len(clip.audio) for clip in clips)
    white = torch.randn(longest, generator=torch.Generator().manual_seed(1))
    noises = {
        "pink": [color(white, 1.0, SAMPLE_RATE).numpy()] * len(clips),
        "babble": [babble(clips, index, random) for index in range(len(clips))],
    }
    for name, noise in noises.items():
        for db in SNRS_DB:
            audio = [clip.noisy(signal, db) for clip, signal in zip(clips, noise, strict=True)]
            yield f"{name}, {db} dB", audio


def measure(clips: Sequence[LabeledClip], audio: Sequence[Samples], detector: Detector) -> Figures:
    """Return the errors of a detector on clips with noise."""
    speech = [clip.speech for clip in clips]
    silence = [~windows for windows in speech]
    detected = [detector(samples) for samples in audio]
    misses = [s & ~d for s, d in zip(speech, detected, strict=True)]
    alarms = [s & d for s, d in zip(silence, detected, strict=True)]
    return {"miss %": error_cell(misses, speech), "false alarm %": error_cell(alarms, silence)}


def main() -> None:
    """Print a table for each corpus."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--recognizer", type=Path)
    parser.add_argument("--languages", default="en")
    options = parser.parse_args()
    with exported_bundle(options.model) as folder:
        detectors: dict[str, Detector] = {"own": partial(detect, VoiceDetector.load(folder))}
    detectors |= {f"webrtcvad, mode {mode}": partial(detect_by_webrtc, mode) for mode in (3, 2)}
    corpora = [
        {"recognizer": options.recognizer, "language": language}
        for language in options.languages.split(",")
    ]
    for corpus in [*corpora, FESTVOX]:
        clips = list(read_test(**corpus))
        print(f"\n{corpus}: {len(clips)} clips\n")
        sides = {
            f"{condition}, {name}": partial(measure, clips, audio, detector)
            for condition, audio in conditions(clips)
            for name, detector in detectors.items()
        }
        measure_once(sides)


if __name__ == "__main__":
    run_main(main)
