"""Nothing outlives what it was made from: edit, start again, and compare with an empty cache."""

import gzip
import importlib.metadata
import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from difflib import unified_diff
from functools import partial
from itertools import chain, count, permutations
from pathlib import Path
from typing import Any, ClassVar

import num2words
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr

from recipes.prepare import prepare_transcripts
from sbkit.base.errors import SbkitError
from sbkit.config.overrides import parse_overrides
from sbkit.data import work_units
from sbkit.data.audio_tables import AudioTable
from sbkit.data.corpus import Corpus as BaseCorpus
from sbkit.data.corpus import CorpusRow
from sbkit.data.manifest import Clip, Excluded, Manifest
from sbkit.data.prepared import Spec, finish, plan, prepare, read_data_settings
from sbkit.data.prepared import write as write_unit
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits
from sbkit.data.tables import TableOptions
from tests.runs import ROOT, times_of
from tests.test_golden import be_other_code

YAML = f"{ROOT}/hparams/ctc.yaml"

MODULE = """
from pathlib import Path
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Clip
from tests.runs import rows_of
class Fresh(Corpus):
    def files(self): return [Path(self.settings["data_folder"])]
    def splits(self):
        return {"train": [self.settings["splits"]["train"]], "valid": ["dev"], "test": []}
    def read(self, split):
        from fresh_helper import change
        folder = Path(self.settings["data_folder"])
        for row in rows_of(folder / f"{split}.tsv"):
            yield Clip(row["path"], folder / "clips" / row["path"], change(row["sentence"]) + "{}",
                       {"speaker": row["client_id"]})
"""
OLD_TIMES = count(10**9)  # seconds


# ---- a corpus in one of several forms

TEXTS = {"train": ["Word 1.", "Word 22!", "", "Other 333."], "dev": ["Long 4.", "Short 5."]}


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

    file: str
    text: str
    speaker: str
    audio: bytes | None


def make_splits() -> dict[str, list[Row]]:
    tones = map(tone, count())
    return {
        split: [
            Row(f"{split}{index}.wav", text, f"s{index % 2}", next(tones))
            for index, text in enumerate(texts)
        ]
        for split, texts in TEXTS.items()
    }


