"""Write the formats of a bundle, and keep those that agree with the trained model.

The folders of formats in a bundle:

onnx/            `model.onnx` and `model.int8.onnx`: waveform in, log-probabilities out; of a
                 streaming model also `streaming.onnx`, a chunk with its state; of other tasks, a
                 file for each of their graphs
torch/           `model.pt2`, a program of torch.export
sherpa-onnx/     `model.onnx` and `tokens.txt`; `HLG.fst`, if the decoder is a decoding graph
huggingface/     a folder for transformers, of a model with a pretrained encoder
speechbrain/     a folder for SpeechBrain's `EncoderASR`
hub/             a copy of the bundle, to upload to a model hub
*/parity.json    what was compared with the trained model, or why the format is not written
*/checksums.json  SHA-256 of the other files of the format
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import to_json
from sbkit.base.versions import versions
from sbkit.export.huggingface_format import write_huggingface
from sbkit.export.onnx_format import WrittenGraph, write_graphs, write_onnx
from sbkit.export.parity import Candidate, Grid, TestSets, compare
from sbkit.export.sherpa_format import write_sherpa
from sbkit.export.speechbrain_format import write_speechbrain
from sbkit.export.traced import TrainedModel, quiet_exporters, trained_log_probs
from sbkit.runtime.test_sets import prepare_test_sets
from sbkit.tasks.task import ONNX, Task

logger = logging.getLogger(__name__)

Writer = Callable[[TrainedModel, Path], Sequence[Candidate]]
ParityReport = Mapping[str, Any]  # plain data
ParityReports = Mapping[str, Mapping[str, ParityReport]]  # by format and candidate

PARITY_FILE, HUB, HUGGINGFACE = "parity.json", "hub", "huggingface"
PROGRAM_FILE = "model.pt2"  # of torch.export; torch suffices to run it
GIT_ATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.safetensors", "*.model")
)
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "sherpa-onnx", "transformers")


def write_torch(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the program of torch.export, and load it."""
    torch.export.save(trained.program, folder / PROGRAM_FILE)
    program = torch.export.load(folder / PROGRAM_FILE).module()
    log_probs = partial(trained_log_probs, program)
    return [Candidate(name="fp32", files=(PROGRAM_FILE,), log_probs=log_probs)]


WRITERS: Mapping[str, Writer] = {
    ONNX: write_onnx,
    "torch": write_torch,
    "sherpa-onnx": write_sherpa,
    HUGGINGFACE: write_huggingface,
    "speechbrain": write_speechbrain,
}


def write_hub(bundle: Path) -> None:
    """Copy the files of a finished bundle into a folder to upload."""
    folder = bundle / HUB
    folder.mkdir()
    for file in bundle.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / ".gitattributes").write_text(GIT_ATTRIBUTES, encoding="utf-8")
    write_checksums(folder)


def require_formats(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no format."""
    for name in names:
        if name not in (*WRITERS, HUB):
            raise ConfigError(
                f"There is no format {name!r}. Choose from {', '.join((*WRITERS, HUB))}."
            )


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
            f"but is {names!r}. For a copy to upload, run `sbkit export RUN --out DIR --formats "
            f"{HUB}` after training."
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
