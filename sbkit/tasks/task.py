"""A task: what a model predicts, and what every command has to know of it.

sbkit's own tasks stand beside this file. A task of the user's is an object of this class in a
module of his own: `Recipe(task=...)` names it, and bundles store its dotted path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sbkit.base.errors import SbkitError
from sbkit.logs.metric import LOSS, Metrics

Argument = tuple[str, dict[str, Any]]  # its name, and the keywords of `add_argument`


ONNX = "onnx"
BUILT_IN = "sbkit.tasks."  # modules that a bundle may name without --import


@dataclass(frozen=True, kw_only=True)
class LabelFile:
    """The file from which the labels of a task are read, in a run folder and in a bundle.

    Attributes:
        name: of the file.
        key: of the YAML's object that is made of it, such as `tokenizer`.
        read: makes that object of the file's path and bytes.
        names: the labels as texts, in the order of their ids.
        arguments: what the model's class takes of it, by keyword.
    """

    name: str
    key: str
    read: Callable[[Path, bytes], Any]
    names: Callable[[Any], Sequence[str]]
    arguments: Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How `sbkit score` scores what the model of a bundle predicts.

    Attributes:
        target: what a prediction is compared with: the transcript, a column of the data that
            `--label` names, or the audio itself.
        score: from the bundle, rows, their clips, and the keywords `label` (the column) and `times`
            (whether the words are timed) to a result for each row.
        measure: the figures of a slice of the results, by name.
        describe: a line for the screen.
        report: writes the files of a test set, given folder, name and results; returns the figures.
    """

    target: Literal["text", "label", "audio"]
    score: Callable[..., list[Any]]
    measure: Callable[[Sequence[Any]], Mapping[str, Any]]
    describe: Callable[[Sequence[Any]], str]
    report: Callable[[Path, str, Sequence[Any]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A method of a task's model that runs elsewhere, too: arrays in, arrays out.

    Of each array the first two dimensions are free, such as batch and time, unless its example has
    one of size 1.

    Attributes:
        inputs, outputs: their names, in order.
        arguments: its arrays for a batch of audio, which written forms of it are compared with:
            from `run(name, *arrays)` of the trained model, audio (B, S) between -1 and 1, lengths.
        format: whose folder it is written into; those of `onnx` are what `--runtime onnx` runs.
        beside: from a bundle to the metadata of the graph and the texts of files that its users
            need, by name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Callable[[Callable[..., Sequence[Any]], Any, Any], Sequence[Any]]
    format: str = ONNX
    beside: Callable[[Any], tuple[Mapping[str, Any], Mapping[str, str]]] = lambda bundle: ({}, {})


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts from a batch, how that is scored, and how its bundle is rebuilt.

    Attributes:
        name: the dotted path by which this object is imported.
        model_name: for the model card, such as "speech recognizer".
        hub_task: the name that model hubs have for the task, if any.
        model_class: the dotted path of the class that a bundle is rebuilt as. It takes the
            ModuleList as `model`, the parts by their keys in the YAML, and what `labels.arguments`
            returns; its method `predict(audio, audio_lengths)` takes (B, S) and (B,). Without one
            runs cannot be exported.
        labels: the file of its labels, if it has any.
        training_parts: keys of the parts that a bundle goes without, such as a discriminator.
        heads: keys of the parts with an output for each label.
        metrics: by name, as the Brain has them; the loss for a Brain without any.
        commands: those that take its bundles, such as `transcribe`.
        runs: the dotted paths of the functions that run those of the task itself: from their
            parsed options to an exit code.
        arguments: of those that the command line does not have, as `argparse` takes them: they run
            by `sbkit run BUNDLE COMMAND ...`, and their options have the bundle's folder, too.
        voice_class: of a task whose bundles speak: the dotted path of a class like
            `sbkit.runtime.synthesizer.Synthesizer`, whose `load` opens one.
        graphs: the methods of its model that a bundle's ONNX and torch programs hold, by name,
            where these are not a recognizer's; the model then has `settings`, the plain data that
            whoever calls them needs.
        uses: how such a format is loaded, for the model card, by the name of its folder.
        scorer: without one, `sbkit score` refuses the bundle.
    """

    name: str
    model_name: str
    hub_task: str | None = None
    model_class: str | None = None
    training_parts: tuple[str, ...] = ()
    labels: LabelFile | None = None
    heads: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=lambda: LOSS)
    commands: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    voice_class: str | None = None
    graphs: Mapping[str, Graph] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)
    scorer: Scorer | None = None

    @property
    def label_file(self) -> str | None:
        """Return the name of the file of labels, if there is one."""
        return None if self.labels is None else self.labels.name

    def require(self, command: str) -> None:
        """Raise SbkitError unless a command takes the bundles of this task."""
        if command not in self.commands:
            first = next(iter(self.commands), "")
            own = f"run BUNDLE {first}" if first in self.arguments else f"{first} BUNDLE FILE"
            use = f"Use: sbkit {own}" if first else ""
            raise SbkitError(
                f"`sbkit {command}` must have a bundle of a task that it runs, but this one is of "
                f"a {self.model_name}. {use or 'Load it in Python: sbkit.bundle.bundle'}"
            )

    def import_model(self) -> Any:
        """Import the class that a bundle is rebuilt as; raises SbkitError where there is none."""
        if self.model_class is None:
            raise SbkitError(
                f"The task {self.name} must name its `model_class` for runs to be exported, but "
                "has none. Add it to the task."
            )
        return import_object(self.model_class)


def import_object(name: str) -> Any:
    """Import what a trusted task names by its dotted path."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def load_task(name: str, *, user_modules: frozenset[str] = frozenset()) -> Task:
    """Import the task of a dotted path: one of sbkit's, or of the user's modules ``user_modules``.

    Importing a module runs it, so nothing else is imported.
    Raises SbkitError: it is of another module, or there is no such task.
    """
    module, _, attribute = name.rpartition(".")
    if not (name.startswith(BUILT_IN) or module in user_modules):
        raise SbkitError(
            f"The task of a model must be one of sbkit's, because importing a module runs it, but "
            f"is {name}. If you trust that module, pass --import {module}."
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise SbkitError(
            f"The model's task, {name}, cannot be imported: {error}. Install the version of sbkit "
            "or of the module that the model was trained with, and what it imports."
        ) from error
    if not isinstance(found, Task):
        raise SbkitError(
            f"A task must be a sbkit.tasks.task.Task, but there is none called {name} here. "
            "Install the version of sbkit or of the module that the model was trained with."
        )
    return found
