"""What is kept never outlives what it was made from: an empty cache is the oracle."""

import ast
import hashlib
import importlib
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from csv import DictReader
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from multiprocessing import get_context
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes import prepare as recipe
from recipes.synthesis import data as synthesis
from recipes.synthesis.data import prepare_spoken
from sbkit.audio.fbank import Fbank
from sbkit.audio.io import encode_audio
from sbkit.base import kept
from sbkit.base.errors import SbkitError
from sbkit.config.hparams import read_knobs
from sbkit.data import cache, clips, splits
from sbkit.data.cache import prune_orphans
from sbkit.data.report import measure_data
from sbkit.data.rows import store_rows
from sbkit.data.shard import AUDIO, read_rows
from sbkit.data.splits import Splits, read_column, read_transcripts
from sbkit.models.layers import GlobalNorm
from sbkit.text.tokenizer import ensure_tokenizer
from sbkit.train.model_state import inputs_of_statistics, measure_normalization
from tests.calls import note_calls
from tests.train.test_statistics import CPU, loader_of

ROOT = Path(__file__).parents[2]
YAML = ROOT / "hparams" / "ctc.yaml"
SPLITS = ("train", "dev", "test")
HEADER = ("path", "sentence", "speaker", "gender", "duration_ms")
MODULE = """
import csv
from pathlib import Path
from sbkit.data.manifest import Clip, Manifest
def files(knobs): return [Path(knobs["data_folder"])]
def splits(knobs): return {"train": ["train"], "valid": ["dev"], "test": ["test"]}
def read(knobs, split):
    from fresh_helper import change
    folder = Path(knobs["data_folder"])
    rows = csv.DictReader((folder / f"{split}.csv").read_text().splitlines())
    return Manifest.of(Clip(r["path"], folder / r["path"], change(r["sentence"])) for r in rows)
"""


def tone(number: int, samples: int = 1600) -> bytes:
    """Return a WAV file."""
    wave = 1000 * np.sin(np.arange(samples) * (number + 1) / 100)
    return encode_audio(wave.astype(np.int16), 16_000, "WAV")


@dataclass
class Corpus:
    """A corpus that edits change."""

    folder: Path
    knobs: dict[str, Any]
    tables: list[Path]
    separator: str = ","
    modules: list[Path] = field(default_factory=list)
    version: int = 0  # of sbkit's code
    pack: Callable[[], None] = lambda: None  # called after an edit


def write_tables(folder: Path, separator: str = ",", suffix: str = "csv") -> Corpus:
    """Write three tables of four clips each."""
    (folder / "clips").mkdir(parents=True)
    tables = [folder / f"{split}.{suffix}" for split in SPLITS]
    for number, table in enumerate(tables):
        lines = [separator.join(HEADER)]
        for row in range(4):
            name = f"clips/{table.stem}{row}.wav"
            (folder / name).write_bytes(tone(4 * number + row))
            lines.append(separator.join((name, f"Word {row}.", f"s{row % 2}", "female", "100")))
        table.write_text("\n".join(lines) + "\n")
    return Corpus(folder, {"manifest": {t.stem: str(t) for t in tables}}, tables, separator)


def make_release(folder: Path) -> Corpus:
    corpus = write_tables(folder, "\t", "tsv")
    for table in corpus.tables:
        table.write_text(table.read_text().replace("clips/", "").replace("speaker", "client_id"))
    corpus.knobs = {"data_folder": str(folder)}
    return corpus


def make_archive(folder: Path) -> Corpus:
    corpus = make_release(folder)
    archive = folder.with_suffix(".tar")

    def pack() -> None:
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, "release")

    corpus.knobs, corpus.pack = {"data_folder": str(archive)}, pack
    return corpus


def make_parquet(folder: Path) -> Corpus:
    corpus = write_tables(folder)

    def pack() -> None:
        for table in corpus.tables:
            rows = [dict(row) for row in DictReader(table.read_text().splitlines())]
            for row in rows:
                file = folder / row.pop("path")
                content = file.read_bytes() if file.is_file() else None
                row["audio"] = {"bytes": content, "path": file.name}
            pq.write_table(pa.Table.from_pylist(rows), table.with_suffix(".parquet"))

    manifest = {table.stem: str(table.with_suffix(".parquet")) for table in corpus.tables}
    corpus.knobs, corpus.pack = {"manifest": manifest}, pack
    return corpus


