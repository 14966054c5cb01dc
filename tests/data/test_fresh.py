"""Nothing outlives what it was made from: edit, start again, and compare with an empty cache."""

import gzip
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import num2words
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT

# ---- what issue 91 changes

OUT = "--shards"  # the option that writes a prepared corpus to a folder
OUR_VERSION: tuple[str, object] = ("sbkit.base.versions.hash_code", lambda *_: "1" * 64)
NEEDS_OUT = ("tar", "url")  # forms that only `OUT` can prepare
MODULE = """
from pathlib import Path
from sbkit.data.manifest import Clip, Manifest
from tests.runs import rows_of
def files(settings): return [Path(settings["data_folder"])]
def splits(settings): return {"train": ["train"], "valid": ["dev"]}
def read(settings, split):
    from fresh_helper import change
    folder = Path(settings["data_folder"])
    rows = rows_of(folder / f"{split}.tsv")
    return Manifest.of(
        Clip(
            row["path"],
            folder / "clips" / row["path"],
            change(row["sentence"]),
            {"speaker": row["client_id"]},
        )
        for row in rows
    )
"""


def name_text_column(name: str | None) -> dict[str, Any]:
    """Return the keys of a YAML that name the column of the texts."""
    return {"text_column": name}


# ---- a corpus in one of several forms


def tone(number: int) -> bytes:
    """Return a WAV whose pitch, level and length are those of the number."""
    samples = np.arange(1600 + 160 * (number % 8))
    wave = (500 + 200 * number) * np.sin(samples * (number + 1) / 30)
    content = io.BytesIO()
    soundfile.write(content, wave.astype(np.int16), 16_000, format="WAV")
    return content.getvalue()


@dataclass
class Row:
    """A clip; its file is missing if it has no audio."""

    name: str
    text: str
    speaker: str
    audio: bytes | None

    @property
    def file(self) -> str:
        return f"{self.name}.wav"


TEXTS = {"train": ["Word 1.", "Word 22!", "", "Other 333."], "dev": ["Long 4.", "Short 5."]}


def make_splits() -> dict[str, list[Row]]:
    return {
        split: [
            Row(f"{split}{n}", text, f"s{n % 2}", tone(n + 4 * (split == "dev")))
            for n, text in enumerate(texts)
        ]
        for split, texts in TEXTS.items()
    }


