"""A hook of MkDocs: pages look and link on the site as they do on a code host.

A page may link to a Python file, or to a file outside docs/, such as `../hparams/ctc.yaml`. The
site gets a copy of the file as text, below source/, and the link leads to this copy. The search
prefers pages that explain to notebooks and to those of the reference. Code in tables may contain a
bar.

A notebook, docs/notebooks/NAME.ipynb, becomes a page with its output. Pages link to the `.ipynb`.
"""

import json
import logging
import os
import re
from base64 import b64decode
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LOW_BOOST = 0.9  # pages of the reference contain nearly every word
ROOT = Path(__file__).parents[1]
# Code hosts need `\|` for a bar in a cell of a table; Python-Markdown would show the backslash.
CELL_WITH_CODE = re.compile(r"(?<=[| \[])`[^`\n]*\\\|[^`\n]*`")
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)(?:#[^)\s]*)?(?=\))")
NOTEBOOK_LINK = re.compile(r"(\]\([^)\s:]*\bnotebooks/[\w-]+)\.ipynb(?=\))")
NOTEBOOKS = "notebooks"

logger = logging.getLogger("mkdocs.plugins.source")  # `--strict` counts its warnings


def to_page(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Write a notebook with its output as Markdown; return it with its pictures, by their names."""
    first, *cells = json.loads(notebook.read_text("utf-8"))["cells"]
    note = f"This page is [a notebook](../source/docs/{NOTEBOOKS}/{notebook.name}.txt), "
    note += f"`docs/{NOTEBOOKS}/{notebook.name}`, which `sbkit new` copies into a project."
    parts = ["".join(first["source"]), note]
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[name] = b64decode(data["image/png"])
                parts.append(f"![output]({name})")
            elif text := "".join(data["text/plain"]).strip():
                parts.append(f"```text\n{text}\n```")
    if not any(cell.get("outputs") for cell in cells):
        logger.warning(f"{notebook.name} has no output: python -m docs.run_notebooks")
    return "\n\n".join(parts), pictures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page with pictures for each notebook, and a copy of its source."""
    for notebook in sorted((Path(config.docs_dir) / NOTEBOOKS).glob("*.ipynb")):
        page, pictures = to_page(notebook)
        files.append(File.generated(config, f"{NOTEBOOKS}/{notebook.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{NOTEBOOKS}/{name}", content=picture))
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
