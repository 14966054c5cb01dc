"""The data report: figures, page and playable clips."""

import base64
import io
import json
import os
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile

from sbkit.commands.cli import run as sbkit
from sbkit.data.data_report import (
    MP3_RATES,
    encode_clips,
    encode_mp3,
    measure_data,
    write_data_page,
)
from sbkit.data.manifest import Clip, Excluded
from sbkit.data.splits import Splits, select_by_length
from tests.data.test_splits import prepare
from tests.runs import ROOT, make_workplace
from tests.stores import Utterance, make_store

HOSTILE = '</td><script>alert(1)</script>"'


def make_splits(folder: Path) -> Splits:
    """Prepare five clips of train, one too long, and two of test, one of them also in train."""

    def prepared(name: str, rows: list[tuple[str, str, str, float]]) -> datasets.Dataset:
        clips = []
        for id, text, speaker, seconds in rows:
            file = folder / f"{name}-{len(clips)}.wav"
            rate = 8_000 if id == "d" else 16_000
            noise = np.random.default_rng(0).standard_normal(int(seconds * rate))
            soundfile.write(file, 0.1 * noise, rate)
            clips.append(Clip(id, file, text, {"speaker": speaker}))
        return prepare(clips).dataset

    train = [("a", "One two", "ann", 1.0), ("b", "two", "bob", 2.5), ("c", HOSTILE, "ann", 2.5)]
    train += [("d", "é", "", 1.5), (f"long{HOSTILE}", "four", "ann", 9.0)]
    limits = {"min_seconds": 0.1, "max_seconds": 5.0, "sample_rate": 16_000}
    inside, out_of_range = select_by_length(prepared("train", train), **limits)
    test = prepared("test", [("x", "One two", "eve", 1.0), ("y", "new", "bob", 1.0)])
    excluded = [Excluded("bad", "unreadable audio", "it is empty", "train")]
    return Splits(inside, {}, {"test": test}, excluded, out_of_range)


@pytest.mark.parametrize(("language", "words"), [("my", None), (["my", "en"], 5), (None, 5)])
def test_words_are_not_counted_in_a_language_without_spaces(
    language: object, words: int | None, tmp_path: Path
) -> None:
    facts = measure_data(make_splits(tmp_path), sample_rate=16_000, language=language)
    assert facts["splits"]["train"]["words"] == words


def test_data_report_figures_match_the_data(tmp_path: Path) -> None:
    facts = measure_data(make_splits(tmp_path), sample_rate=16_000, language="en")
    train = facts["splits"]["train"]
    assert (train["utterances"], train["speakers"], train["words"]) == (4, 2, 5)
    assert train["file_rates"] == {"16000": 3, "8000": 1}
    assert train["hours"] == pytest.approx(7.5 / 3600)
    assert (train["seconds"]["shortest"], train["seconds"]["longest"]) == (1.0, 2.5)
    assert train["characters"]["é"] == 1
    assert [(group["reason"], group["utterances"]) for group in facts["left_out"]] == [
        ("unreadable audio", 1),
        ("longer than 5 s", 1),
    ]
    copies = {row["splits"][0]: row["examples"] for row in facts["shared"][:2]}
    assert copies == {"train": ["c"], "test": ["y"]}  # the same noise as `b` and `x`
    shared = {row["column"]: (row["values"], row["examples"]) for row in facts["shared"][2:]}
    of_text = {"id": (0, []), "text": (1, ["one two"]), "speaker": (1, ["bob"])}
    assert shared == of_text | {"audio": (2, ["x", "y"])}  # the same noise as `a`
    assert train["characters_per_second"] == pytest.approx(sum(train["characters"].values()) / 7.5)
    assert train["transcripts"][0] == {"id": "a", "sentence": "One two", "text": "one two"}


