"""`sbkit segment`: utterances of a long recording, with text that is missing, added or wrong."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.OwnData import corpus as own_data
from sbkit.base.errors import SbkitError
from sbkit.commands import segment as command
from sbkit.commands.cli import run as sbkit
from sbkit.commands.segment import split_text
from sbkit.data.manifest import Manifest
from sbkit.decoding import segmentation
from sbkit.decoding.segmentation import segment
from sbkit.runtime.model_thread import ModelThread
from sbkit.text.vocabulary import Vocabulary
from tests.runtime.tones import RATE, silence, speak, tone_bundle

SENTENCES = ("The quick fox.", "A lazy dog!", "Over the lazy dog.", "A brown fox jumps.")
ADDED = "The dog jumps over a fox."  # nobody speaks it
PAUSE = 0.8  # seconds
Rows = list[dict[str, str]]


class Talk:
    """A recording of the sentences, and a bundle that hears tones in the place of any model."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle, self.tokenizer, self.model = tone_bundle(folder)
        bundle.model.close()
        self.folder = folder
        self.bundle = replace(bundle, config=replace(bundle.config, language="en"))
        self.spans = self.record("talk.wav", SENTENCES)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(command, "open_recognizer", self._open)

    def _open(self, *_: object, **__: object) -> object:
        return replace(self.bundle, model=ModelThread(lambda: self.model))

    def record(self, name: str, sentences: Sequence[str]) -> list[tuple[float, float]]:
        """Speak sentences with pauses between them; return their times in seconds."""
        parts = [silence(PAUSE)]
        spans = []
        for sentence in sentences:
            speech = speak(self.tokenizer, self.bundle.normalizer()(sentence))
            start = sum(map(len, parts))
            spans.append((start / RATE, (start + len(speech)) / RATE))
            parts += [speech, silence(PAUSE)]
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


def assert_spans(rows: Rows, spans: Sequence[tuple[float, float]]) -> None:
    """Check that each row has its sentence, and half of each pause beside it."""
    for row, (start, end) in zip(rows, spans, strict=True):
        offset = float(row["offset"])
        assert start - PAUSE / 2 - 0.05 <= offset < start
        assert end - 0.04 <= offset + float(row["duration"]) <= end + PAUSE / 2 + 0.05


def test_sentences_become_rows_that_training_takes(talk: Talk) -> None:
    rows = talk.segment("The quick\nfox. A lazy dog! Over the lazy dog.\n\nA brown fox jumps.")
    assert [row["text"] for row in rows] == list(SENTENCES)
    assert all(-0.01 < float(row["score"]) <= 0 for row in rows)
    assert_spans(rows, talk.spans)
    manifest = own_data.read({"manifest": {"train": "out/segments.csv"}, "language": "en"}, "train")
    assert isinstance(manifest, Manifest)
    assert manifest.excluded == ()
    assert manifest.ids == [row["id"] for row in rows]
    assert all(part.end is not None for part in manifest.parts)


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
    with pytest.raises(SbkitError, match=r"talk.wav is another recording than the one in"):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Jaqzyx vkwp!\n", r"None of 1 sentence of talk.txt is heard in .*talk.wav. Check that"),
        (b"...\n", "talk.txt has no words. Write the text of the recording into it."),
        ("dé".encode("latin-1"), r"A transcript \(talk.txt\) must be UTF-8"),
    ],
)
def test_wrong_texts_are_refused(talk: Talk, content: bytes, message: str) -> None:
    Path("talk.txt").write_bytes(content)
    arguments = ["segment", "talk.wav", "talk.txt", "--model", "model", "--out", "out", "--lines"]
    with pytest.raises(SbkitError, match=message):
        sbkit(arguments)
    assert not Path("out/segments.csv").exists()


def test_missing_recording_is_named(talk: Talk) -> None:
    with pytest.raises(SbkitError, match=r"Audio file no.wav does not exist"):
        talk.segment("The fox.", recording="no.wav")


def test_numbers_are_words_for_a_model_without_digits(talk: Talk) -> None:
    talk.record("number.wav", ["one fox"])
    (row,) = talk.segment("1 fox", recording="number.wav")
    assert row["text"] == "one fox"
    assert float(row["score"]) > -0.01


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('Mr. Wu said: "Yes."  He\nleft\n\nEnd', ['Mr. Wu said: "Yes."', "He left", "End"]),
        ("今天很好。他说。「好。」走", ["今天很好。", "他说。", "「好。」", "走"]),
        ("मैं घर गया। वह आया।", ["मैं घर गया।", "वह आया।"]),
        ("word " * 99 + "then, " + "more " * 99, None),
    ],
)
def test_text_is_split_into_sentences(text: str, sentences: list[str] | None) -> None:
    parts = split_text(text, seconds=200 if sentences is None else 5)
    if sentences is None:
        assert max(map(len, parts)) <= 100
        assert " ".join(parts).split() == text.split()
        assert "then," in {part.split()[-1] for part in parts}
    else:
        assert parts == sentences


def test_short_text_of_a_long_recording_is_not_cut_into_words() -> None:
    assert split_text("One two, three. ... ?!", seconds=600) == ["One two, three.", "...", "?!"]


def test_windows_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    vocabulary = Vocabulary(size=12)
    spoken = [random.integers(4, 12, 9).tolist() for _ in range(30)]
    frames = [0] * 9
    for number, utterance in enumerate(spoken):
        noise = random.integers(4, 12, 12).tolist() if number == 7 else []
        frames += [frame for token in [*noise, *utterance] for frame in (token, 0)] + [0] * 9
    log_probs = random.normal(-7, 1, (len(frames), 12)).astype(np.float32)
    log_probs[np.arange(len(frames)), frames] = -0.1
    text = [*spoken[:15], random.integers(4, 12, 9).tolist(), *spoken[15:]]
    whole = segment(log_probs, text, vocabulary=vocabulary, silent=[0])
    assert [index for index, utterance in enumerate(whole) if utterance is None] == [15]
    assert all(utterance.end - utterance.first == 17 for utterance in whole if utterance)
    monkeypatch.setattr(segmentation, "BLOCK_FRAMES", 7)
    monkeypatch.setattr(segmentation, "WINDOW_STATES", 60)
    assert segment(log_probs, text, vocabulary=vocabulary, silent=[0]) == whole
    assert segment(log_probs[:20], [[]], vocabulary=vocabulary, silent=[0]) == [None]
