"""Where a bundle is written: in the place of an earlier one, and of nothing else.

    NAME               the bundle
    .NAME.HEX.new      one that is being written
    .NAME.HEX.old      the earlier one, for the moment in which the new one takes its name

A kill leaves at least one whole bundle: under its name, or as `.old`, from where the next export
to the same place puts it back. A folder that is being written is locked, so that no other export
takes it for one that a killed export left.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from sbkit.base.errors import SbkitError
from sbkit.base.files import fsync_tree, naming, read_regular, try_lock
from sbkit.checkpoint.integrity import CHECKSUMS, checksum, listed_checksums
from sbkit.decoding.decoder import LANGUAGE_MODELS
from sbkit.inference.bundle.bundle import CONFIG, LARGEST, TOKENIZER, WEIGHTS

CARD, PARITY = "README.md", "parity.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER, LANGUAGE_MODELS, CARD, CHECKSUMS)
HUB = "hub"
FOLDERS = ("onnx", "torch", "sherpa-onnx", "speechbrain", HUB)  # of formats
FORMATS = (1, 2)  # of bundles that sbkit wrote


def refuse_occupied(out: Path) -> None:
    """Refuse a folder that is neither new, nor empty, nor a bundle and nothing else.

    Raises SbkitError that names what lies there.
    """
    try:
        what = _what_is_wrong(out)
        there = {each.name for each in out.iterdir()} if what is None and out.exists() else set()
    except OSError as error:
        raise SbkitError(
            f"--out must be a folder that can be read, but {out} is not ({error.strerror}). "
            "Choose another name."
        ) from error
    if what is not None:
        raise SbkitError(
            f"--out must be a new folder or an earlier bundle, but {out} {what}. Choose another "
            "name."
        )
    strange = _strange(out) if there else []
    strange = strange or ([] if not there or _is_bundle(out, there) else sorted(there))
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise SbkitError(
            f"--out must be a new folder or an earlier bundle, but {out} holds something else "
            f"({strange[0]}{more}). Choose another folder, or move that away."
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Make an empty folder beside ``out`` to fill; at the end it takes the place of ``out``.

    An error leaves what was there. Raises SbkitError when nothing can be written there.
    """
    out = out.absolute()
    _clear(out)
    beside, old = (out.with_name(f".{out.name}.{uuid4().hex[:12]}.{end}") for end in ("new", "old"))
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise SbkitError(
            f"--out must lie in a folder to write to, but {out.parent} is none ({error.strerror}). "
            "Choose another one."
        ) from error
    lock = os.open(beside, os.O_RDONLY)
    try_lock(lock)
    try:
        with naming(out):
            yield beside
            fsync_tree(beside)
            refuse_occupied(out)  # once more: writing took a while
            if out.exists():
                out.rename(old)
            try:
                beside.rename(out)
            except OSError:
                if old.exists():
                    old.rename(out)
                raise
    finally:
        os.close(lock)
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _strange(out: Path) -> list[str]:
    """Name what an export did not write, or somebody has written since: a card that was edited."""
    named = [each.name for each in out.iterdir() if each.name not in (*FILES, *FOLDERS)]
    if CARD in {each.name for each in out.iterdir()} and not _is_as_written(out / CARD):
        named.append(CARD)
    for folder in (out / name for name in FOLDERS):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            named.append(folder.name)
        elif folder.is_dir():
            ours = {CHECKSUMS, *listed_checksums(folder)}
            named += [
                f"{folder.name}/{each.name}" for each in folder.iterdir() if each.name not in ours
            ]
    return sorted(named)


def _is_as_written(file: Path) -> bool:
    digest = listed_checksums(file.parent).get(file.name)
    return file.is_file() and not file.is_symlink() and checksum(file) == digest


def _what_is_wrong(out: Path) -> str | None:
    if out.is_symlink():
        return "is a symbolic link"
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        return "is the folder that you are in, or one above it"
    return "is no folder" if out.exists() and not out.is_dir() else None


def _clear(out: Path) -> None:
    """Restore or remove what a killed export left; raises SbkitError while another one writes."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{12}}\.(new|old)")
    there = list(out.parent.iterdir()) if out.parent.is_dir() else []
    for each in sorted(there, key=lambda each: each.suffix):  # ".new" first: its lock may refuse
        if not pattern.fullmatch(each.name) or each.is_symlink() or not each.is_dir():
            continue
        if each.name.endswith(".new") and _is_being_written(each):
            raise SbkitError(
                f"One export at a time may write to {out}, but another one is writing there. Wait "
                "for it, or choose another --out."
            )
        if each.name.endswith(".old") and not out.exists():
            with naming(out):
                each.rename(out)
        elif {inner.name for inner in each.iterdir()} <= {*FILES, *FOLDERS}:
            shutil.rmtree(each, ignore_errors=True)


def _is_being_written(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # it was finished meanwhile
        return True
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _is_bundle(folder: Path, there: set[str]) -> bool:
    if not {CONFIG, WEIGHTS, CHECKSUMS} <= there:
        return False
    try:
        content = read_regular(folder / CONFIG, largest=LARGEST[CONFIG], what=CONFIG)
        config = json.loads(content.decode())
    except (SbkitError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") in FORMATS and "parts" in config
