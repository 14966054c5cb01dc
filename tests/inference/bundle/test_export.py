"""An export takes the place of an earlier bundle, and of nothing else; no failure loses both."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from sbkit.base.errors import SbkitError
from sbkit.decoding.decoder import LANGUAGE_MODELS
from sbkit.inference.bundle.export import export_run
from sbkit.inference.bundle.place import replacing, require_free
from sbkit.inference.formats import held_out
from sbkit.inference.formats.held_out import find_held_out
from sbkit.inference.runtime.torch_model import load_bundle
from tests.inference.bundles import ROOT, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    export_run(run, run.parent / "bundle")
    return run.parent / "bundle"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_an_earlier_bundle_is_replaced(run: Path, bundle: Path) -> None:
    (bundle / "model.safetensors").write_bytes(b"old")
    export_run(run, bundle)
    load_bundle(bundle)
    assert names(bundle.parent) == {"bundle"}


def test_a_run_whose_decoder_has_no_weights_yet_is_not_greedy_in_silence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = Path(shutil.copytree(run, tmp_path / "run"))
    (unfinished / LANGUAGE_MODELS).touch()
    export_run(unfinished, tmp_path / "bundle")
    assert "decodes greedily. Finish the run, or choose them: sbkit tune" in capsys.readouterr().err


def test_a_folder_with_anything_else_is_left_alone(run: Path, bundle: Path) -> None:
    (bundle / "NOTES.md").touch()
    with pytest.raises(SbkitError, match=r"something else \(NOTES.md\)"):
        export_run(run, bundle)
    assert "NOTES.md" in names(bundle)


def test_the_configuration_of_another_tool_is_no_bundle(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "checksums.json").touch()
    with pytest.raises(SbkitError, match="holds something else"):
        export_run(run, tmp_path)
    assert len(names(tmp_path)) == 3


@pytest.mark.parametrize("step", ["new", "old", "both"])
def test_a_kill_at_any_step_leaves_a_bundle(run: Path, bundle: Path, step: str) -> None:
    """Put the folder into the state of a kill, before and between the two renames."""
    new, old = bundle.with_name(".bundle.new"), bundle.with_name(".bundle.old")
    if step != "old":
        shutil.copytree(bundle, new)
        (new / "config.json").unlink()
    if step != "new":
        bundle.rename(old)
    with pytest.raises(RuntimeError), replacing(bundle):
        load_bundle(bundle)  # it is back before anything is written
        raise RuntimeError
    load_bundle(bundle)
    assert names(bundle.parent) == {"bundle"}


@pytest.mark.parametrize(
    ("out", "words"),
    [(".", "the folder that you are in"), ("link", "is a symbolic link"), ("file", "is no folder")],
)
def test_a_place_that_is_none_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "file").touch()
    with pytest.raises(SbkitError, match=words):
        require_free(Path(out))


def test_a_place_that_cannot_be_written_names_out(run: Path) -> None:
    with pytest.raises(SbkitError, match="--out must lie in a folder to write to") as caught:
        export_run(run, Path("/proc/bundle"))
    assert "SBKIT_CACHE" not in str(caught.value)


def change_yaml(run: Path, old: str, new: str) -> None:
    file = run / "hyperparams.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sbkit.audio.fbank.Fbank", "torch.nn.ParameterDict.get", "not on the list"),
        ("!new:torch.nn.ModuleList", "!new:torch.nn.Sequential", "must be a torch.nn.ModuleList"),
    ],
)
def test_a_foreign_run_is_data(run: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    foreign = Path(shutil.copytree(run, tmp_path / "run"))
    change_yaml(foreign, old, new)
    with pytest.raises(SbkitError, match=words):
        export_run(foreign, tmp_path / "out")
    assert names(tmp_path) == {"run"}


@pytest.mark.parametrize(
    ("there", "lost", "words"),
    [
        ((), "tokenizer.model", "file of labels .*tokenizer.model"),
        (("lm.safetensors", "summary.json"), "decoder.json", "and would decode greedily"),
    ],
)
def test_a_run_that_lost_a_file_is_no_other_model(
    run: Path, tmp_path: Path, there: tuple[str, ...], lost: str, words: str
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for name in there:
        (copy / name).touch()
    (copy / lost).unlink(missing_ok=True)
    with pytest.raises(SbkitError, match=words):
        export_run(copy, tmp_path / "bundle")


def test_a_run_whose_yaml_has_no_decoder_is_greedy(tmp_path: Path) -> None:
    text = (ROOT / "hparams" / "ctc.yaml").read_text()
    begin, end = text.index("\ndecoder: "), text.index("\ncompute_features: ")
    (tmp_path / "greedy.yaml").write_text(text[:begin] + text[end:])
    run = make_run(tmp_path / "run", tmp_path / "greedy.yaml")
    for name in (LANGUAGE_MODELS, "summary.json"):
        (run / name).write_text("{}")
    export_run(run, tmp_path / "bundle")
    assert load_bundle(tmp_path / "bundle").decoder is None


def test_a_run_without_confidences_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "confidence.json").unlink(missing_ok=True)
    export_run(copy, tmp_path / "bundle")
    said = "note: this run has no confidence.json, so that its words get no confidences. Finish "
    assert f"{said}the run, or fit them: sbkit tune {copy}" in capsys.readouterr().err
    (copy / "confidence.json").write_text('{"greedy": {"weights": null}}')  # too few words
    export_run(copy, tmp_path / "bundle")
    assert "confidence" not in capsys.readouterr().err


def test_a_part_of_ones_own_is_exported_and_loaded_by_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_heads.py").write_text(
        "from torch import nn\n\nclass Head(nn.Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml = tmp_path / "mine.yaml"
    text = (ROOT / "hparams" / "ctc.yaml").read_text()
    yaml.write_text(text.replace("ctc_lin: !new:torch.nn.Linear", "ctc_lin: !new:my_heads.Head"))
    run = make_run(tmp_path / "run", yaml)
    with pytest.raises(SbkitError, match="pass --import my_heads"):
        export_run(run, tmp_path / "bundle")
    own = frozenset(["my_heads"])
    export_run(run, tmp_path / "bundle", own=own)
    with pytest.raises(SbkitError, match="pass --import my_heads"):
        load_bundle(tmp_path / "bundle")
    assert type(load_bundle(tmp_path / "bundle", own=own).model.network.ctc_lin).__name__ == "Head"


def test_test_sets_are_those_that_the_run_was_tested_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "summary.json").write_text('{"test": {"test": {"references": "others"}}}')
    splits = SimpleNamespace(test={"test": Dataset.from_dict({"id": ["a"], "text": ["b"]})})
    recipe = SimpleNamespace(prepare_splits=lambda knobs: splits)
    monkeypatch.setattr(held_out, "load_recipe", lambda *_, **__: recipe)
    with pytest.raises(SbkitError, match="its ids or transcripts changed since"):
        find_held_out(copy)
    splits.test.clear()
    with pytest.raises(SbkitError, match="must have test sets .* Name data of yours: sbkit"):
        find_held_out(copy)
