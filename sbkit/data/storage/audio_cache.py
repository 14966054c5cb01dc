"""Decoded audio, kept by clip: what a corpus folder holds is decoded once for all its splits.

A clip is known by its path, size and time of change. Its text is kept nowhere: correcting a
transcript decodes nothing.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES, EPERM, EROFS
from functools import lru_cache
from pathlib import Path

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.base.files import share_lock, try_lock
from sbkit.data.corpora.clips import Paths
from sbkit.data.storage.fill import DISK_FULL, Outcome, Place, ShardSearch, disk_full, fill
from sbkit.data.storage.shard import (
    CORPUS_FILE,
    ClipKey,
    read_sealed,
    recover_unfinished,
    remove_shard,
    write_sealed,
)
from sbkit.logs.log import say

CACHE_VERSION = 1  # raise it when the same clip would give other audio
AUDIO_FOLDER = "audio"  # of the cache
EMBEDDED_FOLDER = "embedded"  # of the cache: files that a dataset or an archive held itself
READ_ONLY = (EACCES, EPERM, EROFS)


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if own := os.environ.get("SBKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "sbkit"
    except RuntimeError as error:  # as in a container whose user has no entry
        raise SbkitError(
            "The cache must lie in a folder, but this user has no home. Let SBKIT_CACHE name one."
        ) from error


@dataclass(frozen=True)
class AudioCache(Place):
    """The shards of one corpus folder at one sample rate."""

    @staticmethod
    def of(paths: Paths, sample_rate: int, cache_folder: Path, store: str = "pcm") -> "AudioCache":
        """Return the cache of the folder that all clips have in common."""
        parents = {path[: path.rfind("/") + 1] for path in paths}  # "/" for a clip in the root
        corpus = Path(os.path.commonpath([Path(os.path.abspath(each)) for each in parents]))  # noqa: PTH100
        identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}"
        identity += "" if store == "pcm" else f"\n{store}"
        key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
        name = f"{corpus.parent.name}-{corpus.name}-{key}".lstrip("-.")
        folder = cache_folder.expanduser() / AUDIO_FOLDER / name
        return AudioCache(corpus, sample_rate, store, folder)

    def prepare(self, paths: Paths, *, title: str) -> list[Outcome]:
        """Return where the audio of each clip is, after decoding those that are not there yet.

        Raises:
            SbkitError: the cache cannot be written, or its disk is full.
        """
        keys = [self._key(path) for path in paths]
        wanted = {key.path: key for key in keys if isinstance(key, ClipKey)}
        search = ShardSearch(self.folder, wanted)
        search.look()
        if search.damaged or search.missing():
            with self._write_access():
                self._describe_folder()
                search.look()
                _remove(search.damaged)
                fill(self, search, title=title)
        note_use(self.folder)
        return [key if isinstance(key, AudioError) else search.found[key] for key in keys]

    def _describe_folder(self) -> None:
        if read_sealed(self.folder / CORPUS_FILE) is None:
            facts = {
                "folder": str(self.corpus),
                "sample_rate": self.sample_rate,
                "store": self.store,
            }
            write_sealed(self.folder / CORPUS_FILE, facts)

    def _key(self, path: str) -> ClipKey | AudioError:
        try:
            status = os.stat(path)  # noqa: PTH116 - in half the time of Path.stat
            relative = self._relative(path)
            os.fsencode(relative).decode("utf-8")
        except FileNotFoundError:
            sentence = f"{path} must be an audio file, but it is missing. Correct the path."
            return AudioError("missing", sentence)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "its name is not UTF-8"
            sentence = f"{path} must be an audio file, but cannot be reached ({reason}). Repair it."
            return AudioError("unreachable", sentence)
        return ClipKey(relative, status.st_size, status.st_mtime_ns % (1 << 63))  # as Arrow has

    def _relative(self, path: str) -> str:
        name = path.rfind("/") + 1
        return _relative_folder(path[:name], self.corpus) + path[name:]

    @contextmanager
    def _write_access(self) -> Iterator[None]:
        """Make the folder, and share it with other processes that prepare; clean up if alone."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if try_lock(lock, without_locks=False):
                recover_unfinished(self.folder)
            share_lock(lock)
            yield
        except OSError as error:
            if error.errno in (*READ_ONLY, *DISK_FULL):
                raise self._unwritable(error) from error
            raise
        finally:
            os.close(lock)

    def _unwritable(self, error: OSError) -> SbkitError:
        if error.errno in DISK_FULL:
            return disk_full(self.folder, "is full")
        return SbkitError(
            f"{self.folder} must be a folder to write to, but is not: {error.strerror}. Choose "
            "another one; SBKIT_CACHE names that of prepared data."
        )


def note_use(folder: Path) -> None:
    """Note that a folder of the cache was used now, where that can be written."""
    with suppress(OSError):
        os.utime(folder / CORPUS_FILE)


def _remove(damaged: list[Path]) -> None:
    """Remove damaged shards, so that their clips are decoded again."""
    for listing in damaged:
        say(
            f"{listing.with_suffix('.arrow')} holds prepared audio, but is damaged: its clips "
            "are decoded again."
        )
        remove_shard(listing)
    damaged.clear()


@lru_cache(maxsize=1000)
def _relative_folder(folder: str, corpus: Path) -> str:
    relative = os.path.relpath(folder or ".", corpus)
    return "" if relative == "." else f"{relative}/"
