"""Complete runs on other corpora: tables, another sample rate."""

import json
from pathlib import Path

import pytest
import soundfile

from sbkit.evaluate.slices import EMPTY_VALUE
from tests.runs import Workplace, read_json, rows_of

UNCHECKED = ("--number_of_epochs=1", "--check=false")


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
