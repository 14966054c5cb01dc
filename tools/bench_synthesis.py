"""Speak the sentences of a run's test clips, and print a table of figures beside the recordings.

python -m tools.bench_synthesis RUN [--recognizer BUNDLE] [--most N]

RUN is a folder of `hparams/tts.yaml`. Error rates are of a recognizer that knows the voice, with
its own decoder and greedily. The pitch is compared in frames that are voiced in both, with the
durations of the recording, which the voice's aligner finds; the length is compared with that of the
recording without the silence around it. RTFx is by the seconds of one core.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from recipes.synthesis.data import SpokenBatch, SpokenCollate, track_pitch
from recipes.synthesis.recipe import SEMITONES
from sbkit.audio.io import FULL_SCALE, Samples, to_int16
from sbkit.base.machine import cpu_name
from sbkit.base.units import samples_to_seconds
from sbkit.evaluate.wer import count_errors
from sbkit.export.export import exported_bundle
from sbkit.models.synthesis import frame_index
from sbkit.runtime.synthesizer import Synthesizer
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from tools.bench_clips import error_rate, make_parser, read_clips, table_row

Clips = Sequence[Samples]


def main() -> None:
    """Synthesize the sentences, and print the rows of the table."""
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = read_clips(options.run, options.most)
    with exported_bundle(options.run) as folder, Synthesizer.load(folder, device="cpu") as voice:
        bundle, rate = load_bundle(folder), voice.sample_rate
        collate = SpokenCollate(bundle.labels, rate, bundle.model.settings["frame"])
        batches = [collate([{"percent": 100, "weight": 1.0, **row}]) for row in rows]
        clips = [next(batch.clips()) for batch in batches]
        seconds = sum(samples_to_seconds(len(clip), rate) for clip in clips)
        print(f"{len(rows)} sentences, {seconds:.0f} s, {cpu_name()}")
        print("| | WER | CER | WER greedy | CER greedy | f0 RMSE | length | RTFx |")
        print(f"|{'---|' * 8}")
        judge = partial(error_rates, rows, options.recognizer)
        print(table_row("recordings", *judge([row["audio"] for row in rows]), "-", "1", "-"))
        vocoded = [to_int16(by_vocoder(bundle, batch)) for batch in batches]
        print(table_row("recordings, vocoded", *judge(vocoded), "-", "1", "-"), flush=True)
        begun = time.process_time()
        spoken = [to_int16(voice.speak(row["sentence"])) for row in rows]
        used = time.process_time() - begun
        seconds_made = sum(samples_to_seconds(len(audio), rate) for audio in spoken)
        error = pitch_error(bundle, batches)
        figures = (f"{error:.2f}", f"{seconds_made / seconds:.3f}", f"{seconds_made / used:.0f}")
        print(table_row("this voice", *judge(spoken), *figures))
        print(f"first audio of {first_audio(voice, rows):.0f} ms (median of sentences)")


def by_vocoder(bundle: TorchBundle, batch: SpokenBatch) -> Any:
    """Vocode the features of the recording itself: -> (S,)."""
    prediction = bundle.model.network.predict(batch.audio.float(), batch.audio_lengths)
    return prediction[0].numpy()


@torch.inference_mode()
def pitch_error(bundle: TorchBundle, batches: Sequence[SpokenBatch]) -> float:
    """Return the root mean square error of the pitch in semitones."""
    model, rate = bundle.model.network, bundle.config.sample_rate
    frame, squares = model.features.frame, list[np.ndarray[Any, Any]]()
    for batch in batches:
        audio = batch.audio.float() / FULL_SCALE
        features, frames = model.features(audio, batch.audio_lengths)
        normalized = model.mel_decoder.normalize(features)
        _, durations = model.align(batch.symbols, batch.symbol_lengths, normalized, frames)
        states, _ = model.encode(batch.symbols)
        (spoken,) = model.decode(states, frame_index(durations, int(frames)))
        short = max(0, audio.shape[1] - spoken.shape[1])
        pitch = [
            track_pitch(to_int16(signal[0].numpy()), rate, frame)
            for signal in (audio, pad(spoken, (0, short))[:, : audio.shape[1]])
        ]
        voiced = (pitch[0] > 0) & (pitch[1] > 0)
        squares.append(np.square(np.log2(pitch[0][voiced] / pitch[1][voiced])))
    return SEMITONES * math.sqrt(np.concatenate(squares).mean())


def error_rates(
    rows: Sequence[Mapping[str, Any]], recognizer: Path | None, clips: Clips
) -> list[str]:
    """Return WER and CER of a recognizer, with its decoder and with greedy decoding."""
    if recognizer is None:
        return ["-"] * 4
    bundle = load_bundle(recognizer)
    normalize = bundle.normalizer()
    cells = list[str]()
    for decoded_bundle in (bundle, bundle.with_decoder("greedy")):
        transcribe: Callable[..., list[str]] = decoded_bundle.transcribe
        texts = [transcribe([clip])[0] for clip in clips]
        pairs = zip(rows, texts, strict=True)
        scores = [count_errors(normalize(row["text"]), text) for row, text in pairs]
        cells += [error_rate([score.words for score in scores])]
        cells += [error_rate([score.characters for score in scores])]
    return cells


def first_audio(voice: Synthesizer, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time to the audio of the first sentence, in milliseconds."""
    waits = list[float]()
    for row in rows:
        begun = time.perf_counter()
        next(iter(voice.stream(row["sentence"])))
        waits.append(1000 * (time.perf_counter() - begun))
    return float(np.median(waits))


if __name__ == "__main__":
    main()
