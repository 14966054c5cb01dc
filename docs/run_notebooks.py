"""Run the notebooks of docs/notebooks/ in a kernel, and keep what they print and draw.

    python -m docs.run_notebooks data            runs only this one
    python -m docs.run_notebooks decoding        after `python train.py hparams/ctc.yaml`

Look at the outputs before you commit them. They hold no times of runs and no paths of this machine.
"""

import argparse
import io
from base64 import b64decode, b64encode

import nbformat
from nbclient import NotebookClient
from PIL import Image

from docs.hooks import NOTEBOOKS, ROOT

FOLDER = ROOT / "docs" / NOTEBOOKS
KEPT_TYPES = ("text/plain", "text/html", "image/png")  # of what a cell shows
NUM_COLORS = 32  # of a picture, which then has a fifth of the bytes


def run_notebook(notebook: nbformat.NotebookNode) -> None:
    """Run the cells in their order, and keep their outputs without what differs by machine."""
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, resources=resources, coalesce_streams=True).execute()
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_kept(output)]
            for output in cell.outputs:
                output.get("metadata", {}).clear()
                if "text" in output:
                    output.text = output.text.replace(f"{ROOT}/", "")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def _is_kept(output: nbformat.NotebookNode) -> bool:
    if output.output_type == "stream":
        return bool(output.name == "stdout")
    output.data = {kind: output.data[kind] for kind in KEPT_TYPES if kind in output.data}
    if "image/png" in output.data:
        picture = Image.open(io.BytesIO(b64decode(output.data["image/png"]))).convert("RGB")
        small = io.BytesIO()
        picture.quantize(NUM_COLORS).save(small, "PNG", optimize=True)
        output.data = {"image/png": b64encode(small.getvalue()).decode()}
    return bool(output.data)


def main() -> None:
    """Run the named notebooks, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = sorted(file.stem for file in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(names))
    for name in parser.parse_args().names or names:
        file = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
        run_notebook(notebook)
        content = nbformat.writes(notebook, indent=1)  # type: ignore[no-untyped-call]
        file.write_text(f"{content}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
