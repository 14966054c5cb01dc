"""Scores of tasks: their definitions, texts that are normalized once more, and no results."""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.asr.brain import AsrBrain
from sbkit.base.errors import SbkitError
from sbkit.bundle.task import Task
from sbkit.decoding.pool import RecognizedClip
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.logs.metric import describe_values
from sbkit.tasks.asr.task import AsrTask
from sbkit.tasks.tts.task import SpokenUtterance, TtsTask
from sbkit.tasks.vad.task import FrameCounts, VadTask
from sbkit.text.normalization import TextTable, language_table, text_table
from sbkit.text.normalizers import Normalizer, named_normalizer
from sbkit.text.transcripts import transcript_normalizer
from sbkit.train.evaluation import Evaluator
from tests.runs import Workplace, read_json


def test_metric_of_no_utterance_is_not_computed() -> None:
    """An interrupted or empty validation has no figures."""
    evaluator = Evaluator(AsrBrain.metrics, lambda results: {"CER": sum(results) / len(results)})
    evaluator.start(["full", "empty"])
    evaluator.enter("full")
    evaluator.add([0.25, 0.75])
    values = evaluator.measure_splits()
    assert values["CER"] == values["full/CER"] == 0.5
    assert math.isnan(values["empty/CER"])


def score(
    row: dict[str, object], heard: str, table: TextTable, normalizer: Normalizer | None
) -> tuple[ScoredUtterance, ScoredUtterance]:
    """Return the comparison with a text, and that of normalized texts."""
    config: Any = SimpleNamespace(sample_rate=8000, has_words=True, language="en", text_table=table)
    row = {"id": "a", "samples": 16_000, **row}
    scored = AsrTask().result(RecognizedClip(heard), row, config=config, normalizer=normalizer)
    assert scored.normalized is not None
    return scored, scored.normalized


def test_normalizer_is_given_the_sentence_of_the_corpus() -> None:
    """The text table has dropped the sign that a leaderboard's normalizer reads."""
    normalizer = Normalizer("dollars", "0", lambda text: text.replace("$5", "five dollars"))
    row = {"text": "5", "sentence": "$5"}
    scored = score(row, "five dollars", language_table("en"), normalizer)
    assert [utterance.errors.wer for utterance in scored] == [2.0, 0.0]


TABLES = [
    text_table("en", {"case": case, "punctuation": marks, "numbers": numbers})
    for case, marks, numbers in product(("lower", "keep"), ([], [".", "%"]), ("keep", "spell"))
]
SENTENCES = (
    "I paid $3.50 (laughs) for it.",
    "Tom &amp; I [noise] left <unk> *coughs* early, Mr. Wu (really).",
    "R&D's 1,000 %uh <|en|> café at 10:30, 5 % [cough] won't.",
)


@pytest.mark.parametrize("name", ["", "en", "whisper-english", "whisper-basic"])
@pytest.mark.parametrize("tags", [(), ("cough", "laughs")])
def test_perfect_text_has_no_errors_by_any_normalizer(name: str, tags: tuple[str, ...]) -> None:
    if name.startswith("whisper"):
        pytest.importorskip("transformers")
        pytest.importorskip("whisper_normalizer")
    normalizer = named_normalizer(name) if name else None
    for table, sentence in product(TABLES, SENTENCES):
        # Whisper's normalizers read digits with their signs, which a table of digits drops.
        if (table.numbers or not name.startswith("whisper")) and (normalizer or not table.is_plain):
            text = transcript_normalizer(table, tags)(sentence)
            row = {"text": text, "sentence": sentence}
            _, perfect = score(row, text, table, normalizer)
            _, longer = score(row, f"{text} zebra", table, normalizer)
            assert perfect.errors.words.errors == 0, (table, sentence)
            assert longer.errors.words.errors == 1, (table, sentence)


@pytest.mark.parametrize(
    ("task", "results", "name"),
    [
        (AsrTask(), [ScoredUtterance("a", "", ""), ScoredUtterance("b", "", "oh")], "CER"),
        (VadTask(), [FrameCounts(speech=0, missed=0, silence=9, false_alarms=0)], "DCF"),
        (VadTask(), [FrameCounts(speech=9, missed=9, silence=0, false_alarms=0)], "false_alarm"),
        (TtsTask(), [SpokenUtterance(9, 1.0, 0, 0.0, 9.0, 1.0, False)], "pitch_error"),
    ],
)
def test_rate_over_nothing_is_none(task: Task, results: list[Any], name: str) -> None:
    """It was 0 %, so the checkpoint that wrote nothing was the best one."""
    values = task.measure(results)
    assert math.isnan(values[name])
    assert f"{name} none" in describe_values(task.metrics, values)
    assert task.describe(task.figures(results)).count("none") in (0, 2)  # WER and CER


@pytest.mark.slow(60)
@pytest.mark.parametrize("name", ["codec", "tts", "vad"])
def test_score_repeats_the_test_of_a_run(
    name: str,
    task_bundles: Path,
    workplace: Workplace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a table, a detector hears the clips as they are, but in a run's test in noise."""
    run, table = task_bundles.parent / f"run_of_{name}", workplace.release / "test.tsv"
    for out, words in {"run": [run], "table": [task_bundles / name, table]}.items():
        assert workplace.sbkit("score", *words, "--out", tmp_path / out) == 0
    tests = [read_json(folder / "summary.json")["test"] for folder in (run, tmp_path / "run")]
    assert tests[0] == tests[1]
    capsys.readouterr()
    assert workplace.sbkit("compare", run, tmp_path / "run") == 0
    title, header, first, second = capsys.readouterr().out.splitlines()[:4]
    metric = next(iter(tests[0]["test"]))
    assert title == "test: 4 utterances" and header.split()[0] == metric
    assert first.split()[0] == second.split()[0] == f"{tests[0]['test'][metric]:.4g}"
    of_table = read_json(tmp_path / "table/summary.json")["test"]
    assert (of_table == tests[0]) is (name != "vad")
    if name == "vad":
        with pytest.raises(SbkitError, match="tested on other data .*'silence_frames': "):
            workplace.sbkit("compare", run, tmp_path / "table")
