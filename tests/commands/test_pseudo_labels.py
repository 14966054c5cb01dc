"""Pseudo-labels: what the table has, what a second run does again, and whether its WER is true."""

import csv
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from recipes.OwnData import corpus as own_data
from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.base.errors import FILES_FAILED, ConfigError, SbkitError
from sbkit.bundle.config import FORMAT, parse_config
from sbkit.commands import pseudo_labels
from sbkit.commands.cli import run as sbkit
from sbkit.commands.clip_table import ClipTable, Row
from sbkit.data.manifest import Manifest
from sbkit.decoding.fit import fit_decoder
from sbkit.decoding.sample import ValidationUtterance
from sbkit.decoding.utterances import UtteranceConfidence
from sbkit.decoding.words import Confidence, WordAligner
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.transcriber import Transcriber
from tests.runtime.tones import RATE, STEP, ToneModel, silence, speak, tone_bundle
from tests.shortage import largest_file

Captured = pytest.CaptureFixture[str]
TALK = ("lazy", "the quick brown fox", "dog")
PAUSES = (2.0, 3.0)  # seconds
CERTAIN_WORDS = Confidence(3.0, {})
# 0.98 for one word, and 0.46 for four
SURE_OF_SHORT_TEXTS = UtteranceConfidence(Confidence(4.0, {"length": -3.0}), 0.5)


