"""The task of synthesis: text to speech. This module does not import torch.

Legend: B utterances, S samples, L symbols.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sbkit.base.arrays import Array
from sbkit.base.errors import BundleError
from sbkit.base.units import SAMPLE_RATE
from sbkit.logs.metric import Metric
from sbkit.tasks.task import Arrays, Command, Exportable, Graph, LabelFile, Task
from sbkit.text.symbols import SYMBOL_TYPES
from sbkit.text.vocabulary import ClassLabels

SHERPA_TOKENS_FILE = "tokens.txt"
EXAMPLE_SYMBOLS_PER_SECOND = 10  # of example text for a second of audio
EXAMPLE_SYMBOL_IDS = 3  # every voice has at least these
MAX_EXAMPLE_SYMBOLS = 100  # of more, rounding decides which frame is the last symbol's
VITS_SCALES = (0.667, 1.0, 0.8)  # sherpa-onnx's: of noise, lengths, and noise of lengths


def describe_as_vits(bundle: Any) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Return the metadata and the list of characters that sherpa-onnx needs for `OfflineTts`.

    The model has the interface of a VITS of characters. sherpa-onnx splits a text into characters,
    looks them up in `tokens.txt`, and passes those of one sentence to the graph
    (`offline-tts-character-frontend.cc`). It does not spell out numbers or abbreviations.

    Raises:
        BundleError: the model reads phonemes, some of which have several characters.
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
    """List characters with their ids, with capitals: sherpa-onnx lowers only ASCII letters."""
    ids = {name: id for id, name in enumerate(names) if len(name) == 1}
    upper = {name.upper(): id for name, id in ids.items()}
    ids = {name: id for name, id in upper.items() if len(name) == 1} | ids
    return "".join(f"{name} {id}\n" for name, id in ids.items())


def example_symbols(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return symbols for a batch of audio: (B, S) -> (B, L)."""
    count = max(1, audio.shape[1] * EXAMPLE_SYMBOLS_PER_SECOND // SAMPLE_RATE)
    random = np.random.default_rng(count)
    return (random.integers(0, EXAMPLE_SYMBOL_IDS, (len(audio), count)),)


def example_states(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return symbol states and a frame-to-symbol index (four frames per symbol)."""
    states, durations = run("encode", *example_symbols(run, audio, lengths))
    index = np.arange(durations.shape[1]).repeat(4)
    return states, np.tile(index, (len(states), 1))


def example_sentence(run: Callable[..., Arrays], audio: Array, lengths: Array) -> Arrays:
    """Return the inputs of sherpa-onnx: a sentence (1, L), its length (1,), three scales (1,)."""
    symbols = example_symbols(run, audio, lengths)[0][:1, :MAX_EXAMPLE_SYMBOLS]
    scales = (np.full(1, scale, np.float32) for scale in VITS_SCALES)
    return symbols, np.array([symbols.shape[1]]), *scales


SYNTHESIS = Task(
    name="sbkit.tasks.synthesis.SYNTHESIS",
    model_name="speech synthesizer",
    metrics={
        **dict.fromkeys(
            ("distance", "mel_distance", "vocoder_distance", "pitch_error", "length_ratio"),
            Metric(is_fraction=False),
        ),
        "misaligned": Metric(),
    },
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
            "returns the states and durations of symbols, `decode.onnx` the audio of the states of "
            "frames.",
            "sherpa-onnx": '`OfflineTtsVitsModelConfig(model="speak.onnx", tokens="tokens.txt")` '
            "of `OfflineTts`; write numbers as words, and set `silence_scale` to 1 for pauses as "
            "trained.",
        },
    ),
    commands={
        "speak": Command(
            run="sbkit.runtime.synthesizer.speak", example='"Good morning." --out hello.wav'
        )
    },
    synthesizer_class="sbkit.runtime.synthesizer.Synthesizer",
)
