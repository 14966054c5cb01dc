"""A task: what a model predicts, how predictions are scored, and which commands run its bundles.

The tasks of sbkit are defined in this folder. Users define a `Task` object in a module of theirs:
`Recipe(task=...)` names it, and bundles store its dotted path.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sbkit.base.errors import BundleError, ConfigError
from sbkit.logs.metric import LOSS, Metrics

Labels = Any  # the object that a task makes from its label file
Result = Any  # of an utterance: what was predicted, beside the right answer
Figures = dict[str, Any]  # of a test set
Array = Any  # of numpy, which the command line does not import
Arrays = Sequence[Array]
Argument = tuple[str, Mapping[str, Any]]  # the name and the keywords of `add_argument`
Prediction = Literal["text", "speech", "other"]

ONNX = "onnx"
PRECISIONS = {"torch": ("fp32", "bf16", "fp16"), ONNX: ("fp32", "int8")}  # of each runtime
BUILT_IN_PACKAGE = "sbkit.tasks."  # bundles may name its tasks without --import
BUILT_IN_USES: Mapping[Prediction, str] = {  # the command that runs bundles with each prediction
    "text": "transcribe FOLDER talk.wav",
    "speech": "transcribe RECOGNIZER talk.wav --vad FOLDER",
}


@dataclass(frozen=True, kw_only=True)
class LabelFile:
    """The file that the labels of a task are read from, in a run folder and in a bundle.

    name: the name of the file.
    key: the YAML key of the object that is made from the file, such as `tokenizer`.
    read: makes that object from the file's path and bytes.
    names: returns the labels as strings, in the order of their ids.
    arguments: returns the keyword arguments that the model's class takes from that object.
    """

    name: str
    key: str
    read: Callable[[Path, bytes], Labels]
    names: Callable[[Labels], Sequence[str]]
    arguments: Callable[[Labels], Mapping[str, object]]


def mean_loss(results: Sequence[Result]) -> Mapping[str, float]:
    """Return the mean of losses, each a sum and a count; NaN without results."""
    loss_sum = math.fsum(loss_sum for loss_sum, _ in results)
    count = math.fsum(count for _, count in results)
    return {"loss": loss_sum / count if count else math.nan}


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How the results of utterances are measured and reported, wherever a model was scored.

    A validation measures them; the test of a run and `sbkit score` also describe and report them.

    measure: takes at least one result, and returns the value of each metric; by default the loss,
        of results that are its sum and its count.
    figures: returns further figures of a test set, such as counts and intervals.
    slice_figures: returns the figures of a slice of a test set; by default the metrics.
    describe: takes all figures of a test set, and returns a line for the screen; by default the
        metrics.
    report: takes a folder, the name of a test set, its results, their figures and the labels of the
        model; writes files, and returns still further figures, if there are any.
    score: takes a bundle, rows, their clips, and the keywords `times` (whether words are timed) and
        `normalizer`; returns a result for each row. Without it, `sbkit score` refuses the bundle,
        and the Brain of a run scores the batches of its recipe with the exported network.
    target: what `score` compares a prediction with: the transcript, or the audio and the other
        columns.
    """

    measure: Callable[[Sequence[Result]], Mapping[str, float]] = mean_loss
    figures: Callable[[Sequence[Result]], Figures] = lambda _: {}
    slice_figures: Callable[[Sequence[Result]], Mapping[str, Any]] | None = None
    describe: Callable[[Figures], str] | None = None
    report: Callable[[Path, str, Sequence[Result], Figures, Labels], Figures | None] | None = None
    score: Callable[..., list[Result]] | None = None
    target: Literal["text", "audio"] = "audio"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A method of a task's model that is exported as an ONNX graph: arrays in, arrays out.

    The first two dimensions of each array, such as batch and time, are dynamic, unless its example
    has size 1 there.

    inputs, outputs: the names of its arrays, in order.
    arguments: takes `run(name, *arrays)` of the trained model, audio (B, S) between -1 and 1, and
        lengths; returns example inputs, on which the exported graph is compared with the model.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Callable[[Callable[..., Arrays], Array, Array], Arrays]


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """What a bundle of the task holds, and which class it is rebuilt as.

    model_class: the dotted path of that class. It takes the ModuleList as `model`, the parts by
        their keys in the YAML, and the result of `labels.arguments`. Its method
        `predict(audio, audio_lengths)` takes (B, S) and (B,).
    training_parts: keys of the parts that a bundle omits, such as a discriminator.
    hub_task: the name of the task on model hubs, if it has one.
    graphs: the methods of the model that are exported, by name. A recognizer has none: it is
        exported as a whole. A model with graphs has `settings`, plain data for their callers.
    uses: how each format is loaded, for the model card.
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
    """A command that the task defines for its bundles.

    run: the dotted path of a function that takes the parsed options and returns an exit code.
    example: for the model card, the arguments of an example call after the bundle's folder.
    arguments: the arguments of a command that is called as `sbkit run BUNDLE COMMAND ...`, as
        `argparse` takes them; the parsed options also have the bundle's folder. None for a command
        of sbkit's own command line, such as `sbkit speak`.
    """

    run: str
    example: str = ""
    arguments: Sequence[Argument] | None = None

    def usage(self, name: str) -> str:
        """Return an example call of the command."""
        call = f"{name} FOLDER" if self.arguments is None else f"run FOLDER {name}"
        return f"{call} {self.example}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts from a batch, and how predictions are scored.

    >>> from sbkit.tasks.recognition.task import SPEECH_RECOGNITION
    >>> SPEECH_RECOGNITION.predicts, [*SPEECH_RECOGNITION.metrics]
    ('text', ['CER', 'WER'])
    >>> SPEECH_RECOGNITION.uses
    ('transcribe FOLDER talk.wav',)

    name: the dotted path by which this object is imported.
    model_name: the term for its models in messages and model cards, such as "speech recognizer".
    predicts: decides which of sbkit's commands take its bundles: text (`transcribe`, `tune`) or
        speech in each frame (`transcribe --vad`).
    metrics: the metrics of the Brain, by name; the loss for a Brain without metrics.
    labels: the file of its labels, if it has labels.
    heads: keys of the parts with an output for each label.
    scorer: how results are measured and reported.
    export: without it, runs cannot be exported.
    commands: the commands that the task defines, by name.
    synthesizer_class: for text to speech, the dotted path of a class whose `load` opens a bundle as
        a `sbkit.bundle.protocols.SpeechSynthesizer`.
    """

    name: str
    model_name: str
    predicts: Prediction = "other"
    metrics: Metrics = field(default_factory=lambda: LOSS)
    labels: LabelFile | None = None
    heads: tuple[str, ...] = ()
    scorer: Scorer = Scorer()
    export: Exportable | None = None
    commands: Mapping[str, Command] = field(default_factory=dict)
    synthesizer_class: str | None = None

    @property
    def label_file(self) -> str | None:
        """The name of the label file, if there is one."""
        return None if self.labels is None else self.labels.name

    @property
    def uses(self) -> tuple[str, ...]:
        """An example call of each command of `sbkit` that takes its bundles."""
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
        """Return `export`; raises ConfigError for a task without it."""
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
    """Import the object with a dotted path, which must come from a trusted task."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def load_task(name: str, *, user_modules: frozenset[str] = frozenset()) -> Task:
    """Import the task with a dotted path, from `sbkit.tasks` or one of ``user_modules``.

    Importing a module runs it, so no other module is imported.

    Raises:
        BundleError: the path is in another module, or is not the path of a task.
    """
    module, _, attribute = name.rpartition(".")
    if not (name.startswith(BUILT_IN_PACKAGE) or module in user_modules):
        raise BundleError(
            f"The model's task, {name}, is not one of sbkit's, and importing its module would run "
            f"its code. If you trust that module, pass --import {module}, or in Python "
            "`user_modules`."
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
            f"The model's task, {name}, is not a sbkit.bundle.task.Task in this installation. "
            "Install the version of sbkit or of the module that the model was trained with."
        )
    return task
