"""Hostile tables, texts, language models and hotwords, and data in shards."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sbkit.data.corpora.own_manifest import read_manifests
from sbkit.data.corpora.release import read_release
from sbkit.data.storage import sharded_corpus
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.prepare import prepare_split
from sbkit.data.storage.shard_units import ShardOptions
from sbkit.data.storage.write_shards import write_shards
from sbkit.inference.transcribe.whole_clips import read_whole_clips
from sbkit.lm.arpa import read_arpa
from sbkit.logs.log import quiet
from tests.attacks.bundles import KINDS
from tests.attacks.case import Case, Place
from tests.attacks.decoders import GOOD, with_models
from tests.attacks.inputs import TRICKS
from tests.attacks.mutate import Mutate, mutate_bytes, mutate_json, mutate_lines, mutate_text
from tests.inference.bundles import edit_config

STRANGE: dict[str, Callable[[Path], Any]] = {**TRICKS, "a terabyte": KINDS["a terabyte"]}
ESCAPE = "\x1b[2J\x1b[H"


def all_tables() -> Iterator[Case]:
    """List every hostile table, text, language model and corpus in shards."""
    for name, content in TABLES.items():
        yield Case("table", name, partial(_table, content), harmless=True)
    for suffix, mutate in (("csv", mutate_text), ("tsv", mutate_text), ("jsonl", mutate_lines)):
        for seed in range(24):
            changed = partial(_changed_table, suffix, mutate, seed)
            yield Case("table", f"{suffix} mutant {seed}", changed, harmless=True)
    for name, change in KALDI.items():
        yield Case("kaldi", name, partial(_kaldi, change), harmless=True)
    for name, write in PARQUET.items():
        yield Case("parquet", name, partial(_parquet, write), harmless=True)
    for name, content in ARPAS.items():
        yield Case("arpa", name, partial(_arpa, partial(_write, content)), harmless=name in LOADED)
    for name, make in STRANGE.items():
        yield Case("arpa", name, partial(_arpa, make))
        yield Case("lm text", name, partial(_lm, make))
        yield Case("hotwords", name, partial(_hotwords, make), harmless=True)
    for seed in range(40):
        mutate = mutate_text if seed % 2 else mutate_bytes
        write = partial(_write, mutate(ARPA, seed))
        yield Case("arpa", f"mutant {seed}", partial(_arpa, write), harmless=True)
    for name, content in TEXTS.items():
        yield Case("lm text", name, partial(_lm, partial(_write, content)), harmless=True)
        yield Case("hotwords", name, partial(_hotwords, partial(_write, content)), harmless=True)
    for name, listed in LISTS.items():
        yield Case("hotwords", f"a list {name}", partial(_listed, listed), harmless=True)
    for name, spoil in SHARDS.items():
        yield Case("shards", name, partial(_shards, spoil), harmless=name.startswith(UNREAD))


def _write(content: bytes, file: Path) -> None:
    file.write_bytes(content)


# -- tables ---------------------------------------------------------------------------------------

ROWS = [{"path": f"clips/{n}.wav", "sentence": f"one {n}", "speaker": "a"} for n in range(12)]
WRITTEN = {
    "csv": "\n".join(["path,sentence,speaker", *(",".join(row.values()) for row in ROWS)]),
    "tsv": "\n".join(["path\tsentence\tspeaker", *("\t".join(row.values()) for row in ROWS)]),
    "jsonl": "\n".join(map(json.dumps, ROWS)),
}
KEYS = "\n".join(json.dumps({"path": f"{n}.wav", "text": "a", f"k{n}": 1}) for n in range(20_000))
LEVELS = (500, 900, 950, 970, 980, 985, 990, 995, 1000, 3000)
TABLES: dict[str, str] = {
    "a column for each row.jsonl": KEYS,
    "a column twice.csv": f"{ESCAPE},{ESCAPE}\na,b\n",
    "no path.csv": f"{ESCAPE},text\na,b\n",
    "no path of one letter.tsv": f"{ESCAPE}\ttext\tx\na\tb\tc\n",
    "keys twice.jsonl": '{"path": "a.wav", "text": "a", "text": "b"}\n',
    "an id that is a path.csv": "id,path,text\n../../mine/kept,a.wav,hi\n",
    "an id of two lines.csv": 'id,path,text\n"a\nb",a.wav,hi\n',
    "numbers.jsonl": '{"path": "a.wav", "text": 1e999, "offset": NaN, "duration": -1e308}\n',
    "paths up.tsv": "path\tsentence\n../../../../etc/passwd\thi\n",
    "paths of links.tsv": "path\tsentence\nclips/../../mine/kept.txt\thi\n",
    "quotes that do not end.csv": 'path,text\n"a,b\n' + "x,y\n" * 10_000,
    "many delimiters.csv": "path" + ",;|\t" * 20_000 + "\na,b\n",
    "the same id.csv": "path,text\n" + "".join(f"{n}/a.wav,hi\n" for n in range(50_000)),
    "the same clip.csv": "path,text\n" + "a.wav,hi\n" * 50_000,
    **{f"deep {n}.jsonl": f'{{"path": {"[" * n}{"]" * n}, "text": "a"}}\n' for n in LEVELS},
}


def _table(content: str, place: Place) -> list[str]:
    kind = next(each for each in ("jsonl", "csv", "tsv") if content in _of_kind(each))
    file = place.folder / f"train.{kind}"
    file.write_text(content)
    return ["release" if kind == "tsv" else "manifest", str(file)]


def _of_kind(kind: str) -> list[str]:
    return [content for name, content in TABLES.items() if name.endswith(kind)]


def _changed_table(suffix: str, mutate: Mutate, seed: int, place: Place) -> list[str]:
    file = place.folder / f"train.{suffix}"
    file.write_bytes(mutate(WRITTEN[suffix].encode(), seed))
    return ["release" if suffix == "tsv" else "manifest", str(file)]


def _release(tsv: str) -> None:
    read_release(Path(tsv), "en")


# -- Kaldi ----------------------------------------------------------------------------------------


def _in_folder(name: str, make: Callable[[Path], Any], folder: Path) -> None:
    _instead(folder / name, make)


def _instead(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink(missing_ok=True)
    file.touch()
    if make is not KINDS["a terabyte"]:
        file.unlink()
    make(file)


KALDI: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda folder: None,
    **{
        f"{name} {trick}": partial(_in_folder, name, make)
        for name in ("wav.scp", "text", "utt2spk")
        for trick, make in STRANGE.items()
    },
    "a command": lambda folder: (folder / "wav.scp").write_text("a touch CANARY |\n"),
    "a command that moves the cursor": lambda folder: (folder / "wav.scp").write_text(
        f"a {ESCAPE}touch |\n"
    ),
    "an id twice": lambda folder: (folder / "text").write_text(f"{ESCAPE}a hi\n{ESCAPE}a ho\n"),
    "a path to the root": lambda folder: (folder / "wav.scp").write_text("a /dev/zero\n" * 2),
    "segments that move the cursor": lambda folder: (folder / "segments").write_text(ESCAPE),
}  # fmt: skip


def _kaldi(change: Callable[[Path], Any], place: Place) -> list[str]:
    folder = place.folder / "kaldi"
    folder.mkdir()
    (folder / "wav.scp").write_text("a a.wav\nb b.wav\n")
    (folder / "text").write_text("a hi\nb ho\n")
    (folder / "utt2spk").write_text("a x\nb y\n")
    change(folder)
    return ["manifest", str(folder)]


# -- parquet --------------------------------------------------------------------------------------


def _columns(rows: int, *, length: int) -> bytes:
    """Write equal rows, which parquet keeps once."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * length])
    path = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["a.wav"])
    sink = pa.BufferOutputStream()
    table = pa.table({"path": path, "text": text})
    pq.write_table(table, sink, store_schema=False, compression="zstd")
    return bytes(sink.getvalue())


