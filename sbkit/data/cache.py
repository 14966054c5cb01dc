"""The cache folder: unpack archives into it, list its entries, and prune entries not needed."""

import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sbkit.base.errors import DataError
from sbkit.base.files import atomic_folder, task_lock
from sbkit.base.messages import plural, printable
from sbkit.base.user_folders import cache_folder, make_cache_folder
from sbkit.data.filesystem import disk_errors, iter_members, unpacking_errors

logger = logging.getLogger(__name__)

ROWS_VERSION = 7  # raised with each change of rows, or of the files of a prepared corpus
CORPORA_FOLDER, ARCHIVES_FOLDER = "corpora", "archives"  # in the cache
DEBIAN_FOLDERS = ("asterisk-prompts", "festvox-ru")
ENCODING: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names may be any bytes
SOURCE_FILE = "source.json"  # in an unpacked archive: the path of the archive
CORPUS_FILE = "corpus.json"  # in a prepared corpus: the inputs that it was made from
# Folders written by earlier versions; nothing reads them.
FORMER_FOLDERS = (
    *("audio", "embedded", "facts", "files", "pitch", "prepared", "rows", "speech", "statistics"),
    *("symbols", "token_counts"),
)
FORMER_NAME = re.compile(r"\..*|.*-[0-9a-f]{8,16}(\.\w+)?")  # matches every file in them
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
COPY_BYTES = 1 << 20

# ---- archives


