"""Debian's chromium, without a network, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD_ERRORS = """
window.seen = [];
addEventListener("securitypolicyviolation", (event) => seen.push(event.violatedDirective));
addEventListener("error", (event) => seen.push(String(event.message)));
"""


def open_browser(downloads: Path, *arguments: str, has_network: bool = False) -> Iterator[Any]:
    """Yield a Selenium driver; skip the test if chromium is not installed.

    Args:
        downloads: the folder that chromium saves files in.
        arguments: options of chromium.
        has_network: whether chromium can reach servers on this machine.
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.add_argument("--headless=new")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    for argument in arguments:
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # chromium's sandbox does not run as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        if not has_network:
            browser.set_network_conditions(offline=True, latency=0, throughput=0)
        saved = {"behavior": "allow", "downloadPath": str(downloads)}
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORD_ERRORS})
        yield browser
    finally:
        browser.quit()


def visit(browser: Any, page: Path | str, *, width: int = 1200) -> None:
    """Open a file or an address in a window that is so many pixels wide."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page if isinstance(page, str) else page.as_uri())


def assert_no_faults(browser: Any, allowed: str | tuple[str, ...] = "data:") -> None:
    """Assert that the page loads only allowed addresses, has no errors, and fits its window."""
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    addresses = browser.execute_script(script)
    assert not [address for address in addresses if not address.startswith(allowed)], addresses
    assert not (errors := browser.execute_script("return seen")), errors
    assert not (messages := [entry["message"] for entry in browser.get_log("browser")]), messages
    overflow = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0, f"the page is {overflow} pixels wider than the window"
