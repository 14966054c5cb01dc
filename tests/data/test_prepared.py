"""A prepared corpus by commands only: killed, shared, copied, read-only, damaged, and pruned."""

import os
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

from sbkit.commands.cli import run as sbkit
from tests.calls import NOTE_READS, Reads
from tests.data.test_fresh import (
    YAML,
    Corpus,
    Row,
    difference,
    forget,
    observe,
    tone,
    write,
)
from tests.processes import Process
from tests.runs import TINY, TINY_VOICE, Workplace, losses_of, train_here
from tests.shortage import obeying_modes

# ---- what issue 91 changes


START = f"{NOTE_READS}\nfrom sbkit.commands.cli import main\nmain()"


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(tmp_path, monkeypatch)


def make_corpus(folder: Path, count: int = 4, first: int = 0) -> Corpus:
    """Write a release with so many clips in each split; `first`: the number of the first tone."""
    corpus = Corpus("release")
    for rows in corpus.splits.values():
        numbers = range(first, first := first + count)
        rows[:] = [Row(f"{n}.wav", f"Word {n}.", f"s{n}", tone(n)) for n in numbers]
    write(corpus, folder)
    return corpus


# ---- what is decoded, and when


def test_another_text_or_limit_decodes_nothing_and_adds_no_audio(
    tmp_path: Path, own_cache: Path, reads: Reads
) -> None:
    corpus = make_corpus(tmp_path / "corpus", count=20)
    before = observe(corpus, tmp_path / "corpus", own_cache)
    audio = sum(len(row.audio or b"") for row in chain(*corpus.splits.values()))
    size = size_of_tables(own_cache)
    assert set(reads.take()) == {row.file for row in chain(*corpus.splits.values())}
    for key, value in (("text", {"case": "keep"}), ("max_seconds", 0.125), ("language", "de")):
        corpus.edit_key(key, value)
        seen = observe(corpus, tmp_path / "corpus", own_cache)
        assert difference(seen, before)
        assert not reads.take()
        before = seen
    assert size_of_tables(own_cache) - size < audio
    for file in [*(tmp_path / "corpus").rglob("*.*")]:
        os.utime(file)
    assert not difference(observe(corpus, tmp_path / "corpus", own_cache), before)


