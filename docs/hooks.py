"""A hook of MkDocs: pages look and link on the site as they do on a code host.

A page may link to a file outside docs/, such as `../hparams/ctc.yaml`. The site gets a copy of the
file as text, below source/, and the link leads to this copy. The search prefers pages that explain
to those of the reference. Code in tables may contain a bar.
"""

import logging
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REFERENCE_BOOST = 0.9  # its pages contain nearly every word
ROOT = Path(__file__).parents[1]
# Code hosts need `\|` for a bar in a cell of a table; Python-Markdown would show the backslash.
CELL_WITH_CODE = re.compile(r"(?<=[| \[])`[^`\n]*\\\|[^`\n]*`")
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)(?:#[^)\s]*)?(?=\))")

logger = logging.getLogger("mkdocs.plugins.source")  # `--strict` counts its warnings


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside docs/ by links to their copies on the site."""
    folder = PurePosixPath(page.file.src_uri).parent
    if folder.name == "reference":
        page.meta["search"] = {"boost": REFERENCE_BOOST}

    def to_copy(match: re.Match[str]) -> str:
        target = os.path.normpath(Path(config.docs_dir) / folder / match[1])
        if Path(target).is_relative_to(config.docs_dir):
            return match[0]
        if not Path(target).is_file() or not Path(target).is_relative_to(ROOT):
            logger.warning(f"{page.file.src_uri} must link to a file, but links to {match[1]}.")
            return match[0]
        uri = f"source/{Path(target).relative_to(ROOT).as_posix()}.txt"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=target))
        return os.path.relpath(uri, folder)

    markdown = CELL_WITH_CODE.sub(lambda match: match[0].replace(r"\|", "|"), markdown)
    return LINK.sub(to_copy, markdown)
