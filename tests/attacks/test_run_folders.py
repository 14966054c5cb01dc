"""A run folder is data: none of its modules runs unless `--import` names it."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from sbkit.base import imports
from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.files import RUN_YAML
from sbkit.checkpoint.ranking import AveragedCheckpoints
from sbkit.commands.cli import run
from sbkit.config.hparams import read_spec
from sbkit.export.export import export_run
from sbkit.run.run import Run
from tests.attacks.hostile import DAMAGES, refused, watched
from tests.attacks.test_files import plant
from tests.models.pretrained.folders import FRAMES, tiny_config
from tests.runs import Workplace
from tests.runtime.bundles import ROOT, SIZES, edit_config, make_run

# The file is a recipe and a corpus; it leaves a mark if it runs.
EVIL = """
from pathlib import Path
from recipes.CommonVoice.corpus import CommonVoice
from recipes.asr.recipe import AsrRecipe
class Evil(CommonVoice): ...
Path(__file__.partition("evil")[0], "evil.ran").touch()
"""
LAYER = "from torch import nn\n\nclass Layer(nn.Linear):\n    pass\n"
NAMES = {"recipe": "evil.AsrRecipe", "corpus": "evil"}


@pytest.fixture
def folder(workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of a run; leave no module of it in memory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(imports, "_yaml_folders", [])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    yield make_run(tmp_path / "run", data_folder=str(workplace.release))
    sys.modules.pop("evil", None)


def score(folder: Path, *options: str) -> None:
    run(["score", str(folder), *options])


def set_in_yaml(folder: Path, key: str, value: str) -> None:
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(re.sub(rf"(?m)^{key}:.*$", f"{key}: {value}", yaml.read_text()))


@pytest.mark.parametrize("inner", [".", "bundle", "bundle/onnx"])
def test_run_folder_is_not_searched_for_modules(
    inner: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it if it is the working folder: a library may look for a package that is missing."""
    (folder / inner).mkdir(parents=True, exist_ok=True)
    (folder / inner / "evil.py").write_text(EVIL)
    monkeypatch.chdir(folder / inner)
    export_run(folder, folder.parent / "bundle")
    score(folder)
    Run.open(folder).prepare_splits()
    with pytest.raises(ModuleNotFoundError):
        import_module("evil")
    with pytest.raises(SbkitError, match="evil cannot be imported"):
        score(folder, "--import", "evil")