def is_archive(path: Path) -> bool:
    """Check whether a path is a file with the name of a tar file."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.expanduser().is_file()


def unpack_corpus(data_folder: str | Path | None) -> Path:
    """Return the absolute path of a corpus; if it is an archive, unpack it into the cache once.

    Links and devices are skipped.
    """
    if not data_folder:
        raise DataError("This corpus is read from a folder, but `data_folder` is not set.")
    corpus = Path(data_folder).expanduser().absolute()
    if not is_archive(corpus):
        return corpus
    archive = corpus.resolve()
    folder = _folder_of(archive)
    make_cache_folder(ARCHIVES_FOLDER)
    with disk_errors(folder), task_lock(folder.parent, folder.name, wait=True):
        if not folder.is_dir():
            with atomic_folder(folder) as unpacked:
                _unpack(archive, unpacked)
                record = {"made_from": {"source": {"data_folder": str(archive)}}}
                (unpacked / SOURCE_FILE).write_text(json.dumps(record), **ENCODING)
    return _innermost(folder)


def _folder_of(archive: Path) -> Path:
    """Return the folder of the content that an archive has now."""
    status = archive.stat()
    identity = f"{archive} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    return cache_folder() / ARCHIVES_FOLDER / f"{archive.name}-{digest}"


def _unpack(archive: Path, folder: Path) -> None:
    logger.info(f"unpacking {archive} into {folder.parent}, once")
    num_skipped = 0
    with (
        unpacking_errors(archive, "cannot be unpacked as a tar file", fix="Download it again."),
        tarfile.open(archive) as tar,
    ):
        for member in iter_members(tar):
            path = PurePosixPath(member.name)  # checked here: Python before 3.11.4 has no filter
            if _is_outside(path):
                raise DataError(
                    f"{archive} is not unpacked, because its member {member.name[:200]!r} would be "
                    "written outside of the target folder."
                )
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            linked = PurePosixPath(member.linkname)  # the tar has the linked file before its link
            if member.islnk() and not _is_outside(linked) and (folder / linked).is_file():
                shutil.copyfile(folder / linked, target)
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                num_skipped += not member.isdir()
                continue
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file, COPY_BYTES)
        # The checksum of a compressed archive follows its last member.
        while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
            pass
    if num_skipped:
        skipped = plural(num_skipped, "link or device", "links or devices")
        logger.warning(f"{archive}: {skipped} skipped")


def _is_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts


def _innermost(folder: Path) -> Path:
    """Return the corpus in an unpacked archive: skip folders that contain only another folder."""
    entries = [entry for entry in folder.iterdir() if entry.name != SOURCE_FILE]
    is_wrapper = len(entries) == 1 and entries[0].is_dir() and entries[0].name != "clips"
    return _innermost(entries[0]) if is_wrapper else folder


# ---- listing and pruning


class CacheEntry(NamedTuple):
    """One folder of the cache.

    sources: the folders, files or URLs of its content, if known.
    is_superseded: whether a later folder holds the same corpus.
    """

    folder: Path
    sources: Sequence[str]
    is_superseded: bool = False

    @property
    def is_orphan(self) -> bool:
        """Whether nothing needs it."""
        if self.is_superseded:
            return True
        try:
            return bool(self.sources) and all(map(_is_gone, self.sources))
        except OSError:  # a source that cannot be accessed may still exist
            return False

    def __str__(self) -> str:
        size = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process may remove files meanwhile
                size += path.lstat().st_size
        names = ", ".join(self.sources) or self.folder.name
        return printable(f"{size / 1e6:,.1f} MB  {names}, in {self.folder}")


def _is_gone(source: str) -> bool:
    """Return whether a path was removed: a disk that is not mounted leaves nothing beside it."""
    path = Path(source)
    return not ("://" in source or path.exists()) and any(path.parent.glob("*"))


def list_entries(cache: Path) -> list[CacheEntry]:
    """List the folders of the cache: archives, corpora, packages, and unused earlier folders."""
    # The pattern matches folders that sbkit makes, but not lost+found, @eaDir or .Trash-1000.
    parents = (cache / name for name in (ARCHIVES_FOLDER, CORPORA_FOLDER))
    folders = [*chain.from_iterable(parent.glob("[!.]*-*") for parent in parents)]
    folders.sort(key=lambda folder: folder.stat().st_mtime)
    newest = {_supersession_key(folder): folder for folder in folders}
    former_folders = filter(_is_former, (cache / name for name in FORMER_FOLDERS))
    entries = [
        *(
            CacheEntry(f, sources_of(f), newest[_supersession_key(f)] != f or _is_outdated(f))
            for f in folders
        ),
        *(CacheEntry(cache / name, []) for name in DEBIAN_FOLDERS),
        *(CacheEntry(f, ["an earlier version"], is_superseded=True) for f in former_folders),
    ]
    return [entry for entry in entries if entry.folder.is_dir() and not entry.folder.is_symlink()]


def _is_outdated(folder: Path) -> bool:
    """Return whether an archive has changed since, or an earlier version wrote a corpus."""
    if (version := corpus_version(folder)) is not None:
        return version < ROWS_VERSION
    archives = map(Path, sources_of(folder) if folder.parent.name == ARCHIVES_FOLDER else ())
    return any(archive.is_file() and _folder_of(archive) != folder for archive in archives)


def corpus_version(folder: Path) -> int | None:
    """Return the version of the code that wrote a corpus; None if the folder is none."""
    version: int | None = (read_record(folder).get("code") or {}).get("rows")
    return version


def _is_former(folder: Path) -> bool:
    """Return whether earlier versions of sbkit wrote all files of a folder."""
    names = [path.name for path in folder.glob("*")]
    return bool(names) and all(map(FORMER_NAME.fullmatch, names))


def read_record(folder: Path) -> dict[str, Any]:
    """Return the inputs of a corpus, or the source of an unpacked archive; {} if unknown."""
    for name in (CORPUS_FILE, SOURCE_FILE):
        with suppress(OSError, ValueError, LookupError):
            record: dict[str, Any] = json.loads((folder / name).read_text(**ENCODING))["made_from"]
            return record
    return {}


def sources_of(folder: Path) -> list[str]:
    """Return the folders, files and URLs that a corpus or an archive was made from."""
    source = read_record(folder).get("source") or {}
    return [*texts_in(source.get("data_folder")), *texts_in(source.get("manifest"))]


def texts_in(value: object) -> list[str]:
    """Return a text itself, or the texts in lists and the values of mappings, at any depth."""
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(inner, str):
        return [inner]
    return [*chain(*map(texts_in, inner))] if isinstance(inner, Iterable) else []


def _supersession_key(folder: Path) -> str:
    """Return a key that is equal for two corpora if the later one supersedes the other."""
    record = read_record(folder)
    audio = record.get("audio") or {}
    # The folder of an unpacked archive has another name if the archive is replaced.
    archive_folder = re.compile(rf"/{ARCHIVES_FOLDER}/[^/]+")
    texts = texts_in(record.get("tables"))  # paths and URLs, and perhaps etags and times
    tables = [archive_folder.sub("", text) for text in texts if "/" in text]
    made_from = [record.get("source"), audio.get("sample_rate"), audio.get("store"), tables]
    return json.dumps(made_from) if record else folder.name


def print_entries(cache: Path) -> None:
    """Print the folders of the cache, one per line."""
    for entry in list_entries(cache):
        print(f"{entry}{' (not needed)' if entry.is_orphan else ''}")


def prune_orphans(cache: Path) -> None:
    """Remove the folders that nothing needs, and print each."""
    for entry in filter(lambda entry: entry.is_orphan, list_entries(cache)):
        with task_lock(entry.folder.parent, entry.folder.name, wait=False) as is_free:
            print(f"{'removing' if is_free else 'kept, since it is being prepared:'} {entry}")
            if is_free:
                shutil.rmtree(entry.folder)
