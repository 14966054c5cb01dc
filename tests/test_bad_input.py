"""Bad input ends a command with one sentence and a nonzero exit code, and loses nothing."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.commands.cli import run as sbkit
from tests.checkpoint.saves import cut
from tests.runs import ROOT, Workplace, contents_of, read_json, rows_of, write_tsv

ONE_EPOCH = "--number_of_epochs=1"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def own_release(workplace: Workplace, tmp_path: Path) -> Workplace:
    """Return a copy of the release, which a test may change."""
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    return Workplace(release, tmp_path / "cache")


def refusal(
    workplace: Workplace, output: Path, *options: str, capsys: Captured, **yaml: str
) -> str:
    """Run a command that must fail; return the sentence that it prints."""
    capsys.readouterr()
    assert workplace.train_here(output, "--check=True", *options, **yaml) == BAD_INPUT
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert "Traceback" not in error
    return error


def change_row(release: Path, split: str, row: int, **values: str) -> str:
    """Change a row of a manifest; return the id of the clip."""
    rows = [(item["path"], item["sentence"]) for item in rows_of(release / f"{split}.tsv")]
    path, sentence = rows[row]
    rows[row] = (values.get("path", path), values.get("sentence", sentence))
    write_tsv(release, split, rows)
    return Path(rows[row][0]).stem


def test_unwritable_output_folder_is_named(
    workplace: Workplace, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("not a folder")
    sentence = refusal(workplace, tmp_path / "file" / "run", capsys=capsys)
    assert "output_folder" in sentence
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.slow
def test_transcripts_too_long_for_their_audio_are_left_out(
    own_release: Workplace, tmp_path: Path, capsys: Captured
) -> None:
    """Training leaves them out; dev and test keep them."""
    too_long = "one two three four five six seven eight nine ten eleven twelve thirteen " * 3
    clip = change_row(own_release.release, "train", 3, sentence=too_long)
    change_row(own_release.release, "dev", 0, sentence=too_long)
    change_row(own_release.release, "test", 0, sentence="quiz, quartz & jazz")
    for row, item in enumerate(rows_of(own_release.release / "train.tsv")):
        text = item["sentence"].replace("z", "s")
        change_row(own_release.release, "train", row, sentence=text)
    assert own_release.train_here(tmp_path / "run", ONE_EPOCH, "--check=False") == 0
    out = capsys.readouterr().out
    assert "train: 15 utterances" in out
    assert "train: 1 left out, too short for its transcript" in out
    assert "text table of en: lower case, the letters abcdefghijklmnopqrstuvwxyz" in out
    (row,) = rows_of(tmp_path / "run" / "left_out.tsv")
    assert row["id"] == clip
    assert re.fullmatch(r"\d+ frames, \d+ needed", row["detail"])
    assert read_json(tmp_path / "run" / "summary.json")["test"]["test"]["utterances"] == 4


@pytest.mark.slow
def test_run_is_not_resumed_once_a_clip_of_it_is_forgotten(
    own_release: Workplace, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "run"
    assert own_release.train_here(run, ONE_EPOCH, "--check=False") == 0
    named: list[Path] = []
    for split in ("train", "test"):
        rows = [
            (row["path"], row["sentence"]) for row in rows_of(own_release.release / f"{split}.tsv")
        ]
        named.append(own_release.release / "clips" / rows[0][0])
        write_tsv(own_release.release, split, rows[1:])
    capsys.readouterr()
    assert own_release.sbkit("cache", "forget", *named, "--runs", run) == 0
    listed = {*capsys.readouterr().out.splitlines()}
    assert {str(run / name) for name in ("report.html", "utterances_test.jsonl")} <= listed
    sentence = refusal(own_release, run, "--number_of_epochs=2", capsys=capsys)
    assert "train and test" in sentence and "`sbkit cache forget`" in sentence
    assert own_release.train_here(tmp_path / "new", ONE_EPOCH, "--check=False") == 0


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, "--number_of_epochs=2", "--check=false") == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a finished run that a test may change; restore it afterwards, in the same folder."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    yield trained
    shutil.rmtree(trained)
    shutil.copytree(copy, trained)


def checkpoints(run: Path) -> list[Path]:
    return sorted(folder for folder in (run / "checkpoints").iterdir() if folder.is_dir())


@pytest.mark.slow
def test_truncated_checkpoint_is_skipped(run: Path, workplace: Workplace, capsys: Captured) -> None:
    first, last = checkpoints(run)
    cut(last / "model.ckpt")
    complete = contents_of(first)
    capsys.readouterr()
    assert workplace.train_here(run, "--number_of_epochs=2", "--check=false") == 0
    output = capsys.readouterr()
    assert f"{last} is skipped: model.ckpt" in output.err
    assert "epoch 2/2" in output.out
    assert not first.exists() or contents_of(first) == complete


@pytest.mark.slow
def test_run_without_complete_checkpoint_is_left_unchanged(
    run: Path, workplace: Workplace, tmp_path: Path, capsys: Captured
) -> None:
    for checkpoint in checkpoints(run):
        cut(checkpoint / "model.ckpt")
    before = contents_of(run)
    sentence = refusal(workplace, run, "--number_of_epochs=2", capsys=capsys)
    assert "only damaged checkpoints (2)" in sentence
    assert contents_of(run) == before
    shutil.rmtree(run / "bundle")  # which could be exported without them
    with pytest.raises(SbkitError, match="only damaged checkpoints"):
        sbkit(["export", str(run), "--out", str(tmp_path / "bundle")])
    assert not (tmp_path / "bundle").exists()


STRANGERS = ("Thumbs.db", ".nfs0001", "._model.ckpt", "~$model", "a.swp")
STRANGE_FOLDERS = ("lost+found", ".ipynb_checkpoints", "@eaDir", ".Trash-1000")


@pytest.mark.slow
def test_what_systems_and_editors_leave_in_our_folders_is_ignored(
    own_release: Workplace, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made a checkpoint "damaged", and the run could not go on."""
    run, out, cache = tmp_path / "run", tmp_path / "out", own_release.cache
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    assert own_release.train_here(run, "--number_of_epochs=2") == 0
    sbkit(["export", str(run), "--out", str(out), "--formats", "sherpa-onnx,onnx"])
    for folder in [inner for top in (run, out, cache) for inner in (top, *top.rglob("*"))]:
        for name in STRANGERS if folder.is_dir() else ():
            (folder / name).write_bytes(b"strange")
        for name in STRANGE_FOLDERS if folder.is_dir() else ():
            (folder / name).mkdir()
    capsys.readouterr()
    assert own_release.train_here(run, "--number_of_epochs=4", "--average_checkpoints=1") == 0
    printed = "".join(capsys.readouterr())
    assert "epoch 3/4" in printed and "epoch 2/4" not in printed
    assert "damaged" not in printed and "skipped" not in printed
    assert len([path for path in checkpoints(run) if path.name.startswith("CKPT")]) < 4
    clip = str(min((own_release.release / "clips").iterdir()))
    assert sbkit(["export", str(run), "--out", str(out)]) == 0
    assert sbkit(["transcribe", str(out), clip]) == 0
    assert {*STRANGERS, *STRANGE_FOLDERS} <= {path.name for path in out.iterdir()}
    capsys.readouterr()
    assert sbkit(["cache", "prune"]) == 0
    assert not any(name in capsys.readouterr().out for name in STRANGE_FOLDERS)


def test_folder_without_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="is not a run folder: it has no hyperparams.yaml"):
        sbkit(["export", str(tmp_path), "--out", str(tmp_path / "bundle")])
    with pytest.raises(SbkitError, match="does not train. Write: python train.py FILE.yaml"):
        sbkit(["train", "a.yaml"])
    with pytest.raises(SbkitError, match="nobody is not a bundle: there is no such folder"):
        sbkit(["transcribe", str(tmp_path / "nobody"), "talk.wav"])
    bundle = tmp_path / "ctc/en/3407/bundle"
    bundle.mkdir(parents=True)
    (bundle / "config.json").touch()
    with pytest.raises(SbkitError, match=f"is not a bundle: it has no config.json. Name {bundle}."):
        sbkit(["transcribe", str(tmp_path), "talk.wav"])


def test_tilde_in_folder_is_expanded(
    workplace: Workplace, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yaml = str(ROOT / "hparams" / "ctc.yaml")
    options = ("--output_folder=~/run", "--vocab_size=77", "--check=False")
    refusal(workplace, tmp_path / "other", *options, capsys=capsys, yaml=yaml)
    assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "~").exists()
