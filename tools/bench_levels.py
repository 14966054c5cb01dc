"""Measure how sounds beside speech, pauses and levels change the text of a recognizer.

python -m tools.bench_levels BUNDLE [BUNDLE ...] [--data TABLE] [--clips COUNT]
    [--ways transcribed one-piece live] [--vad BUNDLE]

TABLE is a table as for `sbkit score`; without it, the test clips of the default corpus are used.
COUNT limits their number; those used have all lengths. In one way, the 65 clips of the default
corpus take 320 s of processor time. Decodes greedily, and prints character error rates in percent
(errors / characters) of each condition, for each bundle and each way to run it:

- transcribed: as `sbkit transcribe` does, which cuts recordings in their pauses;
- one-piece: up to 30 s at once, as `sbkit score` does, and programs that run an exported graph;
- live: through a streaming session. Without --ways, a streaming bundle is run live, too.

The conditions:

- softer: the clip as it is, softer by some dB;
- click, bang, beep, tone, loud word: a sound that peaks at full scale, 0.3 s before the clip or
  behind it; the clip peaks some dB below. A loud word is the start of another clip, whose words at
  that end of the text are not counted;
- second speaker: another clip, softer by some dB, 0.5 s behind the first; the reference is both;
- rare speech: the clip is in the middle of a recording, in percent of its length; the rest, and the
  clip itself, has white noise, whose RMS is some dB below the clip's.

A second table has the number of letters that are written for 10 s of hum and of chords, also with a
voice detector.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from recipes.AsteriskPrompts.corpus import prepare_prompts
from sbkit.audio.io import FULL_SCALE, Samples, to_int16
from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.base.units import seconds_to_samples
from sbkit.decoding.word_times import GREEDY
from sbkit.evaluate.wer import ErrorCounts, count_errors
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_sets import prepare_user_set, read_whole_clips
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.asr.session import Final, Session, StreamingRecognizer, advance_batch
from sbkit.tasks.vad.predict import VoiceDetector
from tools.bench import Figures, measure_once
from tools.bench_transcribe import in_batches

CLIP_PEAKS_DB = (0, -10, -15, -20)  # beside a sound at full scale
SOFTER_DB = (10, 20)  # a second speaker
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)  # of speech in a recording
SNRS_DB = (20, 30, 40, 50)
GAINS_DB = (-10, -20, -30)
SPEECHLESS_PEAKS_DB = (-10, -30)
SOUND_GAP_SECONDS, SPEAKER_GAP_SECONDS = 0.3, 0.5
SPEECHLESS_SECONDS = 10.0
BATCH_SESSIONS = 8  # live sessions that run as one batch
WAYS = TRANSCRIBED, ONE_PIECE, LIVE = "transcribed", "one-piece", "live"

Side = Literal["before", "behind"]
SIDES: tuple[Side, ...] = ("before", "behind")  # of the clip
Audio = npt.NDArray[np.floating]  # between -1 and 1
Transcribe = Callable[[Sequence[Samples]], list[str]]


class Clip(NamedTuple):
    """A clip with its text."""

    audio: Audio
    text: str


@dataclass(frozen=True)
class Scene:
    """A clip to recognize, another one to mix with it, and their sample rate."""

    clip: Clip
    other: Clip
    rate: int


@dataclass(frozen=True)
class Recording:
    """Audio with the text that should be written; words of `ignored` ends are not counted."""

    audio: Audio
    text: str
    ignored: Side | None = None


Sound = Callable[[Scene], Audio]
Condition = Callable[[Scene], Recording]


# ---- sounds that peak at 1


def click(scene: Scene) -> Audio:
    """Make 5 ms of a rectangular wave."""
    samples = np.arange(seconds_to_samples(0.005, scene.rate))
    return np.where(samples % 8 < 4, 1.0, -1.0)


def bang(scene: Scene) -> Audio:
    """Make 0.1 s of noise that decays by 35 dB."""
    seconds = _seconds(0.1, scene.rate)
    return at_peak(white_noise(len(seconds)) * np.exp(-40 * seconds), 0)


def beep(scene: Scene) -> Audio:
    """Make 0.25 s at 1 kHz."""
    return harmonic(1000, _seconds(0.25, scene.rate))


def tone(scene: Scene) -> Audio:
    """Make a second at 440 Hz."""
    return harmonic(440, _seconds(1.0, scene.rate))


def loud_word(scene: Scene) -> Audio:
    """Cut out the first 0.5 s of the other clip."""
    return at_peak(scene.other.audio[: seconds_to_samples(0.5, scene.rate)], 0)


def hum(scene: Scene) -> Audio:
    """Make the hum of mains: 50 Hz and its harmonics."""
    return at_peak(harmonic(50, _seconds(SPEECHLESS_SECONDS, scene.rate), num_harmonics=10), 0)


def chords(scene: Scene) -> Audio:
    """Play C major, A minor, F major and G major in turn, one a second, on strings that decay."""
    seconds = _seconds(1.0, scene.rate)
    keys = ((0, 4, 7), (-3, 0, 4), (-7, -3, 0), (-5, -1, 2))  # semitones from middle C
    hertz = [[261.6 * 2 ** (key / 12) for key in chord] for chord in keys]
    strings = [[harmonic(x, seconds, num_harmonics=6) for x in chord] for chord in hertz]
    played = np.sum(strings, axis=1) * np.exp(-3 * seconds)  # (4, S)
    return at_peak(np.resize(played, seconds_to_samples(SPEECHLESS_SECONDS, scene.rate)), 0)


def harmonic(hertz: float, seconds: Audio, num_harmonics: int = 1) -> Audio:
    """Add up sines at multiples of a frequency, each softer than the one before."""
    phases = 2 * np.pi * hertz * seconds
    numbers = np.arange(1, num_harmonics + 1)
    return (1 / numbers) @ np.sin(np.outer(numbers, phases))


def white_noise(size: int) -> Audio:
    """Make white noise with an RMS of 1, always the same."""
    return np.random.default_rng(0).standard_normal(size, np.float32)


def at_peak(audio: Audio, decibels: float) -> Audio:
    """Scale audio so that it peaks at this level, in dB of full scale; silence stays as it is."""
    peak = np.abs(audio).max(initial=0)
    return audio * (amplitude(decibels) / (peak or 1))


def amplitude(decibels: float) -> float:
    """Return the factor of a change in dB."""
    return float(10 ** (decibels / 20))


def _seconds(seconds: float, rate: int) -> Audio:
    """Return the time of each sample."""
    return np.arange(seconds_to_samples(seconds, rate)) / rate


def _silence(seconds: float, rate: int) -> Audio:
    return np.zeros(seconds_to_samples(seconds, rate))


# ---- conditions


def softer(scene: Scene, *, gain_db: float) -> Recording:
    """Change the level of a clip."""
    return Recording(scene.clip.audio * amplitude(gain_db), scene.clip.text)


def beside(scene: Scene, *, sound: Sound, side: Side, peak_db: float) -> Recording:
    """Put a sound at full scale before a clip or behind it."""
    parts = [
        sound(scene),
        _silence(SOUND_GAP_SECONDS, scene.rate),
        at_peak(scene.clip.audio, peak_db),
    ]
    if side == "behind":
        parts.reverse()
    ignored = side if sound is loud_word else None
    return Recording(np.concatenate(parts), scene.clip.text, ignored)


def second_speaker(scene: Scene, *, softer_db: float) -> Recording:
    """Let the other clip follow."""
    parts = [
        at_peak(scene.clip.audio, 0),
        _silence(SPEAKER_GAP_SECONDS, scene.rate),
        at_peak(scene.other.audio, -softer_db),
    ]
    return Recording(np.concatenate(parts), f"{scene.clip.text} {scene.other.text}")


def rare_speech(scene: Scene, *, share: float, snr_db: float) -> Recording:
    """Put a clip in the middle of noise."""
    speech = at_peak(scene.clip.audio, -10)
    around = round(len(speech) * (1 / share - 1) / 2)
    rms = float(np.sqrt(np.square(speech).mean()))
    noise = white_noise(len(speech) + 2 * around) * (rms * amplitude(-snr_db))
    return Recording(np.pad(speech, around) + noise, scene.clip.text)


def speechless(scene: Scene, *, sound: Sound, peak_db: float) -> Recording:
    """Play only a sound."""
    return Recording(at_peak(sound(scene), peak_db), "")


def speech_conditions() -> dict[str, Condition]:
    """Return the conditions with speech, by their names in the table."""
    conditions: dict[str, Condition] = {"clean": partial(softer, gain_db=0)}
    for gain in GAINS_DB:
        conditions[f"{-gain} dB softer"] = partial(softer, gain_db=gain)
    for sound, side, peak in product((click, bang, beep, tone, loud_word), SIDES, CLIP_PEAKS_DB):
        name = f"{sound.__name__.replace('_', ' ')} {side}, speech at {peak} dB"
        conditions[name] = partial(beside, sound=sound, side=side, peak_db=peak)
    for decibels in SOFTER_DB:
        name = f"second speaker, {decibels} dB softer"
        conditions[name] = partial(second_speaker, softer_db=decibels)
    for share, snr in product(SHARES, SNRS_DB):
        name = f"speech in {100 * share:.0f} % of the time, noise at {-snr} dB"
        conditions[name] = partial(rare_speech, share=share, snr_db=snr)
    return conditions


def speechless_conditions() -> dict[str, Condition]:
    """Return the conditions without speech, by their names in the table."""
    return {
        f"{sound.__name__} at {peak} dB": partial(speechless, sound=sound, peak_db=peak)
        for sound, peak in product((hum, chords), SPEECHLESS_PEAKS_DB)
    }


def count_characters(recording: Recording, hypothesis: str) -> ErrorCounts:
    """Count the errors in characters; of an ignored end, any number of words is left out."""
    words = hypothesis.split()
    texts = [hypothesis]
    if recording.ignored == "before":
        texts = [" ".join(words[number:]) for number in range(len(words) + 1)]
    elif recording.ignored == "behind":
        texts = [" ".join(words[:number]) for number in range(len(words) + 1)]
    counts = [count_errors(recording.text, text).characters for text in texts]
    return min(counts, key=lambda count: count.errors)


# ---- recognizers


@dataclass(frozen=True)
class Recognizer:
    """A way to run a bundle, with clips at its rate and texts as it writes them."""

    transcribe: Transcribe
    scenes: Sequence[Scene]

    def error_rate(self, condition: Condition) -> str:
        """Return the cell of a condition with speech."""
        recordings = [*map(condition, self.scenes)]
        texts = self.transcribe([to_int16(recording.audio) for recording in recordings])
        counts = sum(map(count_characters, recordings, texts), ErrorCounts())
        return f"{100 * counts.rate:.1f} ({counts})"

    def letters(self, condition: Condition) -> str:
        """Return the cell of a condition without speech."""
        (text,) = self.transcribe([to_int16(condition(self.scenes[0]).audio)])
        return str(len("".join(text.split())))


def read_scenes(
    bundle: AsrBundle[TorchModel], data: Path | None, num_clips: int | None
) -> list[Scene]:
    """Read clips of all lengths, the shortest first; the other clip of a scene is the next one."""
    if data is None:
        data = prepare_prompts(language=bundle.config.language or "en") / "test.tsv"
    rate = bundle.config.sample_rate
    rows = prepare_user_set(bundle, data)
    clips = [
        Clip(np.asarray(row["audio"] / np.float32(FULL_SCALE)), row["text"])
        for batch in read_whole_clips(rows, rate)
        for row in batch.values()
    ]
    if num_clips is not None:
        indices = np.linspace(0, len(clips) - 1, num_clips).round().astype(int)
        clips = [clips[index] for index in np.unique(indices)]
    return [Scene(*pair, rate) for pair in zip(clips, clips[1:] + clips[:1], strict=True)]


def open_way(
    way: str,
    bundle: AsrBundle[TorchModel],
    opened: AsrBundle[ModelThread],
    detector: VoiceDetector | None,
) -> Transcribe:
    """Return the function that transcribes clips in one of the WAYS."""
    if way == LIVE:
        return partial(run_live, StreamingRecognizer(bundle=opened), detector)
    if way == ONE_PIECE:
        return in_batches(bundle.transcribe)
    return partial(run_files, Transcriber(bundle=opened, times=False, detector=detector))


def run_files(transcriber: Transcriber, clips: Sequence[Samples]) -> list[str]:
    """Transcribe clips as if they were files."""
    texts: list[str] = []
    for transcript in transcriber.stream(clips, transcriber.sample_rate):
        if isinstance(transcript, SbkitError):
            raise transcript
        texts.append(transcript.text)
    return texts


def run_live(
    recognizer: StreamingRecognizer, detector: VoiceDetector | None, clips: Sequence[Samples]
) -> list[str]:
    """Run each clip through a session, whose events do not depend on the size of its blocks."""
    texts: list[str] = []
    for first in range(0, len(clips), BATCH_SESSIONS):
        batch = clips[first : first + BATCH_SESSIONS]
        sessions = [Session(recognizer, detector=detector) for _ in batch]
        for session, clip in zip(sessions, batch, strict=True):
            session.feed(clip)
        for session, events in zip(sessions, advance_batch(sessions), strict=True):
            if isinstance(events, Exception):
                raise events
            finals = [event for event in events + session.finish() if isinstance(event, Final)]
            texts.append(" ".join(final.text for final in finals))
    return texts


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundles", type=Path, metavar="BUNDLE", nargs="+")
    parser.add_argument("--data", type=Path, metavar="TABLE")
    parser.add_argument("--clips", type=int, metavar="COUNT")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--vad", metavar="BUNDLE|silero")
    options = parser.parse_args()
    detector = None if options.vad is None else VoiceDetector.load(options.vad, device="cpu")
    speech: dict[str, Recognizer] = {}
    speechless: dict[str, Recognizer] = {}
    with ExitStack() as stack:
        for folder in options.bundles:
            bundle = as_recognizer(load_bundle(folder, decoder=GREEDY))
            scenes = read_scenes(bundle, options.data, options.clips)
            thread = ModelThread(partial(getattr, bundle, "model"))
            stack.callback(thread.close)
            opened = bundle.with_model(thread)
            is_live = bundle.model.streaming is not None
            for way in options.ways or [TRANSCRIBED, *[LIVE] * is_live]:
                column = f"{folder}, {way}"
                speech[column] = Recognizer(open_way(way, bundle, opened, None), scenes)
                speechless[column] = speech[column]
                if detector is not None and way != ONE_PIECE:
                    transcribe = open_way(way, bundle, opened, detector)
                    speechless[f"{column}, --vad"] = Recognizer(transcribe, scenes)
        print_table(speech_conditions(), speech, Recognizer.error_rate)
        print_table(speechless_conditions(), speechless, Recognizer.letters)


def print_table(
    conditions: Mapping[str, Condition],
    recognizers: Mapping[str, Recognizer],
    measure: Callable[[Recognizer, Condition], str],
) -> None:
    """Print a row for each condition, with a column for each recognizer."""

    def cells(condition: Condition) -> Figures:
        return {name: measure(recognizer, condition) for name, recognizer in recognizers.items()}

    measure_once({name: partial(cells, condition) for name, condition in conditions.items()})
    print()


if __name__ == "__main__":
    run_main(main)