@dataclass
class Corpus:
    """Two splits of a few clips, and all else that decides what a run sees of them."""

    form: str
    splits: dict[str, list[Row]] = field(default_factory=make_splits)
    train: str = "train"  # the name of the table for training
    text_column: str = "sentence"
    keys: dict[str, Any] = field(default_factory=dict)  # of the YAML
    sources: dict[str, str] = field(default_factory=dict)  # of the user's modules, by name
    version_of: str = ""  # a package that has another version, or "ours"

    def __post_init__(self) -> None:
        if self.form == "lazy":
            self.keys = {"audio_store": "lazy"}
        elif self.form == "module":
            self.keys = {"corpus": "fresh_corpus"}
            self.sources = {"fresh_corpus": MODULE, "fresh_helper": "change = str.upper\n"}

    def edit(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def edit_row(self, index: int, **values: Any) -> None:
        vars(self.splits["train"][index]).update(values)

    def rename_source(self, name: str) -> None:
        self.sources["fresh_other"] = self.sources.pop(name)
        if name == "fresh_corpus":
            self.keys["corpus"] = "fresh_other"
        else:
            self.sources["fresh_corpus"] = MODULE.replace(name, "fresh_other")

    def edit_key(self, key: str, value: object) -> None:
        """Set a key of the YAML, or take it out if the value is None."""
        self.keys = {name: old for name, old in self.keys.items() if name != key}
        if value is not None:
            self.keys[key] = {"text": value} if key == "columns" else value

    def options(self, folder: Path) -> list[str]:
        """Return the overrides that choose this corpus in a folder."""
        keys: dict[str, Any] = {"min_seconds": 0, "sample_rate": 16_000}
        if self.form in TABLES:
            place = f"file://{folder}" if self.form == "url" else str(folder)
            tables = {"train": self.train, "dev": "dev"}
            keys["manifest"] = {k: f"{place}/{v}.{TABLES[self.form]}" for k, v in tables.items()}
        else:
            keys["data_folder"] = f"{folder}/cv{'.tar.gz' if self.form == 'archive' else ''}"
            keys["splits"] = {"train": self.train, "valid": "dev", "test": []}
        return [f"--{key}={json.dumps(value)}" for key, value in {**keys, **self.keys}.items()]

    def files(self) -> dict[str, bytes]:
        """Return the content of all files by name."""
        files = {f"{name}.py": source.encode() for name, source in self.sources.items()}
        for table, rows in zip((self.train, "dev"), self.splits.values(), strict=True):
            clips = {row.file: row.audio for row in rows if row.audio}
            match TABLES.get(self.form):
                case "parquet":
                    files[f"{table}.parquet"] = self._parquet(rows)
                case "tar":
                    texts = {row.file[:-4]: (row.text, row.speaker) for row in rows}
                    for name, values in texts.items():
                        record = dict(zip((self.text_column, "speaker"), values, strict=True))
                        clips[f"{name}.json"] = json.dumps(record).encode()
                    files[f"{table}.tar"] = pack(clips)
                case "csv":
                    files |= {f"{table}.csv": self._lines(rows, ","), **clips}
                case _:
                    files[f"cv/{table}.tsv"] = self._lines(rows, "\t")
                    files |= {f"cv/clips/{name}": audio for name, audio in clips.items()}
        if self.form == "archive":
            return {"cv.tar.gz": gzip.compress(pack(files), mtime=0)}
        return files

    def _lines(self, rows: list[Row], delimiter: str) -> bytes:
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


def pack(members: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in sorted(members, key=lambda name: name.rpartition(".")[0]):
            info = tarfile.TarInfo(name)
            info.size = len(members[name])
            tar.addfile(info, io.BytesIO(members[name]))
    return content.getvalue()


def write(corpus: Corpus, folder: Path, *, renamed: bool = False, keep_times: bool = False) -> None:
    """Write the files that changed, and remove those that are gone.

    A file of another size keeps its time, and one of the same size has a new time (or keeps it,
    with `keep_times`). With `renamed`, an older file is renamed over each.
    """
    files = corpus.files()
    for path in [path for path in folder.rglob("*.*") if path.is_file()]:
        if str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.is_file() else None
        if before is not None and path.read_bytes() == content:
            continue
        target = path.with_name("new") if renamed else path
        target.write_bytes(content)
        if renamed:
            os.utime(target, (0, next(OLD_TIMES)))
            target.rename(path)
        elif before is not None and (keep_times or before.st_size != len(content)):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- edits, which are made one after another

Edit = Callable[[Corpus], object]
KEYS: dict[str, tuple[object, ...]] = {
    "text": ({"case": "keep"}, {"numbers": "spell"}),
    "where": ({"speaker": "s0"}, {"speaker": "s1"}),
    "splits": ({"train": "dev", "valid": "train"},),
    "language": ("de",),
    "sample_rate": (8000,),
    "min_seconds": (0.105,),
    "max_seconds": (0.115,),
    "columns": ("client_id", "path"),
}
VERSIONS = ("soxr", "num2words", "ours")
EDITS: dict[str, dict[str, Edit]] = {
    "text": {
        "change": partial(Corpus.edit_row, index=0, text="Ward 1."),
        "replace": partial(Corpus.edit_row, index=0, text="Work 1."),
        "rename": partial(Corpus.edit, text_column="transcription"),
        "remove": partial(Corpus.edit_row, index=1, text=""),
        "add": partial(Corpus.edit_row, index=2, text="Now 1 word."),
    },
    "audio": {
        "change": partial(Corpus.edit_row, index=0, audio=tone(20)),
        "replace": partial(Corpus.edit_row, index=0, audio=tone(28)),  # as long as before
        "rename": partial(Corpus.edit_row, index=1, file="renamed.wav"),
        "remove": partial(Corpus.edit_row, index=0, audio=None),
        "add": partial(Corpus.edit_row, index=0, audio=tone(22)),
    },
    "table": {
        "change": partial(Corpus.edit_row, index=1, speaker="s7"),
        "replace": lambda corpus: corpus.splits.update(dev=corpus.splits["dev"][::-1]),
        "rename": partial(Corpus.edit, train="other"),
        "remove": lambda corpus: corpus.splits["train"].pop(0),
        "add": lambda corpus: corpus.splits["train"].append(Row("9.wav", "New.", "s9", tone(40))),
    },
    "order": {"change": lambda corpus: corpus.splits["train"].reverse()},
    "module": {
        "change": lambda corpus: corpus.sources.update(fresh_corpus=MODULE.replace("{}", "1")),
        "replace": lambda corpus: corpus.sources.update(fresh_corpus=MODULE.replace("{}", "2")),
        "rename": lambda corpus: corpus.rename_source("fresh_corpus"),
        "remove": lambda corpus: corpus.sources.pop("fresh_other"),
        "add": lambda corpus: corpus.sources.update(fresh_other=MODULE),
    },
    "helper": {
        "change": lambda corpus: corpus.sources.update(fresh_helper="change = str.lower\n"),
        "replace": lambda corpus: corpus.sources.update(fresh_helper="change = str.title\n"),
        "rename": lambda corpus: corpus.rename_source("fresh_helper"),
        "remove": lambda corpus: corpus.sources.pop("fresh_other"),
        "add": lambda corpus: corpus.sources.update(fresh_other="change = str.upper\n"),
    },
    "keys": {
        f"{key}: {value}": partial(Corpus.edit_key, key=key, value=value)
        for key, values in KEYS.items()
        for value in (*values, None)
    },
    "versions": {name: partial(Corpus.edit, version_of=name) for name in VERSIONS},
}
TABLES = {"csv": "csv", "parquet": "parquet", "tar": "tar", "url": "parquet"}  # endings by form
FORMS = ("release", "lazy", "archive", *TABLES)
# Where an edit of a thing may come out in another way than in other forms: keys and versions decide
# the same in all, and a form of one file has no other table than that with the texts.
FORMS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("module", "helper"), ("module",)),
    **dict.fromkeys(("keys", "versions"), ("release",)),
    "order": ("csv",),
    "table": ("release", "csv", "lazy", "module"),
    "text": ("archive", *TABLES),
    "audio": FORMS,
}