class Talks:
    """A folder of talks, and a bundle that hears tones in the place of any model."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle, tokenizer, self.model = tone_bundle(folder)
        bundle.model.close()
        config = replace(
            bundle.config,
            provenance={"weights": "a"},
            confidence={"greedy": CERTAIN_WORDS},
            utterance_confidence={"greedy": SURE_OF_SHORT_TEXTS},
        )
        self.bundle = replace(bundle, config=config)
        self.folder = folder
        parts = [speak(tokenizer, text) for text in TALK]
        samples = [parts[0], silence(PAUSES[0]), parts[1], silence(PAUSES[1]), parts[2]]
        ends = np.cumsum([len(part) for part in samples]) / RATE
        self.spoken = [(0.0, ends[0]), (ends[1], ends[2]), (ends[3], ends[4])]
        (folder / "talks").mkdir()
        soundfile.write(folder / "talks/long.wav", np.concatenate(samples), RATE)
        soundfile.write(folder / "talks/short.wav", speak(tokenizer, "a fox"), RATE)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(Transcriber, "load", self._load)
        monkeypatch.setattr(
            pseudo_labels, "BundleFiles", lambda _: SimpleNamespace(config=self.bundle.config)
        )

    def _load(self, *_: object, **__: object) -> Transcriber:
        thread = ModelThread(lambda: self.model)
        return Transcriber(bundle=replace(self.bundle, model=thread))

    def label(self, *options: str, files: str = "talks") -> list[dict[str, str]]:
        assert self.run(files, *options) == 0
        return read_table(self.folder / "pseudo.csv")

    def run(self, *arguments: str) -> int:
        out = () if "--out" in arguments else ("--out", "pseudo.csv")
        return sbkit(["transcribe", "model", *arguments, "--format", "manifest", *out])


def read_table(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talks:
    return Talks(tmp_path, monkeypatch)


def test_rows_are_the_utterances_of_long_files(talks: Talks, capsys: Captured) -> None:
    rows = talks.label("--min-confidence", "0")
    assert [row["text"] for row in rows] == [*TALK, "a fox"]
    assert len({row["id"] for row in rows}) == 4
    assert rows[0]["path"] == str(talks.folder.resolve() / "talks/long.wav")
    for row, (start, end) in zip(rows, talks.spoken, strict=False):
        offset = float(row["offset"])
        assert max(0, start - 0.6) <= offset <= start
        assert end <= offset + float(row["duration"]) + 0.1  # the last frame of a tone is silent
        assert offset + float(row["duration"]) <= end + 0.6
    confidence, errors = (float(rows[1][name]) for name in ("confidence", "expected_errors"))
    assert confidence == pytest.approx(1 / (1 + np.exp(3 * np.log(4) - 4)), abs=1e-3)
    wrong_words = 4 * (1 - 1 / (1 + np.exp(-3)))
    assert errors == pytest.approx((1 - confidence) * (1 + 0.5 * wrong_words), abs=1e-2)
    estimate = sum(float(row["expected_errors"]) for row in rows) / 8  # words
    line = capsys.readouterr().out
    assert line.startswith("pseudo.csv: 4 of 4 utterances (0.1 of 0.1 min) with a confidence of")
    assert f"estimated WER is {100 * estimate:.1f} % (" in line


def test_another_threshold_transcribes_nothing_again(talks: Talks, capsys: Captured) -> None:
    assert [row["text"] for row in talks.label()] == ["lazy", "dog"]
    count = len(talks.model.batches)
    rows = talks.label("--min-confidence", "0.7")
    assert [row["text"] for row in rows] == ["lazy", "dog", "a fox"]
    assert len(talks.model.batches) == count
    estimate = sum(float(row["expected_errors"]) for row in rows) / 4  # words of the three
    report = capsys.readouterr().out
    assert "3 of 4 utterances" in report
    assert f"estimated WER is {100 * estimate:.1f} %" in report


def test_stopped_run_goes_on_with_the_next_file(
    talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ClipTable.add_file

    def add_or_stop(table: ClipTable, file: str, rows: list[Row]) -> None:
        if table.rows:
            raise KeyboardInterrupt
        add(table, file, rows)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ClipTable, "add_file", add_or_stop)
        talks.run("talks", "--min-confidence", "0")
    with Path("pseudo.progress.jsonl").open("a") as file:
        file.write('{"item": "/talks/sh')  # a write that was cut off
    talks.model.batches.clear()
    rows = talks.label("--min-confidence", "0")
    assert [row["text"] for row in rows] == [*TALK, "a fox"]
    assert sum(map(len, talks.model.batches)) == 1  # only a fox
    for line in Path("pseudo.progress.jsonl").read_text().splitlines():
        json.loads(line)


def test_full_disk_names_the_progress_and_loses_no_file(talks: Talks) -> None:
    talks.label("--min-confidence", "0", files="talks/long.wav")
    progress = Path("pseudo.progress.jsonl")
    with largest_file(progress.stat().st_size + 20), pytest.raises(OSError, match="too") as caught:
        talks.run("talks", "--min-confidence", "0")
    assert caught.value.filename == progress.name
    talks.model.batches.clear()
    assert [row["text"] for row in talks.label("--min-confidence", "0")] == [*TALK, "a fox"]
    assert sum(map(len, talks.model.batches)) == 1


def test_parts_are_disjoint_and_failed_files_are_tried_again(
    talks: Talks, capsys: Captured
) -> None:
    (talks.folder / "talks/broken.wav").write_text("no audio")
    assert talks.run("talks", "--part", "1/2", "--min-confidence", "0") == FILES_FAILED
    first = read_table(talks.folder / "pseudo.csv")
    rest = ["--part", "2/2", "--out", "rest.csv", "--min-confidence", "0"]
    assert talks.run("talks", *rest) == 0
    texts = [row["text"] for row in [*first, *read_table(talks.folder / "rest.csv")]]
    assert sorted(texts) == sorted([*TALK, "a fox"])
    assert "talks/broken.wav is not recognized as audio" in capsys.readouterr().err
    assert talks.run("talks", "--part", "1/2") == FILES_FAILED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--min-confidence", "1"], "of at least 0 and below 1, but is 1"),
        (["--part", "3"], "K from 1 to N, such as 3/16, but is 3"),
        (["--hotwords", "fox"], "does not take --hotwords"),
        (["--out", "folder"], "writes a table, so --out must name it"),
        (["-"], "cannot read standard input"),
    ],
)
def test_wrong_options_are_refused(talks: Talks, options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        talks.run("talks", *options)


def test_other_models_and_files_are_refused(talks: Talks) -> None:
    with pytest.raises(ConfigError, match="`--part` needs --format manifest"):
        sbkit(["transcribe", "model", "talks", "--part", "1/2"])
    (talks.folder / "own.csv").write_text("path,text\n")
    with pytest.raises(ConfigError, match=re.escape("own.csv was not written by this command")):
        talks.run("talks", "--out", "own.csv")
    talks.label()
    with (talks.folder / "talks/short.wav").open("ab") as replaced:
        replaced.write(b"\0")
    with pytest.raises(SbkitError, match=r"short.wav has changed since .* other audio"):
        talks.run("talks")
    with pytest.raises(ConfigError, match=r"another model or other options \(different: vad\)"):
        talks.run("talks", "--vad", "silero")
    config = replace(talks.bundle.config, provenance={"weights": "b"})
    talks.bundle = replace(talks.bundle, config=config)
    with pytest.raises(ConfigError, match=r"pseudo.csv was begun with .* \(different: weights\)"):
        talks.run("talks")
    talks.bundle = replace(talks.bundle, config=replace(config, utterance_confidence={}))
    with pytest.raises(SbkitError, match="this model has none for greedy decoding"):
        talks.run("talks")


def test_model_without_confidences_keeps_all_utterances(talks: Talks, capsys: Captured) -> None:
    config = replace(talks.bundle.config, utterance_confidence={})
    talks.bundle = replace(talks.bundle, config=config)
    rows = talks.label("--min-confidence", "0")
    assert [row["text"] for row in rows] == [*TALK, "a fox"]
    assert {row["confidence"] for row in rows} == {""}
    assert "estimated" not in capsys.readouterr().out


# ---- whether the estimate is true

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


class MishearingModel(ToneModel):
    """Hear some clips less clearly than others, so errors come together."""

    def _hear(self, clip: Samples) -> LogProbs:
        random = np.random.default_rng(zlib.crc32(clip.tobytes()))
        scores = super()._hear(clip) / 3
        scores += random.uniform(0, 2.8) * random.standard_normal(scores.shape)
        return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def test_estimated_wer_is_true_and_training_takes_the_rows(talks: Talks, capsys: Captured) -> None:
    """The estimate follows the truth from all utterances to those that are probably right."""
    tokenizer, random = talks.bundle.tokenizer, np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(2, 7))) for _ in range(300)]
    clips = [speak(tokenizer, text) for text in texts]
    talks.model = MishearingModel(tokenizer.vocab_size, tokenizer.vocabulary.blank)
    encoded = talks.model.encode(clips[:200])
    validation = [
        ValidationUtterance(clip.log_probs, text)
        for clip, text in zip(encoded, texts, strict=False)
    ]
    aligner = WordAligner(tokenizer=tokenizer, samples_per_frame=STEP, sample_rate=RATE)
    fitted = fit_decoder(None, aligner, validation, splits=["dev"], by_words=True)
    content = {"format": FORMAT, "task": talks.bundle.config.task}
    content |= {
        "sample_rate": RATE,
        "model": [],
        "parts": {},
        "confidence": fitted.confidence_record,
    }
    config = parse_config(json.dumps(content).encode(), file=talks.folder / "config.json")
    talks.bundle = replace(talks.bundle, config=config)
    references = {}
    for index, (clip, text) in enumerate(zip(clips[200:], texts[200:], strict=True)):
        soundfile.write(file := talks.folder / f"{index}.wav", clip, RATE)
        references[str(file)] = text
    true_wer, estimated_wer, counts = [], [], []
    for threshold in ("0", "0.5"):
        assert talks.run(*references, "--min-confidence", threshold) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        estimated_wer.append(float(re.findall(r"estimated WER is ([\d.]+) %", line)[0]))
        rows = read_table(talks.folder / "pseudo.csv")
        assert len({row["path"] for row in rows}) == len(rows)
        errors = sum(
            (count_errors(references[row["path"]], row["text"]) for row in rows), TextErrors()
        )
        true_wer.append(100 * errors.wer)
        counts.append(len(rows))
    assert counts[0] == 100 and counts[1] > 20
    assert true_wer[1] < true_wer[0] - 15  # so an estimate that ignores the selection fails
    assert estimated_wer == pytest.approx(true_wer, abs=5)
    manifest = own_data.read({"manifest": {"train": "pseudo.csv"}, "language": "en"}, "train")
    assert isinstance(manifest, Manifest)
    assert (len(manifest.ids), manifest.excluded) == (counts[1], ())
