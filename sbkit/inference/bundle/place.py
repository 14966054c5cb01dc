"""The folder that an export writes: a new one, or one in the place of an earlier bundle.

    NAME           the bundle
    .NAME.new      one that is being written
    .NAME.old      the earlier one, while the new one takes its name

A killed export leaves at least one whole bundle: under its name, or as `.old`, from where the next
export to the same folder restores it.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import fsync_tree, naming
from sbkit.checkpoint.integrity import CHECKSUMS, checksum, listed_checksums
from sbkit.inference.bundle.bundle import CONFIG
from sbkit.inference.bundle.model_card import FORMATS

CARD, PARITY, HUB = "README.md", "parity.json", "hub"


def require_free(out: Path) -> None:
    """Raise SbkitError unless a folder is new, or empty, or a bundle and nothing else."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        what = "is a symbolic link" if out.is_symlink() else "is no folder"
    elif out.resolve() in (Path.cwd(), *Path.cwd().parents):
        what = "is the folder that you are in, or one above it"
    elif strange := _strange(out):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        what = f"holds something else ({strange[0]}{more})"
    else:
        return
    raise SbkitError(
        f"--out must be a new folder or an earlier bundle, but {out} {what}. Choose another folder."
    )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Make an empty folder beside ``out`` to fill; at the end it takes the place of ``out``.

    An error leaves what was there. Raises SbkitError when nothing can be written there.
    """
    out = out.absolute()
    beside, old = (out.with_name(f".{out.name}.{end}") for end in ("new", "old"))
    try:
        if old.exists() and not out.exists():  # a killed export was about to replace it
            old.rename(out)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    except OSError as error:
        raise SbkitError(
            f"--out must lie in a folder to write to, but {out.parent} is none ({error.strerror}). "
            "Choose another one."
        ) from error
    try:
        with naming(out):
            yield beside
            fsync_tree(beside)
            require_free(out)  # once more: writing took a while
            shutil.rmtree(old, ignore_errors=True)
            if out.exists():
                out.rename(old)
            beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _strange(out: Path) -> list[str]:
    """Name what no export wrote there, or somebody has changed since, such as an edited card."""
    there = {each.name for each in out.iterdir()} if out.exists() else set()
    if not there or not _is_bundle(out):
        return sorted(there)
    named = [CARD] if CARD in there and not _is_as_written(out / CARD) else []
    for folder in (out, *(out / name for name in FORMATS if name in there)):
        ours = {CHECKSUMS, *listed_checksums(folder), *(FORMATS if folder == out else ())}
        found = folder.iterdir() if folder.is_dir() else [folder]
        named += [str(each.relative_to(out)) for each in found if each.name not in ours]
    return sorted(named)


def _is_as_written(file: Path) -> bool:
    return checksum(file) == listed_checksums(file.parent).get(file.name)


def _is_bundle(folder: Path) -> bool:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        return bool(listed_checksums(folder)) and {"format", "parts"} <= {*config}
    except (OSError, ValueError, LookupError, TypeError):
        return False
