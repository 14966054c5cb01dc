"""Code and files of the user's count by their content, wherever they lie."""

from pathlib import Path

import pytest

from sbkit.checkpoint.run_config import RunDescription, describe_spec, differences
from sbkit.config.dependencies import hash_dependencies
from sbkit.config.hparams import read_spec

# The content of each file, none for one that is added later, and what differs after an edit.
FILES = {
    "edited_recipe.py": ("from edited_brain import MyBrain", "the module edited_recipe"),
    "edited_brain.py": ("class MyBrain: ...", "the module edited_brain"),
    "edited_lab/__init__.py": ("x = 1", "the module edited_lab"),
    "edited_lab/models.py": ("def build():\n from . import sizes", "the module edited_lab.models"),
    "edited_lab/sizes.py": ("SIZE = 1", "the module edited_lab.sizes"),
    "edited_schedule.py": ("def warm(): ...", "the module edited_schedule"),
    "edited_corpus.py": ("def read(): ...", "the module edited_corpus"),
    "edited_plots.py": ("x = 1", ""),  # nothing imports it
    "words.txt": ("one", "words"),
    "table.csv": ("a,b", "tokenizer.tables.1"),
    "talks.txt": ("hello", "lm_text.0"),
    "teacher/config.json": ("{}", "teacher"),
    "noise/deep/b.wav": ("noise", "noise.folder"),
    "noise/new.wav": ("", "noise.folder"),
    "noise/.git/index": ("", ""),
    "../data/train.csv": ("path", ""),
    "../clips/a.wav": ("speech", ""),  # a folder that no object is given: of the corpus
    "run/tokenizer.model": ("tokens", ""),
}
YAML = """
recipe: edited_recipe.Mine
corpus: edited_corpus
output_folder: {0}/run
data_folder: {1}/data
lm_text: [{0}/talks.txt]
clips: {1}/clips
words: {0}/words.txt
teacher: {0}/teacher
tokenizer: !new:edited_lab.models.build
    model_file: !ref <output_folder>/tokenizer.model
    corpus: !ref <data_folder>
    tables: [!ref <words>, {0}/table.csv]
    around: !ref <output_folder>/..  # it contains the run, and changes with each save
noise: !new:edited_lab.models.build
    folder: {0}/noise
    separators: ["", /, .]  # no folders
lr_schedule: !name:edited_schedule.warm
"""


def declare(folder: Path) -> RunDescription:
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(folder, folder.parent))
    spec = read_spec(yaml)
    return describe_spec(spec, dependencies=hash_dependencies(spec))


def differing(now: RunDescription, before: RunDescription) -> list[str]:
    return [difference.name for difference in differences(before, now)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sbkit.base.imports._yaml_folders", [])
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    for name, (content, _) in FILES.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if content:
            file.write_text(content)
    return tmp_path / "mine"


@pytest.mark.parametrize("name", FILES)
def test_edited_file_is_named(folder: Path, name: str) -> None:
    before, (content, difference) = declare(folder), FILES[name]
    is_module = name.endswith(".py")
    (folder / name).write_text("x = 2" if is_module else content[::-1])  # the size is the same
    assert differing(declare(folder), before)[:1] == [difference] * bool(difference)


def test_moved_files_are_the_same_and_missing_ones_are_not_compared(folder: Path) -> None:
    before = declare(folder)
    now = declare(folder.rename(folder.with_name("moved")))
    assert (len(now.modules), len(now.files)) == (7, 5)
    assert differing(now, before) == []
    (folder.with_name("moved") / "table.csv").unlink()
    assert differing(declare(folder.with_name("moved")), now) == []


def test_sizes_stand_for_much_audio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbkit.config.dependencies.MAX_READ_BYTES", 4)
    before, clip = declare(folder), folder / "noise/deep/b.wav"
    for content, names in (("other", []), ("longer", ["noise.folder"])):
        clip.write_text(content)
        assert differing(declare(folder), before) == names
