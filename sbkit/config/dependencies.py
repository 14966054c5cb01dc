"""Hash the user's modules that a YAML imports, and the files and folders that it names."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from sbkit.base.imports import user_digests
from sbkit.config.document import walk
from sbkit.config.hparams import OUTPUT_FOLDER, RunSpec
from sbkit.config.keys import KEYS

# Of the keys of every run, only this one names a file to hash. The others name no file, or data,
# which has fingerprints, or initial weights.
FILE_KEY = "lm_text"
NUM_HASH_DIGITS = 12
MAX_READ_BYTES = 1 << 32  # of a larger folder or file, only the sizes are hashed


def hash_dependencies(spec: RunSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return hashes of the user's modules and files, except for the data and the run folder.

    Modules are listed by name, files and folders by the text that names them: files and bundles
    that a value names, and folders that an argument of an object names. A class of `__main__` has
    no file.
    """
    digests = user_digests(*spec.recipe_modules, *spec.module_names)
    nodes = [(keys, node) for keys, node in walk(spec.tree) if isinstance(node, str)]
    texts = [(str(node), str(keys[0])) for keys, node in nodes if node.strip("./")]
    settings = dict(spec.settings.items())  # this marks no key as read
    arguments = {text for text, key in texts if key not in settings}
    ignored_texts = {text for text, key in texts if key in KEYS and key != FILE_KEY}
    run = Path(str(settings.get(OUTPUT_FOLDER, ""))).resolve()
    names = sorted({text for text, _ in texts} - ignored_texts)
    files = [name for name in names if _lies_apart(name, run, is_argument=name in arguments)]
    modules = {name: digest[:NUM_HASH_DIGITS] for name, digest in digests.items()}
    return modules, {name: hash_path(Path(name)) for name in files}


def _lies_apart(text: str, run: Path, *, is_argument: bool) -> bool:
    """Return whether a text names a file or folder that neither contains the run nor lies in it."""
    with suppress(OSError):  # a text may be too long for a path
        path = Path(text).resolve()
        is_bundle = (path / "config.json").is_file()  # for example a teacher's
        if path.is_file() or is_bundle or (is_argument and path.is_dir()):
            return not (path.is_relative_to(run) or run.is_relative_to(path))
    return False


def hash_path(path: Path) -> str:
    """Hash a file's content, or the names and contents of a folder's files except hidden ones.

    Above `MAX_READ_BYTES`, sizes are hashed in place of contents.
    """
    folder, names = path.parent, [path.name]
    if path.is_dir():
        tree = os.walk(path, followlinks=True)
        files = [
            Path(root, name).relative_to(path)
            for root, _, file_names in tree
            for name in file_names
        ]
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