@dataclass
class Corpus:
    """Two splits of a few clips, and all else that decides what a run sees of them."""

    form: str
    splits: dict[str, list[Row]] = field(default_factory=make_splits)
    tables: dict[str, str] = field(default_factory=lambda: {"train": "train", "dev": "dev"})
    text_column: str = "sentence"
    keys: dict[str, Any] = field(default_factory=dict)  # of the YAML
    sources: dict[str, str] = field(default_factory=dict)  # of the user's modules, by name
    versions: frozenset[str] = frozenset()  # other ones of packages, or of sbkit ("ours")

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the keys of a YAML that choose this corpus in a folder."""
        keys: dict[str, Any] = {"min_seconds": 0, "sample_rate": 16_000}
        if self.form in ("csv", "parquet", "tar", "url"):
            place = f"memory:/{folder}" if self.form == "url" else str(folder)
            ending = "parquet" if self.form == "url" else self.form
            keys["manifest"] = {
                split: f"{place}/{table}.{ending}" for split, table in self.tables.items()
            }
        else:
            keys["data_folder"] = f"{folder}/cv{'.tar.gz' if self.form == 'archive' else ''}"
            keys["splits"] = {"train": self.tables["train"], "valid": "dev", "test": []}
        if self.form == "lazy":
            keys["audio_store"] = "lazy"
        return {**keys, **self.keys}

    def files(self) -> dict[str, bytes]:
        """Return the content of all files by name."""
        files = {f"{name}.py": source.encode() for name, source in self.sources.items()}
        for split, table in self.tables.items():
            rows = self.splits[split]
            match self.form:
                case "parquet" | "url":
                    files[f"{table}.parquet"] = self._parquet(rows)
                case "tar":
                    files[f"{table}.tar"] = self._webdataset(rows)
                case "csv":
                    files[f"{table}.csv"] = self._table(rows, ",")
                    files |= {row.file: row.audio for row in rows if row.audio}
                case _:
                    files[f"cv/{table}.tsv"] = self._table(rows, "\t")
                    files |= {f"cv/clips/{row.file}": row.audio for row in rows if row.audio}
        if self.form == "archive":
            return {"cv.tar.gz": gzip.compress(pack(files), mtime=0)}
        return files

    def _table(self, rows: list[Row], delimiter: str) -> bytes:
        lines = [["path", self.text_column, "client_id", "duration_ms"]]
        for row in rows:
            samples = len(row.audio or b"") // 2 - 22
            lines.append([row.file, row.text, row.speaker, str(samples / 16)])
        return "".join(f"{delimiter.join(line)}\n" for line in lines).encode()

    def _parquet(self, rows: list[Row]) -> bytes:
        columns = {
            "audio": [{"bytes": row.audio, "path": row.file} for row in rows],
            self.text_column: [row.text for row in rows],
            "speaker": [row.speaker for row in rows],
        }
        content = io.BytesIO()
        pq.write_table(pa.table(columns), content)
        return content.getvalue()

    def _webdataset(self, rows: list[Row]) -> bytes:
        members: dict[str, bytes] = {}
        for row in rows:
            values = {self.text_column: row.text, "speaker": row.speaker}
            members |= {row.file: row.audio} if row.audio else {}
            members[f"{row.name}.json"] = json.dumps(values).encode()
        return pack(members)


def pack(members: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def write(corpus: Corpus, folder: Path, *, renamed: bool = False) -> None:
    """Write the files that changed, and remove those that are gone.

    A file of another size keeps its time, and one of the same size has a new time. With `renamed`,
    an older file is renamed over it.
    """
    files = corpus.files()
    if corpus.form == "url":
        memory = fsspec.filesystem("memory")
        before = {path: memory.cat(path) for path in memory.find(str(folder))}
        for name, content in files.items():
            if before.pop(f"{folder}/{name}", None) != content:
                memory.pipe(f"{folder}/{name}", content)
        memory.rm([*before])
        return
    for path in [path for path in folder.rglob("*.*") if path.is_file()]:
        if str(path.relative_to(folder)) not in files and path.suffix != ".pyc":
            path.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.is_file() else None
        if before == content:
            continue
        status = path.stat() if before is not None else None
        if renamed:
            path.with_name("new").write_bytes(content)
            os.utime(path.with_name("new"), (1e9, 1e9))
            path.with_name("new").rename(path)
        else:
            path.write_bytes(content)
            if status is not None and status.st_size != len(content):
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# ---- edits

CHANGES = ("change", "replace", "rename", "remove", "add")  # in this order, one after another


def edit_text(corpus: Corpus, change: str) -> None:
    first, second, empty, last = corpus.splits["train"]
    match change:
        case "change":
            first.text = "Ward 1."
        case "replace":
            second.text, last.text = last.text, second.text
        case "rename":
            corpus.text_column = "transcription"
        case "remove":
            second.text = ""
        case "add":
            empty.text = "Now 1 word."


def edit_audio(corpus: Corpus, change: str) -> None:
    first, other = corpus.splits["train"][0], corpus.splits["dev"][1]
    match change:
        case "change":  # also the length
            first.audio = tone(20)
        case "replace":
            first.audio = tone(28)  # as long as before
        case "rename":
            other.name = "renamed"
        case "remove":
            first.audio = None
        case "add":
            first.audio = tone(22)


def edit_table(corpus: Corpus, change: str) -> None:
    rows = corpus.splits["train"]
    match change:
        case "change":
            rows[1].speaker = "s7"
        case "replace":
            corpus.splits = dict(zip(corpus.splits, [*corpus.splits.values()][::-1], strict=True))
        case "rename":
            corpus.tables["train"] = "other"
        case "remove":
            del rows[0]
        case "add":
            rows.append(Row("new", "New 9.", "s9", tone(40)))


def edit_order(corpus: Corpus, change: str) -> None:
    corpus.splits["train"].reverse()


def edit_module(corpus: Corpus, change: str, name: str = "fresh_corpus") -> None:
    match change:
        case "change":
            corpus.sources["fresh_corpus"] = MODULE.replace('"sentence"]', '"sentence"][1:]')
        case "replace":
            corpus.sources["fresh_corpus"] = MODULE.replace('"sentence"]', '"sentence"][2:]')
        case "rename":
            corpus.sources["fresh_other"] = corpus.sources.pop("fresh_corpus")
            corpus.keys["corpus"] = "fresh_other"
        case "remove":
            del corpus.sources["fresh_other"]
        case "add":
            corpus.sources["fresh_other"] = MODULE


def edit_helper(corpus: Corpus, change: str) -> None:
    match change:
        case "change" | "replace":
            method = "lower" if change == "change" else "title"
            corpus.sources["fresh_helper"] = f"change = str.{method}\n"
        case "rename":
            corpus.sources["fresh_other"] = corpus.sources.pop("fresh_helper")
            corpus.sources["fresh_corpus"] = MODULE.replace("fresh_helper", "fresh_other")
        case "remove":
            del corpus.sources["fresh_other"]
        case "add":
            corpus.sources["fresh_other"] = "change = str.upper\n"


Edit = Callable[[Corpus], object]
THINGS = {
    **{"text": edit_text, "audio": edit_audio, "table": edit_table, "order": edit_order},
    **{"module": edit_module, "helper": edit_helper},
}
VERSIONS = ("soxr", "num2words", "ours")
KEYS: dict[str, tuple[object, object]] = {
    "text": ({"case": "keep"}, {"numbers": "spell"}),
    "where": ({"speaker": "s0"}, {"speaker": "s1"}),
    "splits": ({"train": "dev", "valid": "train"}, {"train": "train", "valid": "train"}),
    "language": ("de", "fr"),
    "sample_rate": (8000, 12_000),
    "min_seconds": (0.105, 0.115),
    "max_seconds": (0.115, 0.105),
    "columns": ("client_id", "path"),
}
FORMS = ("release", "csv", "archive", "lazy", "parquet", "tar", "url", "module")
IN_ONE_FILE = ("archive", "parquet", "tar", "url")  # whose tables lie with their audio


def cases() -> Iterator[Any]:
    """Yield each form with each thing that decides what is read of it."""
    for form in FORMS:
        marks = [pytest.mark.xfail(reason="needs --shards")] if form in NEEDS_OUT else []
        for thing in (*THINGS, "keys", "versions"):
            is_of_module = thing in ("module", "helper")
            if is_of_module != (form == "module") and (thing != "table"):
                continue
            if thing in ("order", "table") and form in IN_ONE_FILE:
                continue  # another text changes the same file
            if thing in ("keys", "versions") and form != ("csv" if thing == "keys" else "release"):
                continue  # which decide the same in all forms
            yield pytest.param(form, thing, marks=marks)


def edits(thing: str) -> Iterator[tuple[str, Edit]]:
    """Yield the changes of a thing that have a meaning, to be made one after another."""
    if thing == "keys":
        for key, values in KEYS.items():
            for value in (*values, None):
                yield f"{key}: {value}", partial(edit_key, key=key, value=value)
    elif thing == "versions":
        for name in VERSIONS:
            yield name, partial(edit_versions, name=name)
    else:
        for change in CHANGES if thing != "order" else ("change",):
            yield change, partial(THINGS[thing], change=change)


def edit_versions(corpus: Corpus, name: str) -> None:
    corpus.versions = frozenset([name])


def edit_key(corpus: Corpus, key: str, value: object) -> None:
    """Set a key of the YAML, or take it out if the value is None."""
    keys = name_text_column(value) if key == "columns" else {key: value}
    for name in keys:
        corpus.keys.pop(name, None)
    corpus.keys |= keys if value is not None else {}


# ---- the oracle


class OtherStream(soxr.ResampleStream):
    """Another version of soxr, whose result is half as loud."""

    def resample_chunk(self, *arguments: Any, **options: Any) -> Any:
        return super().resample_chunk(*arguments, **options) / 2


def be_versions(names: frozenset[str], patches: pytest.MonkeyPatch) -> None:
    """Be other versions of packages, or of sbkit: their results differ, too."""
    version = importlib.metadata.version
    patches.setattr(
        importlib.metadata, "version", lambda name: "99.0" if name in names else version(name)
    )
    if {"soxr", "ours"} & names:
        patches.setattr(soxr, "ResampleStream", OtherStream)
    if {"num2words", "ours"} & names:
        english = num2words.CONVERTER_CLASSES["en"]
        patches.setattr(english, "to_cardinal", lambda number, **_: "umpteen")
    if "ours" in names:
        patches.setattr(*OUR_VERSION)


def forget() -> None:
    """Forget what a process remembers."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("fresh_"):
            del sys.modules[name]
        elif name.startswith(("sbkit.base.versions", "sbkit.data.", "sbkit.text.")):
            for value in [*vars(module).values()]:
                getattr(value, "cache_clear", int)()


