"""A recipe: a task, how its data and labels are prepared and loaded, and the Brain that trains it.

    prepare_splits -> prepare_labels -> (the YAML's objects) -> make_loaders -> brain

A YAML names its recipe, `recipe: recipes.asr.recipe.ASR`: any object of this class that can be
imported, including from a file beside the YAML.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import Range
from sbkit.bundle.task import Task
from sbkit.config.document import read_document
from sbkit.config.hparams import Knobs
from sbkit.data.batch import Loaders
from sbkit.data.corpus import Corpus
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task, and what prepares and trains its runs, in their order.

    Attributes:
        task: what the model predicts; bundles of the run store its name.
        prepare_splits: prepares the data of every split, from the knobs.
        prepare_labels: makes the tokenizer or the list of classes, from the knobs and the data, and
            writes the task's label file into the run folder, where the YAML opens it; None for a
            recipe without labels.
        make_loaders: plans the batches, from the built hparams, the data, labels and the device.
        brain: the class of the `sbkit.Brain` that trains it.
        corpus: makes the corpus that `prepare_splits` reads, from the knobs; a recipe without one
            cannot be prepared as shards.
        ranges: allowed ranges of the recipe's own numbers.

    >>> from dataclasses import replace
    >>> from recipes.asr.recipe import ASR
    >>> replace(ASR, brain=MyBrain)  # doctest: +SKIP
    """

    task: Task
    prepare_splits: Callable[[Knobs], Splits]
    prepare_labels: Callable[[Knobs, Splits], Any] = lambda knobs, splits: None
    make_loaders: Callable[[Knobs, Splits, Any, Placement], Loaders]
    brain: Callable[..., Any]
    corpus: Callable[[Knobs], Corpus] | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)


def load_recipe(knobs: Knobs, yaml_file: Path) -> Recipe:
    """Import the recipe that a YAML names.

    Raises ConfigError if the YAML names no recipe, or one that cannot be imported.
    """
    name = knobs.get("recipe")
    if not isinstance(name, str) or "." not in name:
        raise ConfigError(
            f"`recipe` in {yaml_file} must name the recipe to run, but is {name!r}. Write "
            "`recipe: recipes.asr.recipe.ASR`, or MODULE.NAME of your own in a file beside it. A "
            "YAML of SpeechBrain's belongs to its script, which moves over by sbkit.Brain."
        )
    folders = read_document(yaml_file).module_folders
    sys.path += [folder for folder in folders if folder not in sys.path]
    module, _, attribute = name.rpartition(".")
    try:
        recipe = getattr(import_module(module), attribute, None)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            f"The module {module} of `recipe` in {yaml_file} cannot be imported: it raised "
            f"{type(error).__name__} ({error}). Correct the name or the module, put its file "
            "beside the YAML, or add its folder to PYTHONPATH."
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"`recipe` in {yaml_file} must name a sbkit.train.recipe.Recipe, but {name} is "
            f"{'not there' if recipe is None else type(recipe).__name__}. Correct the name."
        )
    return recipe
