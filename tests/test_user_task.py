"""A task whose source lies in a bundle: it loads from Python, and its commands run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.asr.recipe import ASR, AsrBrain
from sbkit.base.errors import SbkitError
from sbkit.bundle.task import Exportable
from sbkit.commands.cli import run
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.recognition.task import SPEECH_RECOGNITION
from sbkit.train.setup import RunSetup
from tests.runtime.bundles import edit_config, make_bundle

SOURCE = """
from dataclasses import replace
from sbkit.tasks.recognition.task import SPEECH_RECOGNITION
from sbkit.bundle.task import Command

def spell(options):
    print(options.bundle.name, options.word, options.times, options.device, options.runtime)
    return 3

TASK = replace(
    SPEECH_RECOGNITION,
    name="MODULE.TASK",
    predicts="other",
    commands={
        "spell": Command(
            run="MODULE.spell",
            arguments=(("word", {}), ("--times", {"type": int}), ("--device", {"default": "pen"})),
        )
    },
)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("user"))


def put(bundle: Path, module: str) -> tuple[str, str]:
    """Give a bundle a user task with its source; return the option that imports it."""
    (bundle / f"{module}.py").write_text(SOURCE.replace("MODULE", module))
    edit_config(bundle, lambda config: config.update(task=f"{module}.TASK"))
    return "--import", module


def test_python_imports_the_module_of_a_bundle_as_the_command_line_does(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    option, module = put(bundle, "task_for_python")
    with pytest.raises(SbkitError, match=f"pass {option} {module}"):
        load_bundle(bundle)
    assert load_bundle(bundle, user_modules=frozenset([module])).task.name == f"{module}.TASK"
    assert caplog.messages == [f"{option} {module}: running {bundle / module}.py"]


def test_run_passes_options_to_a_command_of_a_user_task(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = put(bundle, "task_with_command")
    own = ("spell", "yes", "--times=2")
    assert run(["run", str(bundle), *imported, "--device=cpu", *own]) == 3
    assert run(["run", *imported, str(bundle), *own, "--device", "ink"]) == 3
    assert capsys.readouterr().out == "bundle yes 2 pen torch\nbundle yes 2 ink torch\n"
    with pytest.raises(SbkitError, match="has no shout. It has: spell"):
        run(["run", str(bundle), *imported, "shout"])
    with pytest.raises(SbkitError, match="Use: sbkit run FOLDER spell"):
        run(["transcribe", str(bundle), "a.wav", *imported])


def test_make_brain_refuses_a_brain_of_another_model_class() -> None:
    task = replace(SPEECH_RECOGNITION, export=Exportable(model_class="types.SimpleNamespace"))
    brain: Any = SimpleNamespace(task=task)
    assert AsrBrain.make_model(brain, ctc_lin="a head") == SimpleNamespace(ctc_lin="a head")
    recipe = replace(ASR, task=task, brain=lambda **_: SimpleNamespace(network="another"))
    run: Any = SimpleNamespace(
        load_recipe=lambda: recipe,
        build_hparams=lambda: dict.fromkeys(("model", "opt_class", "checkpointer")),
        choose_placement=lambda: SimpleNamespace(device="cpu"),
    )
    with pytest.raises(SbkitError, match="must be the model .* a types.SimpleNamespace, .* a str"):
        RunSetup.make_brain(run)