def _strings(path: str, text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"path": [path], "text": [text]}), sink)
    return bytes(sink.getvalue())


def _mutant_columns(seed: int) -> bytes:
    return mutate_bytes(_columns(9, length=4), seed)


PARQUET: dict[str, Callable[[], bytes]] = {
    "rows of a megabyte": partial(_columns, 100_000, length=1_000_000),
    "ten million rows": partial(_columns, 10_000_000, length=1),
    "a path that moves the cursor": partial(_strings, ESCAPE, "hi"),
    "a path up": partial(_strings, "../../etc/passwd", "hi"),
    **{f"mutant {seed}": partial(_mutant_columns, seed) for seed in range(30)},
}


def _parquet(write: Callable[[], bytes], place: Place) -> list[str]:
    (place.folder / "train.parquet").write_bytes(write())
    return ["manifest", str(place.folder / "train.parquet")]


# -- language models and hotwords -----------------------------------------------------------------

ARPA = rb"""\data\
ngram 1=5
ngram 2=3

\1-grams:
-1.0	<unk>
-99	<s>	-0.3
-1.0	</s>
-0.7	hello	-0.2
-0.7	fox	-0.2

\2-grams:
-0.3	<s> hello
-0.3	hello fox
-0.3	fox </s>

\end\
"""
ARPAS: dict[str, bytes] = {
    "as it is": ARPA,
    "a line without end": b"\\data\\\nngram 1=" + b"9" * 50_000_000,
    "a first line without end": b"x" * 100_000_000,
    "a word without end": ARPA.replace(b"fox", b"x" * 10_000_000),
    "a count without end": ARPA.replace(b"1=5", b"1=" + b"9" * 5000),
    "a count beyond": ARPA.replace(b"1=5", b"1=99999999999999"),
    "words that move the cursor": ARPA.replace(b"-0.7\tfox", b"-0.7\t\x1b[2J \x1b[2J"),
    "a word of hidden letters": ARPA.replace(b"fox", "\u202exof".encode()),
    "no number": ARPA.replace(b"-0.7\tfox", b"nan\tfox"),
    "infinite": ARPA.replace(b"-0.7\tfox", b"-inf\tfox"),
    "1e308": ARPA.replace(b"-0.7\tfox", b"-1e308\tfox"),
    "a back-off beyond": ARPA.replace(b"fox\t-0.2", b"fox\t1e300"),
}  # fmt: skip
LOADED = ("as it is", "a word without end", "a word of hidden letters")
TEXTS: dict[str, bytes] = {
    "a line without end": b"one two " * 1_000_000,
    "a word without end": b"x" * 5_000_000,
    "words that move the cursor": b"\x1b[2J\x1b[H fox\nfox \x9b2J\n",
    "changes of direction": "fox \u202exof\u202c\nthe \u2066fox".encode(),
    "marks without end": ("e" + "\u0301" * 1_000_000).encode(),
    "many lines": b"".join(b"%d fox\n" % n for n in range(200_000)),
    "zero bytes": b"fox\0the fox\n" * 1000,
    "spaces": b" " * 5_000_000 + b"\nfox\n",
}
LISTS = {
    "of many": ",".join(f"fox {n}" for n in range(300)),
    "that moves the cursor": f"{ESCAPE},fox",
    "of nothing": ",,,",
    "with a zero byte": "fox\0,the fox",
    "that is a folder": "/",
    "that is a device": "/dev/zero",
    "of half a pair": "\ud800,fox",
}


