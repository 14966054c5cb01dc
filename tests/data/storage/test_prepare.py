"""Clips are decoded once, damage is noticed, and what is interrupted goes on."""

import errno
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from sbkit.audio.io import read_audio
from sbkit.base.errors import ASKED_TO_STOP, SbkitError
from sbkit.data.batches.batch import UtteranceDataset
from sbkit.data.batches.plan import Example
from sbkit.data.corpora.clips import Clip, Clips
from sbkit.data.corpora.columns import sample_counts, take_columns
from sbkit.data.corpora.manifest import BadRow, Manifest
from sbkit.data.corpora.splits import Excluded
from sbkit.data.storage import decode, fill, shard
from sbkit.data.storage.audio_cache import AudioCache
from sbkit.data.storage.prepare import PreparedSplit, prepare_split
from tests.processes import Process
from tests.shortage import largest_file


def make_clips(folder: Path, count: int, rate: int = 16_000) -> list[Clip]:
    """Write clips of 0.1, 0.2, 0.3, 0.1 ... seconds of noise."""
    folder.mkdir(exist_ok=True)
    clips = []
    for n in range(count):
        file = folder / f"clip{n}.flac"
        if not file.exists():
            noise = 0.1 * np.random.default_rng(n).standard_normal(rate * (n % 3 + 1) // 10)
            soundfile.write(file, noise, rate)
        clips.append(Clip(f"clip{n}", file, f"Clip {n}!", {"speaker": "ann", "age": str(n)}))
    return clips


def prepare(
    folder: Path,
    clips: list[Clip],
    *,
    keep_empty: bool = False,
    normalize: Callable[[str], str] = str.lower,
    sample_rate: int = 16_000,
    bad_rows: tuple[BadRow, ...] = (),
) -> PreparedSplit:
    """Prepare clips as a training split, with a cache beside the corpus."""
    return prepare_split(
        Manifest(tuple(clips), bad_rows),
        split="train",
        normalize=normalize,
        sample_rate=sample_rate,
        cache_folder=folder / "cache",
        keep_empty=keep_empty,
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the clips that are decoded."""
    names: list[str] = []

    def record(path: Path, sample_rate: int) -> np.ndarray:
        names.append(path.stem)
        return read_audio(path, sample_rate)

    monkeypatch.setattr(decode, "read_audio", record)
    return names


def assert_holds(prepared: PreparedSplit, clips: list[Clip], sample_rate: int = 16_000) -> None:
    """Compare each row with its clip."""
    assert len(prepared.dataset) == len(clips)
    for row, clip in zip(prepared.dataset, clips, strict=True):
        audio = read_audio(clip.path, sample_rate)
        assert (row["id"], row["sentence"], row["samples"]) == (clip.id, clip.sentence, len(audio))
        assert row["text"] == clip.sentence.lower()
        assert np.array_equal(np.frombuffer(row["audio"], "<i2"), audio)


def shards_of(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.arrow"))


def test_text_stands_beside_its_audio(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 250)
    prepared = prepare(tmp_path, clips)
    assert_holds(prepared, clips)
    assert prepared.excluded == []
    first = ["id", "text", "sentence", "samples"]
    assert prepared.dataset.column_names == [*first, "speaker", "age", "audio"]
    assert prepared.dataset[7]["age"] == "7"
    assert [Path(file["filename"]) for file in prepared.dataset.cache_files] == shards_of(tmp_path)


def test_columns_of_a_corpus_module_that_have_the_names_of_ours_are_renamed(tmp_path: Path) -> None:
    (clip,) = make_clips(tmp_path / "clips", 1)
    own = Clip(clip.id, clip.path, clip.sentence, {"text": "as read", "weight": "61 kg"})
    (row,) = prepare(tmp_path, [own]).dataset
    assert (row["text"], row["manifest_text"], row["manifest_weight"]) == (
        *("clip 0!", "as read", "61 kg"),
    )


def test_another_rate_is_another_cache(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 5)
    assert_holds(prepare(tmp_path, clips), clips)
    prepared = prepare(tmp_path, clips, sample_rate=8_000)
    assert_holds(prepared, clips, 8_000)
    assert sample_counts(prepared.dataset).tolist() == [800, 1600, 2400, 800, 1600]


def correct_a_comma(clips: list[Clip]) -> list[Clip]:
    return [Clip(c.id, c.path, c.sentence.replace("p 3", "p, 3"), c.columns) for c in clips]


UNDECODED: dict[str, Callable[[list[Clip]], list[Clip]]] = {
    "nothing": lambda clips: clips,
    "a comma": correct_a_comma,
    "the order": lambda clips: clips[::-1],
    "fewer clips": lambda clips: clips[3:7],
    "the ids": lambda clips: [Clip("x" + clip.id, clip.path, clip.sentence) for clip in clips],
}


@pytest.mark.parametrize("change", UNDECODED)
def test_what_is_no_change_of_audio_decodes_nothing(
    tmp_path: Path, decoded: list[str], change: str
) -> None:
    clips = make_clips(tmp_path / "clips", 10)
    first = prepare(tmp_path, clips)
    assert sorted(decoded) == [clip.id for clip in clips]
    decoded.clear()
    changed = UNDECODED[change](clips)
    again = prepare(tmp_path, changed)
    assert decoded == []
    assert_holds(again, changed)
    assert (again.fingerprint == first.fingerprint) == (change == "nothing")


def test_a_clip_whose_clock_was_wrong_is_decoded_once(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 3)
    os.utime(clips[1].path, (1e10, 1e10))  # in 2286
    prepare(tmp_path, clips)
    decoded.clear()
    assert_holds(prepare(tmp_path, clips), clips)
    assert decoded == []


def test_another_normalization_decodes_nothing_and_is_other_data(
    tmp_path: Path, decoded: list[str]
) -> None:
    clips = make_clips(tmp_path / "clips", 4)
    first = prepare(tmp_path, clips)
    decoded.clear()
    again = prepare(tmp_path, clips, normalize=str.upper)
    assert decoded == []
    assert again.dataset["text"][:] == [f"CLIP {n}!" for n in range(4)]
    assert again.fingerprint != first.fingerprint


def test_a_clip_that_is_new_or_another_is_decoded_alone(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 10)
    first = prepare(tmp_path, clips)
    decoded.clear()
    more = make_clips(tmp_path / "clips", 11)
    assert_holds(prepare(tmp_path, more), more)
    assert decoded == ["clip10"]
    decoded.clear()
    soundfile.write(clips[4].path, np.zeros(999), 16_000)
    again = prepare(tmp_path, clips)
    assert decoded == ["clip4"]
    assert_holds(again, clips)
    assert again.fingerprint != first.fingerprint


def test_the_fingerprint_is_of_the_data_and_not_of_its_place(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 4)
    copied = make_clips(tmp_path / "copy", 4)
    os.utime(copied[0].path, (1, 1))
    assert prepare(tmp_path, clips).fingerprint == prepare(tmp_path, copied).fingerprint


def test_the_splits_of_a_corpus_share_their_audio(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 9)
    prepare(tmp_path, clips[:6])
    prepare(tmp_path, clips[6:])
    decoded.clear()
    assert_holds(prepare(tmp_path, clips[3:]), clips[3:])
    assert decoded == []


def test_the_root_may_be_the_folder_of_a_corpus(tmp_path: Path) -> None:
    clips = Clips.of([Clip("a", Path("/a.wav"), ""), Clip("b", Path("/more/b.wav"), "")])
    for paths, names in ((clips.paths, ["a.wav", "more/b.wav"]), (clips[:1].paths, ["a.wav"])):
        cache = AudioCache.of(paths, 16_000, tmp_path)
        assert cache.corpus == Path("/")
        assert [cache._relative(path) for path in paths] == names


def test_clips_of_one_id_and_rows_of_one_clip_stay_apart(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 4)
    rows = [
        Clip("same", clips[0].path, "first"),
        Clip("same", clips[1].path, "second"),
        Clip("other", clips[0].path, "third"),
        Clip("other", clips[0].path, "fourth"),
        clips[3],
    ]
    assert_holds(prepare(tmp_path, rows), rows)


def test_a_selection_reads_and_travels_like_any_dataset(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 120)[::-1]
    prepared = prepare(tmp_path, clips).dataset
    packed = pickle.dumps(prepared)
    assert len(packed) < prepared.data.nbytes / 10  # the audio stays on the disk
    for dataset in (prepared, pickle.loads(packed)):
        chosen = dataset.select([5, 3, 77])
        assert take_columns(chosen, "id")["id"].to_pylist() == ["clip114", "clip116", "clip42"]
        (row,) = UtteranceDataset(chosen).__getitems__([Example((2, 0), 0)])
        parts = [read_audio(tmp_path / "clips" / f"clip{n}.flac") for n in (42, 114)]
        assert np.array_equal(np.frombuffer(row["audio"], "<i2"), np.concatenate(parts))


def test_empty_transcripts_are_for_evaluation_only(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 3)
    clips[1] = Clip("clip1", clips[1].path, " ")
    prepared = prepare(tmp_path, clips)
    assert prepared.excluded == [Excluded("train", "clip1", "empty transcript", " ")]
    assert sorted(decoded) == ["clip0", "clip2"]
    assert len(prepare(tmp_path, clips, keep_empty=True).dataset) == 3


def test_nothing_at_all_is_an_empty_dataset(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, [])
    assert len(prepared.dataset) == 0
    assert {"id", "text", "sentence", "samples", "audio"} == set(prepared.dataset.column_names)


def loop(file: Path) -> None:
    """Let a clip be a link to itself."""
    file.unlink()
    file.symlink_to(file)


def cut(file: Path) -> None:
    """Keep the first half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


SPOILED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda file: file.unlink(), "is missing", "missing"),
    "empty": (lambda file: file.write_bytes(b""), "is empty", "empty"),
    "a loop of links": (loop, "cannot be reached", "unreachable"),
    "cut": (cut, "truncated", "cut short or damaged"),
    "text": (lambda file: file.write_text("<html>" * 99), "not recognized", "not audio"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_an_unreadable_clip_is_excluded_with_its_reason(tmp_path: Path, spoiled: str) -> None:
    spoil, words, reason = SPOILED[spoiled]
    clips = make_clips(tmp_path / "clips", 20)
    spoil(clips[7].path)
    for _ in range(2):  # decoded, then from the cache
        prepared = prepare(tmp_path, clips)
        (item,) = prepared.excluded
        assert (item.split, item.id, item.reason) == ("train", "clip7", "unreadable audio")
        assert words in item.detail
        assert_holds(prepared, clips[:7] + clips[8:])
    with pytest.raises(SbkitError) as caught:
        prepare(tmp_path, clips[:8], bad_rows=(BadRow("line 9", "no path", "empty"),))
    for expected in ("At most 5% of the rows of train", "2 of 9", "1 no path", words):
        assert expected in str(caught.value)
    assert f"1 unreadable audio: {reason}" in str(caught.value)


def zero_audio(file: Path) -> None:
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(len(content) - middle - 64) + content[-64:])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def read_rows(file: Path) -> pa.Table:
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        return stream.read_all()


def write_rows(file: Path, table: pa.Table) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def put_another_in_its_place(file: Path) -> None:
    other = make_clips(file.parents[3] / "others", 40, rate=8_000)
    prepare(file.parents[3], other)
    (found,) = set(shards_of(file.parents[3])) - {file}
    file.write_bytes(found.read_bytes())


def double_the_samples(file: Path) -> None:
    listing = file.with_suffix(".json")
    content = shard.read_sealed(listing)
    assert content is not None
    *keys, samples, digests = content["clips"]
    content["clips"] = [*keys, [2 * count for count in samples], digests]
    shard.write_sealed(listing, content)
    file.with_suffix(".ok").unlink()


def make_up(write: Callable[[Path], object], file: Path) -> None:
    """Write another file, and its checksum into the listing."""
    write(file)
    listing = file.with_suffix(".json")
    content = shard.read_sealed(listing)
    assert content is not None
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    shard.write_sealed(listing, content | {"sha256": sha256})
    file.with_suffix(".ok").unlink()


def move_offsets(file: Path) -> None:
    """Let all rows lie a gigabyte further on: they have their lengths, and are not there."""
    offsets = np.frombuffer(read_rows(file)["audio"].chunk(0).buffers()[1], np.int32)
    moved = file.read_bytes().replace(offsets.tobytes(), (offsets + (1 << 30)).tobytes())
    file.write_bytes(moved)


def list_otherwise(column: str, values: list[Any], file: Path) -> None:
    """Let a column of the listing hold something else, sealed."""
    listing = file.with_suffix(".json")
    content = shard.read_sealed(listing)
    assert content is not None
    content["clips"][shard.Listing._fields.index(column)] = values * 40
    shard.write_sealed(listing, content)


def be_a_pipe(file: Path) -> None:
    file.with_suffix(".ok").unlink()
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "zeroed audio": zero_audio,
    "a flipped bit": flip_a_bit,
    "rows moved by one": lambda file: write_rows(
        file, pa.concat_tables([read_rows(file)[1:], read_rows(file)[:1]])
    ),
    "half of the rows gone": lambda file: write_rows(file, read_rows(file)[:20]),
    "doubled lengths": double_the_samples,
    "another in its place": put_another_in_its_place,
    "truncated": cut,
    "removed": lambda file: file.unlink(),
    "an unsealed listing": lambda file: flip_a_bit(file.with_suffix(".json")),
    "no listing": lambda file: file.with_suffix(".json").unlink(),
    "offsets that are made up": partial(make_up, move_offsets),
    "a column that is made up": partial(
        make_up, lambda file: write_rows(file, read_rows(file).rename_columns(["speech"]))
    ),
    "no Arrow, made up": partial(make_up, lambda file: file.write_bytes(b"no Arrow")),
    "a pipe": be_a_pipe,
    "lengths that are texts": partial(list_otherwise, "samples", ["x"]),
    "lengths beyond": partial(list_otherwise, "samples", [10**400]),
    "paths that are lists": partial(list_otherwise, "paths", [[1]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_noticed_and_prepared_again(
    tmp_path: Path, decoded: list[str], capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    first = prepare(tmp_path, clips)
    (file,) = shards_of(tmp_path)
    DAMAGE[damage](file)
    decoded.clear()
    again = prepare(tmp_path, clips)
    assert_holds(again, clips)
    assert len(decoded) == 40
    assert not file.exists()
    assert again.fingerprint == first.fingerprint
    if damage != "no listing":
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{file} holds prepared audio, but is damaged")


def test_a_shard_is_hashed_once_and_again_when_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(shard, "has_checksum", lambda file, sha256: not hashed.append(file))
    clips = make_clips(tmp_path / "clips", 4)
    for _ in range(2):
        prepare(tmp_path, clips)
    assert hashed == []
    (file,) = shards_of(tmp_path)
    os.utime(file, (1, 1))
    for _ in range(2):
        prepare(tmp_path, clips)
    assert hashed == [file]


def test_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "SHARD_BYTES", 30_000)
    clips = make_clips(tmp_path / "clips", 40)
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(shards_of(tmp_path)) > 5
    assert max(file.stat().st_size for file in shards_of(tmp_path)) < 35_000


def test_a_full_disk_is_told_and_what_was_prepared_stays(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    monkeypatch.setattr(fill, "SHARD_BYTES", 30_000)
    soundfile.write(clips[30].path, np.zeros(50_000), 16_000)
    with largest_file(60_000), pytest.raises(SbkitError) as caught:
        prepare(tmp_path, clips)
    for words in ("but is full after 31 of 40 clips", "sbkit cache prune", "goes on from there"):
        assert words in str(caught.value)
    finished = len(shards_of(tmp_path))
    assert finished > 3
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    decoded.clear()
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) < 20


def test_a_disk_without_room_for_a_first_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = make_clips(tmp_path / "clips", 1)

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SbkitError, match="must have room for prepared audio, but is full"):
        prepare(tmp_path, clips)


def test_a_disk_that_is_too_small_is_foretold_by_the_first_clips(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    monkeypatch.setattr(fill, "TRIED", 5)
    usage = SimpleNamespace(free=10_000)
    monkeypatch.setattr(fill.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SbkitError, match=r"is too small: by the first 5 of 40 clips, the others"):
        prepare(tmp_path, clips)
    assert len(decoded) < 40
    usage.free = 10**9
    assert_holds(prepare(tmp_path, clips), clips)


PREPARE = """
import sys, time
from pathlib import Path
from sbkit.base.process import leaving_when_asked
from sbkit.data.storage import decode
from sbkit.data.storage import fill
from sbkit.data.storage import shard
from sbkit.data.corpora.clips import Clip
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.storage.prepare import prepare_split

folder, count, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
fill.SHARD_BYTES, fill.BLOCK = int(sys.argv[5]), int(sys.argv[4])
shard.BATCH_ROWS = int(sys.argv[6])
read_audio, count_decoded = decode.read_audio, []
def slow(path, rate):
    time.sleep(delay)
    count_decoded.append(path)
    return read_audio(path, rate)
decode.read_audio = slow
clips = tuple(Clip(f"clip{n}", folder / "clips" / f"clip{n}.flac", f"Clip {n}!")
              for n in range(count))
with leaving_when_asked([]):
    prepared = prepare_split(Manifest(clips, ()), split="train", normalize=str.lower,
        sample_rate=16_000, cache_folder=folder / "cache", keep_empty=False)
print(len(count_decoded))
print(prepared.fingerprint)
"""


def start(
    folder: Path,
    count: int,
    delay: float,
    block: int = 1000,
    shard_bytes: int = 30_000,
    batch_rows: int = 100,
) -> Process:
    return Process(["-c", PREPARE, folder, count, delay, block, shard_bytes, batch_rows])


def test_a_killed_preparation_goes_on_and_leaves_nothing(
    tmp_path: Path, decoded: list[str]
) -> None:
    clips = make_clips(tmp_path / "clips", 60)
    process = start(tmp_path, 60, delay=0.2)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cache").rglob("*.ok"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert list((tmp_path / "cache").rglob("*.tmp"))
    before = len(shards_of(tmp_path))
    assert_holds(prepare(tmp_path, clips), clips)
    assert 0 < len(decoded) < 60
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    assert len(shards_of(tmp_path)) == before + 1


def test_a_killed_preparation_keeps_what_it_wrote(tmp_path: Path, decoded: list[str]) -> None:
    """Of one shard that is not finished: what its record batches hold, and no clip that is torn."""
    clips = make_clips(tmp_path / "clips", 60)
    process = start(tmp_path, 60, delay=0.2, shard_bytes=10**9, batch_rows=5)
    deadline = time.monotonic() + 60
    notes: list[Path] = []
    while not notes and time.monotonic() < deadline:
        notes = list((tmp_path / "cache").rglob(f".*{shard.NOTE}"))
        time.sleep(0.02)
    process.kill()
    process.wait()
    (unfinished,) = (tmp_path / "cache").rglob(".*.arrow.tmp")
    with unfinished.open("ab") as file:
        file.write(b"a part of a batch")
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) % 5 == 0
    assert 0 < len(decoded) <= 55
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_pipe_in_the_place_of_a_stamp_is_not_waited_for(
    tmp_path: Path, decoded: list[str]
) -> None:
    clips = make_clips(tmp_path / "clips", 2)
    prepare(tmp_path, clips)
    (file,) = shards_of(tmp_path)
    file.with_suffix(".ok").unlink()
    os.mkfifo(file.with_suffix(".ok"))
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) == 2


@pytest.mark.parametrize("noted", [{"bytes": 0}, {"bytes": 1 << 62}, {"bytes": -1}, {}, []])
def test_an_unfinished_shard_of_somebody_else_changes_no_file(tmp_path: Path, noted: Any) -> None:
    """It is a link, or the note beside it says what sbkit does not write."""
    clips = make_clips(tmp_path / "clips", 2)
    prepare(tmp_path, clips[:1])
    (folder,) = (tmp_path / "cache" / "audio").iterdir()
    (tmp_path / "thesis.txt").write_text("kept")
    for name in "ab":
        shard.write_sealed(folder / f".{name}{shard.NOTE}", noted)
    (folder / ".a.arrow.tmp").symlink_to(tmp_path / "thesis.txt")
    (folder / ".b.arrow.tmp").write_bytes(b"some")
    assert_holds(prepare(tmp_path, clips), clips)
    assert (tmp_path / "thesis.txt").read_text() == "kept"
    assert not list(folder.glob(".*"))


def test_who_is_asked_to_stop_keeps_every_clip(tmp_path: Path, decoded: list[str]) -> None:
    clips = make_clips(tmp_path / "clips", 60)
    process = start(tmp_path, 60, delay=0.2, shard_bytes=10**9)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1)
    process.terminate()
    assert process.wait() == ASKED_TO_STOP
    (shard_file,) = shards_of(tmp_path)
    kept = len(read_rows(shard_file))
    assert kept > 0
    assert_holds(prepare(tmp_path, clips), clips)
    assert len(decoded) == 60 - kept


def test_several_processes_prepare_one_cache_once(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 40)
    processes = [start(tmp_path, 40, delay=0.05) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert set(said) == {prepare(tmp_path, clips).fingerprint}
    rows = sum(len(read_rows(file)) for file in shards_of(tmp_path))
    assert rows == 40


def test_processes_share_the_blocks_of_a_corpus(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 60)
    processes = [start(tmp_path, 60, delay=0.1, block=5) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    (first, shared), (second, _) = ((int(lines[-2]), lines[-1]) for lines in said)
    assert first + second == 60
    assert min(first, second) >= 5
    assert shared == prepare(tmp_path, clips).fingerprint
    assert sum(len(read_rows(file)) for file in shards_of(tmp_path)) == 60


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 2)
    (tmp_path / "cache").touch()
    with pytest.raises(SbkitError, match="must be a folder to write to"):
        prepare(tmp_path, clips)
