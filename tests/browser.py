"""Debian's chromium without a network, for tests that look at pages."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WATCH = """
window.seen = [];
addEventListener("securitypolicyviolation", (event) => seen.push(event.violatedDirective));
addEventListener("error", (event) => seen.push(String(event.message)));
"""


def open_browser(downloads: Path, *arguments: str, has_network: bool = False) -> Iterator[Any]:
    """Yield a driver of Selenium; the test is skipped where there is no chromium.

    arguments: of chromium; has_network: whether it reaches this machine.
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not here: apt-get install chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.add_argument("--headless=new")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    for each in arguments:
        options.add_argument(each)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # chromium's own does not run as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        if not has_network:
            browser.set_network_conditions(offline=True, latency=0, throughput=0)
        saved = {"behavior": "allow", "downloadPath": str(downloads)}
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        yield browser
    finally:
        browser.quit()


def visit(browser: Any, page: Path | str, *, width: int = 1200) -> None:
    """Open a file, or an address, in a window of some width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page if isinstance(page, str) else page.as_uri())


def require_quiet(browser: Any, own: str = "data:") -> None:
    """Check that the page asked for nothing but its own, that nothing failed, and that it fits."""
    asked = "return performance.getEntriesByType('resource').map((each) => each.name)"
    requests = [each for each in browser.execute_script(asked) if not each.startswith(own)]
    assert not requests, requests
    failed = browser.execute_script("return seen")
    assert not failed, failed
    logged = [each["message"] for each in browser.get_log("browser")]
    assert not logged, logged
    hidden = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert hidden <= 0, f"{hidden} pixels are beyond the window"