def _arpa(make: Callable[[Path], Any], place: Place) -> list[str]:
    file = place.folder / "a.arpa"
    make(file)
    return ["arpa", str(file)]


def _read_arpa(file: str) -> None:
    read_arpa(Path(file))


def _lm(make: Callable[[Path], Any], place: Place) -> list[str]:
    make(place.folder / "text.txt")
    return ["lm", str(place.folder / "text.txt"), "--out", str(place.folder / "out.arpa")]


def _hotwords(make: Callable[[Path], Any], place: Place) -> list[str]:
    make(place.folder / "words.txt")
    return _listed(str(place.folder / "words.txt"), place)


def _listed(listed: str, place: Place) -> list[str]:
    with_models(place.bundle)
    edit_config(place.bundle, lambda config: config.update(decoder=GOOD))
    return [*place.transcribe(), "--hotwords", listed]


# -- shards ---------------------------------------------------------------------------------------


def _shards(spoil: Callable[[Path], Any], place: Place) -> list[str]:
    os.environ["SBKIT_CACHE"] = str(place.folder / "cache")
    (place.folder / "data.csv").write_text("path,text\nclip.wav,hi\n")
    manifest = read_manifests(
        [place.folder / "data.csv"], path_column=None, text_column=None, language="en"
    )
    folder = place.folder / "shards"
    options = ShardOptions(sample_rate=16_000, store="pcm", shard_bytes=1_000_000, seed=1)
    roles = {"train": ("train",), "valid": ("dev",), "test": ("test",)}
    sources = dict.fromkeys(("train", "dev", "test"), manifest)
    with quiet():
        write_shards(Storage.at(str(folder)), options, sources, roles)
    spoil(folder)
    return ["shards", str(folder)]


