"""The page of the server in a real browser, with a file for its microphone."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from selenium.webdriver.common.keys import Keys
from starlette.applications import Starlette
from starlette.routing import Mount

from sbkit.serve.app import Service
from tests.browser import assert_no_faults, open_browser, visit
from tests.logs.test_report_in_browser import find, wait
from tests.runtime.tones import silence, speak, streaming_bundle, tone_bundle
from tests.serve.server import RunningServer, Tones, ToneSpeaker, running_server

pytestmark = pytest.mark.browser

PREFIX = "/asr"
TEXTS = ("the quick brown fox", "jumps over a lazy dog")
README = """# A card

## Results

| test set | decoder | metric | value | 95 % interval |
|---|---|---|---|---|
| test | greedy | CER | 16.50 % | 14.1 to 19.2 |

## How it was made
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[RunningServer]:
    """Serve the page below a path, as a proxy may."""
    tones, app = streaming_bundle(folder), Service.app
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Service, "app", lambda *of: Starlette(routes=[Mount(PREFIX, app(*of))]))
            server = running_server(folder, tones=tones, language="en", readme=README)
            live = stack.enter_context(server)
        yield live


@pytest.fixture(scope="module")
def second(folder: Path) -> Tones:
    return tone_bundle(folder)


@pytest.fixture(scope="module")
def clip_server(folder: Path, second: Tones) -> Iterator[RunningServer]:
    with running_server(folder, keys=["secret"], speaker=ToneSpeaker, second=second) as server:
        yield server


@pytest.fixture(scope="module")
def browser(folder: Path, live: RunningServer) -> Iterator[Any]:
    """Open a browser whose microphone hears two sentences."""
    spoken = [part for text in TEXTS for part in (speak(live.tokenizer, text), silence(1.5))]
    samples = np.concatenate([silence(1.0), *spoken, silence(20.0)])
    signal = soxr.resample(samples / np.float32(32768), 1, 3)
    soundfile.write(folder / "microphone.wav", signal, 48_000, subtype="PCM_16")
    yield from open_browser(
        folder,
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={folder}/microphone.wav",
        "--autoplay-policy=no-user-gesture-required",
        has_network=True,
    )


def words(browser: Any) -> list[str]:
    return [part.text for part in find(browser, "#text .word")]


@pytest.mark.slow
def test_page_transcribes_the_microphone(browser: Any, live: RunningServer) -> None:
    visit(browser, f"{live.url}{PREFIX}/")
    (record,) = find(browser, "#record")
    wait(record.is_enabled)
    assert "tones" in browser.title
    card = find(browser, "#card")[0].text
    assert all(part in card for part in ("16000 Hz", "en", "tones, cpu, fp32", "every 640 ms"))
    assert "16.50 %" in find(browser, "#scores")[0].text
    record.click()
    wait(lambda: find(browser, ".doubt"))
    wait(lambda: words(browser) == " ".join(TEXTS).split())
    assert record.text == "Stop"
    record.click()
    wait(lambda: live.service.sessions == 0)
    assert [line.text for line in find(browser, "#text p") if line.text] == [*TEXTS]
    find(browser, "#text .word")[5].click()  # over
    wait(lambda: find(browser, ".word.now"))
    assert_no_faults(browser, live.url)


def test_page_transcribes_a_file_with_a_whole_clip_model(
    browser: Any, clip_server: RunningServer, second: Tones, folder: Path
) -> None:
    soundfile.write(folder / "talk.flac", speak(clip_server.tokenizer, TEXTS[0]), 16_000)
    visit(browser, clip_server.url, width=390)
    (key,), (file,) = find(browser, "#secret"), find(browser, "#file")
    wait(key.is_displayed)
    file.send_keys(str(folder / "talk.flac"))
    wait(lambda: "talk.flac is sent once there is a key" in find(browser, "#text")[0].text)
    assert "API key is missing" in find(browser, "#error")[0].text
    key.send_keys("secret\n")
    wait(lambda: words(browser) == TEXTS[0].split())
    assert not key.is_displayed()
    find(browser, "#model option")[1].click()
    wait(lambda: browser.title == "second")
    assert "after each recording" in find(browser, "#card")[0].text
    batches = len(second[2].batches)
    file.send_keys(str(folder / "talk.flac"))
    wait(lambda: len(second[2].batches) > batches)
    wait(lambda: words(browser) == TEXTS[0].split())
    first = find(browser, "#text .word")[0]
    wait(find(browser, "#play")[0].is_enabled)
    browser.execute_script("arguments[0].focus()", first)
    first.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait(lambda: browser.execute_script("return player.currentTime") > 1.2)  # brown
    browser.get_log("browser")  # of the answer 401
    assert_no_faults(browser, clip_server.url)


def test_page_plays_a_voice(browser: Any, clip_server: RunningServer) -> None:
    """The page has the key of the test before."""
    visit(browser, clip_server.url)
    wait(find(browser, "#record")[0].is_enabled)
    find(browser, "#sentence")[0].send_keys("a fox")
    find(browser, "#speak")[0].click()
    wait(lambda: browser.execute_script("return spoken.ended"))
    assert browser.execute_script("return spoken.duration") == pytest.approx(0.6, abs=0.1)
    find(browser, "#sentence")[0].send_keys(" 2")
    find(browser, "#speak")[0].click()
    wait(lambda: "Only letters can be spoken" in find(browser, "#error")[0].text)
    browser.get_log("browser")  # of the answer 400
    assert_no_faults(browser, "")


def test_page_ends_a_turn_with_the_recording(browser: Any, clip_server: RunningServer) -> None:
    (record,) = find(browser, "#record")
    record.click()
    wait(lambda: browser.execute_script("return seconds") > 4.5)
    record.click()
    wait(lambda: words(browser)[:4] == TEXTS[0].split())
    wait(lambda: clip_server.service.sessions == 0)
    assert_no_faults(browser, clip_server.url)


ATTACK = """
const [url, done] = arguments
const form = new FormData()
form.append("file", new Blob(["x"]), "a.wav")
const send = (path, options) => fetch(url + path, {mode: "no-cors", ...options})
const socket = new WebSocket(url.replace("http", "ws") + "/v1/realtime")
socket.onopen = () => done("a session was opened")
socket.onerror = () => Promise.all([
  send("/v1/audio/transcriptions", {method: "POST", body: form}),
  send("/v1/audio/speech", {method: "POST", body: JSON.stringify({input: "a fox"})}),
]).then(() => done("refused"), done)
"""


def test_page_of_another_site_can_use_nothing(
    browser: Any, live: RunningServer, clip_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """CORS stops neither its requests nor its sessions, but only hides the answers."""
    visit(browser, f"{clip_server.url}/health")  # of another port, so of another origin
    assert browser.execute_async_script(ATTACK, live.url + PREFIX) == "refused"
    lines = [line for line in caplog.messages if f" {PREFIX}/v1/" in line]
    assert [line.split()[2] for line in lines] == ["403"] * 3, lines
    browser.get_log("browser")  # of the answers
