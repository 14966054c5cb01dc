"""A hook of MkDocs: pages look and link on the site as they do on a code host.

A page may link to a Python file, or to a file outside docs/, such as `../hparams/ctc.yaml`. The
site gets a copy of the file as text, below source/, and the link leads to this copy. The search
prefers pages that explain to notebooks and to those of the reference. Code in tables may contain a
bar.

A notebook, docs/notebooks/NAME.py, becomes a page with its output, which `docs/run_notebooks.py`
has written. Pages link to the `.py`.
"""

import json
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypedDict

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LOW_BOOST = 0.9  # pages of the reference contain nearly every word
ROOT = Path(__file__).parents[1]
# Code hosts need `\|` for a bar in a cell of a table; Python-Markdown would show the backslash.
CELL_WITH_CODE = re.compile(r"(?<=[| \[])`[^`\n]*\\\|[^`\n]*`")
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)(?:#[^)\s]*)?(?=\))")
NOTEBOOK_LINK = re.compile(r"(\]\([^)\s:]*\bnotebooks/\w+)\.py(?=\))")
NOTEBOOKS = "notebooks"

logger = logging.getLogger("mkdocs.plugins.source")  # `--strict` counts its warnings


class Cell(NamedTuple):
    """A cell of a notebook; the source of a text is Markdown."""

    is_text: bool
    source: str


class Output(TypedDict):
    """What a cell prints, and the titles of the pictures that it draws, by file."""

    text: str
    pictures: dict[str, str]


def read_cells(notebook: Path) -> list[Cell]:
    """Split a notebook in percent format into its cells."""
    cells: list[Cell] = []
    for part in re.split(r"(?m)^# %%", notebook.read_text("utf-8"))[1:]:
        kind, _, source = part.partition("\n")
        is_text = kind.strip() == "[markdown]"
        source = re.sub(r"(?m)^# ?", "", source) if is_text else source
        cells.append(Cell(is_text, source.strip()))
    return cells


def to_page(notebook: Path) -> str:
    """Write a notebook with its output as Markdown."""
    first, *cells = read_cells(notebook)
    name = f"docs/{NOTEBOOKS}/{notebook.name}"
    note = f"This page is [a notebook](../source/{name}.txt) in percent format. Open `{name}` in "
    note += f"VS Code, or in Jupyter with jupytext, or run it: `python {name}`."
    parts = [first.source, note]
    file = notebook.with_suffix(".json")
    outputs: list[Output] = json.loads(file.read_text("utf-8")) if file.exists() else []
    num_code_cells = sum(not cell.is_text for cell in cells)
    if len(outputs) != num_code_cells:
        logger.warning(f"{name} has other cells than its output: python -m docs.run_notebooks")
    remaining = iter(outputs)
    nothing = Output(text="", pictures={})
    for cell in cells:
        parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
        output = nothing if cell.is_text else next(remaining, nothing)
        if output["text"]:
            parts.append(f"```text\n{output['text']}\n```")
        pictures = output["pictures"].items()
        parts += [f"![{title}](../pictures/{picture})" for picture, title in pictures]
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and a copy of its source."""
    for notebook in sorted((Path(config.docs_dir) / NOTEBOOKS).glob("*.py")):
        uri = f"{NOTEBOOKS}/{notebook.stem}.md"
        files.append(File.generated(config, uri, content=to_page(notebook)))
        source = f"source/docs/{NOTEBOOKS}/{notebook.name}.txt"
        files.append(File.generated(config, source, abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files that are not pages by links to their copies on the site."""
    folder = PurePosixPath(page.file.src_uri).parent
    if folder.name in ("reference", NOTEBOOKS):
        page.meta["search"] = {"boost": LOW_BOOST}

    def to_copy(match: re.Match[str]) -> str:
        target = os.path.normpath(Path(config.docs_dir) / folder / match[1])
        if Path(target).is_relative_to(config.docs_dir) and not target.endswith(".py"):
            return match[0]
        if not Path(target).is_file() or not Path(target).is_relative_to(ROOT):
            logger.warning(f"{page.file.src_uri} must link to a file, but links to {match[1]}.")
            return match[0]
        uri = f"source/{Path(target).relative_to(ROOT).as_posix()}.txt"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=target))
        return os.path.relpath(uri, folder)

    markdown = CELL_WITH_CODE.sub(lambda match: match[0].replace(r"\|", "|"), markdown)
    markdown = NOTEBOOK_LINK.sub(r"\1.md", markdown)
    return LINK.sub(to_copy, markdown)
