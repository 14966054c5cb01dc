"""The task of synthesis: text to speech. It imports no torch, which ONNX does without.

Legend: B utterances, S samples, L symbols.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.logs.metric import Metric, Metrics
from sbkit.tasks.task import Graph, LabelFile, Task
from sbkit.text.symbols import KINDS
from sbkit.text.vocabulary import ClassLabels

METRICS: Metrics = {
    "distance": Metric(is_fraction=False),
    "mel_distance": Metric(is_fraction=False),
    "vocoder_distance": Metric(is_fraction=False),
    "pitch_error": Metric(is_fraction=False),
    "length_ratio": Metric(is_fraction=False),
    "misaligned": Metric(),
}


TOKENS = "tokens.txt"
Texts = Mapping[str, str]


def as_vits(bundle: Any) -> tuple[Mapping[str, Any], Texts]:
    """Return the metadata and the list of characters that sherpa-onnx needs for `OfflineTts`.

    The model has the form of a VITS of characters. sherpa-onnx splits a text into characters, looks
    them up in `tokens.txt`, and gives the graph those of one sentence
    (`offline-tts-character-frontend.cc`). It spells out no numbers or abbreviations.

    Raises SbkitError for a voice of phonemes, which are more than a character each.
    """
    kind = bundle.model.settings["kind"]
    if kind != KINDS[0]:
        raise SbkitError(
            f"A voice for sherpa-onnx must read {KINDS[0]}, one by one, but this one reads {kind}. "
            "Leave the format out."
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
    return metadata, {TOKENS: tokens_of(bundle.labels.names)}


def tokens_of(names: list[str]) -> str:
    """List characters with their ids, capitals too: sherpa-onnx lowers those of ASCII alone."""
    ids = {name: id for id, name in enumerate(names) if len(name) == 1}
    upper = {name.upper(): id for name, id in ids.items()}
    ids = {name: id for name, id in upper.items() if len(name) == 1} | ids
    return "".join(f"{name} {id}\n" for name, id in ids.items())


Arrays = Sequence[np.ndarray[Any, Any]]
PER_SECOND = 10  # symbols of text that stand for audio
IDS = 3  # of symbols, as every voice has them
SENTENCE = 100  # symbols; of more, the frame of the last one depends on the last digit
SCALES = (0.667, 1.0, 0.8)  # of noise, lengths, and noise of lengths


def text_of(run: Any, audio: Any, lengths: Any) -> Arrays:
    """Return symbols for a batch of audio: (B, S) -> (B, L)."""
    count = max(1, audio.shape[1] * PER_SECOND // SAMPLE_RATE)
    return (np.random.default_rng(count).integers(0, IDS, (len(audio), count)),)


def states_of(run: Callable[..., Arrays], audio: Any, lengths: Any) -> Arrays:
    """Return the states of symbols, and which of them four frames each are of."""
    states, durations = run("encode", *text_of(run, audio, lengths))
    index = np.arange(durations.shape[1]).repeat(4)
    return states, np.tile(index, (len(states), 1))


def sentence_of(run: Callable[..., Arrays], audio: Any, lengths: Any) -> Arrays:
    """Return what sherpa-onnx gives: a sentence (1, L), its length (1,), and three scales (1,)."""
    symbols = text_of(run, audio, lengths)[0][:1, :SENTENCE]
    scales = (np.full(1, each, np.float32) for each in SCALES)
    return symbols, np.array([symbols.shape[1]]), *scales


SYNTHESIS = Task(
    name="sbkit.tasks.synthesis.SYNTHESIS",
    model_name="synthesizer",
    hub_task="text-to-speech",
    model_class="sbkit.models.synthesis.SynthesisModel",
    labels=LabelFile(
        name="symbols.txt",
        key="labels",
        read=lambda file, content: ClassLabels(file=file, content=content),
        names=lambda labels: labels.names,
        arguments=lambda labels: {},
    ),
    metrics=METRICS,
    commands=("speak",),
    runs={"speak": "sbkit.runtime.synthesizer.speak"},
    voice_class="sbkit.runtime.synthesizer.Synthesizer",
    graphs={
        "encode": Graph(inputs=("symbols",), outputs=("states", "durations"), arguments=text_of),
        "decode": Graph(inputs=("states", "index"), outputs=("audio",), arguments=states_of),
        "speak": Graph(
            inputs=("x", "x_length", "noise_scale", "length_scale", "noise_scale_w"),
            outputs=("audio",),
            arguments=sentence_of,
            format="sherpa-onnx",
            beside=as_vits,
        ),
    },
    uses={
        "onnx": "`sbkit speak FOLDER TEXT --out hello.wav --runtime onnx`: `encode.onnx` gives the "
        "states and durations of symbols, `decode.onnx` the audio of the states of frames.",
        "sherpa-onnx": '`OfflineTtsVitsModelConfig(model="speak.onnx", tokens="tokens.txt")` of '
        "`OfflineTts`; write numbers as words, and set `silence_scale` to 1 for pauses as trained.",
    },
)
