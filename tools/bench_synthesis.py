"""Speak the sentences of a run's test clips, and print a table that compares the recordings.

python -m tools.bench_synthesis RUN [--recognizer BUNDLE] [--max-clips N]

RUN is a run of `hparams/tts.yaml`. A recognizer that knows the voice gives the error rates with
their 95 % intervals over clips, with its own decoder and with greedy decoding. The length is
relative to the recording without the silence around it. RTFx is seconds of audio per second of
processor time, and the first audio of a sentence comes after the median delay.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.synthesis.data import SpokenBatch, SpokenCollate
from sbkit.audio.io import Samples, to_int16
from sbkit.base.machine import cpu_name
from sbkit.base.process import run_main
from sbkit.base.units import samples_to_seconds
from sbkit.checkpoint.run_config import RUN_YAML, folder_override
from sbkit.config.hparams import read_knobs
from sbkit.data.batch import UtteranceDataset
from sbkit.evaluate.intervals import Grouping, intervals_of
from sbkit.evaluate.wer import ErrorCounts, count_errors
from sbkit.export.export import exported_bundle
from sbkit.runtime.synthesizer import Synthesizer
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.train.recipe import load_recipe
from tools.bench import Figures, measure_once

Rows = Sequence[Mapping[str, Any]]  # of clips, with `audio` (S,) int16 and `text`


def main() -> None:
    """Synthesize the sentences, and print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recognizer", type=Path, metavar="BUNDLE")
    parser.add_argument("--max-clips", type=int, default=1000)
    options = parser.parse_args()
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
            greedy = recognizer.with_decoder("greedy")
            rates = score_clips(greedy, rows, clips)
            return {
                **score_clips(recognizer, rows, clips),
                **{f"{name} greedy": rate for name, rate in rates.items()},
            }

        def speak() -> Figures:
            start = time.process_time()
            spoken = [to_int16(voice.speak(row["sentence"])) for row in rows]
            used = time.process_time() - start
            spoken_seconds = sum(samples_to_seconds(len(audio), rate) for audio in spoken)
            return {
                **score(spoken),
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


def read_clips(run: Path, max_clips: int) -> Rows:
    """Return the first test clips of a run."""
    knobs = read_knobs(run / RUN_YAML, folder_override(run / RUN_YAML))
    test_sets = load_recipe(knobs, run / RUN_YAML).prepare_splits(knobs).test
    readers = map(UtteranceDataset, test_sets.values())
    rows = (reader[index] for reader in readers for index in range(len(reader)))
    return [*islice(rows, max_clips)]


def score_clips(bundle: TorchBundle, rows: Rows, clips: Sequence[Samples]) -> dict[str, str]:
    """Transcribe clips one by one; return WER and CER with their counts and intervals."""
    normalize = bundle.normalizer()
    errors = [
        count_errors(normalize(row["text"]), *bundle.transcribe([clip]))
        for row, clip in zip(rows, clips, strict=True)
    ]
    grouping = Grouping("clip", tuple(map(str, range(len(errors)))))
    rates = {"WER": [text.words for text in errors], "CER": [text.characters for text in errors]}
    cells: dict[str, str] = {}
    for name, interval in intervals_of(rates, grouping).items():
        total = sum(rates[name], ErrorCounts())
        cells[name] = f"{100 * total.rate:.1f} % ({total}; {interval})"
    return cells


@torch.inference_mode()
def vocode(bundle: TorchBundle, batch: SpokenBatch) -> Samples:
    """Vocode the features of a recording: -> (S,)."""
    prediction = bundle.model.network.predict(batch.audio.float(), batch.audio_lengths)
    return to_int16(prediction[0].numpy())


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