def test_data_report_page_loads_nothing_and_escapes_text(tmp_path: Path) -> None:
    splits, file = make_splits(tmp_path), tmp_path / "page.html"
    write_data_page(splits, measure_data(splits, sample_rate=16_000, language="en"), file)
    page = file.read_text()
    assert "<td>3 of 16000 Hz, 1 of 8000 Hz" in page
    tags: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            for name, value in attrs:
                assert name not in ("onload", "onerror")
                assert name != "href" or value == "data:,"
                assert name != "src" or str(value).startswith("data:audio/mpeg;base64,")

    Tags().feed(page)
    assert tags.count("script") == 2  # the page's own, and its data
    assert tags.count("audio") == 4  # of the clips of train
    assert "alert(1)" in page
    assert re.findall(r"https?://", page) == []
    assert "default-src &#39;none&#39;; " in page


@pytest.mark.parametrize("rate", MP3_RATES)
def test_clips_are_encoded_at_every_rate_of_mp3(rate: int) -> None:
    noise = np.random.default_rng(0).integers(-999, 999, rate).astype(np.int16)
    assert soundfile.info(io.BytesIO(encode_mp3(noise, rate))).samplerate == rate


def test_prepare_command_writes_no_run_folder(
    asterisk_english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = make_workplace(asterisk_english, tmp_path).release
    run = tmp_path / "run"
    arguments = [f"--data_folder={release}", f"--output_folder={run}", "--language=en"]
    report = ["--report", str(tmp_path / "report")]
    yaml = str(ROOT / "hparams/ctc.yaml")
    assert sbkit(["prepare", yaml, *arguments, "--audio_store=flac", *report]) == 0
    output = capsys.readouterr().out
    facts = json.loads((tmp_path / "report/data_report.json").read_text())
    assert f"train: {facts['splits']['train']['utterances']} utterances, " in output
    assert (tmp_path / "report/data_report.html").is_file()
    assert not run.exists()


@pytest.fixture(scope="module")
def split() -> datasets.Dataset:
    """Make three clips of 1, 2 and 3 seconds; their file is truncated in the last."""
    rows = zip("abc", (16_000, 32_000, 48_000), strict=True)
    split = make_store((Utterance(id, "", "", "", n, bytes(2 * n)) for id, n in rows), "flac")
    os.truncate(split[2]["audio"]["file"], split[2]["audio"]["start"] + 100)
    return split


def test_clips_are_encoded_in_order_up_to_a_size(split: datasets.Dataset) -> None:
    """Those that are missing or unreadable are skipped."""
    encode = partial(encode_clips, split, sample_rate=16_000, max_seconds=1.5)
    clips = encode(["b", "none", "c", "a"])
    files = {id: io.BytesIO(base64.b64decode(clip)) for id, clip in clips.items()}
    assert {id: soundfile.info(file).duration for id, file in files.items()} == {"b": 1.5, "a": 1.0}
    assert [*clips] == ["b", "a"]
    ids = iter("abc")
    assert [*encode(ids, max_characters=len(clips["a"]))] == ["a"]
    assert [*ids] == ["c"]  # the caller shows the progress


def test_implausible_transcripts_are_named_but_no_short_clip(tmp_path: Path) -> None:
    splits = make_splits(tmp_path)
    texts = [("a" * (15 + n % 10), 1.5 + n % 3 / 4) for n in range(30)]
    texts += [("w", 0.8), ("yes", 2.0), ("b" * 60, 6.0), ("b" * 200, 2.0), ("a", 9.0)]
    columns = {
        "id": [str(n) for n in range(len(texts))],
        "text": [text for text, _ in texts],
        "sentence": [text for text, _ in texts],
        "samples": [int(seconds * 16_000) for _, seconds in texts],
        "audio": [splits.train[0]["audio"]] * len(texts),
    }
    train = datasets.Dataset.from_dict(columns)
    facts = measure_data(Splits(train, {}, {}), sample_rate=16_000, language="en")
    assert [row["id"] for row in facts["splits"]["train"]["implausible"]] == ["34", "33"]
    few = train.select(range(20, 34))
    facts = measure_data(Splits(few, {}, {}), sample_rate=16_000, language="en")
    assert facts["splits"]["train"]["implausible"] == []
