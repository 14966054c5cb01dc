"""The cache: unpacked archives, and what it holds."""

import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sbkit.base.errors import DataError
from sbkit.base.files import atomic_folder, task_lock
from sbkit.base.messages import plural, printable
from sbkit.base.user_folders import cache_folder
from sbkit.data.filesystem import disk_errors, iter_members, unpacking_errors

logger = logging.getLogger(__name__)

CORPORA_FOLDER, ARCHIVES_FOLDER = "corpora", "archives"  # of the cache
DEBIAN_FOLDERS = ("asterisk-prompts", "festvox-ru")
ENCODING: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names may be any bytes
SOURCE_FILE = "source.json"  # of an unpacked archive: its path
CORPUS_FILE = "corpus.json"  # of a prepared corpus: what it was made from
# What versions before this one kept; nothing reads it.
FORMER_FOLDERS = (
    *("audio", "embedded", "facts", "files", "pitch", "prepared", "rows", "speech", "statistics"),
    *("symbols", "token_counts"),
)
FORMER_NAME = re.compile(r"\..*|.*-[0-9a-f]{8,16}(\.\w+)?")  # of all that they hold
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
COPY_BYTES = 1 << 20

# Archives


def is_archive(path: Path) -> bool:
    """Check whether a path is a file with the name of a tar file."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES) and path.expanduser().is_file()


def unpack_corpus(data_folder: str | Path | None) -> Path:
    """Return the absolute path of a corpus; if it is an archive, unpack it into the cache once.

    Hard links become copies. Symbolic links and devices are skipped.
    """
    if not data_folder:
        raise DataError("This corpus is read from a folder, but `data_folder` names none.")
    corpus = Path(data_folder).expanduser().absolute()
    if not is_archive(corpus):
        return corpus
    archive = corpus.resolve()
    status = archive.stat()
    identity = f"{archive} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    folder = cache_folder() / ARCHIVES_FOLDER / f"{archive.name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), task_lock(folder.parent, folder.name, wait=True):
        if not folder.is_dir():
            with atomic_folder(folder) as unpacked:
                _unpack(archive, unpacked)
                record = {"made_from": {"source": {"data_folder": str(archive)}}}
                (unpacked / SOURCE_FILE).write_text(json.dumps(record), **ENCODING)
    return _innermost(folder)


def _unpack(archive: Path, folder: Path) -> None:
    logger.info(f"unpacking {archive} into {folder.parent}, once")
    num_skipped = 0
    with (
        disk_errors(folder.parent),
        unpacking_errors(archive, "cannot be unpacked as a tar file", fix="Download it again."),
        tarfile.open(archive) as tar,
    ):
        for member in iter_members(tar):
            if not member.isdir() and not _extract_member(tar, member, archive, folder):
                num_skipped += 1
        # The checksum of a compressed archive follows its last member.
        while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
            pass
    if num_skipped:
        logger.warning(
            f"{plural(num_skipped, 'entry', 'entries')} of {archive} skipped: links or devices"
        )


def _extract_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path, folder: Path
) -> bool:
    """Write a file, or copy the file of a hard link; return False for any other member."""
    path = PurePosixPath(member.name)  # Python before 3.11.4 has no filter for it
    name = member.name[:200]
    if _is_outside(path):
        raise DataError(
            f"{archive} is not unpacked, because it would write outside of its own folder, to "
            f"{name!r}."
        )
    target = folder / path
    if member.islnk():
        linked = PurePosixPath(member.linkname)
        # A hard link follows the file that it names.
        if _is_outside(linked) or not (folder / linked).is_file():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / linked, target)
        return True
    content = tar.extractfile(member) if member.isfile() else None
    if content is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file, COPY_BYTES)
    return True


def _is_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts


def _innermost(folder: Path) -> Path:
    """Return the corpus in an unpacked archive: skip folders that contain only another folder."""
    entries = [entry for entry in folder.iterdir() if entry.name != SOURCE_FILE]
    is_wrapper = len(entries) == 1 and entries[0].is_dir() and entries[0].name != "clips"
    return _innermost(entries[0]) if is_wrapper else folder


# Listing and pruning


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache."""

    folder: Path
    sources: Sequence[str]  # the folders or files that its content comes from, if known
    is_superseded: bool = False  # by what was prepared later

    @property
    def name(self) -> str:
        return ", ".join(self.sources) or self.folder.name

    @property
    def size(self) -> int:
        """Bytes on the disk; a shard that several corpora share counts for each."""
        size = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process may remove files meanwhile
                size += path.lstat().st_size
        return size

    @property
    def is_orphan(self) -> bool:
        """Whether nothing needs it. A source that cannot be accessed may still exist."""
        if self.is_superseded:
            return True
        try:
            paths = [Path(source) for source in self.sources if "://" not in source]
            return 0 < len(paths) == len(self.sources) and not any(p.exists() for p in paths)
        except OSError:
            return False


