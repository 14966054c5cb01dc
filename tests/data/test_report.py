"""The report of a run's data: its figures, its page, and what of it can be heard."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sbkit.commands.cli import run as sbkit
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.data.report import measure_data, write_data_report
from sbkit.data.splits import Splits, prepare_split, within_limits
from tests.runs import ROOT, make_workplace

HOSTILE = '</td><script>alert(1)</script>"'


def make_splits(folder: Path) -> Splits:
    """Prepare five clips of train, of which one is too long, and two of test, one known."""

    def prepared(name: str, clips: list[tuple[str, str, str, float]]):  # type: ignore[no-untyped-def]
        made = []
        for id, text, speaker, seconds in clips:
            file = folder / f"{name}-{len(made)}.wav"
            noise = np.random.default_rng(0).standard_normal(int(seconds * 16_000))
            soundfile.write(file, 0.1 * noise, 16_000)
            made.append(Clip(id, file, text, {"speaker": speaker}))
        return prepare_split(
            Manifest.of(made),
            split=name,
            normalize=str.lower,
            sample_rate=16_000,
            cache_folder=folder / "cache",
            keep_empty=True,
        ).dataset

    train = [("a", "One two", "ann", 1.0), ("b", "two", "bob", 2.5), ("c", HOSTILE, "ann", 2.5)]
    train += [("d", "é", "", 1.5), (f"long{HOSTILE}", "four", "ann", 9.0)]
    limits = {"min_seconds": 0.1, "max_seconds": 5.0, "sample_rate": 16_000}
    kept, unused, outside = within_limits(prepared("train", train), **limits)
    test = prepared("test", [("x", "One two", "eve", 1.0), ("y", "new", "bob", 1.0)])
    return Splits(
        kept,
        {},
        {"test": test},
        excluded=[Excluded("bad", "unreadable audio", "it is empty", "train")],
        out_of_range=outside,
        unused=unused,
    )


def write(folder: Path) -> tuple[dict, str]:  # type: ignore[type-arg]
    data, page = write_data_report(
        make_splits(folder), folder / "run", sample_rate=16_000, language="en"
    )
    return json.loads(data.read_text()), page.read_text()


@pytest.mark.parametrize(("language", "words"), [("my", None), (["my", "en"], 5), (None, 5)])
def test_what_has_no_spaces_has_no_count_of_words(
    language: object, words: int | None, tmp_path: Path
) -> None:
    facts = measure_data(make_splits(tmp_path), sample_rate=16_000, language=language)
    assert facts["splits"]["train"]["words"] == words


def test_the_figures_are_those_of_the_data(tmp_path: Path) -> None:
    facts, _ = write(tmp_path)
    train = facts["splits"]["train"]
    assert (train["utterances"], train["speakers"], train["words"]) == (4, 2, 5)
    assert train["hours"] == pytest.approx(7.5 / 3600)
    assert (train["seconds"]["shortest"], train["seconds"]["longest"]) == (1.0, 2.5)
    histogram = {each["from"]: each["utterances"] for each in train["seconds"]["histogram"]}
    assert {key: count for key, count in histogram.items() if count} == {1: 2, 2: 2}
    assert train["characters"]["é"] == 1
    assert [(each["reason"], each["utterances"]) for each in facts["left_out"]] == [
        ("unreadable audio", 1),
        ("longer than 5 s", 1),
    ]
    shared = {each["column"]: (each["values"], each["examples"]) for each in facts["shared"]}
    of_text = {"id": (0, []), "text": (1, ["one two"]), "speaker": (1, ["bob"])}
    assert shared == of_text | {"audio": (2, ["x", "y"])}  # the same noise as `a`
    assert [each["from"] for each in train["seconds"]["histogram"]] == [1, 2]
    assert train["characters_per_second"] == pytest.approx(sum(train["characters"].values()) / 7.5)
    assert train["transcripts"][0] == {"id": "a", "sentence": "One two", "text": "one two"}
    assert train["dBFS"] == pytest.approx([-20] * 3, abs=0.2)
    assert (train["measured_clips"], train["clipped"], train["source_rates"]) == (4, 0, [])


def test_the_page_asks_for_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    _, page = write(tmp_path)
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
    assert "alert(1)" in page
    assert re.findall(r"https?://", page) == []
    assert "default-src &#39;none&#39;; " in page


def test_an_example_that_is_left_out_can_be_heard(tmp_path: Path) -> None:
    _, page = write(tmp_path)
    (encoded,) = re.findall(r"data:audio/mpeg;base64,([\w+/=]+)", page)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(encoded)))
    assert rate == 16_000
    assert len(samples) / rate == pytest.approx(9.0, abs=0.2)


def test_the_command_prepares_without_a_run_folder(
    asterisk_english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = make_workplace(asterisk_english, tmp_path).release
    run = tmp_path / "run"
    arguments = [f"--data_folder={release}", f"--output_folder={run}", "--language=en"]
    report = ["--report", str(tmp_path / "report")]
    yaml = str(ROOT / "hparams/ctc.yaml")
    assert sbkit(["prepare", yaml, *arguments, "--audio_store=flac", *report]) == 0
    said = capsys.readouterr().out
    facts = json.loads((tmp_path / "report/data_report.json").read_text())
    assert f"train: {facts['splits']['train']['utterances']} utterances, " in said
    assert (tmp_path / "report/data_report.html").is_file()
    assert not run.exists()
