"""A bundle: the folder that holds everything needed to run a model elsewhere.

    config.json             the parts as plain data, and where they come from
    model.safetensors       the weights of the one ModuleList
    symbols.txt             the symbols of a synthesizer
    lm.safetensors          the language models of the decoder, if it has any
    MODULE.py               the code of user modules, which only `--import MODULE` runs
    checksums.json          SHA-256 of the other files
    README.md               the model card: data, results, licenses, how to run it
    card.json               the facts of the model card
    FORMAT/                 a form of the model for another runtime, if export or run named it

Loading a bundle is safe, whoever made it: only regular files are read; the bytes that were hashed
are the bytes that are parsed or, with `--import`, run; weights are safetensors; and only classes on
the list of `sbkit.bundle.allowed_classes` are built.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from sbkit.audio.io import Samples, to_samples
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.imports import import_user_modules
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE, BundleConfig, BundleFiles
from sbkit.bundle.protocols import ClipModel
from sbkit.bundle.side_inputs import SideInputs, make_side_inputs
from sbkit.bundle.task import ClipBatch, Labels, Task, load_task
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE

ModelT = TypeVar("ModelT", bound=ClipModel, covariant=True)
OtherModelT = TypeVar("OtherModelT", bound=ClipModel)


class Opening(NamedTuple):
    """The call that opened a bundle, and the bundle that it returned."""

    call: "Callable[[], Bundle[Any]]"
    bundle: "Bundle[Any]"


def _open_again(call: "Callable[[], Bundle[Any]]", changes: Mapping[str, Any]) -> "Bundle[Any]":
    return replace(call(), **changes)


@dataclass(frozen=True, kw_only=True)
class Bundle(Generic[ModelT]):
    """A bundle whose model is ready to run; a task may have a subclass, such as `AsrBundle`.

    This module imports no torch.

    labels: the object that the task makes from its label file, such as a list of classes.
    digests: SHA-256 of the weights and of the language models, if there are any.
    model: runs on clips.
    opening: how the bundle was opened; None if it is stored in no folder.
    """

    config: BundleConfig
    task: Task = field(repr=False)
    labels: Labels = field(default=None, repr=False)
    digests: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    model: ModelT = field(repr=False)  # its text has many lines
    opening: Opening | None = field(default=None, repr=False, compare=False)

    @classmethod
    def read_fields(cls, files: BundleFiles, labels: Labels) -> Mapping[str, Any]:
        """Return the values of the fields that a subclass adds, from the files of a bundle."""
        if files.config.decoder is not None:
            raise BundleError(
                f"{files.folder / CONFIG_FILE} has a decoder, but models of {files.config.task} "
                "have none."
            )
        return {}

    def with_model(self, model: OtherModelT) -> "Bundle[OtherModelT]":
        """Return a bundle that another model runs, and that is stored in no folder."""
        # With `opening`, it would keep the model of this bundle in memory.
        bundle: Bundle[Any] = replace(self, opening=None)
        return replace(bundle, model=model)

    def with_options(self, **options: Any) -> Self:
        """Return the bundle with options of its task, of which there are none by default."""
        for name, value in options.items():
            if value is not None:
                kind = self.task.model_name
                raise ConfigError(f"`{name}` is not an option of this model, a {kind}.")
        return self

    def opened_by(self, call: "Callable[[], Bundle[ModelT]]") -> Self:
        """Return a copy that pickles as the call that opened it."""
        return replace(self, opening=Opening(call, self))

    def __reduce__(self) -> "tuple[Callable[..., Bundle[Any]], tuple[object, ...]]":
        """Pickle as the call that opened it, with the fields that were replaced afterwards."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        opening = values.pop("opening")
        if opening is None:
            return partial(type(self), **values), ()
        changes = {
            name: value
            for name, value in values.items()
            if value is not getattr(opening.bundle, name)
        }
        return _open_again, (opening.call, changes)

    # ---- predictions

    def predict(self, clips: Sequence[Samples], rows: Sequence[Mapping[str, Any]] = ()) -> Any:
        """Return the network's predictions for clips, which `to_samples` converts, in one batch.

        rows: the values of the task's `side_fields` for each clip.
        """
        sides = self.side_inputs(rows, len(clips))
        return self.model.predict([*map(to_samples, clips)], sides)

    def side_inputs(self, rows: Sequence[Mapping[str, Any]], count: int) -> Sequence[SideInputs]:
        """Return what the network takes beside each of some clips; nothing if the task has none.

        rows: of the clips; without rows, only the defaults of fields are known.
        """
        if not self.task.side_fields:
            return ()
        rate = self.config.sample_rate
        make = partial(make_side_inputs, self.task, self.labels, sample_rate=rate)
        return [*map(make, rows or [{}] * count)]

    def predict_batch(self, batch: ClipBatch) -> Sequence[Any]:
        """Return the task's prediction for each clip, in one batch if the model can do that."""
        return self.task.predict(self, batch)

    # ---- texts

    @property
    def tags(self) -> tuple[str, ...]:
        """The names of the tags that texts keep."""
        return ()

    def normalizer(self) -> Callable[[str], str]:
        """Return the function that normalized the training texts, if the task has texts."""
        return self.task.normalizer(self.config.text_table, self.labels)

    # ---- what a report says about it

    def facts(self, rows: Any) -> Mapping[str, Any]:
        """Return how a prepared test set was predicted, and notes about it, as plain data."""
        return {}

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The hashes of its files, and what else decides its predictions."""
        return self.digests


@dataclass(frozen=True, kw_only=True)
class BundleContents:
    """The contents of a bundle's files.

    labels, digests: those of its `Bundle`; further: the values of the fields that the task adds.
    weights: the bytes of the weights, if they were requested.
    """

    config: BundleConfig
    task: Task = field(repr=False)
    labels: Labels = field(default=None, repr=False)
    digests: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    further: Mapping[str, Any] = field(default_factory=dict, repr=False)
    weights: bytes = field(default=b"", repr=False)

    def with_model(self, model: OtherModelT) -> Bundle[OtherModelT]:
        """Return the bundle that a model runs."""
        bundle_class = self.task.bundle_class() or Bundle
        bundle: Bundle[OtherModelT] = bundle_class(
            config=self.config,
            task=self.task,
            labels=self.labels,
            digests=self.digests,
            model=model,
            **self.further,
        )
        return bundle


def read_bundle(
    folder: Path | str, *, with_weights: bool = False, user_modules: frozenset[str] = frozenset()
) -> BundleContents:
    """Read the files of a bundle, and compare their bytes with the checksums.

    user_modules: the modules that `--import` names; one of them may define the task. If a module
        cannot be imported otherwise, the copy in the bundle is run.
    """
    files = BundleFiles(folder)
    folder = files.folder
    config = files.config
    import_user_modules(sorted(user_modules), {folder: files.read_modules(user_modules)})
    task = load_task(config.task, user_modules=user_modules)
    weights = files.read(WEIGHTS_FILE) if with_weights else b""
    labels: Labels = None
    if task.label_file is not None:
        labels = task.read_labels(folder / task.label_file, files.read(task.label_file))
    checksums = read_checksums(folder)
    names = {"weights": WEIGHTS_FILE, "language_models": LANGUAGE_MODELS_FILE}
    return BundleContents(
        config=config,
        task=task,
        labels=labels,
        digests={name: checksums.get(file) for name, file in names.items()},
        further=(task.bundle_class() or Bundle).read_fields(files, labels),
        weights=weights,
    )