def size_of_tables(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.arrow"))


def test_three_starts_read_each_audio_file_once(tmp_path: Path, reads: Reads) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    reads.take()
    for _ in range(3):
        observe(corpus, tmp_path / "corpus", tmp_path / "cache")
    assert {*reads.take().values()} == {1}


def test_starts_at_once_wait_for_each_other_and_end_alike(tmp_path: Path, reads: Reads) -> None:
    corpus = make_corpus(tmp_path / "corpus", count=40)
    starts = [start(corpus, tmp_path, f"--report={tmp_path / name}") for name in "abc"]
    outputs = [process.communicate(timeout=120) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], outputs
    reads.take()
    seen = observe(corpus, tmp_path / "corpus", tmp_path / "cache")
    assert not reads.take()
    for name in "abc":
        report = sorted((tmp_path / name).iterdir())
        assert not difference("".join(file.read_text() for file in report), seen)


def start(corpus: Corpus, folder: Path, *options: str) -> Process:
    """Start `sbkit prepare` in a process of its own."""
    words = ("prepare", YAML, *corpus.options(folder / "corpus"), *options)
    return Process(["-c", START, *words])


def write_out(corpus: Corpus, folder: Path, out: Path, *options: str) -> None:
    """Write a prepared corpus to a folder of its own."""
    forget()
    assert sbkit(["prepare", YAML, *corpus.options(folder), "--out", str(out), *options]) == 0


def read_out(out: Path) -> str:
    """Return what `observe` returns of a prepared corpus."""
    corpus = Corpus("release")
    corpus.keys = {"data_folder": str(out), "splits": None}
    return observe(corpus, out, out.parent / f"cache of {out.name}").replace(str(out), "OUT")


# ---- edits that test_fresh.py has not


def test_edit_that_keeps_size_and_time_is_found_by_again_only(
    tmp_path: Path, own_cache: Path
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    before = observe(corpus, tmp_path / "corpus", own_cache)
    corpus.edit_row(0, audio=tone(16))  # as long as it was
    write(corpus, tmp_path / "corpus", keep_times=True)
    assert not difference(observe(corpus, tmp_path / "corpus", own_cache), before)
    seen = observe(corpus, tmp_path / "corpus", own_cache, "--again")
    assert difference(seen, before)
    assert not difference(seen, observe(corpus, tmp_path / "corpus", tmp_path / "empty"))


@pytest.mark.parametrize("form", ["csv", "tar", "url"])
def test_corpus_written_again_is_as_in_an_empty_folder(form: str, tmp_path: Path) -> None:
    corpus = Corpus(form)
    write(corpus, tmp_path / "corpus")
    write_out(corpus, tmp_path / "corpus", tmp_path / "out")
    for number, values in enumerate(({"text": "Wart 1."}, {"audio": tone(8)})):
        corpus.edit_row(0, **values)
        write(corpus, tmp_path / "corpus")
        outs = tmp_path / "out", tmp_path / f"empty {number}"
        for out in outs:
            write_out(corpus, tmp_path / "corpus", out)
        seen, expected = map(read_out, outs)
        assert not difference(seen, expected) and not seen.startswith("error")


@pytest.mark.slow(60)
@pytest.mark.parametrize(("yaml", "tiny"), [("ctc", TINY), ("tts", TINY_VOICE)])
def test_run_on_edited_corpus_is_as_with_an_empty_cache(
    yaml: str, tiny: Sequence[str], workplace: Workplace, tmp_path: Path
) -> None:
    """Token counts, symbols, pitch and statistics of features decide its losses."""
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    words = ("train.py", f"hparams/{yaml}.yaml", f"--data_folder={release}", *tiny)
    losses = []
    for run, cache in (("first", "used"), ("second", "used"), ("third", "empty")):
        output = f"--output_folder={tmp_path / run}"
        assert train_here([*words, "--number_of_epochs=1", output], tmp_path / cache) == 0
        losses.append(losses_of(tmp_path / run))
        if run == "first":
            clips = sorted((release / "clips").iterdir())
            shutil.copy(clips[0], clips[-1])
            table = release / "train.tsv"
            head, _, _ = table.read_text().rstrip().rpartition("\t")
            table.write_text(f"{head}\tAnother sentence.\n")
    assert losses[1] == losses[2] != losses[0]


# ---- shared, copied, damaged, and pruned


@pytest.mark.slow(10)
def test_moved_corpus_that_is_read_only_can_be_trained_on(
    workplace: Workplace, tmp_path: Path
) -> None:
    data = f"--data_folder={workplace.release}"
    assert sbkit(["prepare", YAML, data, "--out", str(tmp_path / "written")]) == 0
    shared = (tmp_path / "written").rename(tmp_path / "shared")
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    output = f"--output_folder={tmp_path / 'run'}"
    words = ["train.py", YAML, f"--data_folder={shared}", output, *TINY, "--number_of_epochs=1"]
    with obeying_modes():
        with pytest.raises(PermissionError):
            (shared / "file").touch()
        assert train_here(words, tmp_path / "cache") == 0


def test_damaged_cache_gives_the_same_or_an_error(tmp_path: Path, own_cache: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    expected = observe(corpus, tmp_path / "corpus", own_cache)
    for file in [path for path in own_cache.rglob("[!.]*") if path.is_file()]:
        shutil.copytree(own_cache, tmp_path / "damaged")
        damaged = tmp_path / "damaged" / file.relative_to(own_cache)
        damaged.write_bytes(damaged.read_bytes()[: file.stat().st_size // 2])
        seen = observe(corpus, tmp_path / "corpus", tmp_path / "damaged")
        assert not difference(seen, expected) or seen.startswith("error: "), file
        shutil.rmtree(tmp_path / "damaged")


def test_prune_removes_the_corpora_that_are_gone(
    tmp_path: Path, own_cache: Path, reads: Reads, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, here = make_corpus(tmp_path / "gone"), make_corpus(tmp_path / "here", first=30)
    observe(gone, tmp_path / "gone", own_cache)
    expected = observe(here, tmp_path / "here", own_cache)
    own_file = own_cache / "notes" / "mine.txt"
    own_file.parent.mkdir()
    own_file.write_text("of the user")
    shutil.rmtree(tmp_path / "gone")
    reads.take()
    listings = []
    for action in ("list", "prune", "list"):
        capsys.readouterr()
        assert sbkit(["cache", action]) == 0
        listings.append(capsys.readouterr().out)
    for name, is_listed in (("gone", [True, True, False]), ("here", [True, False, True])):
        assert [str(tmp_path / name) in listing for listing in listings] == is_listed
    assert own_file.is_file()
    assert not difference(observe(here, tmp_path / "here", own_cache), expected)
    assert not reads.take()
