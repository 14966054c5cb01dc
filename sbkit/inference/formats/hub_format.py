"""A folder to upload to a model hub as it is: a bundle, its card, and which files are large."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sbkit.checkpoint.integrity import write_checksums
from sbkit.inference.bundle import load_bundle
from sbkit.inference.formats.candidate import EXACT, Candidate
from sbkit.inference.formats.source import Source, trained_log_probs
from sbkit.inference.formats.traced import WaveformModel

ATTRIBUTES = ".gitattributes"
LARGE = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in ("*.safetensors", "*.model")
)


def write_hub(source: Source, folder: Path) -> Sequence[Candidate]:
    """Copy the bundle that the folder lies in, and load the copy."""
    for file in sorted(folder.parent.iterdir()):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / ATTRIBUTES).write_text(LARGE, encoding="utf-8")
    write_checksums(folder)
    loaded = load_bundle(folder, own=source.own)
    names = tuple(sorted(each.name for each in folder.iterdir()))
    log_probs = partial(trained_log_probs, WaveformModel(loaded.model.network).eval())
    return [Candidate(name="fp32", files=names, limits=EXACT, log_probs=log_probs)]