def make_kaldi(folder: Path) -> Corpus:
    corpus = write_tables(folder)
    for table in corpus.tables:
        rows = [*DictReader(table.read_text().splitlines())]
        table.with_suffix("").mkdir()
        for name, column in (("wav.scp", "path"), ("text", "sentence"), ("utt2spk", "speaker")):
            prefix = f"{folder}/" if name == "wav.scp" else ""
            lines = [f"u{row} {prefix}{rows[row][column]}\n" for row in range(4)]
            (table.with_suffix("") / name).write_text("".join(lines))
    folders = [table.with_suffix("") for table in corpus.tables]
    manifest = {table.name: str(table) for table in folders}
    tables = [table / name for table in folders for name in ("text", "utt2spk")]
    return Corpus(folder, {"manifest": manifest}, tables, " ")


def make_module(folder: Path) -> Corpus:
    """Write a module of the user's with two data folders, and one that it imports."""
    modules = [folder / f"fresh_{name}.py" for name in ("corpus", "helper")]
    parts = [write_tables(folder / name) for name in "ab"]
    for file, source in zip(modules, (MODULE, "change = str.upper\n"), strict=True):
        file.write_text(source)
    knobs = {"corpus": "fresh_corpus", "data_folder": [str(part.folder) for part in parts]}
    return Corpus(folder, knobs, [*parts[0].tables, *parts[1].tables], modules=modules)


MAKERS = (write_tables, make_release, make_archive, make_parquet, make_kaldi, make_module)

# Edits


def rewrite(file: Path, content: bytes) -> None:
    """Write a file in place, and restore its time."""
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit_table(corpus: Corpus, random: Random) -> None:
    """Change a field, or the rows; the size may stay, and the time is restored."""
    table = random.choice(corpus.tables)
    header, *lines = table.read_text().splitlines()
    row = random.randrange(len(lines))
    fields = lines[row].split(corpus.separator)
    action = random.choice(["letter", "letter", "tag", "order", "remove", "add", "exchange"])
    if action == "letter":
        index = random.randrange(len(fields))
        fields[index] = fields[index][:-1] + random.choice("abc123")
    elif action == "tag":
        fields[1] += " [noise]"
    lines[row] = corpus.separator.join(fields)
    if action == "order":
        lines.reverse()
    elif action == "remove":
        lines = lines[1:] or lines
    elif action == "add":
        lines.append(lines[row].replace("0.wav", "1.wav"))
    elif action == "exchange":
        other = random.choice([t for t in corpus.tables if t.suffix or t.name == table.name])
        content = other.read_bytes()
        rewrite(other, table.read_bytes())
        rewrite(table, content)
        return
    rewrite(table, "\n".join([header, *lines, ""]).encode())


def edit_clip(corpus: Corpus, random: Random) -> None:
    """Change a clip in place with time and size restored, rename one over it, or remove it."""
    file = random.choice(sorted(corpus.folder.rglob("*.wav*")))
    action = random.choice(["in place", "in place", "renamed", "longer", "gone"])
    if action == "gone":  # or back again
        file.rename(file.with_suffix(".wav_" if file.suffix == ".wav" else ".wav"))
        return
    content = tone(random.randrange(100), 2400 if action == "longer" else 1600)
    if action == "renamed":
        other = corpus.folder / "other.wav"
        other.write_bytes(content)
        other.replace(file)
    else:
        rewrite(file, content)


def edit_knobs(corpus: Corpus, random: Random) -> None:
    key, values = random.choice(
        [
            ("language", ["de", "en"]),
            ("text", [{"case": "keep"}, {}]),
            ("where", [{"speaker": "s0"}, {}]),
            ("keep_tags", [["noise"], []]),
            ("sample_rate", [8000, 16_000]),
            ("audio_store", ["flac", "pcm", "lazy"]),
            ("splits", [{"test": []}, None]),
        ]
    )
    corpus.knobs[key] = random.choice(values)


