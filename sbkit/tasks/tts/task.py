"""The task of synthesis: text to speech. This module does not import torch.

A synthesizer is scored on recordings: by distances of features, pitch and lengths.

Legend: B utterances, S samples, L symbols, U frames, F features.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.audio.io import MP3_RATES, Samples, encode_mp3, to_int16
from sbkit.base.arrays import Array
from sbkit.base.files import write_bytes_atomically
from sbkit.base.units import SAMPLE_RATE
from sbkit.bundle.task import Arrays, ClipBatch, Figures, Graph, Labels, Task
from sbkit.logs.curves import write_picture
from sbkit.logs.metric import Metric, Metrics, ratio
from sbkit.tasks.tts.symbols import read_texts

SYMBOL_FILE = "symbols.txt"
SEMITONES = 12  # in an octave
NUM_EXAMPLES = 3  # utterances of a test set that are drawn
EXAMPLE_SYMBOLS_PER_SECOND = 10
EXAMPLE_SYMBOL_IDS = 3  # every voice has at least these


class SpeechExample(NamedTuple):
    """An utterance that is drawn and written as audio."""

    id: str
    sample_rate: int  # Hz
    symbols: list[str]
    ends: list[int]  # the frame at which each symbol ends
    recorded: Samples  # (S,)
    synthesized: Samples  # (S,)
    target: Array  # (U, F) normalized features
    predicted: Array  # (U, F)
    voiced: Array  # (U,)
    octaves: Array  # (U,) the pitch
    predicted_octaves: Array  # (U,)


class SpokenUtterance(NamedTuple):
    """The measurements of an utterance."""

    frames: int
    distance: float  # mean difference of log-mel features, summed over frames
    voiced: int  # frames
    squares: float  # squared error of the pitch in octaves, summed over voiced frames
    predicted_frames: float  # by the predicted durations
    vocoder_distance: float  # mean difference of features, after vocoding the recording's own
    is_misaligned: bool  # the text does not match the audio
    example: SpeechExample | None = None  # only in the first utterances of a test set


def draw_examples(examples: Sequence[SpeechExample]) -> bytes:
    """Draw recordings beside their synthesis, with symbols and pitch, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(14, 3 * len(examples)), layout="constrained")
    rows = figure.subplots(len(examples), 2, squeeze=False)
    for example, (recorded_axes, synthesized_axes) in zip(examples, rows, strict=True):
        for axes, title, features, octaves in (
            (recorded_axes, "recorded", example.target, example.octaves),
            (synthesized_axes, "synthesized", example.predicted, example.predicted_octaves),
        ):
            hops = features.reshape(2 * len(features), -1)  # a frame is two hops
            extent = (0, len(features), 0, hops.shape[1])
            axes.imshow(hops.T, origin="lower", aspect="auto", extent=extent)
            pitch = np.where(example.voiced, (octaves + 1.5) * hops.shape[1] / 3, np.nan)
            axes.plot(np.arange(len(pitch)) + 0.5, pitch, "r", label="pitch")
            starts = [0, *example.ends[:-1]]
            axes.vlines(starts, 0, hops.shape[1], "w", lw=0.3)
            middles = np.add(starts, example.ends) / 2
            axes.set_xticks(middles, example.symbols, fontsize=6)
            axes.set(title=f"{example.id}, {title}", yticks=[])
    figure.savefig(png := io.BytesIO(), format="png", dpi=80)
    return png.getvalue()


