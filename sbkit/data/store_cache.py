"""Cache whole shards of `--out` in a local folder, which the key `store_cache` names.

One process fetches a shard once: when one of its clips is read, or earlier, in the order in which
the plan of an epoch uses the shards. fsspec's own caches write a file under its final name while it
is being fetched, so another process could read half of it.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from threading import Thread

from datasets import Dataset

from sbkit.base.errors import DataError, SbkitError
from sbkit.base.files import task_lock
from sbkit.base.messages import note_once
from sbkit.data.filesystem import Storage
from sbkit.data.sampler import MicroBatch
from sbkit.data.shard import AUDIO, AudioLocation


class StoreCache:
    """Copies of the files of a store, which all processes of a machine share.

    folder: on a disk with room for the shards. The name of a shard follows from its inputs, so a
        copy stays valid, also for other runs.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._num_epochs = 0
        self._is_refused = False

    def cached(self, location: AudioLocation) -> AudioLocation:
        """Return the location of a clip in the copy of its shard; make a missing copy."""
        url = location["file"]
        is_shard = location["start"] is not None and ("://" in url or url.startswith("/"))
        if not is_shard:  # a clip's own file, or a shard of the cache
            return location
        folder, _, name = url.rpartition("/")
        file = self._folder / hashlib.sha256(folder.encode()).hexdigest()[:16] / name
        if not file.exists():
            if self._is_refused:
                return location
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with task_lock(file.parent, name, wait=True):
                    if not file.exists():  # otherwise another process was first
                        with TemporaryDirectory(dir=file.parent) as scratch:
                            copy = Path(scratch, name)
                            source = Storage(folder).fetch(name, Path(scratch))
                            if source != copy:  # the store is a mounted folder
                                copyfile(source, copy)
                            copy.rename(file)
            except (OSError, DataError) as error:  # its disk is full, or cannot be written to
                self._is_refused = True
                note = f"note: `store_cache` takes no further shards ({error})."
                note_once(note, key=str(self._folder), level=logging.WARNING)
                return location
        return {**location, "file": str(file)}

    def fetch_ahead(self, split: Dataset, steps: Iterator[MicroBatch]) -> None:
        """Fetch the shards of an epoch in the order of its steps, in a thread."""
        self._num_epochs += 1
        audio = split.select_columns([AUDIO])
        with suppress(RuntimeError):  # no thread can be started: a shard is fetched when it is read
            Thread(target=self._fetch, args=(audio, steps, self._num_epochs), daemon=True).start()

    def _fetch(self, audio: Dataset, steps: Iterator[MicroBatch], epoch: int) -> None:
        # If a shard cannot be fetched, reading one of its clips raises the error.
        with suppress(SbkitError):
            for step in steps:
                for location in audio[[row for example in step for row in example.rows]][AUDIO]:
                    if epoch != self._num_epochs:  # a later epoch has begun
                        return
                    self.cached(location)
