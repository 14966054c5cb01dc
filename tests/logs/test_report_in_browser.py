"""The pages of reports work in a real browser without a network: tables, clicks and audio."""

import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbkit.data.data_report import measure_data, write_data_page
from sbkit.evaluate.report import write_report
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.text.recognized_word import Word
from tests.browser import assert_no_faults, open_browser, visit
from tests.data.test_data_report import make_splits
from tests.logs.reports import HOSTILE, SAID, results, tone, write_example

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads: Path) -> Iterator[Any]:
    yield from open_browser(downloads)


def find(browser: Any, selector: str) -> list[Any]:
    return list(browser.find_elements("css selector", selector))


def ids(browser: Any) -> list[str]:
    return [cell.text for cell in find(browser, "#table .id")]


def click(browser: Any, selector: str) -> None:
    target = find(browser, selector)[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
    target.click()


def wait(condition: Callable[[], object]) -> Any:
    """Return the value of a condition as soon as it is true."""
    deadline = time.monotonic() + 120
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert value
    return value


def test_table_is_sorted_filtered_and_saved(browser: Any, tmp_path: Path, downloads: Path) -> None:
    visit(browser, write_example(tmp_path))
    assert ids(browser) == ["c", "a", HOSTILE]
    click(browser, "#table th:nth-child(3) button")  # words
    assert ids(browser) == ["c", HOSTILE, "a"]
    click(browser, "#table th:nth-child(3) button")
    assert ids(browser) == ["a", HOSTILE, "c"]
    click(browser, "#wrong")
    assert ids(browser) == ["a", "c"]
    find(browser, "#search")[0].send_keys("LINE")
    assert ids(browser) == ["c"]
    assert find(browser, "#count")[0].text == "1 of 3 utterances."
    click(browser, "#csv")
    file = downloads / "utterances_test.csv"
    wait(file.exists)
    with file.open(encoding="utf-8", newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["reference"], row["hypothesis"]) == (SAID, "told the line now please")
    assert (row["word_errors"], row["words"], row["seconds"]) == ("2", "4", "2")
    visit(browser, write_example(tmp_path))
    click(browser, ".confusion[data-said=hold]")
    assert ids(browser) == ["c"]
    assert find(browser, "#pair")[0].text == "only hold → told ✕"
    click(browser, "#pair")
    assert len(ids(browser)) == 3
    assert_no_faults(browser)


def test_clicked_word_is_played(browser: Any, tmp_path: Path) -> None:
    visit(browser, write_example(tmp_path))
    click(browser, "#table .open")
    lane = wait(lambda: find(browser, ".lane button"))
    assert [word.text for word in lane] == ["told", "the", "line", "now", "please"]
    width, loud, silent = browser.execute_script(
        """
        const canvas = document.querySelector("canvas"), width = canvas.width;
        const all = canvas.getContext("2d").getImageData(0, 0, width, canvas.height).data;
        const dark = (x) => all.reduce((sum, v, i) => sum - ((i >> 2) % width === x ? v : 0), 0);
        return [canvas.width, dark(50), dark(150)];
        """
    )
    assert width == pytest.approx(200, abs=4)  # frames of 10 ms
    assert loud > silent  # it is a tone until the middle
    lane[2].click()
    audio = find(browser, "audio")[0]
    position = "return [arguments[0].currentTime, arguments[0].paused]"
    wait(lambda: browser.execute_script(position, audio)[0] > 1.0)
    seconds, _ = wait(lambda: (playing := browser.execute_script(position, audio))[1] and playing)
    assert 1.3 <= seconds < 1.6  # the word is from 1.0 to 1.3 s
    click(browser, ".spoken ins button")  # told
    wait(lambda: 0.2 <= browser.execute_script(position, audio)[0] < 1.0)
    assert_no_faults(browser)


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    visit(browser, write_example(tmp_path))
    assert HOSTILE in ids(browser)
    assert len(find(browser, "script")) == 2
    assert find(browser, "img:not(#curves *), iframe, b script, #table script") == []
    assert_no_faults(browser)
    fetch = "fetch('https://example.org/').then(arguments[0], () => arguments[0]('refused'))"
    assert browser.execute_async_script(fetch) == "refused"
    assert browser.execute_script("return seen") == ["connect-src"]
    browser.get_log("browser")  # drops the message of the refusal


def test_without_words_characters_are_shown(browser: Any, tmp_path: Path, downloads: Path) -> None:
    """Two sentences with times, separated by a space; no words are counted."""
    words = (Word("今气", 0.2, 0.9), Word("好", 1.0, 1.5))
    scored = [ScoredUtterance("c", "今天 好", "今气 好", seconds=2.0, words=words, by_words=False)]
    page = tmp_path / "report.html"
    write_report(page, **results(scored), clips=lambda *_: {"c": tone()})
    visit(browser, page)
    assert [cell.text for cell in find(browser, "#table .text")] == ["今天气 好"]
    assert not [cell for cell in find(browser, "th") if "ord" in cell.text or "WER" in cell.text]
    file = downloads / "utterances_test.csv"
    file.unlink(missing_ok=True)  # from the test before
    click(browser, "#csv")
    wait(file.exists)
    assert file.read_text("utf-8").splitlines() == [
        "id,reference,hypothesis,character_errors,characters,seconds,speaker",
        "c,今天 好,今气 好,1,4,2,",
    ]
    click(browser, "#table .open")
    lane = wait(lambda: find(browser, ".lane button"))
    assert [cell.text for cell in lane] == ["今气", "好"]
    assert ["error" in str(cell.get_attribute("class")) for cell in lane] == [True, False]
    assert_no_faults(browser)


@pytest.mark.parametrize("width", [1200, 390])
def test_pages_fit_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    visit(browser, write_example(tmp_path), width=width)
    texts = [cell.text for cell in find(browser, "#table tbody tr:first-child .text")]
    assert texts == ["hold told the line now please"]
    click(browser, "#table .open")
    wait(lambda: find(browser, ".lane"))
    assert_no_faults(browser)
    splits, page = make_splits(tmp_path), tmp_path / "data_report.html"
    facts = measure_data(splits, sample_rate=16_000, language="en")
    write_data_page(splits, facts, page)
    visit(browser, page, width=width)
    assert_no_faults(browser)