def example_symbols(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return random symbols that would take about as long as the audio: (B, S) -> (B, L)."""
    count = max(1, audio.shape[1] * EXAMPLE_SYMBOLS_PER_SECOND // SAMPLE_RATE)
    random = np.random.default_rng(count)
    return (random.integers(0, EXAMPLE_SYMBOL_IDS, (len(audio), count)),)


def example_states(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return symbol states and a frame-to-symbol index (four frames per symbol)."""
    states, durations = run("encode", *example_symbols(run, audio, lengths))
    index = np.arange(durations.shape[1]).repeat(4)
    return states, np.tile(index, (len(states), 1))


class TtsTask(Task):
    """Text to speech."""

    model_name = "speech synthesizer"
    predicts = "audio"
    uses = ('speak FOLDER "Good morning." --out hello.wav',)
    metrics: ClassVar[Metrics] = {
        **dict.fromkeys(
            ("distance", "mel_distance", "vocoder_distance", "pitch_error", "length_ratio"),
            Metric(is_fraction=False),
        ),
        "misaligned": Metric(),
    }
    label_file = SYMBOL_FILE
    graphs: ClassVar[Mapping[str, Graph]] = {
        "encode": Graph(
            inputs=("symbols",), outputs=("states", "durations"), arguments=example_symbols
        ),
        "decode": Graph(inputs=("states", "index"), outputs=("audio",), arguments=example_states),
    }
    format_uses: ClassVar[Mapping[str, str]] = {
        "onnx": "`sbkit speak FOLDER TEXT --out hello.wav --runtime onnx`: `encode.onnx` "
        "turns symbols into states and durations, `decode.onnx` turns the states of frames "
        "into audio."
    }
    hub_task = "text-to-speech"

    def model_class(self) -> Any:
        from sbkit.tasks.tts.model import TtsModel

        return TtsModel

    def open_synthesizer(self, folder: Path, **options: Any) -> Any:
        from sbkit.tasks.tts.predict import Synthesizer

        return Synthesizer(folder, **options)

    def predict(self, bundle: Any, batch: ClipBatch) -> list[SpokenUtterance]:
        """Synthesize the texts of recordings, and measure how far they are from the recordings."""
        from sbkit.tasks.tts.recordings import PITCH, SYMBOLS, SpokenCollate, pitch_text

        rate, labels, model = bundle.config.sample_rate, bundle.labels, bundle.model
        frame, symbol_type = model.settings["frame"], model.settings["symbol_type"]
        sentences = [row["sentence"] for row in batch.rows]
        texts = read_texts(sentences, bundle.config.language or "und", symbol_type)
        rows = [  # a table may have columns of these names
            {**row, SYMBOLS: text, PITCH: pitch_text(row["audio"], rate, frame)}
            for row, text in zip(batch.rows, texts, strict=True)
        ]
        spoken = SpokenCollate(labels, rate, frame)(rows).to(model.device)
        outputs = model.call("resynthesize", spoken, num_examples=NUM_EXAMPLES)
        return self.read_outputs(outputs, labels)

    def read_outputs(self, outputs: Any, labels: Labels) -> list[SpokenUtterance]:
        """Compare each utterance of the model's `Synthesized` with its recording."""
        batch, mask = outputs.batch, outputs.mask
        distance = ((outputs.features - outputs.target).abs() * outputs.target_std).mean(2) * mask
        voiced = batch.voiced & mask.bool()
        squares = (outputs.predicted_octaves - batch.octaves).square() * voiced
        measured = zip(
            outputs.frames.tolist(),
            distance.sum(1).tolist(),
            voiced.sum(1).tolist(),
            squares.sum(1).tolist(),
            (outputs.log_durations.exp() * outputs.symbol_mask).sum(1).tolist(),
            outputs.distance.tolist(),
            outputs.is_misaligned.tolist(),
            strict=True,
        )
        utterances = [SpokenUtterance(*values) for values in measured]
        by_frame = (
            *(outputs.target, outputs.features, batch.voiced, batch.octaves),
            outputs.predicted_octaves,
        )
        for row, audio in enumerate(outputs.examples):
            frames, symbols = int(outputs.frames[row]), int(batch.symbol_lengths[row])
            samples = int(batch.audio_lengths[row])
            example = SpeechExample(
                batch.ids[row],
                outputs.sample_rate,
                [labels.names[id] for id in batch.symbols[row, :symbols].tolist()],
                outputs.durations[row, :symbols].cumsum(0).tolist(),
                batch.audio[row, :samples].cpu().numpy(),
                to_int16(audio[:samples].float().cpu().numpy()),
                *(values[row, :frames].cpu().numpy() for values in by_frame),
            )
            utterances[row] = utterances[row]._replace(example=example)
        return utterances

    def result(self, prediction: SpokenUtterance, row: Any, **options: Any) -> SpokenUtterance:
        return prediction  # the figures, which were measured on the recording itself

    def measure(self, results: Sequence[SpokenUtterance]) -> Mapping[str, float]:
        """Return the distances in nats, the error of the pitch in semitones, and two ratios.

        distance: the sum of the other distances, which chooses the best checkpoint.
        """
        frames, distance, voiced, squares, predicted_frames, vocoder_distance, misaligned = (
            math.fsum(values) for values in zip(*(result[:-1] for result in results), strict=True)
        )
        return {
            "distance": distance / frames + vocoder_distance / len(results),
            "mel_distance": distance / frames,
            "vocoder_distance": vocoder_distance / len(results),
            "pitch_error": SEMITONES * math.sqrt(ratio(squares, voiced)),
            "length_ratio": predicted_frames / frames,
            "misaligned": misaligned / len(results),
        }

    def report(
        self,
        folder: Path,
        name: str,
        results: Sequence[SpokenUtterance],
        figures: Figures,
        labels: Labels,
    ) -> None:
        """Draw a few utterances of a test set as `speech_NAME.png`.

        Their audio is `speech_NAME.N_recorded.mp3` and `speech_NAME.N_synthesized.mp3`.
        """
        examples = [result.example for result in results if result.example is not None]
        examples = examples[:NUM_EXAMPLES]
        write_picture(folder / f"speech_{name}.png", lambda: draw_examples(examples))
        for number, example in enumerate(examples, 1):
            for kind in ("recorded", "synthesized"):
                if example.sample_rate in MP3_RATES:
                    mp3 = encode_mp3(getattr(example, kind), example.sample_rate)
                    write_bytes_atomically(folder / f"speech_{name}.{number}_{kind}.mp3", mp3)
