"""Run the notebooks of docs/notebooks/, and write what they print and draw for their pages.

    python -m docs.run_notebooks data            runs only this one
    python -m docs.run_notebooks decoding        after `python train.py hparams/ctc.yaml`

The texts are written beside the notebook, as JSON, and the pictures into docs/pictures/. Look at
both before you commit them.
"""

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from docs.hooks import NOTEBOOKS, Output, read_cells
from docs.pictures import ROOT, style, write_figure
from sbkit.base.files import to_json

FOLDER = ROOT / "docs" / NOTEBOOKS


def run_notebook(notebook: Path) -> list[Output]:
    """Run the cells in order; return the text and the pictures, with their titles, of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[Output] = []
    count = 0
    for cell in read_cells(notebook):
        if cell.is_text:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(cell.source, notebook, "exec"), namespace)
        pictures: dict[str, str] = {}
        for number in pyplot.get_fignums():
            drawn = pyplot.figure(number)
            count += 1
            name = f"notebook-{notebook.stem}-{count}"
            pictures[f"{name}.svg"] = "; ".join(axis.get_title() for axis in drawn.axes)
            write_figure(name, drawn)
        outputs.append(Output(text=printed.getvalue().strip(), pictures=pictures))
    return outputs


def main() -> None:
    """Run the named notebooks, or all of them."""
    matplotlib.use("Agg")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(names))
    for name in parser.parse_args().names or names:
        notebook = FOLDER / f"{name}.py"
        with pyplot.rc_context(style()):
            text = to_json(run_notebook(notebook), indent=1) + "\n"
        notebook.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
