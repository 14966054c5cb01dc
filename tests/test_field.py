"""Recordings with annotations of ELAN train a model, are scored, and get annotations back."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from pympi import Eaf

from sbkit.base.errors import BAD_INPUT
from sbkit.data.annotations import read_annotations
from sbkit.data.tables import TableOptions
from tests.runs import Workplace, read_json, rows_of

pytestmark = pytest.mark.slow
RATE = 16_000


def write_recordings(release: Path, folder: Path) -> int:
    """Write a recording of each of four speakers, with its annotations; return their number."""
    rows = [row for split in ("train", "dev", "test") for row in rows_of(release / f"{split}.tsv")]
    folder.mkdir()
    for speaker in range(4):
        eaf = Eaf(author="")
        eaf.remove_tier("default")
        eaf.add_linguistic_type("utterance")
        eaf.add_tier(f"tx@{speaker}", "utterance", part=f"speaker {speaker}")
        eaf.add_tier("noises")
        eaf.add_annotation("noises", 0, 300, "door")
        pieces, start = [np.zeros(RATE // 2, np.int16)], 500
        for row in rows[speaker::4]:
            audio, _ = soundfile.read(release / "clips" / row["path"], dtype="int16")
            audio = audio[: len(audio) // 16 * 16]  # whole milliseconds
            end = start + len(audio) // 16
            eaf.add_annotation(f"tx@{speaker}", start, end, row["sentence"])
            pieces += [audio, np.zeros(RATE // 5, np.int16)]
            start = end + 200
        name = f"session {speaker}"
        soundfile.write(folder / f"{name}.wav", np.concatenate(pieces), RATE)
        eaf.add_linked_file(f"file:///C:/{name}.wav", f"./{name}.wav", "audio/x-wav")
        eaf.to_file(str(folder / f"{name}.eaf"))
    return len(rows)


def test_folder_of_elan_trains_and_is_scored(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "elan", tmp_path / "run"
    num_rows = write_recordings(workplace.release, folder)
    options = (f"--data_folder={folder}", "--number_of_epochs=1")
    assert workplace.train_here(run, *options) == BAD_INPUT
    assert "noises (type default-lt, 1 annotation)" in capsys.readouterr().err
    assert workplace.train_here(run, *options, "--tier=utterance") == 0
    report = read_json(run / "data_report.json")["splits"]
    assert sum(report[split]["utterances"] for split in ("train", "dev", "test")) == num_rows
    file, scores = folder / "session 0.eaf", tmp_path / "scores"
    assert workplace.sbkit("score", run, file, "--out", scores) == 0
    (scored,) = read_json(scores / "summary.json")["test"].values()
    tiers = TableOptions(tiers=("tx@0",))
    assert scored["utterances"] == len(read_annotations(str(file), tiers).rows)

    out = tmp_path / "out"
    for format in ("eaf", "textgrid"):
        assert (
            workplace.sbkit(
                "transcribe",
                run / "bundle",
                folder / "session 1.wav",
                "--format",
                format,
                "--out",
                out,
            )
            == 0
        )
    for name in ("session 1.eaf", "session 1.TextGrid"):
        assert (out / name).is_file()
