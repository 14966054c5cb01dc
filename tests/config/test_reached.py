"""Code and files of the user's count by their content, wherever they lie."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.checkpoint.run_config import RunConfig
from sbkit.config.hparams import resolve
from sbkit.config.reached import list_reached

FILES = {
    "edited_recipe.py": "from edited_brain import MyBrain\n",
    "edited_brain.py": "class MyBrain: ...\n",
    "edited_lab/__init__.py": "",
    "edited_lab/models.py": "def build():\n    from .sizes import SIZE\n",
    "edited_lab/sizes.py": "SIZE = 1\n",
    "edited_schedule.py": "def warm(): ...\n",
    "edited_corpus.py": "def read(): ...\n",
    "edited_plots.py": "x = 1\n",  # nothing imports it
    "words.txt": "one\n",
    "table.csv": "a,b\n",
    "noise/a.wav": "louder",
    "noise/deep/b.wav": "noise",
    "talks.txt": "hello\n",
    "../clips/a.wav": "speech",  # of a corpus that the recipe reads
    "../data/train.csv": "path\n",
    "run/tokenizer.model": "tokens",
}
YAML = """
recipe: edited_recipe.Mine
corpus: edited_corpus
output_folder: {0}/run
data_folder: {1}/data
lm_text: [{0}/talks.txt]
clips: {1}/clips
words: {0}/words.txt
tokenizer: !new:edited_lab.models.build
    model_file: !ref <output_folder>/tokenizer.model
    corpus: !ref <data_folder>
    tables: [!ref <words>, {0}/table.csv]
noise: !new:edited_lab.models.build
    folder: {0}/noise
lr_schedule: !name:edited_schedule.warm
"""


def declare(folder: Path) -> RunConfig:
    """Return the configuration of a YAML in a folder."""
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(folder, folder.parent))
    reached = list_reached(resolve(yaml, {}))
    return replace(RunConfig.from_yaml(yaml, {}), **reached._asdict())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sbkit.base.imports._yaml_folders", [])
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    for name, content in FILES.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        *((f"edited_{name}.py", f"the module edited_{name}") for name in ("recipe", "brain")),
        *((f"edited_{name}.py", f"the module edited_{name}") for name in ("schedule", "corpus")),
        ("edited_lab/__init__.py", "the module edited_lab"),
        ("edited_lab/models.py", "the module edited_lab.models"),
        ("edited_lab/sizes.py", "the module edited_lab.sizes"),
        ("words.txt", "words"),
        ("table.csv", "tokenizer.tables.1"),
        ("noise/deep/b.wav", "noise.folder"),
        ("noise/new.wav", "noise.folder"),
        ("talks.txt", "lm_text"),
        *((name, "") for name in ("noise/.hidden", "noise/.git/index", "edited_plots.py")),
        *((name, "") for name in ("../clips/a.wav", "../data/train.csv", "run/tokenizer.model")),
    ],
)
def test_edited_file_is_named(folder: Path, name: str, difference: str) -> None:
    before = declare(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    content = "more" if name.endswith(".py") else FILES.get(name, "more")[::-1]  # of the same size
    (folder / name).write_text(content)
    now = declare(folder)
    differing = [d.name for d in (*now.differences(before), *now.changes(before))]
    assert differing[:1] == ([difference] if difference else [])


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_moved_code_and_files_are_the_same(
    folder: Path, move: Callable[[Path, Path], object]
) -> None:
    before = declare(folder)
    move(folder, folder.with_name("moved"))
    now = declare(folder.with_name("moved"))
    assert now.files and now.modules == before.modules
    assert [*now.differences(before), *now.changes(before)] == []
    shutil.rmtree(folder.with_name("moved") / "noise")
    assert [
        *declare(folder.with_name("moved")).differences(now)
    ] == []  # what is gone is not compared
