"""Write a bundle's formats: each is compared with the trained model, and kept within its limits.

FORMAT/          what its users load
    parity.json      what was compared, or why it is not written
    checksums.json   SHA-256 of the other files
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.text import versions
from sbkit.checkpoint.integrity import write_checksums
from sbkit.inference.bundle.place import PARITY
from sbkit.inference.formats.held_out import HeldOut
from sbkit.inference.formats.onnx_format import write_onnx
from sbkit.inference.formats.parity import EXACT, Candidate, Grid, certificate, compare
from sbkit.inference.formats.sherpa_format import write_sherpa
from sbkit.inference.formats.speechbrain_format import write_speechbrain
from sbkit.inference.formats.traced import TrainedModel, WaveformModel, quietly, trained_log_probs
from sbkit.inference.runtime.torch_model import load_bundle

Writer = Callable[[TrainedModel, Path], Sequence[Candidate]]
Certificates = Mapping[str, Mapping[str, Any]]  # by format and candidate

PROGRAM = "model.pt2"  # of torch.export, which runs with torch alone
LARGE = "".join(  # what .gitattributes says to a model hub
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.safetensors", "*.model")
)


def write_torch(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the program, and read it again."""
    torch.export.save(trained.program, folder / PROGRAM)
    loaded = torch.export.load(folder / PROGRAM).module()
    return [
        Candidate(
            name="fp32",
            files=(PROGRAM,),
            limits=EXACT,
            log_probs=partial(trained_log_probs, loaded),
        )
    ]


def write_hub(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Copy the bundle that the folder lies in, and load the copy."""
    for file in sorted(folder.parent.iterdir()):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / ".gitattributes").write_text(LARGE, encoding="utf-8")
    write_checksums(folder)
    loaded = load_bundle(folder, own=trained.own)
    names = tuple(sorted(each.name for each in folder.iterdir()))
    log_probs = partial(trained_log_probs, WaveformModel(loaded.model.network).eval())
    return [Candidate(name="fp32", files=names, limits=EXACT, log_probs=log_probs)]


WRITERS: Mapping[str, Writer] = {
    "onnx": write_onnx,
    "torch": write_torch,
    "sherpa-onnx": write_sherpa,
    "speechbrain": write_speechbrain,
    "hub": write_hub,
}
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "sherpa-onnx")


def require_formats(names: Sequence[str]) -> None:
    """Raise SbkitError for a name that is no format."""
    unknown = [name for name in names if name not in WRITERS]
    if unknown:
        raise SbkitError(
            f"`--formats` must name some of {', '.join(WRITERS)}, with commas, but has "
            f"{unknown[0]!r}. Correct it."
        )


def write_formats(
    trained: TrainedModel, folder: Path, names: Sequence[str], held_out: HeldOut | str, grid: Grid
) -> Certificates:
    """Write formats into a bundle's folder, each with its certificate.

    ``held_out`` may be why the run's test sets are not there.
    Raises SbkitError for a model that does not transcribe.
    """
    if "transcribe" not in trained.bundle.task.commands:
        raise SbkitError(
            "`--formats` must be of a model that transcribes, but this one is a "
            f"{trained.bundle.task.model_name}. Leave it out."
        )
    written: dict[str, Sequence[Candidate]] = {}
    certificates: dict[str, dict[str, Any]] = {}
    for name in names:
        (folder / name).mkdir()
        try:
            with quietly():
                written[name] = WRITERS[name](trained, folder / name)
        except SbkitError as error:
            certificates[name] = {"all": {"written": False, "reasons": [str(error)]}}
    candidates = [each for several in written.values() for each in several]
    clips = None if isinstance(held_out, str) else held_out
    by_candidate = {id(each.candidate): each for each in compare(trained, candidates, grid, clips)}
    for name, several in written.items():
        found = [by_candidate[id(each)] for each in several]
        certificates[name] = {
            each.candidate.name: certificate(each, grid, held_out) for each in found
        }
    for name in names:
        kept = [each for each in written.get(name, ()) if not by_candidate[id(each)].reasons()]
        _keep(folder / name, written.get(name, ()), kept, certificates[name])
    return certificates


def _keep(
    folder: Path, written: Sequence[Candidate], kept: Sequence[Candidate], certified: Any
) -> None:
    """Remove what missed its limits, and write the certificate."""
    if not kept:
        shutil.rmtree(folder)
        folder.mkdir()
    for each in written:
        if each not in kept:
            for file in each.files:
                (folder / file).unlink(missing_ok=True)
    said = {"versions": versions(PACKAGES), "compared_with_the_trained_model": certified}
    (folder / PARITY).write_text(to_json(said, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)
