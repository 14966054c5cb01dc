"""Write a bundle's formats: each is compared with the trained model, and kept within its limits.

FORMAT/          what its users load
    parity.json      what was compared, or why it is not written
    checksums.json   SHA-256 of the other files
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.versions import versions
from sbkit.export.graphs import WrittenGraph, write_graphs
from sbkit.export.held_out import find_held_out
from sbkit.export.huggingface_format import write_huggingface
from sbkit.export.onnx_format import write_onnx
from sbkit.export.parity import Candidate, Grid, HeldOut, compare
from sbkit.export.sherpa_format import write_sherpa
from sbkit.export.speechbrain_format import write_speechbrain
from sbkit.export.traced import TrainedModel, quietly, trained_log_probs
from sbkit.tasks.task import ONNX

logger = logging.getLogger(__name__)

Writer = Callable[[TrainedModel, Path], Sequence[Candidate]]
ParityReports = Mapping[str, Mapping[str, Any]]  # by format and candidate

PARITY, HUB, HUGGINGFACE = "parity.json", "hub", "huggingface"
PROGRAM = "model.pt2"  # of torch.export, which runs with torch alone
LARGE = "".join(  # what .gitattributes says to a model hub
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.safetensors", "*.model")
)


def write_torch(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the program, and read it again."""
    torch.export.save(trained.program, folder / PROGRAM)
    loaded = torch.export.load(folder / PROGRAM).module()
    return [
        Candidate(name="fp32", files=(PROGRAM,), log_probs=partial(trained_log_probs, loaded)),
    ]


def write_hub(bundle: Path) -> None:
    """Copy a finished bundle into a folder of its own, to upload."""
    folder = bundle / HUB
    folder.mkdir()
    for file in bundle.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / ".gitattributes").write_text(LARGE, encoding="utf-8")
    write_checksums(folder)


WRITERS: Mapping[str, Writer] = {
    ONNX: write_onnx,
    "torch": write_torch,
    "sherpa-onnx": write_sherpa,
    HUGGINGFACE: write_huggingface,
    "speechbrain": write_speechbrain,
}
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "sherpa-onnx", "transformers")


def require_formats(names: Sequence[str]) -> None:
    """Raise SbkitError for a name that is no format."""
    unknown = [name for name in names if name not in (*WRITERS, HUB)]
    if unknown:
        raise SbkitError(
            f"`--formats` must name some of {', '.join((*WRITERS, HUB))}, with commas, but has "
            f"{unknown[0]!r}. Correct it."
        )


def write_formats(
    trained: TrainedModel, run: Path, folder: Path, names: Sequence[str], grid: Grid
) -> ParityReports:
    """Write formats into a bundle's folder, each with its parity report.

    Raises SbkitError for a model of neither frames nor graphs.
    """
    task = trained.bundle.task
    of_frames = task.predicts in ("text", "speech")
    of_graphs = {graph.format for graph in task.require_export().graphs.values()}
    if not of_frames and not of_graphs.issuperset(names):
        others = f"; of a {task.model_name}, {' or '.join(sorted(of_graphs))}" if of_graphs else ""
        raise SbkitError(
            f"`--formats` must be of a model that transcribes{others}, but is {', '.join(names)} "
            f"of a {task.model_name}. Leave it out."
        )
    try:
        held_out: HeldOut | str = find_held_out(run)
    except SbkitError as error:
        held_out = str(error)
    written: dict[str, Sequence[Any]] = {}  # candidates, or graphs
    parity: dict[str, dict[str, Any]] = {}
    for name in names:
        logger.info(f"writing {name}")
        (folder / name).mkdir()
        try:
            with quietly():
                if of_graphs:
                    written[name] = write_graphs(trained, folder / name, grid, held_out)
                else:
                    written[name] = WRITERS[name](trained, folder / name)
        except SbkitError as error:
            parity[name] = {"all": {"written": False, "reasons": [str(error)]}}
    every = [each for several in written.values() for each in several]
    if of_graphs:
        reports = iter([each.report() for each in every])
    else:
        compared = compare(trained, every, grid, held_out)
        reports = iter([each.report(grid, held_out) for each in compared])
    for name, several in written.items():
        parity[name] = {each.name: next(reports) for each in several}
    for name in names:
        _keep(folder / name, written.get(name, ()), parity[name])
    return parity


def _keep(
    folder: Path, written: Sequence[Candidate | WrittenGraph], reports: Mapping[str, Any]
) -> None:
    """Remove what missed its limits, and write the parity report."""
    missed = [each for each in written if not reports[each.name]["written"]]
    if len(missed) == len(written):
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        for file in (file for each in missed for file in each.files):
            (folder / file).unlink()
    said = {"versions": versions(PACKAGES), "compared_with_the_trained_model": reports}
    (folder / PARITY).write_text(to_json(said, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)
