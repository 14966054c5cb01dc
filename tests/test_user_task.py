"""A task whose source lies in a bundle: its commands run, and its class is stored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.asr.brain import AsrBrain
from recipes.asr.recipe import AsrRecipe
from recipes.codec.brain import CodecBrain
from recipes.codec.recipe import CodecRecipe
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run
from sbkit.config.hparams import Settings, load_hparams, read_spec
from sbkit.config.overrides import parse_overrides
from sbkit.export.export import part_facts
from sbkit.tasks.asr.task import AsrTask
from sbkit.tasks.codec.model import CodecModel
from sbkit.train.setup import make_brain
from tests.runs import ROOT, TINY_CODEC
from tests.runtime.bundles import edit_config, make_bundle

SOURCE = """
from argparse import ArgumentParser
from sbkit.tasks.asr.task import AsrTask

def spell(options):
    parser = ArgumentParser()
    parser.add_argument("word")
    parser.add_argument("--times", type=int)
    parser.add_argument("--device", default="pen")
    own = parser.parse_args(options.arguments)
    print(options.bundle.name, own.word, own.times, own.device, options.device, options.runtime)
    return 3

class Spelling(AsrTask):
    predicts = "other"

    def commands(self):
        return {"spell": spell}
"""


def test_run_passes_options_to_a_command_of_a_user_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, module = make_bundle(tmp_path), "task_with_command"
    (bundle / f"{module}.py").write_text(SOURCE)
    edit_config(bundle, lambda config: config.update(task=f"{module}.Spelling"))
    imported = ("--import", module)
    own = ("spell", "yes", "--times=2")
    assert run(["run", str(bundle), *imported, "--device=cpu", *own]) == 3
    assert run(["run", *imported, "--device=cpu", str(bundle), *own, "--device", "ink"]) == 3
    assert capsys.readouterr().out == "bundle yes 2 pen cpu torch\nbundle yes 2 ink cpu torch\n"
    with pytest.raises(SbkitError, match="no command shout. It has: spell"):
        run(["run", str(bundle), *imported, "shout"])


class Naming(AsrTask):
    def model_class(self) -> Any:
        return SimpleNamespace


class Importing(AsrTask): ...


class OtherBrain(SimpleNamespace):
    """Takes what SpeechBrain's takes, and no task."""

    def __init__(
        self, modules: Any, opt_class: Any, hparams: Any, run_opts: Any, checkpointer: Any
    ) -> None:
        super().__init__(network="another")


class NamingRecipe(AsrRecipe):
    task = Naming()
    brain: Any = OtherBrain


class OtherCodecBrain(CodecBrain):
    """Passes on what SpeechBrain's Brain takes."""

    def __init__(
        self, modules: Any, opt_class: Any, hparams: Any, run_opts: Any, checkpointer: Any
    ) -> None:
        super().__init__(modules, opt_class, hparams, run_opts, checkpointer)


class OtherCodec(CodecRecipe):
    brain: Any = OtherCodecBrain


def test_brain_with_the_arguments_of_speechbrain_knows_its_task(tmp_path: Path) -> None:
    overrides = parse_overrides([*TINY_CODEC, f"--output_folder={tmp_path}"])
    setup: Any = SimpleNamespace(
        recipe=OtherCodec(),
        hparams=load_hparams(ROOT / "hparams/codec.yaml", overrides),
        placement=SimpleNamespace(device="cpu"),
        loaders=None,
    )
    brain = make_brain(setup)
    assert brain.task is setup.recipe.task and isinstance(brain.network, CodecModel)


def test_make_brain_refuses_a_brain_of_another_model_class() -> None:
    setup: Any = SimpleNamespace(
        recipe=NamingRecipe(),
        hparams=Settings(dict.fromkeys(("model", "opt_class", "checkpointer"))),
        placement=SimpleNamespace(device="cpu"),
    )
    with pytest.raises(SbkitError, match="`network` .* a SimpleNamespace, .* a str"):
        make_brain(setup)


def test_recipe_refuses_a_method_of_its_task() -> None:
    """A bundle would lack it."""
    assert NamingRecipe().task.name == f"{__name__}.Naming"
    with pytest.raises(SbkitError, match="`measure` of the recipe Wrong belongs to its task"):
        type("Wrong", (AsrRecipe,), {"measure": lambda self, results: {}})


def test_export_refuses_a_task_whose_module_imports_recipes() -> None:
    """A machine that runs bundles has no recipes; this module imports them."""
    root = read_spec(ROOT / "hparams/ctc.yaml", {"data_folder": "", "output_folder": ""}).tree
    objects = {"tokenizer": SimpleNamespace(vocab_size=12)}
    with pytest.raises(SbkitError, match="must be defined without `recipes`"):
        part_facts(root, objects, Importing(), [*AsrBrain.parts, *AsrBrain.optional_parts])
