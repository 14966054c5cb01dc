"""Additions that are made as docs/contributing.md says pass the tests that it names."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from tests.runs import ROOT

CORPUS = '''"""A corpus for the test of contributions: a folder of notes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sbkit.data.corpus import Corpus, SettingValues
from sbkit.data.manifest import Clip, Manifest


class Notes(Corpus):
    """A folder of notes: SPLIT.txt has lines of a file, a bar and its transcript."""

    layout = "a folder of notes"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        folder = settings["data_folder"]
        return isinstance(folder, str) and Path(folder, "train.txt").is_file()

    def splits(self) -> Mapping[str, Sequence[str]]:
        return {"train": ("train",), "valid": ("dev",), "test": ("test",)}

    def read(self, split: str) -> Iterator[Manifest]:
        folder = Path(self.settings["data_folder"])
        lines = (folder / f"{split}.txt").read_text(encoding="utf-8").splitlines()
        rows = [line.split("|") for line in lines]
        clips = [Clip(Path(name).stem, folder / name, text) for name, text in rows]
        return Manifest.of(clips, folder).blocks()
'''
AUGMENTATION = '''

class InvertPolarity(nn.Module):
    """Invert some utterances: (B, S), (B,) -> (B, S), (B,).

    prob: the share of inverted utterances.
    """

    def __init__(self, *, prob: Share = 0.5) -> None:
        super().__init__()
        self.prob = prob

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        is_chosen = draw_uniform(len(lengths), 1).to(audio.device).T[0] < self.prob
        return torch.where(is_chosen.unsqueeze(1), -audio.float(), audio.float()), lengths
'''
FORMAT = '''"""Write the weights for numpy."""

from pathlib import Path

import numpy as np

from sbkit.bundle.bundle import Bundle
from sbkit.export.parity import Candidate
from sbkit.runtime.torch_model import TorchModel


def write_numpy(bundle: Bundle[TorchModel], folder: Path) -> list[Candidate]:
    """Write all weights into a file of numpy."""
    weights = bundle.model.network.state_dict()
    np.savez(folder / "weights.npz", **{name: w.cpu().numpy() for name, w in weights.items()})
    return []
'''
LOSS = '''

def frame_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the entropies of the frames of each clip: (B, U, V), (B, U) -> (B,)."""
    return (torch.special.entr(log_probs.exp()).sum(2) * mask).sum(1)
'''


def copy_checkout(folder: Path) -> None:
    """Copy the files that git tracks into a repository of their own, as some tests ask git."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "copy"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def edit(file: Path, *edits: tuple[str, str]) -> None:
    """Insert a text before another one; at the end of the file, if that is empty."""
    content = file.read_text(encoding="utf-8")
    for before, text in edits:
        assert content.count(before) == 1 or not before, before
        content = content.replace(before, text + before) if before else content + text
    file.write_text(content, encoding="utf-8")


def add_corpus(copy: Path) -> None:
    (copy / "recipes/Notes").mkdir()
    (copy / "recipes/Notes/__init__.py").touch()
    (copy / "recipes/Notes/corpus.py").write_text(CORPUS)
    row = "| notes, a folder of notes | yours | `data_folder`: a folder of notes |\n"
    edit(copy / "docs/corpora.md", ("| [your tables]", row))


def add_error_rate(copy: Path) -> None:
    edit(
        copy / "sbkit/evaluate/wer.py",
        ("    utterances: int = 0\n", "    sentences: ErrorCounts = ErrorCounts()\n"),
        ('    "CER": ErrorRate("characters"),\n', '    "SER": ErrorRate("sentences"),\n'),
        (
            "    return TextErrors(words=words,",
            "    sentences = _count_edits([reference], [hypothesis])\n",
        ),
        ("utterances=1)\n", "sentences=sentences, "),
    )
    edit(
        copy / "docs/reference.py",
        ('    "test.SET.words":', '    "test.SET.SER": "share of the utterances with an error",\n'),
        ('    "test.SET.WER_int', '    "test.SET.SER_interval.KEY": "the same for the SER",\n'),
        (
            '    "test.SET.character_errors',
            '    "test.SET.sentences": "number of utterances",\n'
            '    "test.SET.sentence_errors.KEY": "the same for utterances",\n',
        ),
    )


def add_augmentation(copy: Path) -> None:
    edit(copy / "sbkit/audio/augment.py", ("", AUGMENTATION))
    yaml = copy / "hparams/ctc_speechbrain.yaml"
    content = yaml.read_text()
    before = "wave_augment: !new:sbkit.audio.augment.AddPauses\n"
    start, _, rest = content.partition(before)
    pauses, end, rest = rest.partition("\n\n")
    assert end, content
    parts = (
        "wave_augment: !new:sbkit.audio.augment.Compose\n    parts:\n"
        "        - !new:sbkit.audio.augment.InvertPolarity\n            prob: 0.5\n"
        "        - !new:sbkit.audio.augment.AddPauses\n"
    )
    yaml.write_text(start + parts + indent(pauses, " " * 8) + end + rest)