def _read_shards(folder: str) -> None:
    knobs = {"data_folder": folder, "sample_rate": 16_000}
    for name in {name for names in sharded_corpus.splits(knobs).values() for name in names}:
        rows = prepare_split(
            sharded_corpus.read(knobs, name),
            split=name,
            normalize=str,
            sample_rate=16_000,
            cache_folder=Path(folder).with_name("cache"),
            keep_empty=True,
        ).dataset
        for clips in read_whole_clips(rows, 16_000):
            assert all(len(each) for each in clips.audio), "no audio"


def _index(change: Callable[[bytes], bytes], folder: Path) -> None:
    file = folder / sharded_corpus.INDEX
    file.write_bytes(change(file.read_bytes()))


def _seeded(mutate: Mutate, seed: int, content: bytes) -> bytes:
    return mutate(content, seed)


def _in_index(change: Callable[[Any], Any], folder: Path) -> None:
    def changed(content: bytes) -> bytes:
        values = json.loads(content)
        change(values)
        return json.dumps(values).encode()

    _index(changed, folder)


def _table_of(change: Callable[[bytes], bytes], folder: Path) -> None:
    """Change the table of the shard, and its checksum in the index."""
    (file,) = folder.glob("train-*.parquet")
    file.write_bytes(change(file.read_bytes()))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    _in_index(lambda values: values["splits"]["train"][0].update(table_sha256=digest), folder)


def _with_place(change: Callable[[dict[str, Any]], Any], content: bytes) -> bytes:
    """Let the table say that audio lies elsewhere, and the like."""
    table = pq.read_table(pa.BufferReader(content))
    column = table.column_names.index(sharded_corpus.SHARDED)
    places = table[sharded_corpus.SHARDED].to_pylist()
    for place in places:
        change(place)
    changed = table.set_column(
        column, table.schema.field(column), pa.array(places, table.schema.field(column).type)
    )
    sink = pa.BufferOutputStream()
    pq.write_table(changed, sink)
    return bytes(sink.getvalue())


def _with_column(name: str, column: pa.Array, content: bytes) -> bytes:
    """Let a column of the table hold something else, in a row."""
    table = pq.read_table(pa.BufferReader(content))
    if name in table.column_names:
        table = table.drop_columns([name])
    sink = pa.BufferOutputStream()
    pq.write_table(table.append_column(name, column), sink)
    return bytes(sink.getvalue())


def _file_of(suffix: str, make: Callable[[Path], Any], folder: Path) -> None:
    (file,) = (*folder.glob(f"train-*{suffix}"), *folder.glob(f"sbkit-*{suffix}"))
    _instead(file, make)


SHARDS: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda folder: None,
    **{
        f"{suffix} {trick}": partial(_file_of, suffix, make)
        for suffix in (".json", ".parquet", ".arrow")
        for trick, make in STRANGE.items()
    },
    **{
        f"index mutant {seed}": partial(_index, partial(_seeded, mutate_json, seed))
        for seed in range(40)
    },
    **{
        f"table mutant {seed}": partial(_table_of, partial(_seeded, mutate_bytes, seed))
        for seed in range(40)
    },
    **{
        f"place {name} {value}": partial(
            _table_of, partial(_with_place, lambda place, n=name, v=value: place.update({n: v}))
        )
        for name, value in (
            ("start", -1), ("start", 2**62), ("size", -1), ("size", 2**40), ("size", 0),
            ("size", 3), ("crc32", -1), ("file", "/etc/passwd"), ("store", "none"),
        )
    },
    **{
        f"column {name} {column.type} {column[0]}": partial(
            _table_of, partial(_with_column, name, column)
        )
        for name, column in product(
            ("samples", "id", "sentence", "audio_shard", "speaker"),
            (pa.array([value]) for value in (None, 0, -5, 2**62, 0.5, "x", b"\xff", [1])),
        )
    },
    "rows of a megabyte": partial(_table_of, lambda _: _columns(100_000, length=1_000_000)),
}  # fmt: skip
# The index, not the table, says which file holds the audio, and how.
UNREAD = ("as it is", "index mutant", "table mutant", "place file", "place store")
UNREAD += ("column id", "column sentence", "column speaker")
COMMANDS: dict[str, Callable[[str], None]] = {
    "release": _release,
    "arpa": _read_arpa,
    "shards": _read_shards,
}
