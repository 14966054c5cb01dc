"""Write the formats of a bundle, and keep those that agree with the trained model.

The folders of formats in a bundle:

onnx/            `model.onnx` and `model.int8.onnx`: waveform in, log-probabilities out; of a
                 streaming model also `streaming.onnx`, a chunk with its state; of other tasks, a
                 file for each of their graphs
sherpa-onnx/     `model.onnx` and `tokens.txt`
huggingface/     a folder for transformers, of a model with a pretrained encoder
*/parity.json    what was compared with the trained model, or why the format is not written
*/checksums.json  SHA-256 of the other files of the format
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import to_json
from sbkit.base.versions import versions
from sbkit.export.huggingface_format import write_huggingface
from sbkit.export.onnx_format import WrittenGraph, write_graphs, write_onnx
from sbkit.export.parity import Candidate, Grid, TestSets, compare
from sbkit.export.sherpa_format import write_sherpa
from sbkit.export.traced import TrainedModel, quiet_exporters
from sbkit.runtime.test_sets import prepare_test_sets
from sbkit.tasks.task import ONNX, Task

logger = logging.getLogger(__name__)

Writer = Callable[[TrainedModel, Path], Sequence[Candidate]]
ParityReport = Mapping[str, Any]  # plain data
ParityReports = Mapping[str, Mapping[str, ParityReport]]  # by format and candidate

PARITY_FILE = "parity.json"
HUGGINGFACE = "huggingface"
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "sherpa-onnx", "transformers")

WRITERS: Mapping[str, Writer] = {
    ONNX: write_onnx,
    "sherpa-onnx": write_sherpa,
    HUGGINGFACE: write_huggingface,
}


def require_formats(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no format."""
    for name in names:
        if name not in WRITERS:
            raise ConfigError(f"There is no format {name!r}. Choose from {', '.join(WRITERS)}.")


def declared_formats(knobs: Mapping[str, Any], task: Task) -> list[str]:
    """Return the formats of `export_formats`, which a run writes into its bundle.

    Raises:
        ConfigError: it is no list of formats, or the task's models have no such format.
    """
    names = knobs.get("export_formats") or []
    is_list = isinstance(names, list | tuple)
    if not is_list or not {*map(str, names)} <= {*WRITERS}:
        raise ConfigError(
            f"`export_formats` must be a list of formats of {', '.join(WRITERS)}, such as [onnx], "
            f"but is {names!r}."
        )
    if names and task.export is not None:
        require_supported(names, task)
    return [*dict.fromkeys(names)]


def require_supported(names: Sequence[str], task: Task) -> None:
    """Raise ConfigError if the task's models have no such format."""
    graph_formats = {graph.format for graph in task.require_export().graphs.values()}
    unsupported = [name for name in names if name not in graph_formats]
    if unsupported and task.predicts not in ("text", "speech"):
        fix = f"Its formats are: {', '.join(sorted(graph_formats))}." if graph_formats else ""
        raise ConfigError(
            f"The format {', '.join(unsupported)} is not supported for this model, a "
            f"{task.model_name}. {fix or 'Leave it out.'}"
        )


def describe_failures(reports: ParityReports) -> list[str]:
    """Say which formats are not written, and why."""
    return [
        f"{name} ({kind}) is not written: {reason.rstrip('.')}."
        for name, candidates in reports.items()
        for kind, report in candidates.items()
        for reason in report["reasons"]
    ]


def write_formats(
    trained: TrainedModel, run: Path, folder: Path, names: Sequence[str], grid: Grid
) -> ParityReports:
    """Write formats into a bundle's folder, each with its parity report.

    Raises:
        ConfigError: the task's models have no such format.
    """
    task = trained.bundle.task
    require_supported(names, task)
    try:
        test_sets: TestSets | str = prepare_test_sets(run)
    except SbkitError as error:
        test_sets = str(error)
    candidates: dict[str, Sequence[Candidate]] = {}
    graphs: dict[str, Sequence[WrittenGraph]] = {}
    reports: dict[str, dict[str, ParityReport]] = {}
    for name in names:
        logger.info(f"writing {name}")
        (folder / name).mkdir()
        try:
            with quiet_exporters():
                if task.require_export().graphs:
                    graphs[name] = write_graphs(trained, folder / name, grid, test_sets)
                    reports[name] = {graph.name: graph.report() for graph in graphs[name]}
                else:
                    candidates[name] = WRITERS[name](trained, folder / name)
        except SbkitError as error:
            reports[name] = {"all": {"written": False, "reasons": [str(error)]}}
    if candidates:
        reports |= compare(trained, candidates, grid, test_sets)
    for name in names:
        _finish(folder / name, candidates.get(name) or graphs.get(name, ()), reports[name])
    return reports


def _finish(
    folder: Path, written: Sequence[Candidate | WrittenGraph], reports: Mapping[str, ParityReport]
) -> None:
    """Remove the files that missed their limits, and write the parity report and the checksums."""
    missed = [item for item in written if not reports[item.name]["written"]]
    if len(missed) == len(written):
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        for item in missed:
            for file in item.files:
                (folder / file).unlink()
    parity = {"versions": versions(PACKAGES), "compared_with_the_trained_model": reports}
    (folder / PARITY_FILE).write_text(to_json(parity, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)