def observe(corpus: Corpus, folder: Path, cache: Path, *options: str) -> str:
    """Return what `sbkit prepare` tells of a corpus: its report, or the error."""
    report = folder.parent / "report"
    shutil.rmtree(report, ignore_errors=True)
    forget()
    settings = corpus.settings(folder)
    overrides = [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
    command = ["prepare", f"{ROOT}/hparams/ctc.yaml", *overrides, f"--report={report}", *options]
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SBKIT_CACHE", str(cache))
        patches.syspath_prepend(folder)
        be_versions(corpus.versions, patches)
        try:
            assert sbkit(command) == 0
            seen = "".join(file.read_text() for file in sorted(report.iterdir()))
        except (SbkitError, ImportError) as error:
            seen = f"error: {error}"
    return seen.replace(str(cache), "CACHE")


def make_corpus(form: str, thing: str) -> Corpus:
    corpus = Corpus(form)
    if form == "module":
        corpus.sources = {"fresh_corpus": MODULE, "fresh_helper": "change = str.upper\n"}
        corpus.keys = {"corpus": "fresh_corpus"}
    elif thing == "versions":  # of packages that all of this needs
        corpus.keys = {"sample_rate": 8000, "text": {"numbers": "spell"}}
    return corpus


@pytest.mark.slow(60)
@pytest.mark.parametrize(("form", "thing"), [*cases()])
def test_edited_corpus_is_as_with_an_empty_cache(form: str, thing: str, tmp_path: Path) -> None:
    folder, used = tmp_path / "corpus", tmp_path / "used"
    corpus = make_corpus(form, thing)
    write(corpus, folder)
    original = deepcopy(corpus)
    seen = observe(corpus, folder, used)
    assert not seen.startswith("error"), seen
    expected = {repr(corpus): seen}
    undo = "undo", lambda corpus: vars(corpus).update(vars(original))
    for change, edit in (*edits(thing), undo):
        edit(corpus)
        write(corpus, folder, renamed=change == "replace")
        before, seen = seen, observe(corpus, folder, used)
        if repr(corpus) not in expected:
            empty = tmp_path / f"empty {len(expected)}"
            expected[repr(corpus)] = observe(corpus, folder, empty)
        assert not difference(seen, expected[repr(corpus)]), change
        assert difference(seen, before) or change in ("rename", "undo"), change


def difference(seen: str, expected: str) -> list[str]:
    """Return the lines that differ; pytest would compare long texts for seconds."""
    return [line[:200] for line in unified_diff(expected.split("\n"), seen.split("\n"), n=0)]
