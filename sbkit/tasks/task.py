"""A task: what a model predicts, how that is scored, and what can be done with its bundles.

The tasks of sbkit stand beside this file. A user's task is a `Task` object in a module of theirs:
`Recipe(task=...)` names it, and bundles store its dotted path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sbkit.base.errors import BundleError, ConfigError
from sbkit.logs.metric import LOSS, Metrics

Labels = Any  # the object that a task makes from its label file
Result = Any  # of an utterance, as the task's scorer returns it
Array = Any  # of numpy, which the command line does not import
Arrays = Sequence[Array]
Argument = tuple[str, Mapping[str, Any]]  # its name, and the keywords of `add_argument`
Prediction = Literal["text", "label", "speech", "other"]

ONNX = "onnx"
PRECISIONS = {"torch": ("fp32", "bf16", "fp16"), ONNX: ("fp32", "int8")}  # of each runtime
BUILT_IN_PACKAGE = "sbkit.tasks."  # whose tasks a bundle may name without --import
BUILT_IN_USES: Mapping[Prediction, str] = {  # sbkit's commands for bundles, by what they predict
    "text": "transcribe FOLDER talk.wav",
    "label": "classify FOLDER talk.wav",
    "speech": "transcribe RECOGNIZER talk.wav --vad FOLDER",
}


@dataclass(frozen=True, kw_only=True)
class LabelFile:
    """The file that the labels of a task are read from, in a run folder and in a bundle.

    Attributes:
        name: of the file.
        key: of the YAML's object that is made from it, such as `tokenizer`.
        read: makes that object from the file's path and bytes.
        names: the labels as texts, in the order of their ids.
        arguments: the keyword arguments that the model's class takes from that object.
    """

    name: str
    key: str
    read: Callable[[Path, bytes], Labels]
    names: Callable[[Labels], Sequence[str]]
    arguments: Callable[[Labels], Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How `sbkit score` scores what the model of a bundle predicts.

    Attributes:
        target: what a prediction is compared with: the transcript, a column of the data that
            `--label` names, or the audio itself.
        score: returns a result for each row, given the bundle, the rows, their clips, and the
            keywords `label` (the column) and `times` (whether words are timed).
        measure: returns the figures of a slice of the results, by name.
        describe: returns a line for the screen.
        report: writes the files of a test set, given folder, name and results; returns the figures.
    """

    target: Literal["text", "label", "audio"]
    score: Callable[..., list[Result]]
    measure: Callable[[Sequence[Result]], Mapping[str, Any]]
    describe: Callable[[Sequence[Result]], str]
    report: Callable[[Path, str, Sequence[Result]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A method of a task's model that is exported as a graph: arrays in, arrays out.

    The first two dimensions of each array, such as batch and time, are dynamic, unless its example
    has size 1 there.

    Attributes:
        inputs, outputs: their names, in order.
        arguments: returns example inputs for a batch of audio, on which the exported graph is
            compared with the model; takes `run(name, *arrays)` of the trained model, audio (B, S)
            between -1 and 1, and lengths.
        format: the format whose folder holds it; `--runtime onnx` runs those of `onnx`.
        companions: returns, for a bundle, the graph's metadata and the texts of further files that
            its users need, by name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Callable[[Callable[..., Arrays], Array, Array], Arrays]
    format: str = ONNX
    companions: Callable[[Any], tuple[Mapping[str, object], Mapping[str, str]]] = lambda _: ({}, {})


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """What a bundle of the task holds, and what it is rebuilt as.

    Attributes:
        model_class: the dotted path of the class that a bundle is rebuilt as. It takes the
            ModuleList as `model`, the parts by their keys in the YAML, and what `labels.arguments`
            returns; its method `predict(audio, audio_lengths)` takes (B, S) and (B,).
        training_parts: keys of the parts that a bundle omits, such as a discriminator.
        hub_task: the name that model hubs have for the task, if any.
        graphs: the exported methods of the model, by name, for models that are not frame-wise
            recognizers; the model then has `settings`, the plain data that callers need.
        uses: how a format is loaded, for the model card, by the name of its folder.
    """

    model_class: str
    training_parts: tuple[str, ...] = ()
    hub_task: str | None = None
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)

    def import_model_class(self) -> Any:
        """Import the class that a bundle is rebuilt as."""
        return import_object(self.model_class)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that the task itself runs on its bundles.

    Attributes:
        run: the dotted path of a function from the parsed options to an exit code.
        example: the arguments of an example call after the bundle's folder, for the model card.
        arguments: for a command that the command line does not have: its arguments, as `argparse`
            takes them. It is called as `sbkit run BUNDLE COMMAND ...`, and its options also hold
            the bundle's folder. None for sbkit's own commands.
    """

    run: str
    example: str = ""
    arguments: Sequence[Argument] | None = None

    def usage(self, name: str) -> str:
        """Return an example call of the command by its name."""
        call = f"{name} FOLDER" if self.arguments is None else f"run FOLDER {name}"
        return f"{call} {self.example}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts from a batch, and how that is scored.

    >>> from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
    >>> SPEECH_RECOGNITION.predicts, [*SPEECH_RECOGNITION.metrics]
    ('text', ['CER', 'WER'])
    >>> SPEECH_RECOGNITION.uses
    ('transcribe FOLDER talk.wav',)

    Attributes:
        name: the dotted path by which this object is imported.
        model_name: for messages and the model card, such as "speech recognizer".
        predicts: which of sbkit's own commands take its bundles: text (`transcribe`, `tune`), a
            label (`classify`) or speech in each frame (`transcribe --vad`).
        metrics: by name, as the Brain has them; the loss for a Brain without metrics.
        labels: the file of its labels, if it has labels.
        heads: keys of the parts with an output for each label.
        scorer: without one, `sbkit score` refuses the bundle.
        export: without it, runs cannot be exported.
        commands: the commands that the task itself runs, by name.
        synthesizer_class: for text to speech, the dotted path of a class whose `load` opens a
            bundle as a `sbkit.bundle.protocols.SpeechSynthesizer`.
    """

    name: str
    model_name: str
    predicts: Prediction = "other"
    metrics: Metrics = field(default_factory=lambda: LOSS)
    labels: LabelFile | None = None
    heads: tuple[str, ...] = ()
    scorer: Scorer | None = None
    export: Exportable | None = None
    commands: Mapping[str, Command] = field(default_factory=dict)
    synthesizer_class: str | None = None

    @property
    def label_file(self) -> str | None:
        """Return the name of the file of labels, if any."""
        return None if self.labels is None else self.labels.name

    @property
    def model_class(self) -> str | None:
        """Return the dotted path of the class that a bundle is rebuilt as, if any."""
        return None if self.export is None else self.export.model_class

    @property
    def uses(self) -> tuple[str, ...]:
        """Return an example call of each command of `sbkit` that takes its bundles."""
        built_in = [BUILT_IN_USES[self.predicts]] if self.predicts in BUILT_IN_USES else []
        return (*built_in, *(command.usage(name) for name, command in self.commands.items()))

    def require_prediction(self, prediction: Prediction, *, command: str) -> None:
        """Raise BundleError unless the task predicts what a command of sbkit needs."""
        if self.predicts != prediction:
            raise self._unsuitable(command)

    def require_command(self, name: str) -> Command:
        """Return one of the task's commands; raises BundleError for any other name."""
        if name not in self.commands:
            raise self._unsuitable(name)
        return self.commands[name]

    def require_export(self) -> Exportable:
        """Return what is exported; raises ConfigError for a task that only trains."""
        if self.export is None:
            raise ConfigError(
                f"Runs of the task {self.name} cannot be exported: it has no `export`. Add "
                "`export=Exportable(model_class=...)` to the task."
            )
        return self.export

    def _unsuitable(self, command: str) -> BundleError:
        use = f"Use: sbkit {self.uses[0]}" if self.uses else "Use it in Python: sbkit.bundle"
        return BundleError(
            f"`sbkit {command}` cannot run this kind of bundle: {self.model_name}. {use}"
        )


def import_object(name: str) -> Any:
    """Import an object that a trusted task names by its dotted path."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def load_task(name: str, *, user_modules: frozenset[str] = frozenset()) -> Task:
    """Import the task with a dotted path, from `sbkit.tasks` or one of ``user_modules``.

    Importing a module runs it, so no other module is imported.

    Raises:
        BundleError: the path is of another module, or there is no such task.
    """
    module, _, attribute = name.rpartition(".")
    if not (name.startswith(BUILT_IN_PACKAGE) or module in user_modules):
        raise BundleError(
            f"The model's task, {name}, is not one of sbkit's, and importing its module would run "
            f"its code. If you trust that module, pass --import {module}."
        )
    try:
        task = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise BundleError(
            f"The model's task, {name}, cannot be imported: {error}. Install the version of sbkit "
            "or of the module that the model was trained with, and the packages that it imports."
        ) from error
    if not isinstance(task, Task):
        raise BundleError(
            f"The model's task, {name}, is not a sbkit.tasks.task.Task in this installation. "
            "Install the version of sbkit or of the module that the model was trained with."
        )
    return task