def add_format(copy: Path) -> None:
    (copy / "sbkit/export/numpy_format.py").write_text(FORMAT)
    entry = """    "numpy": Format(
        writer="sbkit.export.numpy_format:write_numpy",
        use="`numpy.load` reads `weights.npz`.",
        packages=("numpy",),
    ),
"""
    edit(copy / "sbkit/export/format_table.py", ('    "huggingface": Format(', entry))
    edit(copy / "sbkit/export/formats.py", ("huggingface/  ", "numpy/           `weights.npz`\n"))


def add_loss(copy: Path) -> None:
    edit(copy / "sbkit/models/loss.py", ("", LOSS))
    brain = copy / "recipes/vad/brain.py"
    before = "        return Loss(sums * batch.weights, mask"
    entropies = "        sums = sums + 0.0 * frame_entropy(log_probs, mask)\n"
    edit(brain, (before, entropies))
    content = brain.read_text()
    imported = "from sbkit.models.loss import Loss"
    brain.write_text(content.replace(f"{imported}\n", f"{imported}, frame_entropy\n"))


def add_key(copy: Path) -> None:
    """Add one line where the key is declared, one where it is read, and one to its YAML."""
    recipe = copy / "recipes/vad/recipe.py"
    edit(
        recipe,
        ('        "noise_prob": Key(Share),\n', '        "loss_weight": Key(NonNegative),\n'),
    )
    weighted = "        sums = sums * self.hparams.loss_weight\n"
    edit(copy / "recipes/vad/brain.py", ("        return Loss(sums * batch.w", weighted))
    content = recipe.read_text()
    imported = "Decibels, PositiveCount"
    recipe.write_text(content.replace(imported, "Decibels, NonNegative, PositiveCount"))
    edit(copy / "hparams/vad.yaml", ("\n# ---- fine-t", "loss_weight: 1.0  # of all frames\n"))


def add_task(copy: Path) -> None:
    """Move the example of a task to the folders of tasks, recipes and YAMLs."""
    example = copy / "docs/examples/language_id"
    task, recipe = copy / "sbkit/tasks/language_id", copy / "recipes/language_id"
    for folder in (task, recipe):
        folder.mkdir()
    parts = '"""Which language an utterance is in."""\n\nMODEL_PARTS = "AttentivePooling"\n'
    (task / "__init__.py").write_text(parts)
    (recipe / "__init__.py").touch()
    head, class_of_model, rest = (example / "language_id.py").read_text().partition("class Lang")
    model, command, task_class = rest.partition("def identify(")
    (task / "model.py").write_text(head.partition("\nCOLUMN")[0] + "\n\n" + class_of_model + model)
    imported = "from sbkit.tasks.language_id.model import LanguageModel\n\nCOLUMN"
    (task / "task.py").write_text(head.replace("\nCOLUMN", f"{imported}", 1) + command + task_class)
    recipe_text = (example / "language_id_recipe.py").read_text()
    here = "from language_id import COLUMN, LanguageIdentification, LanguageModel\n"
    assert here in recipe_text
    moved = (
        "from sbkit.tasks.language_id.model import LanguageModel\n"
        "from sbkit.tasks.language_id.task import COLUMN, LanguageIdentification\n"
    )
    (recipe / "recipe.py").write_text(recipe_text.replace(here, moved))
    yaml = (example / "language_id.yaml").read_text()
    yaml = yaml.replace("language_id_recipe.", "recipes.language_id.recipe.")
    yaml = yaml.replace("!new:language_id.", "!new:sbkit.tasks.language_id.model.")
    yaml = re.sub(r"(?m)^(\w+: .*?)  # .*", r"\1", yaml)  # or in the words of their keys
    (copy / "hparams/language_id.yaml").write_text(yaml)
    for words in (["check", "--fix", "-q"], ["format", "-q"]):  # unused and unsorted imports
        subprocess.run(["ruff", *words, str(task), str(recipe)], check=True)


def named_tests(name: str) -> list[str]:
    """Return the tests that the page names: those of the row, and those of the house."""
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"(?m)^\| {name} \|.*\| `([^`]*)` \|$", page)
    (command,) = re.findall(r"`tools/test quick (tests/[^`]*)`", page)
    return [*row.split(), *command.split()[2:]]  # the command has those of a corpus first


PATCHES: dict[str, Callable[[Path], None]] = {
    "corpus": add_corpus,
    "error rate of texts": add_error_rate,
    "augmentation": add_augmentation,
    "export format": add_format,
    "loss": add_loss,
    "key": add_key,
    "task": add_task,
}


@pytest.mark.release
@pytest.mark.slow(300)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PATCHES)
def test_addition_as_the_page_says_is_green(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "sbkit"
    copy_checkout(copy)
    PATCHES[name](copy)
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> None:
        command = [sys.executable, "-m", *words]
        process = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-1000:]

    run("docs.reference")
    for words in (["format", "--check"], ["check"]):
        run("ruff", *words, ".")
    tests = ("-m", "not slow and not ddp and not browser and not release", "--skip-missing")
    run("pytest", "-q", "-n", "2", "--dist", "loadscope", *tests, *named_tests(name))
