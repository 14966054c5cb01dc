"""Results as text with the worst utterances first, and as lines for programs."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from sbkit.evaluate.wer import ERROR_RATES, ScoredUtterance
from sbkit.evaluate.wer_report import (
    TextFigures,
    describe_silence,
    figures_of_test_set,
    read_utterances,
    slice_figures,
    write_results,
    write_utterances,
    write_wer,
)
from sbkit.text.recognized_word import Word

SPLIT = [
    ScoredUtterance("c_right", "all is well", "all is well"),
    ScoredUtterance("b_long", "please hold the line", "please told line"),
    ScoredUtterance("a_short", "hello there", "yellow chair"),
    ScoredUtterance("d_silent", "", "oh"),
]


def by_rate(entries: Iterable[str]) -> dict[str, str]:
    """Return what each entry says behind the name of its rate."""
    return dict(entry.split(" ", 1) for entry in entries)


def test_write_wer_writes_the_worst_first(tmp_path: Path) -> None:
    write_wer(tmp_path / "wer_test.txt", iter(SPLIT), figures_of_test_set(SPLIT))
    totals, legend, *utterances = (tmp_path / "wer_test.txt").read_text().split("\n\n")
    of_rate = by_rate(totals.splitlines())
    assert [*of_rate] == [*ERROR_RATES]
    assert of_rate["WER"] == "55.56 % (5 errors / 9 words: 3 S, 1 D, 1 I)"
    assert of_rate["CER"].startswith("30.95 % (13 ")
    ids = [text.partition(":")[0] for text in utterances]
    assert ids == ["a_short", "b_long", "d_silent", "c_right"]
    head, *_, hypothesis, marks = utterances[1].splitlines()
    of_rate = by_rate(head.partition(": ")[2].split(", "))
    assert (of_rate["WER"], of_rate["CER"]) == ("50.00 % (2 / 4)", "25.00 % (5 / 20)")
    assert hypothesis.split()[1:] == ["please", "told", "***", "line"] and marks.split() == [
        "S",
        "D",
    ]


def test_word_confidences_are_compared_with_the_reference() -> None:
    """Words without a confidence do not count; greedy decoding has figures of its own."""
    words = (Word("please", 0, 1, 0.9), Word("told", 1, 2, 0.2), Word("line", 2, 3))
    beam = ScoredUtterance("a", "please hold the line", "please told line", words=words)
    greedy = replace(beam, hypothesis="pleas", words=(Word("pleas", 0, 1, 0.4),))
    figures = figures_of_test_set([replace(beam, greedy=greedy), SPLIT[0]])
    assert figures.plain()["confidence"] == {
        "AUC": 1.0,
        "ECE": pytest.approx((0.1 + 0.2) / 2),
        "words": 2,
        "right": 1,
    }
    assert figures.plain()["greedy"]["confidence"]["ECE"] == pytest.approx(0.4)
    assert str(figures_of_test_set([beam])).endswith(
        "; confidence AUC 1.0, ECE 0.15 (1 right / 2 words)"
    )
    assert "confidence" not in figures_of_test_set(SPLIT).plain()


def test_figures_are_read_back_from_plain_data() -> None:
    words = (Word("please", 0, 1, 0.9), Word("told", 1, 2, 0.2))
    beam = ScoredUtterance("a", "hold the line", "told line", words=words, normalizer="en 1")
    normalized = replace(beam, reference="hold line", words=(), normalizer="basic 2")
    results = [replace(beam, greedy=SPLIT[0], normalized=normalized), *SPLIT]
    chinese = ScoredUtterance("b", "今天天气好", "今天气好", by_words=False)
    for figures in map(figures_of_test_set, (results, [chinese, chinese])):
        plain = json.loads(json.dumps(figures.plain()))
        read = TextFigures.from_plain(plain)
        assert read.plain() == plain
        assert str(read) == str(figures)


def test_describe_silence_notes_a_model_that_wrote_nothing() -> None:
    reference = "please hold the line please"

    def scored(*greedy_texts: str) -> list[ScoredUtterance]:
        greedy = [ScoredUtterance(text, reference, text) for text in greedy_texts]
        return [replace(result, hypothesis="the line", greedy=result) for result in greedy]

    assert [*describe_silence(scored("es", ""))] == [
        "greedy decoding wrote 2 of 54 characters, and nothing for 1 of 2 utterances; "
        "the beam wrote 16 characters"
    ]
    (note,) = describe_silence([ScoredUtterance("a", reference, "")])  # only greedy decoding
    assert note.endswith("nothing for 1 of 1 utterance")
    for results in (scored("please", ""), [ScoredUtterance("a", "", "")], []):
        assert not [*describe_silence(results)]


def test_language_without_spaces_has_no_word_error_rate(tmp_path: Path) -> None:
    """Nor has greedy decoding, nor a slice. The worst utterance has the most wrong characters."""
    texts = (("a", "今天天气好", "今天气好"), ("b", "你好", "您好吗"))
    greedy = [ScoredUtterance(*row, by_words=False) for row in texts]
    scored = [replace(result, greedy=result) for result in greedy]
    figures = figures_of_test_set(scored)
    line = str(figures)
    assert "CER 42.9 %" in line.partition("; greedily ")[2]
    of_slice = slice_figures(scored)
    plain = figures.plain()
    text = json.dumps([line, plain, of_slice])
    assert "WER" not in text
    assert "word" not in text
    assert plain["CER"] == plain["greedy"]["CER"] == of_slice["CER"] == 3 / 7
    assert plain["character_errors"] == {"substitutions": 1, "deletions": 1, "insertions": 1}
    write_results(tmp_path, "test", scored, figures)
    worst, other = (tmp_path / "wer_test.txt").read_text().split("\n\n")[2:]
    heads = [text.splitlines()[0].partition(": ") for text in (worst, other)]
    assert [head[0] for head in heads] == ["b", "a"]
    cers = [by_rate(head[2].split(", "))["CER"] for head in heads]
    assert cers == ["100.00 % (2 / 2)", "20.00 % (1 / 5)"]
    assert other.splitlines()[1:] == [
        "  reference   今天天气好",
        "  hypothesis  今天**气好",
        "                  D",
    ]


def test_normalizer_that_changes_the_number_of_words_is_noted() -> None:
    """Whisper's basic one splits Hindi at its signs of vowels."""
    scored = [ScoredUtterance("a", "हिन्दी भाषा", "हिन्दी")]
    for words, noted in ((2, ""), (7, " (the normalizer makes 7 words of 2, so the WER counts")):
        plain = replace(scored[0], reference="x " * words, normalizer="basic 0123")
        line = str(figures_of_test_set([replace(scored[0], normalized=plain)]))
        assert noted in line and ("the normalizer makes" in line) == bool(noted)


