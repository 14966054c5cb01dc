"""A task: what a model predicts, how predictions are scored, and what its bundles hold.

The tasks of sbkit are in sbkit/tasks. A user's task is a subclass in a module of theirs, which
imports nothing of `recipes`. A recipe derives from its task; bundles store the task's dotted path.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.imports import dotted_path
from sbkit.logs.metric import LOSS_METRIC, Metrics

Labels = Any  # the object that a task makes from its label file
Result = Any  # the prediction for an utterance, beside the right answer
Figures = Any  # figures of a test set: plain data by name, or a record with `plain` that returns it
AnyArray = Any  # a NumPy array; the command line does not import NumPy
Arrays = Sequence[AnyArray]
Prediction = Literal["text", "speech", "codes", "audio", "other"]

BUILT_IN_PACKAGE = "sbkit.tasks."  # bundles may name its tasks without --import


def mean_loss(results: Sequence[Result]) -> Mapping[str, float]:
    """Return the mean of losses, each a sum and a count; NaN without results."""
    loss_sum = math.fsum(loss_sum for loss_sum, _ in results)
    count = math.fsum(count for _, count in results)
    return {"loss": loss_sum / count if count else math.nan}


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
    arguments: Callable[[Callable[..., Arrays], AnyArray, AnyArray], Arrays]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipBatch:
    """Clips that a task predicts in one call, and the options of the predictions.

    clips: (S,) each in the scale of int16, at the sample rate of the bundle.
    rows: of the clips: columns of a table in a test, else the values that are given beside them.
    times: whether words are timed, from the start of their clip.
    phrases: texts to expect, if the decoder of the bundle can prefer them.
    nbest: how many of the most probable texts to return.
    with_greedy: whether to return the greedy text, too, if a beam search is used.
    encode: returns decoder inputs, joined where clips overlap; only if the task `decodes_frames`.
    """

    clips: Sequence[AnyArray]
    rows: Sequence[Mapping[str, Any]] = ()
    times: bool = False
    phrases: tuple[str, ...] = ()
    nbest: int = 0
    with_greedy: bool = False
    encode: Callable[[], Sequence[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class SideField:
    """A value that a task reads for each clip: a column, an option `--side`, or a form field.

    kind: "audio" is the path of a file in a table or an option, and a file in a request; the task
        gets its samples (S,) at the model's rate.
    default: of a text that is missing or empty; None: there must be one.
    """

    kind: Literal["text", "audio"] = "text"
    default: str | None = None


class Task:
    """What a model predicts, how it is scored, and what its bundles hold; it has no state.

    Methods import what they need, so that the module of a task imports without torch.

    >>> from sbkit.tasks.asr.task import AsrTask
    >>> AsrTask().name, AsrTask.predicts, next(iter(AsrTask.metrics))
    ('sbkit.tasks.asr.task.AsrTask', 'text', 'CER')
    """

    model_name: ClassVar[str] = "model"  # in messages and cards, such as "speech recognizer"
    # Decides which of sbkit's commands take its bundles: text (`transcribe`, `tune`), speech in
    # each frame (`transcribe --vad`), codes (`encode`, `decode`) or audio (`speak`, `serve`).
    predicts: ClassVar[Prediction] = "other"
    uses: ClassVar[tuple[str, ...]] = ()  # example calls of commands, for messages and cards
    metrics: ClassVar[Metrics] = LOSS_METRIC  # what `measure` returns; the first ranks checkpoints
    label_file: ClassVar[str | None] = None  # its name in a run folder and in a bundle
    label_key: ClassVar[str] = "labels"  # in the YAML, of the object made from the label file
    # Further files of a run and a bundle, by the key and the argument of the object that opens it.
    further_files: ClassVar[Mapping[tuple[str, str], str]] = {}
    label_count: ClassVar[str] = "size"  # the attribute with the number of labels
    label_version: ClassVar[int] = 0  # changes if the same texts give other labels
    heads: ClassVar[tuple[str, ...]] = ()  # keys of the parts with an output for each label
    fresh_heads: ClassVar[tuple[str, ...]] = ()  # keys of the parts that no pretrained model has
    training_parts: ClassVar[tuple[str, ...]] = ()  # keys of parts that a bundle omits
    # What the network takes beside audio is made from these values; see `side_inputs`.
    side_fields: ClassVar[Mapping[str, SideField]] = {}
    # The exported methods of the model; empty for a recognizer, which is exported as a whole. A
    # model with graphs has `settings`, plain data for the code that calls the graphs.
    graphs: ClassVar[Mapping[str, Graph]] = {}
    format_uses: ClassVar[Mapping[str, str]] = {}  # code that loads each format, for the card
    hub_task: ClassVar[str | None] = None  # the name of the task on model hubs

    @property
    def name(self) -> str:
        """The dotted path of the class that bundles store."""
        return dotted_path(type(self))

    # ---- the model

    def model_class(self) -> Any:
        """Return the class of the trained model, which a bundle is rebuilt as.

        It takes the ModuleList as `model`, the parts by their keys in the YAML, and
        `model_arguments`. Its method `predict(audio, audio_lengths)` takes (B, S) and (B,).
        """
        raise ConfigError(f"Runs of {self.name} cannot be exported: it has no `model_class`.")

    @property
    def has_model(self) -> bool:
        """Whether runs can be exported, because the task defines `model_class`."""
        return type(self).model_class is not Task.model_class

    def read_labels(self, file: Path, content: bytes) -> Labels:
        """Make the object of `label_key` from the path and the bytes of the label file."""
        from sbkit.text.vocabulary import ClassLabels

        return ClassLabels(file=file, content=content)

    def label_names(self, labels: Labels) -> Sequence[str]:
        """Return the labels as strings, in the order of their ids."""
        names: Sequence[str] = labels.names
        return names

    def normalizer(self, table: Any, labels: Labels) -> Callable[[str], str]:
        """Return the function that normalizes training texts, if the task has texts.

        table: the `TextTable` of the run.
        """
        return str

    def model_arguments(self, labels: Labels) -> Mapping[str, object]:
        """Return the keyword arguments that the model's class takes from the labels, if any."""
        return {}

    def bundle_class(self) -> Any:
        """Return the class of its open bundles, a subclass of `Bundle`; None for `Bundle`."""
        return None

    def side_inputs(self, fields: Mapping[str, Any], labels: Labels) -> Mapping[str, AnyArray]:
        """Return what the network takes beside a clip, by the names of its arguments.

        fields: the values of `side_fields`: texts, and samples (S,) at the model's rate.

        A batch stacks numbers to (B,), and pads arrays (N, ...) to (B, N, ...); then the network
        also gets their lengths, `NAME_lengths`.
        """
        return fields

    # ---- predictions

    def predict(self, bundle: Any, batch: ClipBatch) -> Sequence[Any]:
        """Return the prediction of an open `Bundle` for each clip; a `RecognizedClip` for text."""
        sides = bundle.side_inputs(batch.rows, len(batch.clips))
        return self.read_outputs(bundle.model.predict(batch.clips, sides), bundle.labels)

    def read_outputs(self, outputs: Any, labels: Labels) -> Sequence[Any]:
        """Return the prediction of each clip from the result of the network's `predict`.

        In a validation, the outputs are what the Brain's `compute_forward` returned.
        """
        predictions: Sequence[Any] = outputs
        return predictions

    def result(
        self, prediction: Any, row: Mapping[str, Any], *, config: Any, normalizer: Any = None
    ) -> Result:
        """Compare a prediction with the row of its clip, in validations and tests.

        config: the `BundleConfig`.
        normalizer: normalizes texts for a second comparison.
        """
        raise ConfigError(f"{self.name} cannot score tables: it has no method `result`.")

    @property
    def decodes_frames(self) -> bool:
        """Whether `predict` decodes the log-probabilities of frames, as `AsrTask.predict` does."""
        return False

    def require_frames(self, feature: str) -> None:
        """Raise BundleError unless the task `decodes_frames`, which a feature of sbkit needs."""
        if not self.decodes_frames:
            raise BundleError(
                f"{feature} needs a model that is decoded frame by frame, but models of "
                f"{self.name} are not: its `decodes_frames` is False."
            )

    # ---- scores

    def measure(self, results: Sequence[Result]) -> Mapping[str, float]:
        """Return the value of each metric over one or more results."""
        return mean_loss(results)

    def figures(self, results: Sequence[Result]) -> Figures:
        """Return further figures of a test set, such as counts and intervals."""
        return {}

    def slice_figures(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """Return the figures of a slice of a test set; if empty, its metrics are used."""
        return {}

    def read_figures(self, plain: Mapping[str, Any]) -> Figures:
        """Return the figures that were written as plain data."""
        return plain

    def describe(self, figures: Figures) -> str:
        """Describe what `figures` returned in one line; if "", the metrics are listed."""
        return "" if isinstance(figures, Mapping) else str(figures)

    def report(
        self, folder: Path, name: str, results: Sequence[Result], figures: Figures, labels: Labels
    ) -> Mapping[str, Any] | None:
        """Write files about a test set into a folder; return more plain figures, if there are any.

        figures: what `figures` returned.
        """

    # ---- commands

    def commands(self) -> Mapping[str, Callable[[Namespace], int | None]]:
        """Return the functions that `sbkit run BUNDLE NAME ...` calls, by name.

        A function takes the parsed options: `bundle`, the options of the runtime, and `arguments`,
        the strings after its name. It returns an exit code.
        """
        return {}

    def open_synthesizer(self, folder: Path, **options: Any) -> Any:
        """Open a bundle that predicts audio, to be served by `sbkit.serve.tts.Voice`."""
        raise NotImplementedError("a task that predicts audio defines `open_synthesizer`")

    def require_prediction(self, prediction: Prediction, *, command: str) -> None:
        """Raise BundleError unless the task predicts what a command of sbkit needs."""
        if self.predicts != prediction:
            in_python = "Use it in Python: sbkit.load_bundle"
            use = f"Use: sbkit {self.uses[0]}" if self.uses else in_python
            raise BundleError(
                f"`sbkit {command}` cannot run this kind of bundle: {self.model_name}. {use}"
            )


def load_task(name: str, *, user_modules: frozenset[str] = frozenset()) -> Task:
    """Import the task with a dotted path, from `sbkit.tasks` or one of ``user_modules``.

    Importing a module runs it, so no other module is imported.
    """
    module, _, attribute = name.rpartition(".")
    if not (name.startswith(BUILT_IN_PACKAGE) or module in {__name__, *user_modules}):
        raise BundleError(
            f"The model's task, {name}, is not one of sbkit's. If you trust its author, pass "
            f"--import {module}, or in Python `user_modules`."
        )
    try:
        task = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise BundleError(
            f"The model's task, {name}, cannot be imported: {error}. Install the version of sbkit "
            "that the model was trained with."
        ) from error
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise BundleError(
            f"The model's task, {name}, is not a sbkit.bundle.task.Task in this installation."
        )
    return task()