# ---- the oracle


class OtherStream(soxr.ResampleStream):
    """Another version of soxr, whose result is half as loud."""

    def resample_chunk(self, *arguments: Any, **options: Any) -> Any:
        return super().resample_chunk(*arguments, **options) / 2


def be_version(of: str, patches: pytest.MonkeyPatch) -> None:
    """Be another version of a package, or of sbkit ("ours"): the results differ, too."""
    version = importlib.metadata.version
    patches.setattr(importlib.metadata, "version", lambda x: "99.0" if x == of else version(x))
    if of in ("soxr", "ours"):
        patches.setattr(soxr, "ResampleStream", OtherStream)
    if of in ("num2words", "ours"):
        english = num2words.CONVERTER_CLASSES["en"]
        patches.setattr(english, "to_cardinal", lambda number, **_: "umpteen")
    if of == "ours":
        be_other_code(patches)


def forget() -> None:
    """Forget what a process remembers."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("fresh_"):
            del sys.modules[name]
        elif name.startswith(("sbkit.base.versions", "sbkit.data.", "sbkit.text.")):
            for value in [*vars(module).values()]:
                getattr(value, "cache_clear", int)()


def observe(corpus: Corpus, folder: Path, cache: Path) -> str:
    """Return what a run sees of a corpus: all rows and audio, and what is left out; or the error.

    A report of `sbkit prepare` would take three times as long.
    """
    forget()
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SBKIT_CACHE", str(cache))
        patches.syspath_prepend(folder)
        patches.setattr(work_units, "usable_cores", lambda: 1)  # processes start slowly
        be_version(corpus.version_of, patches)
        try:
            overrides = parse_overrides(corpus.options(folder))
            seen = describe(prepare_transcripts(read_data_settings(Path(YAML), overrides)))
        except (SbkitError, ImportError) as error:
            seen = f"error: {error}"
    return seen.replace(str(cache), "CACHE")


def describe(splits: Splits) -> str:
    lines = [str(splits.filtered), str(splits.fingerprints)]
    lines += map(str, (*splits.excluded, *splits.out_of_range))
    for name, split in splits.named().items():
        for row in read_rows(split, range(len(split))):
            lines.append(f"{name} { ({**row, 'audio': zlib.crc32(row['audio'])}) }")
    return "\n".join(lines)


@pytest.mark.slow(60)
@pytest.mark.parametrize(
    ("form", "thing"),
    [(form, thing) for thing in EDITS for form in FORMS_OF[thing]],
)
def test_edited_corpus_is_as_with_an_empty_cache(form: str, thing: str, tmp_path: Path) -> None:
    folder, used = tmp_path / "corpus", tmp_path / "used"
    corpus = Corpus(form)
    if thing == "versions":  # of packages that all of this needs
        corpus.keys = {"sample_rate": 8000, "text": {"numbers": "spell"}}
    write(corpus, folder)
    original = deepcopy(corpus)
    seen = observe(corpus, folder, used)
    assert not seen.startswith("error"), seen
    expected = {repr(corpus): seen}
    edits = {**EDITS[thing], "undo": partial(Corpus.edit, **vars(original))}
    for change, edit in edits.items():
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


# ---- splits and rows, one by one

SPLITS = ("train-b", "train-a", "dev-d", "test-c")
BASIC = {"language": "en", "sample_rate": 16_000}


def write_splits(form: str, folder: Path) -> dict[str, Any]:
    """Write a corpus of four splits; return settings that choose it."""
    if form.startswith("joined"):
        inner = "LibriSpeech" if form == "joined without files" else "release"
        folders = [folder.with_name(name) for name in ("one", "two")]
        return BASIC | {"data_folder": [write_splits(inner, f)["data_folder"] for f in folders]}
    if form == "out":
        roles = {"train": SPLITS[0], "valid": SPLITS[1], "test": [*SPLITS[2:]]}
        spec = Spec(write_splits("release", folder) | {"splits": roles}, f"{folder} out")
        [*map(write_unit, plan(spec))]
        assert finish(spec) == []
        return BASIC | {"data_folder": spec.out}
    files: dict[str, bytes] = {}
    for number, split in enumerate(SPLITS):
        name, audio = f"{split}-0-1", tone(number)
        if form == "LibriSpeech":
            files |= {f"{split}/0/1/{name}.wav": audio}
            files |= {f"{split}/0/1/0-1.trans.txt": f"{name} A WORD\n".encode()}
        else:
            audio_folder = "clips/" if form == "release" else ""
            files |= {f"{audio_folder}{name}.wav": audio}
            files |= {f"{split}.tsv": f"path\tsentence\n{name}.wav\tA word\n".encode()}
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    if form == "tables":
        return BASIC | {"manifest": {split: str(folder / f"{split}.tsv") for split in SPLITS}}
    return BASIC | {"data_folder": str(folder)}


@pytest.mark.parametrize(
    "form", ["release", "LibriSpeech", "tables", "joined", "joined without files", "out"]
)
def test_each_choice_of_splits_takes_effect_after_any_other(form: str, tmp_path: Path) -> None:
    settings = write_splits(form, tmp_path / "corpus")
    names = SPLITS
    if form.startswith("joined"):
        names = (*(f"{name}-one" for name in SPLITS[:2]), *(f"{name}-two" for name in SPLITS[2:]))
    choices = [
        {"train": order[:first], "valid": order[first:second], "test": order[second:]}
        for first, second in ((1, 2), (2, 3), (1, 4))
        for order in permutations(names)
    ][::7]
    fingerprints = set()
    for is_prepared in (False, True):
        for roles in choices:
            chosen = settings | {"splits": {role: [*names] for role, names in roles.items()}}
            before = times_of(tmp_path)
            data = prepare(chosen)
            assert (times_of(tmp_path) == before) is is_prepared  # all are kept beside each other
            assert {role: tuple(names) for role, names in data.roles.items()} == roles
            ids = {name: split.dataset["id"][:] for name, split in data.splits.items()}
            declared = chain.from_iterable(roles.values())
            assert ids == {name: [f"{re.sub('-(one|two)', '', name)}-0-1"] for name in declared}
            splits = prepare_transcripts(chosen | {"min_seconds": 0, "max_seconds": 9})
            fingerprints.add(json.dumps(splits.fingerprints, sort_keys=True))
    # A run may be resumed with its test sets in another order, but not with others in training.
    kinds = {(roles["train"], frozenset(roles["valid"])) for roles in choices}
    assert len(fingerprints) == len(kinds)


class HeldCorpus(BaseCorpus):
    """A corpus without `files`, of the rows that a test holds."""

    held: ClassVar[Mapping[str, Sequence[CorpusRow]]] = {}

    def read(self, split: str) -> Sequence[CorpusRow]:
        return self.held[split]


@pytest.mark.parametrize("kind", ["clip", "excluded", "block", "table"])
def test_each_field_of_a_row_is_noticed_in_a_corpus_without_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen is as in an empty cache, and nothing is written where nothing has changed."""
    monkeypatch.setattr(work_units, "usable_cores", lambda: 1)  # processes start slowly
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        samples = draw.integers(-9000, 9000, (3200, 2), np.int16)
        soundfile.write(tmp_path / f"{name}.wav", samples, 16_000)
        row = {"audio": (tmp_path / f"{name}.wav").read_bytes(), "text": name, "speaker": "ann"}
        pq.write_table(pa.Table.from_pylist([row] * 2), tmp_path / f"{name}.parquet")
    # Of fewer rows, none may be excluded.
    spans = [(5000 * n, 5000 * n + 4000) for n in range(30)]
    rest = [Clip(f"{s[0]}", tmp_path / "c.wav", "Rest", start=s[0], end=s[1]) for s in spans]
    clip = Clip("a", tmp_path / "a.wav", "A word", {"speaker": "ann"})
    block = Manifest.of([clip, *rest])
    table = AudioTable(str(tmp_path / "a.parquet"), "1", TableOptions(), {"lang": "de"})
    rows: Mapping[str, tuple[CorpusRow, Mapping[str, object]]] = {  # with other values of fields
        "clip": (
            clip,
            {"path": tmp_path / "b.wav", "columns": {}, "start": 2000, "end": 90_000, "channel": 1},
        ),
        "excluded": (Excluded("a", "noise", "in line 7"), {}),
        "block": (
            block,
            {
                "rows": block.rows.append_column("age", pa.array(["40"] * len(block))),
                "excluded": (Excluded("b", "noise", "loud"),),
                "filtered": {"too loud": 1},
            },
        ),
        "table": (
            table,
            {
                "file": str(tmp_path / "b.parquet"),
                "options": TableOptions({"text": "speaker"}),
                "partition": {},
                "rows": (2,),
            },
        ),
    }
    first, others = rows[kind]

    def see(row: CorpusRow, cache: str, where: Mapping[str, str] | None = None) -> str:
        monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / cache))
        held = [row] if kind in ("block", "table") else [row, *rest]
        monkeypatch.setattr(HeldCorpus, "held", {"train": held, "dev": rest, "test": rest})
        settings = BASIC | {"where": where}
        split = prepare(settings, HeldCorpus(settings)).splits["train"]
        seen = [
            row | {"audio": zlib.crc32(row["audio"])}
            for row in read_rows(split.dataset, range(len(split.dataset)))
        ]
        return f"{seen} {split.excluded} {split.filtered}".replace(cache, "")

    original = see(first, "used")
    for number, name in enumerate(item.name for item in fields(first)):
        row = replace(first, **{name: others.get(name, "another")})
        seen = see(row, "used")
        assert seen == see(row, f"empty{number}"), name
        assert (seen == original) is ((kind, name) in UNSEEN), name
        before = times_of(tmp_path / "used")
        assert see(row, "used") == seen
        assert times_of(tmp_path / "used") == before, name
        assert see(first, "used") == original, name
    if kind == "table":
        with pytest.raises(SbkitError, match="keeps rows whose speaker is bob"):
            see(first, "used", {"speaker": "bob"})


# Its split is that which lists an excluded row; another version has other content.
UNSEEN = {("excluded", "split"), ("table", "version")}


def test_names_and_roles_of_a_corpus_without_files_are_its_present_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.wav").write_bytes(tone(1))
    clip = Clip("a", tmp_path / "a.wav", "A word")
    monkeypatch.setattr(HeldCorpus, "held", dict.fromkeys("abcd", [clip]))
    for order in (*permutations("abc"), ("a", "b", "d")):
        for second in (("c",), ("b", "c")):
            roles = {"train": (order[0],), "valid": (order[1],), "test": (order[2],)}
            if second == ("b", "c"):
                roles |= {"train": order[:2], "valid": (order[2],), "test": ()}
            monkeypatch.setattr(HeldCorpus, "splits", lambda _, roles=roles: roles)
            data = prepare(BASIC, HeldCorpus(BASIC))
            assert {role: tuple(names) for role, names in data.roles.items()} == roles
            assert [*data.splits] == [*chain.from_iterable(roles.values())]
