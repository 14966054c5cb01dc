"""The user's modules that a YAML reaches, and the files and folders that it names."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from sbkit.base.imports import user_digests
from sbkit.base.ranges import KEYS
from sbkit.config.document import walk
from sbkit.config.hparams import OUTPUT_FOLDER, RunSpec

# Other keys of every run name no file, or the data, which has fingerprints, or initial weights.
FILE_KEY = "lm_text"
NUM_HASH_DIGITS = 12
MAX_READ_BYTES = 1 << 32  # beyond it, sizes stand for contents


def list_reached(spec: RunSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return hashes of the user's modules and files outside of the run folder, but for the data.

    Modules are by name, and files and folders by the text that names them: files and bundles that
    a value names, and folders that an argument of an object names. A class of `__main__` has no
    file.
    """
    digests = user_digests(*spec.given_modules, *spec.module_names)
    nodes = [(keys, node) for keys, node in walk(spec.tree) if isinstance(node, str)]
    texts = [(str(node), str(keys[0])) for keys, node in nodes if node.strip("./")]
    settings = dict(spec.settings.items())  # this marks no key as read
    arguments = {text for text, key in texts if key not in settings}
    others = {text for text, key in texts if key in KEYS and key != FILE_KEY}
    run = Path(str(settings.get(OUTPUT_FOLDER, ""))).resolve()
    names = sorted({text for text, _ in texts} - others)
    files = [name for name in names if _lies_apart(name, run, is_argument=name in arguments)]
    modules = {name: digest[:NUM_HASH_DIGITS] for name, digest in digests.items()}
    return modules, {name: digest_of(Path(name)) for name in files}


def _lies_apart(text: str, run: Path, *, is_argument: bool) -> bool:
    """Return whether a text names a file or folder that is neither in the run folder nor above."""
    with suppress(OSError):  # a text may be too long for a path
        path = Path(text).resolve()
        is_bundle = (path / "config.json").is_file()  # such as that of a teacher
        if path.is_file() or is_bundle or (is_argument and path.is_dir()):
            return not (path.is_relative_to(run) or run.is_relative_to(path))
    return False


def digest_of(path: Path) -> str:
    """Hash the content of a file, or the names and contents of a folder's files but hidden ones.

    Of more than `MAX_READ_BYTES`, sizes stand for contents.
    """
    folder, names = path.parent, [path.name]
    if path.is_dir():
        tree = os.walk(path, followlinks=True)
        files = [Path(root, file).relative_to(path) for root, _, found in tree for file in found]
        folder, names = path, sorted(str(file) for file in files if "/." not in f"/{file}")
    files = [folder / name for name in names]
    sizes = [file.stat().st_size for file in files]
    digests: list[object] = [*sizes]
    if sum(sizes) <= MAX_READ_BYTES:
        digests = [_digest_file(file) for file in files]
    return _hash(repr([names if path.is_dir() else "", digests]).encode())


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:NUM_HASH_DIGITS]