def edit_code(corpus: Corpus, random: Random) -> None:
    """Change the user's module, or else sbkit's own code."""
    if corpus.modules:
        source = f"change = lambda text: f'{{text}} {random.randrange(10)}'\n"
        rewrite(corpus.modules[1], source.encode())
    else:
        corpus.version += 1


EDITS = (edit_table, edit_table, edit_clip, edit_clip, edit_knobs, edit_code)


# The oracle


def be_version(number: int, patches: pytest.MonkeyPatch) -> None:
    """Be a version of sbkit that decodes and normalizes in a way of its own."""
    normalizer, encode = recipe.transcript_normalizer, clips.encode_audio
    patches.setattr(kept, "code_identity", lambda: f"{number:08}")
    patches.setattr(cache, "audio_identity", lambda: f"{number:08}")
    patches.setattr(
        recipe, "transcript_normalizer", lambda *a: lambda text: f"{normalizer(*a)(text)} {number}"
    )
    patches.setattr(clips, "encode_audio", lambda clip, *a, **o: encode(clip + number, *a, **o))


def prepare(corpus: Corpus, **knobs: object) -> Splits:
    return recipe.prepare_transcripts(read_knobs(YAML, {"min_seconds": 0, **corpus.knobs, **knobs}))


def rows_of(prepared: Splits) -> list[tuple[bytes, str]]:
    """Return the columns and the samples of all clips."""
    splits = prepared.named().values()
    rows = chain(*(read_rows(split, range(len(split))) for split in splits))
    return [(row.pop(AUDIO).tobytes(), f"{row}") for row in rows]


def observe(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return all that a run sees of a corpus, or the error."""
    for file in corpus.modules:
        sys.modules.pop(file.stem, None)
    with monkeypatch.context() as patches:
        patches.syspath_prepend(corpus.folder)
        if corpus.version:
            be_version(corpus.version, patches)
        try:
            prepared = prepare(corpus)
            facts = measure_data(prepared, sample_rate=16_000, language="en")
            told = prepared.excluded, prepared.filtered, prepared.fingerprints, facts
            seen = f"{rows_of(prepared)} {told}"
        except SbkitError as error:
            seen = f"error: {error}"
    return seen.replace(str(kept.default_cache()), "CACHE")


@pytest.mark.slow(40)
@pytest.mark.parametrize("make", MAKERS)
def test_edited_data_are_as_with_an_empty_cache(
    make: Callable[[Path], Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "MAX_UNUSABLE_SHARE", 1.0)
    whatever_happens = [
        note_calls(monkeypatch, kept, "_replace", lambda path, _: path),
        note_calls(monkeypatch, hashlib, "file_digest", lambda file, _: file),
        note_calls(monkeypatch, clips, "read_audio", lambda path, *_: path),
    ]
    random = Random(make.__name__)
    corpus = make(tmp_path / "corpus")
    for edit in (lambda *_: None, *random.sample(EDITS * 2, k=12)):
        edit(corpus, random)
        corpus.pack()
        monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "used"))
        seen = observe(corpus, monkeypatch)
        for calls in whatever_happens:
            calls.clear()
        assert observe(corpus, monkeypatch) == seen
        assert seen.startswith("error") or not any(whatever_happens)
        monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / f"empty {random.random()}"))
        assert seen == observe(corpus, monkeypatch)


# Every kind


def list_kinds() -> set[object]:
    """Return the kinds that the source passes to `keep`, but those of `with_column`."""
    kinds = set()
    for file in chain(*((ROOT / folder).rglob("*.py") for folder in ("sbkit", "recipes"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "keep":
                name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                value = ast.unparse(node.args[0])
                kinds.add(vars(importlib.import_module(name)).get(value, value.strip("'")))
    return kinds - {"column", "split"}  # parameters of `with_column` and `prepare_split`


def use_every_kind(folder: Path) -> None:
    """Prepare a recognizer's data, a voice's, rows that Python holds, an archive; measure it."""
    corpus = make_archive(folder)
    corpus.pack()
    knobs = {"min_seconds": 0, **corpus.knobs}
    spoken = prepare_spoken(read_knobs(ROOT / "hparams/tts.yaml", knobs))
    measure_data(spoken, sample_rate=16_000, language="en")
    texts = read_column(spoken.train, "text")
    model_file = folder / "tokenizer.model"
    tokenizer = ensure_tokenizer(
        model_file=model_file, kind="char", vocab_size=None, texts=lambda: texts
    )
    read_transcripts(spoken.train, tokenizer)
    store_rows([{"audio": "a.wav", "text": "x"}])
    features, loader = Fbank(n_mels=23), loader_of(spoken.train)
    inputs = inputs_of_statistics(loader, features, __name__, CPU)
    measure_normalization([GlobalNorm(n_mels=23)], features, loader, CPU, inputs)


def leaves(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each leaf of plain data."""
    if isinstance(value, Mapping | list | tuple):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            yield from ((key, *keys) for keys in leaves(value[key]))
    else:
        yield ()


def test_whatever_is_kept_is_made_anew_if_one_input_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    keep = kept.keep

    def note(kind: str, made_from: Mapping[str, Any], make: Any, **options: Any) -> Path:
        calls.append((kind, json.loads(json.dumps(made_from, default=str)), options))
        return keep(kind, made_from, make, **options)

    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get("keep") is keep:
            monkeypatch.setattr(module, "keep", note)
    use_every_kind(tmp_path / "corpus")
    assert {kind for kind, _, _ in calls} == list_kinds() | {"symbols", "pitch"}
    made: list[Path] = []

    def make(path: Path) -> None:
        path.touch()
        made.append(path)

    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "other"))
    for number, (kind, made_from, options) in enumerate(calls):
        by_code = options.get("by_code", True)
        keep_it = partial(keep, kind, make=make, label=f"{number}", by_code=by_code)
        inputs = [made_from]
        for keys in leaves(made_from):
            changed: Any = deepcopy(made_from)
            parent = reduce(getitem, keys[:-1], changed)
            parent[keys[-1]] = f"not {parent[keys[-1]]}"
            inputs.append(changed)
        paths = [keep_it(made_from=each) for each in inputs]
        assert len({*paths}) == len(made) == len(inputs) > 1
        assert [keep_it(made_from=each) for each in inputs] == paths
        with monkeypatch.context() as patches:
            be_version(1, patches)
            keep_it(made_from=made_from)
        assert len(made) == len(inputs) + by_code
        made.clear()


