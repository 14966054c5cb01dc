"""`sbkit segment`: utterances of a long recording, with text that is missing, added or wrong."""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sbkit.audio.io import Samples
from sbkit.base.arrays import LogProbs
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.decoding import long_alignment
from sbkit.decoding.long_alignment import align_utterances
from sbkit.runtime.model_thread import ModelThread
from sbkit.tasks.asr.subtitles import read_cues, to_srt, to_vtt
from sbkit.text.recognized_word import Word
from sbkit.text.vocabulary import Vocabulary
from tests.runtime.tones import LOWEST, RATE, silence, speak, tone_bundle
from tests.stores import read_split

SENTENCES = ("The quick fox.", "A lazy dog!", "Over the lazy dog.", "A brown fox jumps.")
ADDED = "The dog jumps over a fox."  # nobody speaks it
PAUSE = 0.8  # seconds
Rows = list[dict[str, str]]


class Talk:
    """A recording of the sentences, and a bundle that hears tones in the place of any model."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        bundle, self.tokenizer, self.model = tone_bundle(folder, **options)
        bundle.model.close()
        self.folder = folder
        self.bundle = replace(bundle, config=replace(bundle.config, language="en"))
        self.spans = self.record("talk.wav", SENTENCES)
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sbkit.runtime.runtimes.load_in_thread", self._open)

    def _open(self, *_: object, **__: object) -> object:
        return replace(self.bundle, model=ModelThread(lambda: self.model))

    def record(
        self, name: str, sentences: Sequence[str], gaps: Iterable[Samples] = repeat(silence(PAUSE))
    ) -> list[tuple[float, float]]:
        """Speak sentences, each with a gap after it; return their times in seconds."""
        parts = [silence(PAUSE)]
        spans = []
        for sentence, gap in zip(sentences, gaps, strict=False):
            speech = speak(self.tokenizer, self.bundle.normalizer()(sentence))
            start = sum(map(len, parts))
            spans.append((start / RATE, (start + len(speech)) / RATE))
            parts += [speech, gap]
        soundfile.write(self.folder / name, np.concatenate(parts), RATE)
        return spans

    def segment(self, text: str, *options: str, recording: str = "talk.wav") -> Rows:
        Path("talk.txt").write_text(text, encoding="utf-8")
        arguments = ["segment", recording, "talk.txt", "--model", "model", "--out", "out"]
        assert sbkit([*arguments, *options]) == 0
        with Path("out/segments.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(tmp_path, monkeypatch)


def times_of(row: dict[str, str]) -> tuple[float, float]:
    offset = float(row["offset"])
    return offset, offset + float(row["duration"])


def assert_spans(rows: Rows, spans: Sequence[tuple[float, float]]) -> None:
    """Check that each row has its sentence, and half of each pause beside it."""
    for row, (start, end) in zip(rows, spans, strict=True):
        assert times_of(row) == pytest.approx((start - PAUSE / 2, end + PAUSE / 2), abs=0.05)


def test_sentences_become_rows_that_training_takes(talk: Talk) -> None:
    rows = talk.segment("The quick\nfox. A lazy dog! Over the lazy dog.\n\nA brown fox jumps.")
    assert [row["text"] for row in rows] == list(SENTENCES)
    assert all(-0.01 < float(row["score"]) <= 0 for row in rows)
    assert_spans(rows, talk.spans)
    manifest = read_split({"manifest": {"train": "out/segments.csv"}}, "train")
    assert manifest.excluded == ()
    assert manifest.ids == [row["id"] for row in rows]
    assert all(span.end is not None for span in manifest.spans)


def test_text_may_be_missing_and_added(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [SENTENCES[0], ADDED, SENTENCES[2], SENTENCES[3].replace("fox", "fax")]
    rows = talk.segment("\n".join(lines), "--lines")
    assert [row["text"] for row in rows] == [SENTENCES[0], SENTENCES[2]]
    assert_spans(rows, [talk.spans[0], talk.spans[2]])
    assert (
        "out/segments.csv: 2 of 4 utterances (0.1 min) with a score of at least -3; 1 are not "
        "heard, and 1 have a lower score (out/left_out.tsv)"
    ) in capsys.readouterr().out
    left_out = [line.split("\t") for line in Path("out/left_out.tsv").read_text().splitlines()]
    assert [line[3] for line in left_out[1:]] == [lines[1], lines[3]]
    assert float(left_out[2][2]) < -3
    rows = talk.segment("\n".join(lines), "--lines", f"--min-score={left_out[2][2]}")
    assert [row["text"] for row in rows] == [SENTENCES[0], *lines[2:]]


SRT = "1\r\n00:00:00,500 --> 00:00:02,000 X1:9\r\n{\\an8}<i>The quick\r\nfox.</i> A lazy\r\n\r\n"
SRT += "2\r\n00:00:02,000 --> 00:00:04,000\r\ndog!\r\n3\r\n00:00:04,000 --> 00:00:06,000\r\n"
SRT += "Over the lazy dog.\r\n\r\n4\r\n00:00:06,000 --> 00:00:08,000\r\nA brown fox jumps."
VTT = "WEBVTT - by hand\n\nNOTE one\nfox\n\nfox 1\n00:00.500 --> 00:02.000 align:left\n"
VTT += (
    "<v Ann>The quick <00:01.000>fox. A lazy\n\n0:00:02.000 --> 0:00:04.000\ndog!&nbsp;Over\nthe "
)
VTT += "lazy\n\n00:04.000 --> 00:05.000\n\n00:05.000 --> 00:08.000\ndog. A brown fox jumps.\n"
SUBTITLES = [
    *(SRT, VTT, f"\ufeff{VTT}".replace("\n", "\r\n")),
    re.sub(",[05]00", "", SRT),
    re.sub(",([05]00)", r":\1", SRT),
    re.sub(",([05]00)", r" , \1", SRT),
    SRT.replace("\r\n", "\r"),
    SRT.replace("\r\n", "\r\n\r\n"),
    SRT.replace("fox.</i>", "\r\n\r\nfox.</i>"),  # an empty line within a subtitle
]


@pytest.mark.parametrize("subtitles", SUBTITLES)
def test_transcript_may_be_subtitles(talk: Talk, subtitles: str) -> None:
    rows = talk.segment(subtitles)
    assert [row["text"] for row in rows] == list(SENTENCES)
    assert_spans(rows, talk.spans)


def test_subtitles_are_utterances_with_lines(talk: Talk) -> None:
    words = [Word(word, 9.0 * index, 9.0 * index + 1) for index, word in enumerate(SENTENCES)]
    for content in (to_srt(words), to_vtt(words)):
        assert [row["text"] for row in talk.segment(content, "--lines")] == list(SENTENCES)


def test_text_between_angle_brackets_is_no_style() -> None:
    (text,) = read_cues("00:01.0 --> 00:02.0\n<c.b>if a < 5</c> <00:01.5>and b > 3\n")
    assert text == "if a < 5 and b > 3"


def test_last_line_of_digits_is_text_if_subtitles_have_no_numbers() -> None:
    cue = "00:00:01,000 --> 00:00:02,000\n42\n"
    assert read_cues(2 * cue) == ["42", "42"]
    assert read_cues(f"1\n{cue}2\n{cue}") == ["42", "42"]


def test_one_letter_needs_pauses_around_it(talk: Talk) -> None:
    """Any speech that the text lacks has such a letter somewhere."""
    lines = [SENTENCES[0], "z", SENTENCES[2]]
    assert [row["text"] for row in talk.segment("\n".join(lines), "--lines")] == lines[::2]
    talk.record("letter.wav", [SENTENCES[0], "z", SENTENCES[2]])
    rows = talk.segment("\n".join(lines), "--lines", recording="letter.wav")
    assert [row["text"] for row in rows if "letter.wav" in row["path"]] == lines


def test_another_recording_of_the_same_name_is_refused(talk: Talk) -> None:
    talk.segment(SENTENCES[0], "--lines")
    talk.record("talk.wav", SENTENCES[:2])
    with pytest.raises(SbkitError, match="talk.wav has changed"):
        talk.segment(SENTENCES[0], "--lines")


def test_recordings_are_added_and_none_is_heard_again(talk: Talk) -> None:
    text = "\n".join(SENTENCES)
    assert len(talk.segment(text, "--lines")) == 4
    talk.record("second.wav", SENTENCES[:2])
    talk.segment("\n".join(SENTENCES[:2]), "--lines", recording="second.wav")
    talk.model.batches.clear()
    assert len(talk.segment(text, "--lines", "--min-score", "-2")) == 6
    assert talk.model.batches == []
    assert len(talk.segment(SENTENCES[1], "--lines")) == 3  # another text of the first recording
    assert talk.model.batches != []


def test_wrong_texts_are_refused(talk: Talk) -> None:
    arguments = ["segment", "talk.wav", "talk.txt", "--model", "model", "--out", "out", "--lines"]
    for content, message in (
        (b"Jaqzyx vkwp!\n", r"None of 1 sentence of talk.txt is heard in .*talk.wav"),
        (b"...\n", "talk.txt has no words"),
        (b"WEBVTT\n\n00:01.000 --> 00:02.000\n\nfox", "talk.txt looks like subtitles, but none"),
        (b"[00:01.000 --> 00:02.000]  A fox\n", "talk.txt looks like subtitles, but none"),
        ("dé".encode("latin-1"), r"A transcript \(talk.txt\) must be UTF-8"),
    ):
        Path("talk.txt").write_bytes(content)
        with pytest.raises(SbkitError, match=message):
            sbkit(arguments)
        assert not Path("out/segments.csv").exists()


def test_numbers_are_words_for_a_model_without_digits(talk: Talk) -> None:
    talk.record("number.wav", ["one fox"])
    (row,) = talk.segment("1 fox", recording="number.wav")
    assert row["text"] == "one fox"
    assert float(row["score"]) > -0.01


def test_digits_stay_if_the_model_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(tmp_path, monkeypatch, text="the quick brown fox jumps over 1 lazy dog")
    talk.record("number.wav", ["1 fox"])
    (row,) = talk.segment("1 fox", recording="number.wav")
    assert row["text"] == "1 fox"


def test_row_ends_in_the_longest_pause_near_its_last_word(talk: Talk) -> None:
    """A hum that is no letter interrupts the pause after the first sentence."""
    hum = (8000 * np.sin(2 * np.pi * LOWEST * np.arange(960) / RATE)).astype(np.int16)
    gaps = [np.concatenate([silence(0.16), hum, silence(PAUSE)]), silence(PAUSE)]
    (_, end), _ = talk.record("click.wav", SENTENCES[:2], gaps)
    row, _ = talk.segment("\n".join(SENTENCES[:2]), "--lines", recording="click.wav")
    assert times_of(row)[1] == pytest.approx(end + 0.22 + PAUSE / 2, abs=0.05)


def test_rows_share_no_sound_if_their_sentences_meet_without_a_pause(talk: Talk) -> None:
    """The pauses nearest to their meeting are before a word of the first and after the second's."""
    gaps = [silence(PAUSE), silence(0), silence(PAUSE), silence(PAUSE)]
    _, (_, meeting), *_ = talk.record("meet.wav", ["The fox", "o", "a", "dog"], gaps)
    first, second = talk.segment("The fox o\na dog", "--lines", recording="meet.wav")
    assert times_of(first)[1] == pytest.approx(meeting, abs=0.05)
    assert times_of(second)[0] == pytest.approx(meeting, abs=0.05)


