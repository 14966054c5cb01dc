"""The task of synthesis: text to speech. This module does not import torch.

Legend: B utterances, S samples, L symbols.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sbkit.base.arrays import Array
from sbkit.base.errors import BundleError
from sbkit.base.units import SAMPLE_RATE
from sbkit.tasks.synthesis_results import METRICS, measure_speech, report_speech
from sbkit.tasks.task import Arrays, Command, Exportable, Graph, LabelFile, Scorer, Task
from sbkit.text.symbols import SYMBOL_TYPES
from sbkit.text.vocabulary import ClassLabels

SHERPA_TOKENS_FILE = "tokens.txt"
EXAMPLE_SYMBOLS_PER_SECOND = 10
EXAMPLE_SYMBOL_IDS = 3  # every voice has at least these
MAX_EXAMPLE_SYMBOLS = 100  # with more, rounding decides which frame is the last symbol's
VITS_SCALES = (0.667, 1.0, 0.8)  # sherpa-onnx's defaults: noise, lengths, noise of lengths


def describe_as_vits(bundle: Any) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Return the metadata and the list of characters that sherpa-onnx needs for `OfflineTts`.

    The model has the interface of a character-based VITS. sherpa-onnx splits a text into sentences
    and characters, looks up the characters in `tokens.txt`, and runs the graph on one sentence at a
    time (`offline-tts-character-frontend.cc`). It does not spell out numbers or abbreviations.

    Raises:
        BundleError: the model reads phonemes; some phonemes have several characters.
    """
    symbol_type = bundle.model.settings["symbol_type"]
    if symbol_type != SYMBOL_TYPES[0]:
        raise BundleError(
            f"sherpa-onnx can only run a TTS model of {SYMBOL_TYPES[0]}, but this one reads "
            f"{symbol_type}. Leave the format out."
        )
    metadata = {
        "model_type": "vits",
        "frontend": "characters",
        "comment": "sbkit",
        "language": bundle.config.language or "und",
        "n_speakers": 1,
        "add_blank": 0,
        "use_eos_bos": 0,
    }
    return metadata, {SHERPA_TOKENS_FILE: list_characters(bundle.labels.names)}


def list_characters(names: list[str]) -> str:
    """List characters and their capitals with ids: sherpa-onnx lowercases only ASCII letters."""
    ids = {name: id for id, name in enumerate(names) if len(name) == 1}
    capitals = {name.upper(): id for name, id in ids.items() if len(name.upper()) == 1}
    return "".join(f"{name} {id}\n" for name, id in (capitals | ids).items())


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


def example_sentence(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return sherpa-onnx's inputs: a sentence (1, L), its length (1,) and three scales (1,)."""
    symbols = example_symbols(run, audio, lengths)[0][:1, :MAX_EXAMPLE_SYMBOLS]
    scales = (np.full(1, scale, np.float32) for scale in VITS_SCALES)
    return symbols, np.array([symbols.shape[1]]), *scales


SYNTHESIS = Task(
    name="sbkit.tasks.synthesis.SYNTHESIS",
    model_name="speech synthesizer",
    metrics=METRICS,
    scorer=Scorer(measure=measure_speech, report=report_speech),
    labels=LabelFile(
        name="symbols.txt",
        key="labels",
        read=lambda file, content: ClassLabels(file=file, content=content),
        names=lambda labels: labels.names,
        arguments=lambda labels: {},
    ),
    export=Exportable(
        model_class="sbkit.models.synthesis.SynthesisModel",
        hub_task="text-to-speech",
        graphs={
            "encode": Graph(
                inputs=("symbols",), outputs=("states", "durations"), arguments=example_symbols
            ),
            "decode": Graph(
                inputs=("states", "index"), outputs=("audio",), arguments=example_states
            ),
            "speak": Graph(
                inputs=("x", "x_length", "noise_scale", "length_scale", "noise_scale_w"),
                outputs=("audio",),
                arguments=example_sentence,
                format="sherpa-onnx",
                companions=describe_as_vits,
            ),
        },
        uses={
            "onnx": "`sbkit speak FOLDER TEXT --out hello.wav --runtime onnx`: `encode.onnx` "
            "turns symbols into states and durations, `decode.onnx` turns the states of frames "
            "into audio.",
            "sherpa-onnx": '`OfflineTts` with `OfflineTtsVitsModelConfig(model="speak.onnx", '
            'tokens="tokens.txt")`; write numbers as words, and set `silence_scale` to 1 to keep '
            "the pauses of the training data.",
        },
    ),
    commands={
        "speak": Command(
            run="sbkit.commands.speak.speak", example='"Good morning." --out hello.wav'
        )
    },
    synthesizer_class="sbkit.runtime.synthesizer.Synthesizer",
)