@pytest.mark.parametrize("key", NAMES)
def test_module_that_a_run_names_is_imported_if_the_user_names_it(
    key: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It lies in the working folder, as when the run was started."""
    (tmp_path / "evil.py").write_text(EVIL)
    set_in_yaml(folder, key, NAMES[key])
    monkeypatch.chdir(tmp_path)
    for message in refused_by("score tune", folder):
        assert re.search("needs code of the module evil, .* pass --import evil", message)
    assert "evil" not in sys.modules
    score(folder, "--import", "evil")
    assert capsys.readouterr().out.startswith("test: CER")


def test_reading_the_yaml_of_a_run_imports_no_recipe(folder: Path) -> None:
    """Without the key `output_folder`, the recipe was asked whether it has this key."""
    (folder / "evil.py").write_text(EVIL)
    yaml = folder / "hyperparams.yaml"
    yaml.write_text(yaml.read_text().replace("<output_folder>", str(folder)))
    yaml.write_text(re.sub(r"(?m)^output_folder:.*\n", "", yaml.read_text()))
    set_in_yaml(folder, "recipe", NAMES["recipe"])
    with pytest.raises(SbkitError):
        read_spec(folder / RUN_YAML)
    with pytest.raises(SbkitError):
        Run.open(folder)
    assert "evil" not in sys.modules


def test_override_of_an_unknown_key_imports_no_recipe(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may declare more keys; that of a stranger is not asked, even where it is found."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    set_in_yaml(folder, "recipe", NAMES["recipe"])
    message = refused(lambda: Run.open(folder, {"evil_key": 1}), tmp_path / "evil.ran")
    assert "evil_key" in message and "evil" not in sys.modules


# -- what is in the files of a run -----------------------------------------------------------------

READERS: dict[str, Callable[[Path], object]] = {
    "history": lambda folder: Run.open(folder).history,
    "scores": lambda folder: Run.open(folder).scores,
    "errors": lambda folder: Run.open(folder).errors(),
    "model": lambda folder: Run.open(folder).model,
    "tune": lambda folder: Run.open(folder).tune(out=folder.parent / "tuned"),
    "tune an order": lambda folder: run(
        ["tune", str(folder), "--word-lm-order=2", "--out", str(folder.parent / "tuned")]
    ),
    "compare": lambda folder: run(["compare", str(folder), str(folder)]),
    "score": score,
    "export": lambda folder: run(["export", str(folder), "--out", str(folder.parent / "new")]),
}
FILES = {  # with readers that refuse a pipe or a device in its place
    "hyperparams.yaml": "history scores errors model tune score export",
    "run_config.json": "history scores errors model tune",
    "train_log.jsonl": "history",
    "summary.json": "scores errors compare export",
    "utterances_test.jsonl": "errors compare",
    "bundle/config.json": "model tune score export",
    "bundle/model.safetensors": "model tune score export",
    # of a run without a bundle
    "tokenizer.model": "model score export",
    "checkpoints/averaged.json": "model score export",
    "checkpoints/*/CKPT.yaml": "model tune score export",
    "checkpoints/*/model.ckpt": "model score export",
}


def export_into(folder: Path) -> None:
    """Give a run its bundle, as the end of training does."""
    export_run(folder, folder.parent / "bundle")
    (folder.parent / "bundle").rename(folder / "bundle")


@pytest.fixture
def tested(folder: Path) -> Path:
    """Return a run with a bundle, results and a log."""
    export_into(folder)
    score(folder, "--out", str(folder.parent / "scores"))
    for name in ("summary.json", "utterances_test.jsonl"):
        shutil.copy(folder.parent / "scores" / name, folder)
    names = tuple(checkpoint.name for checkpoint in folder.glob("checkpoints/CKPT*"))
    AveragedCheckpoints(names, names, {}).write(folder / "checkpoints")
    (folder / "train_log.jsonl").touch()
    return folder


def refused_by(readers: str | Sequence[str], folder: Path) -> list[str]:
    """Return the errors of readers, each of which refuses a run."""
    canary = folder.parent / "canary"
    names = readers.split() if isinstance(readers, str) else readers
    return [refused(partial(READERS[name], folder), canary) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["pipe", "link to /dev/zero", "a terabyte"])
def test_files_of_a_run_are_regular_and_limited(damage: str, tested: Path) -> None:
    for name, readers in FILES.items():
        if name == "tokenizer.model":
            shutil.rmtree(tested / "bundle")
        (file,) = tested.glob(name)
        shutil.copy(file, tested.parent / "kept")
        DAMAGES[damage](file)
        refused_by(readers, tested)
        file.unlink()
        shutil.copy(tested.parent / "kept", file)


@pytest.mark.parametrize(
    ("first", "level", "use"),
    [
        ("[1]", "[{}]", "*x{}"),
        ("{a: 1}", "{{<<: [{}]}}", "*x{}"),
        ("[1]", "[{}]", "!ref <x{}>"),
        ("abc", "!ref {}", "<x{}>"),
        ("{a: *x0}", "*x0", ""),
    ],
)
def test_few_aliases_stay_few_values(first: str, level: str, use: str, folder: Path) -> None:
    levels = [level.format(", ".join(10 * [use.format(n)])) for n in range(11)]
    bomb = "".join(f"x{n}: &x{n} {text}\n" for n, text in enumerate([first, *levels]))
    (meta,) = folder.glob("checkpoints/*/CKPT.yaml")
    for file, readers in ((folder / "hyperparams.yaml", "scores tune"), (meta, "tune export")):
        kept = file.read_text()
        file.write_text(f"{bomb}{kept}".replace("CER: 50.0", "CER: *x11"))
        write_checksums(meta.parent)
        refused_by(readers, folder)
        file.write_text(kept)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_folder", "http://localhost/a"),
        ("data_folder", "[s3://a/b, /c]"),
        ("manifest", "{train: a.csv, dev: a.csv, test: {b: http://localhost/a.csv}}"),
        ("manifest", "{train: a.csv, dev: a.csv, test: [/dev/zero]}"),
        ("corpus", "evil"),
        ("lm_text", "http://localhost/a.txt"),
        ("lm_text", "[a.txt, 's3://a/b.arpa']"),
        ("lm_text", "/dev/zero"),
    ],
)
def test_run_that_is_read_as_data_opens_no_address_or_module(
    key: str, value: str, tested: Path
) -> None:
    set_in_yaml(tested, key, value)
    advice = "If you trust it, pass" if key == "corpus" else "only if you name it yourself"
    readers = ["score", "tune an order"] if key == "lm_text" else "scores errors tune score"
    for message in refused_by(readers, tested):
        assert advice in message and (f"`{key}` of the run is " in message or key == "corpus")


@pytest.mark.slow
def test_address_in_the_files_of_a_run_is_not_opened(tested: Path) -> None:
    """Not by a reader that refuses the run, either."""
    for folder in (tested, tested / "bundle"):
        plant(folder)
    for read in READERS.values():
        with watched(tested.parent / "canary"), suppress(SbkitError):
            read(tested)


def test_encoder_that_a_run_names_is_downloaded_for_training_only(folder: Path) -> None:
    """`encoder_config` may be missing, or name a commit of the hub's model."""
    yaml = folder / "hyperparams.yaml"
    text = (ROOT / "hparams/ctc_pretrained.yaml").read_text()
    yaml.write_text(text.replace("pretrained: null", "pretrained: stranger/tracker"))
    shutil.rmtree(folder / "checkpoints")
    canary = folder.parent / "canary"
    assert "downloaded only if you name it" in refused(lambda: Run.open(folder), canary)
    sizes = tiny_config(**FRAMES) | {"source": {"name": "stranger/tracker", "revision": "0" * 40}}
    set_in_yaml(folder, "encoder_config", json.dumps(sizes))
    with watched(canary):
        opened = Run.open(folder)
    assert opened.settings["encoder_config"] == sizes and opened.history == []
    refused_by("scores errors model tune score export", folder)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "recipes.AsteriskPrompts.corpus --language=en"),  # the default corpus
        ({"corpus": "recipes.FestvoxRu.corpus"}, "recipes.FestvoxRu.corpus --language=ru"),
    ],
)
def test_corpus_of_a_run_is_fetched_only_if_the_user_names_it(
    settings: Mapping[str, str],
    advice: str,
    tested: Path,
    own_cache: Path,
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description = json.loads((tested / "run_config.json").read_text())
    for key in ("corpus", "data_folder"):
        set_in_yaml(tested, key, json.dumps(settings.get(key)))
        description["values"][key] = settings.get(key)
    (tested / "run_config.json").write_text(json.dumps(description))
    for message in refused_by("errors tune score", tested):
        assert f"you name it yourself: sbkit prepare hparams/ctc.yaml --corpus={advice}" in message
    assert not own_cache.exists()
    with patch("recipes.debian.release.fetch_packages", side_effect=SbkitError("asks a mirror")):
        opened = Run.open(tested, {"corpus": settings.get("corpus")})
        assert refused(opened.errors, tested.parent / "canary") == "asks a mirror"
    monkeypatch.setattr("recipes.debian.release.find_release", lambda *_: workplace.release)
    with watched(tested.parent / "canary"):
        assert Run.open(tested).errors()  # from the cache


def test_address_that_the_user_gives_is_opened(tested: Path) -> None:
    opened = Run.open(tested, {"data_folder": "memory://shards"})
    assert "has no such index" in refused(opened.errors, tested.parent / "canary")


# -- the modules of its bundle ---------------------------------------------------------------------

LIBRARY_CLASS = "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"  # not on the list


@pytest.mark.parametrize("name", ["evil.Layer", LIBRARY_CLASS])
def test_class_in_a_bundle_is_built_only_if_the_user_names_its_module(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "evil.py").write_text(LAYER)
    monkeypatch.syspath_prepend(folder.parent)
    module = name.rpartition(".")[0]
    import_module(module)  # which is no trust
    export_into(folder)
    edit_config(folder / "bundle", lambda config: config["parts"]["seq_lin"].update(new=name))
    edit_config(folder / "bundle", lambda config: config.update(user_modules=[module]))
    for message in refused_by("model tune score export", folder):
        assert "is not on sbkit's list" in message and "`user_modules`" in message
    opened = Run.open(folder, user_modules=[module])
    if name != LIBRARY_CLASS:
        assert "Layer(" in repr(opened.model)
        return
    for read in (lambda: opened.model, lambda: score(folder, "--import", module)):
        assert "is a class of an installed package" in refused(read, folder.parent / "canary")


def test_modules_that_an_own_yaml_names_are_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(LAYER)
    sizes = "{in_features: !ref <d_model>, out_features: !ref <tokenizer.vocab_size>}"
    yaml = tmp_path / "own.yaml"
    yaml.write_text(f"base: {ROOT}/hparams/ctc.yaml\nseq_lin: !new:evil.Layer {sizes}\n")
    run = make_run(tmp_path / "made", yaml)
    own = Run(yaml, {**SIZES, "output_folder": str(run)})
    assert "Layer(" in repr(own.model)
    own.export(tmp_path / "exported")
    assert (tmp_path / "exported/evil.py").read_text() == LAYER
    assert "`user_modules`" in refused_by("model", run)[0]
    assert "Layer(" in repr(Run.open(run, user_modules=["evil"]).model)