def list_entries(cache: Path) -> list[CacheEntry]:
    """List the folders of the cache: archives, corpora, packages, and what nothing reads."""
    entries = [
        CacheEntry(folder, _sources_of(folder)) for folder in _folders(cache / ARCHIVES_FOLDER)
    ]
    corpora = sorted(_folders(cache / CORPORA_FOLDER), key=lambda folder: folder.stat().st_mtime)
    newest = {_kind_of(folder): folder for folder in corpora}
    for folder in corpora:
        is_superseded = newest[_kind_of(folder)] != folder
        entries.append(CacheEntry(folder, _sources_of(folder), is_superseded))
    packages = (cache / name for name in DEBIAN_FOLDERS)
    entries += [CacheEntry(folder, []) for folder in packages if folder.is_dir()]
    former = [cache / name for name in FORMER_FOLDERS if _is_former(cache / name)]
    return [*entries, *(CacheEntry(folder, ["an earlier version"], True) for folder in former)]


def _is_former(folder: Path) -> bool:
    """Return whether a version before this one has made all that is in a folder, not the user."""
    names = [path.name for path in folder.glob("*")] if not folder.is_symlink() else []
    return bool(names) and all(map(FORMER_NAME.fullmatch, names))


def _folders(parent: Path) -> list[Path]:
    """Return the folders that sbkit has made, not lost+found, @eaDir or .Trash-1000; no links."""
    return [
        path for path in sorted(parent.glob("[!.]*-*")) if path.is_dir() and not path.is_symlink()
    ]


def _read_record(folder: Path) -> dict[str, Any]:
    """Return what an archive or a corpus was made from; {} if it does not tell."""
    for name in (CORPUS_FILE, SOURCE_FILE):
        with suppress(OSError, ValueError, LookupError):
            record: dict[str, Any] = json.loads((folder / name).read_text(**ENCODING))["made_from"]
            return record
    return {}


def _sources_of(folder: Path) -> list[str]:
    """Return the paths and URLs that a folder was made from."""
    source = _read_record(folder).get("source") or {}
    folders = source.get("data_folder") or ()
    named = [folders] if isinstance(folders, str) else [*folders]
    return [*named, *map(str, _leaves(source.get("manifest") or {}))]


def _leaves(value: Any) -> Iterator[object]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _kind_of(folder: Path) -> str:
    """Return what two corpora have in common if the later one supersedes the other."""
    record = _read_record(folder)
    paths = [text for text in _leaves(record.get("tables")) if isinstance(text, str)]
    audio = record.get("audio") or {}
    kept = [record.get("source"), audio.get("sample_rate"), audio.get("store"), paths]
    return json.dumps(kept) if record else folder.name


def print_entries(cache: Path) -> None:
    """Print the folders of the cache, a line each, and their total size."""
    entries = list_entries(cache)
    for entry in entries:
        name = f"{entry.name} (not needed)" if entry.is_orphan else entry.name
        print(printable(f"{_format_size(entry.size):>9}  {name}, in {entry.folder}"))
    total = _format_size(sum(entry.size for entry in entries))
    print(f"{total} in {plural(len(entries), 'folder')} of {cache}")


def prune_orphans(cache: Path) -> None:
    """Remove the folders that nothing needs, and print each."""
    for entry in list_entries(cache):
        if not entry.is_orphan:
            continue
        description = f"{entry.folder} ({_format_size(entry.size)}) of {entry.name}"
        with task_lock(entry.folder.parent, entry.folder.name, wait=False) as is_free:
            if is_free:
                _remove(entry.folder)
        print(
            printable(
                f"{'removed' if is_free else 'kept, since it is being prepared:'} {description}"
            )
        )


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be removed: {error.strerror}.") from error


def _format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
