"""Decoded audio, kept by clip: what a corpus folder holds is decoded once for all its splits.

A clip is known by its path, size and time of change. Its text is kept nowhere: correcting a
transcript decodes nothing.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.base.files import try_lock
from sbkit.data.decode import Decoded, DecodingProgress, decode_clips
from sbkit.data.shard import (
    CORPUS_FILE,
    SHARD_BYTES,
    CachedClip,
    ClipKey,
    Shard,
    ShardWriter,
    UnreadableClip,
    is_intact,
    list_shards,
    read_sealed,
    remove_unfinished,
    write_sealed,
)
from sbkit.logs.log import say

CACHE_VERSION = 1  # raise it when the same clip would give other audio
AUDIO_FOLDER = "audio"  # of the cache
TRIED = 100  # clips, by which the room for all others is estimated
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class CachedAudio(NamedTuple):
    """Where the audio of a clip lies, its length in samples, and a hash of the clip's file."""

    file: Path
    row: int
    samples: int
    digest: str


Outcome = CachedAudio | AudioError


def default_cache() -> Path:
    """Return ``$SBKIT_CACHE``, else ``$XDG_CACHE_HOME/sbkit``, else ``~/.cache/sbkit``."""
    if own := os.environ.get("SBKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sbkit"


@dataclass(frozen=True)
class AudioCache:
    """The shards of one corpus folder at one sample rate."""

    corpus: Path
    sample_rate: int
    folder: Path

    @staticmethod
    def of(paths: Sequence[Path], sample_rate: int, cache_folder: Path) -> "AudioCache":
        """Return the cache of the folder that all clips have in common."""
        parents = {path.parent for path in paths}
        corpus = Path(os.path.commonpath([Path(os.path.abspath(each)) for each in parents]))  # noqa: PTH100
        identity = f"{CACHE_VERSION}\n{corpus}\n{sample_rate}"
        key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]
        name = f"{corpus.parent.name}-{corpus.name}-{key}".lstrip("-.")
        return AudioCache(corpus, sample_rate, cache_folder.expanduser() / AUDIO_FOLDER / name)

    def prepare(self, paths: Sequence[Path], *, title: str) -> list[Outcome]:
        """Return where the audio of each clip is, after decoding those that are not there yet.

        Raises:
            SbkitError: the cache cannot be written, or its disk is full.
        """
        keys = [self._key(path) for path in paths]
        wanted = {key for key in keys if isinstance(key, ClipKey)}
        found, damaged = self._find(wanted)
        if damaged or len(found) < len(wanted):
            with self._write_access() as alone:
                if alone:
                    remove_unfinished(self.folder)
                self._describe_folder()
                found, damaged = self._find(wanted)
                self._remove(damaged)
                ordered = (key for key in dict.fromkeys(keys) if isinstance(key, ClipKey))
                missing = [key for key in ordered if key not in found]
                found |= self._decode(missing, title=title)
        self._note_use()
        return [key if isinstance(key, AudioError) else found[key] for key in keys]

    def _describe_folder(self) -> None:
        if read_sealed(self.folder / CORPUS_FILE) is None:
            facts = {"folder": str(self.corpus), "sample_rate": self.sample_rate}
            write_sealed(self.folder / CORPUS_FILE, facts)

    def _key(self, path: Path) -> ClipKey | AudioError:
        try:
            status = path.stat()
            relative = os.path.relpath(path, self.corpus)
            os.fsencode(relative).decode("utf-8")
        except FileNotFoundError:
            sentence = f"{path} must be an audio file, but it is missing. Correct the path."
            return AudioError("missing", sentence)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "its name is not UTF-8"
            sentence = f"{path} must be an audio file, but cannot be reached ({reason}). Repair it."
            return AudioError("unreachable", sentence)
        return ClipKey(relative, status.st_size, status.st_mtime_ns)

    def _find(self, wanted: set[ClipKey]) -> tuple[dict[ClipKey, Outcome], list[Path]]:
        """Look the clips up in the shards, and list the damaged shards among those needed."""
        found: dict[ClipKey, Outcome] = {}
        damaged: list[Path] = []
        for listing, shard in list_shards(self.folder):
            if shard is None:
                damaged.append(listing)
                continue
            here = {clip.key for clip in shard.clips if clip.key in wanted} - found.keys()
            if here and not is_intact(shard):
                damaged.append(listing)
                continue
            for row, clip in enumerate(shard.clips):
                if clip.key in here:
                    found[clip.key] = CachedAudio(shard.file, row, clip.samples, clip.digest)
            for bad in shard.unreadable:
                if bad.key in wanted:
                    found.setdefault(bad.key, AudioError(bad.reason, bad.detail))
        return found, damaged

    def _remove(self, damaged: Sequence[Path]) -> None:
        for listing in damaged:
            say(
                f"{listing.with_suffix('.arrow')} holds prepared audio, but is damaged: its clips "
                "are decoded again."
            )
            Shard(listing.with_suffix(".arrow"), (), (), "").remove()

    @contextmanager
    def _write_access(self) -> Iterator[bool]:
        """Hold the folder's lock; yield whether it is held, which not every disk can do."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            alone = try_lock(lock)
            if not alone:
                say(f"Another process prepares {self.corpus}; waiting for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield try_lock(lock, without_locks=False)
        except OSError as error:
            if error.errno in (*READ_ONLY, *DISK_FULL):
                raise self._unwritable(error) from error
            raise
        finally:
            os.close(lock)

    def _unwritable(self, error: OSError) -> SbkitError:
        if error.errno in DISK_FULL:
            return self._disk_full("is full")
        return SbkitError(
            f"{self.folder} must be a folder to write to, but is not: {error.strerror}. Choose "
            "another one; SBKIT_CACHE names that of prepared data."
        )

    def _decode(self, missing: Sequence[ClipKey], *, title: str) -> Mapping[ClipKey, Outcome]:
        """Decode clips into new shards; what is finished stays, whatever happens."""
        found: dict[ClipKey, Outcome] = {}
        if not missing:
            return found
        written = 0  # bytes
        writer = ShardWriter(self.folder)
        try:
            with DecodingProgress(len(missing), title, self.sample_rate) as progress:
                paths = [self.corpus / key.path for key in missing]
                decoding = decode_clips(paths, self.sample_rate)
                for key, decoded in zip(missing, decoding, strict=True):
                    size = _size(decoded)
                    if writer.bytes and writer.bytes + size > SHARD_BYTES:
                        found |= _located(writer.finish())
                        writer = ShardWriter(self.folder)
                    _write(writer, key, decoded, found)
                    written += size
                    progress.advance(decoded)
                    if progress.done == TRIED:
                        self._require_room(written, missing)
            found |= _located(writer.finish())
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            needed = written / max(1, progress.done) * len(missing) - written
            raise self._disk_full(
                f"is full after {progress.done} of {len(missing)} clips; the rest needs about "
                f"{needed / 1e9 + 0.1:.1f} GB more"
            ) from error
        finally:
            writer.discard()
        return found

    def _require_room(self, written: int, missing: Sequence[ClipKey]) -> None:
        """Foretell from the first clips what the others will take; raises SbkitError."""
        tried, rest = (sum(key.size for key in keys) for keys in (missing[:TRIED], missing[TRIED:]))
        needed = written / max(1, tried) * rest
        if needed > shutil.disk_usage(self.folder).free:
            raise self._disk_full(
                f"is too small: by the first {TRIED} of {len(missing)} clips, the others need "
                f"about {needed / 1e9 + 0.05:.1f} GB more"
            )

    def _disk_full(self, state: str) -> SbkitError:
        free = shutil.disk_usage(self.folder.parent).free / 1e9
        return SbkitError(
            f"The disk of {self.folder} must have room for prepared audio, but {state} "
            f"({free:.1f} GB are free). Free some, with `sbkit cache prune` or by hand, or let "
            "SBKIT_CACHE name a folder on another disk. The shards that are finished stay, and the "
            "same command goes on from there."
        )

    def _note_use(self) -> None:
        with suppress(OSError):
            os.utime(self.folder / CORPUS_FILE)


def _size(decoded: Decoded) -> int:
    return 0 if isinstance(decoded.audio, AudioError) else len(decoded.audio)


def _write(
    writer: ShardWriter, key: ClipKey, decoded: Decoded, found: dict[ClipKey, Outcome]
) -> None:
    """Add one clip; what may be readable tomorrow is not noted as unreadable."""
    if not isinstance(decoded.audio, AudioError):
        writer.add(CachedClip(key, len(decoded.audio) // 2, decoded.digest), decoded.audio)
        return
    found[key] = decoded.audio
    if decoded.audio.reason not in ("missing", "unreachable"):
        writer.add_unreadable(UnreadableClip(key, decoded.audio.reason, str(decoded.audio)))


def _located(shard: Shard) -> dict[ClipKey, Outcome]:
    return {
        clip.key: CachedAudio(shard.file, row, clip.samples, clip.digest)
        for row, clip in enumerate(shard.clips)
    }
