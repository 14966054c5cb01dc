"""Complete runs on other corpora: the layout of LibriSpeech, tables, another sample rate."""

import json
import shutil
from pathlib import Path

import pytest
import soundfile

from sbkit.base.errors import BAD_INPUT
from sbkit.evaluate.slices import EMPTY_VALUE
from sbkit.logs.run_log import read_log
from tests.recipes.test_librispeech import write_chapter
from tests.runs import Workplace, prompts, read_json, rows_of

UNCHECKED = ("--number_of_epochs=1", "--check=false")
LIBRISPEECH = {
    **{"train-clean-100": "train", "train-other-500": "train"},
    **{"dev-clean": "dev", "dev-other": "dev", "test-clean": "test", "test-other": "test"},
}


def write_librispeech(asterisk: Path, root: Path) -> None:
    """Write six splits of eight or three clips; no clip is in two of them."""
    clips = {split: prompts(asterisk, split) for split in ("train", "dev", "test")}
    for number, (name, split) in enumerate(LIBRISPEECH.items()):
        count = 8 if split == "train" else 3
        write_chapter(root / name / str(number) / "7", clips[split], count=count)


@pytest.mark.slow
def test_librispeech_run_reports_each_test_set(
    asterisk_english: Path, workplace: Workplace, tmp_path: Path
) -> None:
    write_librispeech(asterisk_english, tmp_path / "LibriSpeech")
    run = tmp_path / "run"
    folder = f"--data_folder={tmp_path / 'LibriSpeech'}"
    assert workplace.train_here(run, folder, "--number_of_epochs=1") == 0
    test = read_json(run / "summary.json")["test"]
    counts = {name: figures["utterances"] for name, figures in test.items()}
    assert counts == {"test-clean": 3, "test-other": 3}
    assert all((run / f"wer_{name}.txt").is_file() for name in counts)
    log = read_log(run / "train_log.jsonl")
    (epoch,) = [record for record in log if record["kind"] == "epoch"]
    assert {"CER", "dev-clean/CER", "dev-other/WER"} <= epoch.keys()
    tests = [record["split"] for record in log if record["kind"] == "test"]
    assert tests == ["test-clean", "test-other"]


@pytest.mark.slow
def test_run_on_tables_reports_by_column(workplace: Workplace, tmp_path: Path) -> None:
    clips = workplace.release / "clips"
    rows = {
        split: [(clips / row["path"], row["sentence"]) for row in rows_of(file)]
        for split in ("train", "dev", "test")
        for file in [workplace.release / f"{split}.tsv"]
    }
    comma = "".join(f'{path},"{text}",ann\n' for path, text in rows["train"])
    (tmp_path / "a.csv").write_text(f"path,sentence,reader\n{comma}")
    tab = "".join(f"{path}\t{text}\n" for path, text in rows["dev"])
    (tmp_path / "b.tsv").write_text(f"audio\ttranscript\n{tab}")
    lines = [
        {"audio_filepath": str(path), "text": text, "reader": "ann" if number else ""}
        for number, (path, text) in enumerate(rows["test"])
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables: list[str] = []
    for name, file in (("train", "a.csv"), ("dev", "b.tsv"), ("test", "c.jsonl")):
        tables += ["--manifest", f"{name}={tmp_path / file}"]
    run = tmp_path / "run"
    options = ("--data_folder=null", *UNCHECKED, "--report_by=[reader]")
    assert workplace.train_here(run, *options, *tables) == 0
    test = read_json(run / "summary.json")["test"]["test"]
    assert test["utterances"] == 4
    slices = test["report_by"]["reader"]
    counts = {reader: figures["utterances"] for reader, figures in slices.items()}
    assert counts == {"ann": 3, EMPTY_VALUE: 1}
    assert (run / "report_by_test.tsv").read_text().startswith("column\tvalue\tutterances\tCER")


@pytest.mark.slow
def test_run_at_8_khz_uses_all_audio(workplace: Workplace, tmp_path: Path) -> None:
    assert workplace.train_here(tmp_path, "--sample_rate=8000", *UNCHECKED) == 0
    seconds = read_json(tmp_path / "summary.json")["audio_seconds"]
    rows = rows_of(workplace.release / "train.tsv")
    clips = [workplace.release / "clips" / row["path"] for row in rows]
    assert seconds == pytest.approx(sum(soundfile.info(clip).duration for clip in clips), abs=0.1)


@pytest.mark.slow
def test_run_on_another_language_is_refused(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    german = Workplace(tmp_path / "release", tmp_path / "cache")
    shutil.copytree(workplace.release, german.release)
    for split in ("train", "dev", "test"):
        table = german.release / f"{split}.tsv"
        head, *rows = table.read_text().splitlines()
        table.write_text("\n".join([f"{head}\tlocale", *(f"{row}\tde" for row in rows)]) + "\n")
    assert german.train_here(tmp_path / "run") == BAD_INPUT
    assert "is en, but 16 of 16 rows of the manifest have the locale de" in capsys.readouterr().err