# Where a user meets it


def replace_in(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def test_facts_are_those_of_the_corrected_table(tmp_path: Path) -> None:
    corpus = write_tables(tmp_path / "corpus")
    replace_in(corpus.tables[1], ".,s", ".,t")

    def measure() -> tuple[Any, Any]:
        facts = measure_data(prepare(corpus), sample_rate=16_000, language="en")
        counts = {s["splits"][1]: s["values"] for s in facts["shared"] if s["column"] == "speaker"}
        return counts["dev"], [change["kind"] for change in facts["splits"]["train"]["changes"]]

    before = measure()
    replace_in(corpus.tables[1], ".,t", ".,s")
    replace_in(corpus.tables[0], ".,", ". [noise],")
    after = measure()
    assert (before[0], after[0]) == (0, 2)
    assert "tags" in str(after[1]) and "tags" not in str(before[1])


def test_clips_that_are_recorded_again_are_decoded_alone(
    tmp_path: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    corpus = write_tables(tmp_path / "corpus")
    before = rows_of(prepare(corpus))
    decoded.clear()
    for number in range(3):
        rewrite(clip := tmp_path / f"corpus/clips/train{number}.wav", tone(50 + number))
    after = rows_of(prepare(corpus))
    assert sorted(decoded) == ["train0", "train1", "train2"] and clip.stem == "train2"
    assert "3 audio files of 12 changed" in caplog.text
    assert after[3:] == before[3:] and not {*after[:3]} & {*before}
    caplog.clear()
    prepare(corpus)
    assert "changed" not in caplog.text


def test_symbols_follow_sentences_and_the_code_that_spells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_tables(tmp_path / "corpus")
    knobs = read_knobs(ROOT / "hparams/tts.yaml", {"min_seconds": 0, **corpus.knobs})
    assert prepare_spoken(knobs).train["symbols"][0] == "word zero."
    replace_in(corpus.tables[0], ".,", ",")
    assert prepare_spoken(knobs).train["symbols"][0] == "word zero"
    monkeypatch.setattr(kept, "code_identity", lambda: "another!")
    monkeypatch.setattr(synthesis, "read_texts", lambda texts, *_: texts)
    assert prepare_spoken(knobs).train["symbols"][0] == "Word 0"


def test_clip_that_changes_while_it_is_decoded_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_tables(tmp_path / "corpus")
    read_audio = clips.read_audio

    def read(path: str, *arguments: Any) -> Any:
        samples = read_audio(path, *arguments)
        Path(path).write_bytes(tone(99))
        return samples

    with monkeypatch.context() as patches:
        patches.setattr(clips, "read_audio", read)
        with pytest.raises(SbkitError, match="train0.wav has changed while it was decoded"):
            prepare(corpus)
    found = rows_of(prepare(corpus))
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "empty"))
    assert found == rows_of(prepare(corpus))


