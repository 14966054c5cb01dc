"""Whole shards of a store on a local disk, by the key `store_cache`."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from recipes.prepare import collate_clips, prepare_audio
from sbkit.data import prepared
from sbkit.data.batch import make_loaders
from sbkit.distributed.device import Placement
from tests.data.test_batch import SETTINGS
from tests.data.test_prepare import prepare_out, spec_of
from tests.data.test_prepare import settings as settings_of
from tests.data.test_splits import make_clips
from tests.shortage import largest_file

requests: Counter[str] = Counter()  # of the audio of shards, by name


class Ranges(SimpleHTTPRequestHandler):
    """Serve files, whole or in part, as stores do."""

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        name = self.path.rpartition("/")[2]
        kind, _, span = self.headers.get("Range", "").partition("=")
        requests[f"{'part of ' * bool(kind)}{name}"] += 1
        start, _, end = span.partition("-")
        part = content[int(start or 0) : int(end) + 1 if end else None]
        self.send_response(206 if kind else 200)
        self.send_header("Content-Length", str(len(part)))
        if kind:
            last = int(start or 0) + len(part) - 1
            self.send_header("Content-Range", f"bytes {start or 0}-{last}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a corpus of several shards."""
    monkeypatch.setattr(prepared, "UNIT_CLIPS", 8)
    prepare_out(spec_of(make_clips(tmp_path, 24), tmp_path / "corpus"))
    handler = partial(Ranges, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/corpus"
        server.shutdown()


def train(location: str, num_workers: int, store_cache: Path | None) -> list[tuple[Any, ...]]:
    """Load two epochs; return the ids and the samples of their batches."""
    more = {"batch_seconds": 2.0, "seed": 1, "num_workers": num_workers}
    store = store_cache and str(store_cache)
    settings = {**SETTINGS, **settings_of(location, store_cache=store, **more)}
    loaders = make_loaders(
        prepare_audio(settings),
        settings,
        collate=partial(collate_clips, sample_rate=16_000),
        placement=Placement(torch.device("cpu"), "fp32"),
    )
    requests.clear()
    batches = []
    for epoch in (1, 2):
        loaders.train.batch_sampler.set_epoch(epoch)
        batches += [(*batch.ids, batch.audio.numpy().tobytes()) for batch in loaders.train]
    return batches


def test_shards_of_a_folder_are_copied(corpus: str, tmp_path: Path) -> None:
    read = train(corpus, 0, None)
    assert train(str(tmp_path / "corpus"), 0, tmp_path / "disk") == read
    copies = {file.name for file in (tmp_path / "disk").glob("*/*.clips")}
    assert copies == {file.name for file in (tmp_path / "corpus").glob("train-*.clips")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_shard_is_fetched_once_and_whole(
    corpus: str, num_workers: int, tmp_path: Path
) -> None:
    read = train(corpus, num_workers, None)
    assert all(name.startswith("part of ") for name in requests)
    assert train(corpus, num_workers, tmp_path / "disk") == read
    shards = {file.name for file in (tmp_path / "corpus").glob("train-*.clips")}
    assert requests == dict.fromkeys(shards, 1)
    assert {file.name for file in (tmp_path / "disk").glob("*/*.clips")} == shards
    assert train(corpus, num_workers, tmp_path / "disk") == read
    assert not requests


def test_shards_stay_in_the_store_if_the_disk_takes_none(
    corpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read = train(corpus, 0, None)
    (tmp_path / "file").write_text("")
    assert train(corpus, 0, tmp_path / "file") == read
    with largest_file(2000):  # smaller than a shard
        assert train(corpus, 0, tmp_path / "disk") == read
    notes = [record.message for record in caplog.records if "store_cache" in record.message]
    assert len(notes) == 2 and "Not a directory" in notes[0] and "too large" in notes[1]
