"""Speak the sentences of a run's test clips, and print a table that compares the recordings.

python -m tools.bench_synthesis RUN [--recognizer BUNDLE] [--max-clips N]

RUN is a run of `hparams/tts.yaml`. A recognizer that knows the voice gives the error rates, with
its own decoder and with greedy decoding. For the pitch error, the voice speaks with the durations
that its aligner finds in the recording; only frames that are voiced in both count. The length is
relative to the recording without the silence around it. RTFx is seconds of audio per second of
processor time, and the first audio of a sentence comes after the median delay.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from recipes.synthesis.data import SpokenBatch, SpokenCollate, track_pitch
from sbkit.audio.io import FULL_SCALE, Samples, to_int16
from sbkit.base.machine import cpu_name
from sbkit.base.process import run_main
from sbkit.base.units import samples_to_seconds
from sbkit.export.export import exported_bundle
from sbkit.models.synthesis import frame_index
from sbkit.runtime.synthesizer import Synthesizer
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.tasks.synthesis import SEMITONES
from tools.bench import Figures, measure_once
from tools.bench_clips import Rows, error_rate, make_parser, read_clips, score_clips


def main() -> None:
    """Synthesize the sentences, and print the rows of the table."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = read_clips(options.run, options.max_clips)
    recognizer = options.recognizer and load_bundle(options.recognizer)
    with exported_bundle(options.run) as folder, Synthesizer.load(folder, device="cpu") as voice:
        bundle = load_bundle(folder)
        rate = voice.sample_rate
        collate = SpokenCollate(bundle.labels, rate, bundle.model.settings["frame"])
        batches = [collate([{"percent": 100, "weight": 1.0, **row}]) for row in rows]
        clips = [next(batch.clips()) for batch in batches]
        seconds = sum(samples_to_seconds(len(clip), rate) for clip in clips)

        def score(clips: Sequence[Samples]) -> dict[str, str]:
            if recognizer is None:
                return {}
            cells: dict[str, str] = {}
            for name in ("", " greedy"):
                scored = recognizer.with_decoder("greedy") if name else recognizer
                errors = score_clips(scored, rows, clips)
                cells[f"WER{name}"] = error_rate([text.words for text in errors])
                cells[f"CER{name}"] = error_rate([text.characters for text in errors])
            return cells

        def speak() -> Figures:
            start = time.process_time()
            spoken = [to_int16(voice.speak(row["sentence"])) for row in rows]
            used = time.process_time() - start
            spoken_seconds = sum(samples_to_seconds(len(audio), rate) for audio in spoken)
            return {
                **score(spoken),
                "f0 RMSE": pitch_error(bundle, batches),
                "length": f"{spoken_seconds / seconds:.3f}",
                "RTFx": spoken_seconds / used,
                "first audio (ms)": first_audio_ms(voice, rows),
            }

        print(f"{len(rows)} sentences, {seconds:.0f} s, {cpu_name()}")
        sides: dict[str, Callable[[], Figures]] = {
            "this voice": speak,
            "recordings": lambda: score([row["audio"] for row in rows]),
            "recordings, vocoded": lambda: score([vocode(bundle, batch) for batch in batches]),
        }
        measure_once(sides)


@torch.inference_mode()
def vocode(bundle: TorchBundle, batch: SpokenBatch) -> Samples:
    """Vocode the features of a recording: -> (S,)."""
    prediction = bundle.model.network.predict(batch.audio.float(), batch.audio_lengths)
    return to_int16(prediction[0].numpy())


@torch.inference_mode()
def pitch_error(bundle: TorchBundle, batches: Sequence[SpokenBatch]) -> float:
    """Return the root mean square error of the pitch in semitones."""
    model = bundle.model.network
    rate = bundle.config.sample_rate
    frame = model.features.frame_samples
    squares: list[np.ndarray[Any, Any]] = []
    for batch in batches:
        audio = batch.audio.float() / FULL_SCALE
        features, frames = model.features(audio, batch.audio_lengths)
        normalized = model.mel_decoder.normalize(features)
        _, durations = model.align(batch.symbols, batch.symbol_lengths, normalized, frames)
        states, _ = model.encode(batch.symbols)
        (spoken,) = model.decode(states, frame_index(durations, int(frames)))
        missing = max(0, audio.shape[1] - spoken.shape[1])
        recorded_pitch, spoken_pitch = (
            track_pitch(to_int16(signal[0].numpy()), rate, frame)
            for signal in (audio, pad(spoken, (0, missing))[:, : audio.shape[1]])
        )
        voiced = (recorded_pitch > 0) & (spoken_pitch > 0)
        squares.append(np.square(np.log2(recorded_pitch[voiced] / spoken_pitch[voiced])))
    return SEMITONES * math.sqrt(np.concatenate(squares).mean())


def first_audio_ms(voice: Synthesizer, rows: Rows) -> float:
    """Return the median time to the first audio of a text, in milliseconds."""
    delays: list[float] = []
    for row in rows:
        start = time.perf_counter()
        next(iter(voice.stream(row["sentence"])))
        delays.append(1000 * (time.perf_counter() - start))
    return float(np.median(delays))


if __name__ == "__main__":
    run_main(main)
