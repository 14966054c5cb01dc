"""Transcripts that a model reads otherwise, with confidence."""

from pathlib import Path

from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import figures_of_test_set, suspicious_transcripts, write_results
from sbkit.text.word import Word


def heard(id: str, reference: str, hypothesis: str, confidence: float | None) -> ScoredUtterance:
    words = tuple(Word(text, 0.0, 0.1, confidence) for text in hypothesis.split())
    return ScoredUtterance(id, reference, hypothesis, seconds=1.5, words=words)


RIGHT = [heard(f"right{n}", "please hold the line", "please hold the line", 0.9) for n in range(8)]
WRONG = heard("wrong", "press one\t=now", "good bye", 0.9)
WORSE = heard("worse", "yes", "the office is closed", 0.8)
UNSURE = heard("unsure", "press two", "good bye", 0.2)


def test_confident_other_readings_are_ranked_and_written(tmp_path: Path) -> None:
    scored = [WRONG, UNSURE, *RIGHT * 2, WORSE]
    (note,) = write_results(tmp_path, "train", scored, figures_of_test_set(scored))["notes"]
    assert note.startswith("2 transcripts may be wrong")
    assert note.endswith("(suspicious_train.tsv): worse, wrong")
    header, *lines = (tmp_path / "suspicious_train.tsv").read_text().splitlines()
    assert header.split("\t") == ["id", "CER", "confidence", "reference", "hypothesis"]
    assert [line.split("\t")[2:] for line in lines] == [
        ["0.800", "yes", "the office is closed"],
        ["0.900", r"press one\t=now", "good bye"],  # a tab would be another column
    ]


def test_no_transcript_is_suspected_without_a_reliable_model(tmp_path: Path) -> None:
    assert not suspicious_transcripts([])
    assert not suspicious_transcripts([WRONG, WORSE, RIGHT[0]])
    without_confidence = heard("wrong", "press one", "good bye", None)
    assert not suspicious_transcripts([without_confidence, *RIGHT])
    unsure = [heard(str(n), "hold the line", "hold the line", 0.09) for n in range(8)]
    assert not suspicious_transcripts([heard("wrong", "press one", "good bye", 0.08), *unsure])
    figures = figures_of_test_set(RIGHT)
    write_results(tmp_path, "test", [WRONG, *RIGHT], figures)
    assert write_results(tmp_path, "test", RIGHT, figures)["notes"] == []
    assert not [*tmp_path.glob("suspicious_*")]  # nor that of an earlier test
