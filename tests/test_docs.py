"""The site builds and works offline, the reference is fresh, and what pages name exists.

tests/test_readme.py runs the commands of the pages.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs import licenses
from docs.reference import FOLDER, PAGES
from tests.browser import assert_no_faults, open_browser, visit
from tests.runs import ROOT

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
REFERENCE = tuple(FOLDER / name for name in PAGES)
DOCS = tuple(file for file in sorted((ROOT / "docs").rglob("*.md")) if file not in REFERENCE)
FOLDERS = ("hparams", "recipes", "sbkit", "tools")
BELOW = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))
READMES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *BELOW)


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def prose(file: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```$", "", file.read_text("utf-8"))


@cache
def anchors(file: Path) -> set[str]:
    """Return the anchors of the headings of a page, as code hosts and the site name them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(file))
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts]
    return {slug for slug in slugs if slug}


@pytest.mark.parametrize("name", PAGES)
def test_reference_is_what_its_generator_writes(name: str) -> None:
    is_current = (FOLDER / name).read_text("utf-8") == PAGES[name]()
    assert is_current, f"docs/reference/{name} is older than the code: run python -m docs.reference"


def test_page_of_licenses_has_each_package_and_each_library_in_a_wheel() -> None:
    pins = map(Requirement, (ROOT / "constraints.txt").read_text("utf-8").splitlines())
    pinned = {
        pin.name: str(pin.specifier) for pin in pins if not pin.marker or pin.marker.evaluate()
    }
    for package in licenses.default_packages():
        version = f"=={package.version}"
        if pinned.get(canonicalize_name(package.name), version) != version:
            pytest.skip(
                f"the page has the versions of constraints.txt, not {package.name}{version}"
            )
    page = licenses.PAGE.read_text("utf-8")
    assert licenses.UNKNOWN not in page
    assert page == licenses.licenses(), "docs/licenses.md is older: run python -m docs.licenses"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in process.stderr
    return folder


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > len(DOCS)
    for page in pages:
        text = page.read_text("utf-8")
        assert not re.findall(
            r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//', text
        )


def test_notebooks_are_pages_with_their_code_texts_and_pictures(site: Path) -> None:
    notebooks = [*(ROOT / "docs/notebooks").glob("*.ipynb")]
    assert len(notebooks) == 4
    for notebook in notebooks:
        page = (site / f"notebooks/{notebook.stem}.html").read_text("utf-8")
        pictures = re.findall(r'src="([\w-]+\.png)"', page)
        assert bool(pictures) == ("image/png" in notebook.read_text("utf-8"))
        assert all((site / "notebooks" / picture).is_file() for picture in pictures)
        assert (site / f"source/docs/notebooks/{notebook.name}.txt").is_file()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from open_browser(tmp_path_factory.mktemp("downloads"))


@pytest.mark.slow(30)
@pytest.mark.browser
def test_site_works_as_files_on_phone_and_desktop(site: Path, browser: Any) -> None:
    for page in sorted(site.rglob("*.html")):
        for width in (390, 1200):
            if page.name != "404.html":  # its addresses are those of a server
                visit(browser, page, width=width)
                assert_no_faults(browser, ("data:", site.as_uri()))


@pytest.mark.parametrize("file", [*DOCS, *REFERENCE, *READMES], ids=name_of)
def test_links_lead_to_files_and_headings(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(file)):
        address, _, anchor = target.partition("#")
        if not address.startswith(("http:", "https:", "mailto:")):
            linked = (file.parent / address) if address else file
            place = f"{name_of(file)} links to {target}, but there is no such"
            assert linked.exists(), f"{place} file: correct the link"
            assert not anchor or anchor in anchors(linked), f"{place} heading: correct the link"


def test_names_of_the_glossary_are_in_their_files() -> None:
    page = FOLDER / "glossary.md"
    for name, file in re.findall(r"`([\w.]+)` in \[[^]]+\]\(([^)]+)\)", page.read_text("utf-8")):
        code = (page.parent / file).read_text("utf-8")
        for word in name.split("."):
            assert re.search(rf"\b{word}\b", code), f"{name} of the glossary is not in {file}"


@pytest.mark.parametrize("file", BELOW, ids=name_of)
def test_table_of_a_folder_names_its_files(file: Path) -> None:
    """Eight modules had moved on, and their README still sent readers to them."""
    for first_column in re.findall(
        r"^\| (`[^|]*\.(?:py|yaml)`[^|]*) \|", file.read_text("utf-8"), re.M
    ):
        for name in re.findall(r"`([\w/]+\.(?:py|yaml))`", first_column):
            assert (file.parent / name).is_file(), f"{name_of(file)} lists {name}: remove the row"


@pytest.mark.parametrize("file", DOCS, ids=name_of)
def test_lists_and_tables_follow_an_empty_line(file: Path) -> None:
    """The site shows them as text otherwise, unlike code hosts."""
    lines = prose(file).splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        for start in (r"[-*] ", r"\d+\. ", r"\|"):
            if re.match(start, line) and before.strip() and not before.startswith(" "):
                assert re.match(start, before), f"{name_of(file)}: add an empty line above {line}"


def texts_of(module: Path) -> Iterator[str]:
    """Yield the texts in a module; in an f-string, `...` stands for each value."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        match node:
            case ast.Constant(value=str() as text):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts
                )


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    page = (ROOT / "docs/guide/troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"(?m)^\| `([^`]+)`", page)
    modules = (file for folder in ("sbkit", "recipes") for file in (ROOT / folder).rglob("*.py"))
    texts = "\n".join(text for module in modules for text in texts_of(module))
    for message in messages:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert re.search(pattern, texts), (
            f"docs/guide/troubleshooting.md quotes `{message}`, but no code says so any "
            "more: write the new message in its table, or remove the row"
        )
