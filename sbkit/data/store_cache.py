"""Shards of `--out`, cached whole on a disk of this machine, which the key `store_cache` names.

A shard is fetched once, by one process: when one of its clips is read, or before that, in the order
in which the plan of an epoch uses them. fsspec's own caches write a file under its final name while
it is fetched, where another process would read half of it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from threading import Thread

from datasets import Dataset

from sbkit.base.errors import SbkitError
from sbkit.base.files import task_lock
from sbkit.data.filesystem import Storage, disk_errors
from sbkit.data.sampler import MicroBatch
from sbkit.data.shard import AUDIO, AudioLocation


class StoreCache:
    """Copies of the files of a store; each process of a machine has one of these.

    folder: on a disk with room for the shards. Their names follow from what they are made of, so a
        copy stays valid, also for other runs.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._num_epochs = 0

    def cached(self, location: AudioLocation) -> AudioLocation:
        """Return where a clip lies in the copy of its shard, which is made if it is not there."""
        url = location["file"]
        is_shard = location["start"] is not None and ("://" in url or url.startswith("/"))
        if not is_shard:  # a clip's own file, or a shard of the cache
            return location
        folder, _, name = url.rpartition("/")
        file = self._folder / hashlib.sha256(folder.encode()).hexdigest()[:16] / name
        if not file.exists():
            with disk_errors(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
                with task_lock(file.parent, name, wait=True):
                    if not file.exists():  # no other process was first
                        with TemporaryDirectory(dir=file.parent) as scratch:
                            copy = Path(scratch, name)
                            source = Storage(folder).fetch(name, Path(scratch))
                            if source != copy:  # of a disk, perhaps of another machine
                                copyfile(source, copy)
                            copy.rename(file)
        return {**location, "file": str(file)}

    def fetch_ahead(self, split: Dataset, steps: Iterator[MicroBatch]) -> None:
        """Fetch the shards of an epoch in the order of its steps, beside the training."""
        self._num_epochs += 1
        audio = split.select_columns([AUDIO])
        Thread(target=self._fetch, args=(audio, steps, self._num_epochs), daemon=True).start()

    def _fetch(self, audio: Dataset, steps: Iterator[MicroBatch], epoch: int) -> None:
        # Who reads a clip of a shard that cannot be fetched raises the error.
        with suppress(SbkitError):
            for step in steps:
                for location in audio[[row for example in step for row in example.rows]][AUDIO]:
                    if epoch != self._num_epochs:  # a later one has begun
                        return
                    self.cached(location)
