"""Write the formats of a bundle, and keep those that agree with the trained model.

The folders of formats in a bundle:

onnx/            `model.onnx` and `model.int8.onnx`: waveform in, log-probabilities out. A
                 streaming model adds `streaming.onnx`, a chunk with its state; a Whisper with its
                 decoder adds `decoder_frames.onnx` and `decoder.onnx`. Other tasks have a file
                 for each of their graphs
sherpa-onnx/     `model.onnx` and the names of its outputs
huggingface/     a folder for transformers, if the model has a pretrained encoder
*/parity.json    the comparison with the trained model, or why the format is not written
*/checksums.json  SHA-256 of the other files of the format
"""

import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import to_json
from sbkit.base.versions import versions
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.task import Task
from sbkit.export.format_table import FORMATS
from sbkit.export.parity import Candidate, TestSets, compare_candidates
from sbkit.export.trace import quiet_exporters
from sbkit.runtime.score_sets import prepare_test_sets
from sbkit.runtime.torch_model import TorchModel

logger = logging.getLogger(__name__)

ParityReport = Mapping[str, Any]  # plain data
ParityReports = Mapping[str, Mapping[str, ParityReport]]  # by format and candidate

PARITY_FILE = "parity.json"
FOLDERS_OF_PATH = re.compile(r"(?<=[\s=,:'\"(\[{])/(?:[^/\s\"]+/)+")  # in messages of libraries


def declared_formats(settings: Mapping[str, Any], task: Task) -> list[str]:
    """Return the formats of `export_formats`, which a run writes into its bundle."""
    names = settings["export_formats"] or ()
    if names and task.has_model:
        require_formats(names, task)
    return [*dict.fromkeys(names)]


def require_formats(names: Sequence[str], task: Task) -> None:
    """Raise ConfigError for a name that is no format, or that the task does not support."""
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"There is no format {name!r}. Choose from {', '.join(FORMATS)}.")
    supported = [name for name, form in FORMATS.items() if form.supports(task)]
    if unsupported := [name for name in names if name not in supported]:
        if task.side_fields:
            raise ConfigError(
                f"`{next(iter(task.side_fields))}`, which this {task.model_name} takes beside the "
                f"audio, cannot be passed to {', '.join(unsupported)}. Leave these formats out."
            )
        raise ConfigError(
            f"A {task.model_name} cannot be exported as {', '.join(unsupported)}. Its formats: "
            f"{', '.join(supported) or 'none'}."
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
    bundle: Bundle[TorchModel],
    run: Path,
    folder: Path,
    names: Sequence[str],
    *,
    user_modules: Collection[str] | None,
) -> ParityReports:
    """Write formats into a bundle's folder, each with its parity report.

    user_modules: as for `prepare_test_sets`.
    """
    require_formats(names, bundle.task)
    try:
        test_sets: TestSets | str = prepare_test_sets(run, user_modules=user_modules).test
    except SbkitError as error:
        logger.warning(f"note: the formats are compared on noise only. {error}")
        test_sets = "the data of the run could not be read where it was exported"
    candidates: dict[str, Sequence[Candidate]] = {}
    reports: dict[str, dict[str, ParityReport]] = {}
    for name in names:
        logger.info(f"writing {name}")
        (folder / name).mkdir()
        try:
            with quiet_exporters():
                candidates[name] = FORMATS[name].write(bundle, folder / name)
        except SbkitError as error:
            reports[name] = {"all": {"written": False, "reasons": [str(error)]}}
    if candidates:
        reports |= compare_candidates(bundle, candidates, test_sets)
    for name, by_candidate in reports.items():
        written = candidates.get(name, ())
        rejected = [item for item in written if not by_candidate[item.name]["written"]]
        if len(rejected) == len(written):
            shutil.rmtree(folder / name)
            (folder / name).mkdir()
        else:
            for file in chain.from_iterable(item.files for item in rejected):
                (folder / name / file).unlink()
        packages = versions(FORMATS[name].packages)
        parity = {"versions": packages, "compared_with_the_trained_model": by_candidate}
        text = FOLDERS_OF_PATH.sub("", to_json(parity, indent=1) + "\n")
        (folder / name / PARITY_FILE).write_text(text, encoding="utf-8")
        write_checksums(folder / name)
    return reports