@pytest.mark.parametrize("pauses", [(0, 0.12), (0.12, 0)])
def test_short_word_with_one_pause_has_its_length(talk: Talk, pauses: Sequence[float]) -> None:
    """Its only pause is near its start as well as near its end."""
    gaps = [*map(silence, pauses), silence(PAUSE)]
    _, span, _ = talk.record("short.wav", ["The fox", "do", "a dog"], gaps)
    _, row, _ = talk.segment("The fox\ndo\na dog", "--lines", recording="short.wav")
    assert times_of(row) == pytest.approx(span, abs=0.08)


LETTERS = Vocabulary(size=12)


def letters(random: np.random.Generator, count: int) -> list[int]:
    return random.integers(4, LETTERS.size, count).tolist()


def hear(random: np.random.Generator, spoken: Sequence[Sequence[int]]) -> LogProbs:
    frames = [0] * 9
    for utterance in spoken:
        frames += [frame for token in utterance for frame in (token, 0)] + [0] * 9
    log_probs = random.normal(-7, 1, (len(frames), LETTERS.size)).astype(np.float32)
    log_probs[np.arange(len(frames)), frames] = -0.1
    return log_probs


def test_windows_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    spoken = [letters(random, 9) for _ in range(30)]
    noisy = [*spoken[:7], [*letters(random, 12), *spoken[7]], *spoken[8:]]
    log_probs = hear(random, noisy)
    text = [*spoken[:15], letters(random, 9), *spoken[15:]]
    whole = align_utterances(log_probs, text, vocabulary=LETTERS, silent_ids=[0])
    assert [index for index, utterance in enumerate(whole) if utterance is None] == [15]
    assert all(utterance.end - utterance.first == 17 for utterance in whole if utterance)
    monkeypatch.setattr(long_alignment, "TRACED_FRAMES", 7)
    monkeypatch.setattr(long_alignment, "WINDOW_STATES", 60)
    assert align_utterances(log_probs, text, vocabulary=LETTERS, silent_ids=[0]) == whole
    assert align_utterances(log_probs[:20], [[]], vocabulary=LETTERS, silent_ids=[0]) == [None]


def test_passage_heard_before_its_place_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording begins with sentences of its middle, and the window follows them there."""
    random = np.random.default_rng(0)
    text = [letters(random, 9) for _ in range(60)]
    monkeypatch.setattr(long_alignment, "TRACED_FRAMES", 50)
    monkeypatch.setattr(long_alignment, "WINDOW_STATES", 400)
    log_probs = hear(random, [*text[15:24], *text])
    assert None not in align_utterances(log_probs, text, vocabulary=LETTERS, silent_ids=[0])


@pytest.mark.parametrize(("log_prob", "is_found"), [(-6.0, True), (-10.0, False)])
def test_misheard_short_word_is_kept_unless_it_is_absurd(log_prob: float, is_found: bool) -> None:
    before, word, after = [4, 5, 4, 5], [6, 7], [8, 9, 8, 9]
    log_probs = hear(np.random.default_rng(0), [before, [10, 11], after])
    is_heard = log_probs[:, [10, 11]] == np.float32(-0.1)
    log_probs[:, word] = np.where(is_heard, log_prob, -30.0)
    spans = align_utterances(log_probs, [before, word, after], vocabulary=LETTERS, silent_ids=[0])
    assert [utterance is not None for utterance in spans] == [True, is_found, True]