# Copies, and caches of several users


@pytest.mark.parametrize("original", ["kept", "removed", "changed"])
@pytest.mark.parametrize("copy", [shutil.copy, shutil.copy2])
def test_cache_that_is_copied_with_its_data_is_used(
    copy: Any, original: str, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_release(tmp_path / "corpus")
    expected = rows_of(prepare(corpus))
    for source, target in (("corpus", "other name"), ("cache", "copied")):
        shutil.copytree(tmp_path / source, tmp_path / target, copy_function=copy)
    for clip in sorted((tmp_path / "corpus/clips").iterdir()) if original == "changed" else ():
        rewrite(clip, tone(77))
    if original == "removed":
        shutil.rmtree(tmp_path / "corpus")
        shutil.rmtree(tmp_path / "cache")
    decoded.clear()
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "copied"))
    corpus.knobs = {"data_folder": str(tmp_path / "other name")}
    assert rows_of(prepare(corpus)) == expected
    assert not decoded
    if original == "removed":  # its folder of the cache is still needed
        prune_orphans(tmp_path / "copied")
        assert rows_of(prepare(corpus)) == expected
    rewrite(tmp_path / "other name/clips/dev1.wav", tone(78))
    assert rows_of(prepare(corpus)) != expected
    assert decoded == ["dev1"]


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_shared_cache_is_read_and_never_written_to(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_archive(tmp_path / "corpus")
    corpus.pack()

    def use() -> object:
        knobs = read_knobs(ROOT / "hparams/tts.yaml", {"min_seconds": 0, **corpus.knobs})
        spoken = prepare_spoken(knobs)
        facts = measure_data(spoken, sample_rate=16_000, language="en")
        return rows_of(spoken), facts, spoken.train["symbols"], store_rows([{"text": "x"}]).name

    shared = tmp_path / "shared"
    monkeypatch.setenv("SBKIT_CACHE", str(shared))
    seen = use()
    before = snapshot(shared)
    decoded.clear()
    for caches in (f"{tmp_path / 'own'}:{shared}", str(shared)):
        monkeypatch.setenv("SBKIT_CACHE", caches)
        assert use() == seen
        assert not decoded
    assert not [*(tmp_path / "own").glob("[!f]*/*")]
    monkeypatch.setenv("SBKIT_CACHE", f"{tmp_path / 'own'}:{shared}")
    rewrite(tmp_path / "corpus/clips/dev1.wav", tone(78))
    corpus.pack()
    use()
    assert decoded == ["dev1"]
    assert snapshot(shared) == before


def test_first_starts_of_several_processes_decode_each_clip_once(tmp_path: Path) -> None:
    corpus = write_tables(tmp_path / "corpus")
    context = get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()

    def start() -> None:
        barrier.wait()
        with pytest.MonkeyPatch.context() as patches:
            notes = note_calls(patches, clips, "read_audio", lambda path, *_: Path(path).name)
            results.put((rows_of(prepare(corpus)), notes))

    processes = [context.Process(target=start) for _ in range(3)]
    for process in processes:
        process.start()
    (first, *others), notes = zip(*(results.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert others == [first] * 2
    assert sorted(chain(*notes)) == sorted(f"{s}{n}.wav" for s in SPLITS for n in range(4))
