"""A recipe: how the data and the labels of a task are prepared and loaded, and what trains it.

    prepare_splits -> prepare_labels -> (the YAML's objects) -> make_loaders -> brain

A YAML names its recipe, `recipe: recipes.asr.recipe.AsrRecipe`: any subclass of `Recipe` that can
be imported, including from a file beside the YAML.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from sbkit.base.errors import ConfigError, concerning
from sbkit.base.imports import import_recipe, search_folders
from sbkit.bundle.task import Task
from sbkit.checkpoint.run_config import require_trusted
from sbkit.config.document import Document
from sbkit.config.hparams import RECIPE, RunSpec, Settings
from sbkit.config.keys import DATA_SOURCES, KEYS, Key
from sbkit.data.batch import Loaders
from sbkit.data.corpus import Corpus
from sbkit.data.sampler import StepSampler
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement

if TYPE_CHECKING:
    from sbkit.train.brain import Brain

BrainClass: TypeAlias = "type[Brain] | str"


class Recipe:
    """How the runs of a task are prepared: the methods below, in their order.

    Derive a class from a recipe, such as `AsrRecipe`, or from this one. Bundles store the name of
    the task, so what a bundle needs, such as `predict`, belongs there.

    Attributes:
        task: what is predicted, how it is scored, and which model a bundle is rebuilt as.
        brain: the class of the `sbkit.Brain` that trains it, or its MODULE.NAME. Only training
            imports that module: preparing data and scoring a model need no SpeechBrain.
        keys: what is declared about the keys of its YAMLs: `KEYS`, and its own, which count as read
            by its code.

    >>> from recipes.asr.recipe import AsrRecipe
    >>> class Mine(AsrRecipe):
    ...     keys = {**AsrRecipe.keys, "my_weight": Key(Share, 0.1, "of my loss")}
    ...     brain = MyBrain  # doctest: +SKIP
    """

    task: ClassVar[Task] = Task()
    brain: ClassVar[BrainClass]
    keys: ClassVar[Mapping[str, Key]] = KEYS

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a method of the task, which the bundles of a run would not have."""
        super().__init_subclass__(**options)
        if names := [name for name in vars(cls) if name in vars(Task) and name[:2] != "__"]:
            raise ConfigError(
                f"`{names[0]}` of the recipe {cls.__name__} belongs to its task. Define it in a "
                "subclass of the task, in a module that imports nothing of `recipes`, and set "
                f"`task = MyTask()` in {cls.__name__}."
            )

    def brain_class(self) -> "type[Brain]":
        """Return the class of `brain`."""
        if not isinstance(self.brain, str):
            return self.brain
        module, _, name = self.brain.rpartition(".")
        kind: type[Brain] = getattr(import_recipe(module), name)
        return kind

    def corpus(self, settings: Settings) -> Corpus | None:
        """Return the corpus that `prepare_splits` reads; None cannot be prepared as shards."""
        return None

    def prepare_splits(self, settings: Settings) -> Splits:
        """Prepare the data of every split."""
        raise NotImplementedError("a recipe defines `prepare_splits`")

    def prepare_labels(self, settings: Settings, splits: Splits) -> Any:
        """Make the labels, such as a list of classes, and return them; None without labels.

        Each file that it writes into `output_folder` is one of the run, where the YAML opens it.
        """
        return None

    def checks(self) -> Sequence[Callable[[Any], Any]]:
        """Return checks of the recipe's own, such as `recipes.asr.checks.check_texts`.

        A check takes a `sbkit.check.checked_run.CheckedRun` and yields findings.
        """
        return ()

    def make_loaders(
        self, hparams: Settings, splits: Splits, labels: Any, placement: Placement
    ) -> Loaders:
        """Plan the batches of every split."""
        raise NotImplementedError("a recipe defines `make_loaders`")

    def make_sampler(self, hparams: Settings, splits: Splits, default: StepSampler) -> StepSampler:
        """Return the sampler that plans the training steps, such as one that wraps the default.

        Its examples have rows of `splits.train`: the utterances that `make_loaders` has kept.
        """
        return default


def load_trusted_recipe(spec: RunSpec, user_modules: Collection[str]) -> Recipe:
    """Load the recipe of a run that is read as data; see `require_trusted`.

    A corpus that the run names, or means by naming none, is downloaded only if the user names it.
    """
    require_trusted(spec.settings, spec.user_keys, user_modules)
    recipe = load_recipe(spec)
    if not DATA_SOURCES & spec.user_keys and (corpus := recipe.corpus(spec.settings)) is not None:
        corpus.require_fetched()
    return recipe


def load_recipe(spec: RunSpec) -> Recipe:
    """Make the recipe of a run: the one given in Python, or the one that its YAML names."""
    kind: type[Recipe] = spec.recipe or find_recipe(spec.settings.get(RECIPE), spec.document)
    return kind()


@concerning(RECIPE)
def find_recipe(name: object, document: Document) -> type[Recipe]:
    """Import the recipe that a YAML names."""
    if not isinstance(name, str) or "." not in name:
        raise ConfigError(
            f"`recipe` in {document.path} must be MODULE.NAME of a recipe, but is {name!r}. Write "
            "`recipe: recipes.asr.recipe.AsrRecipe`."
        )
    search_folders(document.module_folders)
    module, _, attribute = name.rpartition(".")
    recipe = getattr(import_recipe(module), attribute, None)
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise ConfigError(
            f"`recipe` in {document.path} must name a subclass of sbkit.train.recipe.Recipe, but "
            f"{name} is {'not there' if recipe is None else 'none'}."
        )
    return recipe
