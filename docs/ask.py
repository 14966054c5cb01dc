"""Ask the search of the site which pages it finds for a question.

    python -m docs.ask "how do I resume a run" "use my own torch"

Without questions, it asks those of docs/questions.tsv, and prints the rank of the page that answers
each: a test requires the first three. The search is that of the built site, in chromium.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.browser import open_browser, visit

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "docs/questions.tsv"
# The messages of Material's search worker: 0 makes the index, and 2 asks.
SCRIPT = """
const [index, questions, done] = arguments, answers = [];
const path = JSON.parse(document.getElementById("__config").textContent).search;
const worker = new Worker(new URL(path, location.href).href);
const ask = () => answers.length < questions.length
  ? worker.postMessage({type: 2, data: questions[answers.length]}) : done(answers);
worker.addEventListener("message", ({data}) => {
  if (data.type === 3) answers.push(data.data.items.map((sections) => sections[0].location));
  ask();
});
worker.postMessage({type: 0, data: {...index, options: {suggest: false}}});
"""


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site; warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def find_pages(browser: Any, site: Path, questions: list[str]) -> list[list[str]]:
    """Return the pages that the search finds for each question, such as `guide/yaml`."""
    visit(browser, site / "security.html")
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    found = browser.execute_async_script(SCRIPT, index, questions)
    pages = [[address.partition("#")[0].removesuffix(".html") for address in a] for a in found]
    return [[*dict.fromkeys(addresses)] for addresses in pages]


def read_questions() -> list[tuple[str, str]]:
    """Return the questions of the table with the page that answers each."""
    rows = (line.split("\t") for line in QUESTIONS.read_text("utf-8").splitlines()[1:])
    return [(question, page) for question, page in rows]


def main() -> None:
    """Print the pages for each question, or the ranks of the answers to those of the table."""
    expected = dict(read_questions())
    questions = sys.argv[1:] or [*expected]
    with TemporaryDirectory() as folder:
        if (process := build(Path(folder))).returncode:
            sys.exit(process.stderr)
        with contextmanager(open_browser)(Path(folder)) as browser:
            answers = find_pages(browser, Path(folder), questions)
    for question, pages in zip(questions, answers, strict=True):
        page = expected.get(question)
        rank = f"{pages.index(page) + 1 if page in pages else 'none'}: " if page else ""
        print(f"{rank}{question}: {', '.join(pages[:5])}")


if __name__ == "__main__":
    main()