# -- utterances

SET = [
    ScoredUtterance(
        "b",
        "hold the line",
        "told line",
        speaker="ann",
        seconds=1.25,
        words=(Word("told", 0.04, 0.4, 0.312), Word("line", 0.48, 1.0)),
    ),
    ScoredUtterance("a", "naïve\u2028 «да»", "", by_words=False),
]


def test_written_utterances_are_read_back(tmp_path: Path) -> None:
    write_utterances(tmp_path / "utterances_test.jsonl", SET)
    lines = (tmp_path / "utterances_test.jsonl").read_text("utf-8").removesuffix("\n").split("\n")
    written = {
        "id": "b",
        "reference": "hold the line",
        "hypothesis": "told line",
        "by_words": True,
        "reference_words": 3,
        "word_errors": {"substitutions": 1, "deletions": 1, "insertions": 0},
        "reference_characters": 13,
        "character_errors": {"substitutions": 1, "deletions": 4, "insertions": 0},
        "seconds": 1.25,
        "speaker": "ann",
        "words": [
            {"text": "told", "start": 0.04, "end": 0.4, "confidence": 0.312},
            {"text": "line", "start": 0.48, "end": 1.0},
        ],
    }
    assert json.loads(lines[1]) | written == json.loads(lines[1])
    first = json.loads(lines[0])
    assert (first["seconds"], first["speaker"], first["by_words"]) == (None, None, False)
    assert not {"reference_words", "word_errors"} & first.keys()
    assert read_utterances(tmp_path / "utterances_test.jsonl") == [SET[1], SET[0]]
