"""What is kept never outlives what it was made from: an empty cache is the oracle."""

import hashlib
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from recipes import prepare as recipe
from recipes.synthesis import data as synthesis
from recipes.synthesis.data import prepare_spoken
from sbkit.audio.fbank import Fbank
from sbkit.audio.io import encode_audio
from sbkit.base import content_cache
from sbkit.base.errors import SbkitError
from sbkit.config.hparams import Settings, read_settings
from sbkit.data import cache, clip_decoding, splits
from sbkit.data.batch import UtteranceDataset
from sbkit.data.cache import prune_orphans
from sbkit.data.data_report import measure_data
from sbkit.data.read_manifests import store_rows
from sbkit.data.shard import AUDIO, read_rows
from sbkit.data.splits import Splits, read_column, read_transcripts
from sbkit.models.layers import GlobalNorm
from sbkit.train.model_state import inputs_of_statistics, measure_normalization
from tests.calls import note_calls
from tests.decoding.spoken import char_tokenizer
from tests.runs import ROOT, rows_of, times_of
from tests.train.test_statistics import CPU, loader_of

SPLITS = ("train", "dev", "test")
MODULE = """
from pathlib import Path
from sbkit.data.manifest import Clip, Manifest
from tests.runs import rows_of
def files(settings): return [Path(settings["data_folder"])]
def splits(settings): return {"train": ["train"], "valid": ["dev"], "test": ["test"]}
def read(settings, split):
    from fresh_helper import change
    folder = Path(settings["data_folder"])
    clips, rows = folder / "clips", rows_of(folder / f"{split}.tsv")
    return Manifest.of(Clip(r["path"], clips / r["path"], change(r["sentence"])) for r in rows)
"""


def tone(number: int, samples: int = 1600) -> bytes:
    wave = 1000 * np.sin(np.arange(samples) * (number + 1) / 100)
    return encode_audio(wave.astype(np.int16), 16_000, "WAV")


class Corpus:
    """Three tables of four clips each, which edits change."""

    def __init__(self, folder: Path, form: str = "release") -> None:
        self.folder, self.form = folder, form
        self.tables = [folder / f"{split}.tsv" for split in SPLITS]
        self.helper = folder.with_name("fresh_helper.py")  # of a module of the user
        self.version = 0  # of sbkit's code
        (folder / "clips").mkdir(parents=True)
        for number, table in enumerate(self.tables):
            lines = ["path\tsentence\tclient_id\tgender\tduration_ms\n"]
            for row in range(4):
                name = f"{table.stem}{row}.wav"
                (folder / "clips" / name).write_bytes(tone(4 * number + row))
                lines.append(f"{name}\tWord {row}.\ts{row % 2}\tfemale\t100\n")
            table.write_text("".join(lines))
        self.settings: dict[str, Any] = {"data_folder": str(folder)}
        if form == "archive":
            self.settings = {"data_folder": f"{folder}.tar"}
        elif form == "module":
            folder.with_name("fresh_corpus.py").write_text(MODULE)
            self.helper.write_text("change = str.upper\n")
            folders = [str(folder), shutil.copytree(folder, f"{folder} again")]
            self.settings = {"corpus": "fresh_corpus", "data_folder": folders}
        elif form != "release":
            suffix = "" if form == "kaldi" else ".parquet"
            self.settings = {"manifest": {name: f"{folder}/{name}{suffix}" for name in SPLITS}}
        self.pack()

    def pack(self) -> None:
        """Write what the form makes of the tables, also after an edit."""
        if self.form == "archive":
            with tarfile.open(f"{self.folder}.tar", "w") as tar:
                tar.add(self.folder, "release")
        for table in self.tables if self.form in ("kaldi", "parquet") else ():
            rows: list[dict[str, Any]] = [*rows_of(table)]
            files = [self.folder / "clips" / row.pop("path") for row in rows]
            if self.form == "kaldi":
                write_kaldi(table.with_suffix(""), files, rows)
            else:
                for row, file in zip(rows, files, strict=True):
                    content = file.read_bytes() if file.is_file() else None
                    row["audio"] = {"bytes": content, "path": file.name}
                pq.write_table(pa.Table.from_pylist(rows), table.with_suffix(".parquet"))


def write_kaldi(folder: Path, files: list[Path], rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    sentences, speakers = ([row[name] for row in rows] for name in ("sentence", "client_id"))
    for name, values in (("wav.scp", files), ("text", sentences), ("utt2spk", speakers)):
        lines = [f"u{number} {value}\n" for number, value in enumerate(values)]
        (folder / name).write_text("".join(lines))


# Edits


def rewrite(file: Path, content: bytes) -> None:
    """Write a file in place, and restore its time."""
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit_table(corpus: Corpus, random: Random) -> None:
    """Change a field or the rows; the size may stay, and the time is restored."""
    table = random.choice(corpus.tables)
    header, *lines = table.read_text().splitlines()
    row = random.randrange(len(lines))
    fields = lines[row].split("\t")
    column = random.choice([1, random.randrange(len(fields))])
    fields[column] = fields[column][:-1] + random.choice(["a", "b", "c", "1", "2", " [noise]"])
    changed = [*lines[:row], "\t".join(fields), *lines[row + 1 :]]
    added = [*lines, lines[row].replace("0.wav", "1.wav")]
    lines = random.choice([changed, changed, changed, added, lines[::-1], lines[1:] or lines])
    rewrite(table, "\n".join([header, *lines, ""]).encode())


def exchange_tables(corpus: Corpus, random: Random) -> None:
    tables = random.sample(corpus.tables, 2)
    for table, content in zip(tables, [table.read_bytes() for table in tables][::-1], strict=True):
        rewrite(table, content)


def edit_clip(corpus: Corpus, random: Random) -> None:
    """Change a clip in place with time and size restored, rename one over it, or remove it."""
    file = random.choice(sorted(corpus.folder.rglob("*.wav*")))
    content = tone(random.randrange(100), random.choice([1600, 1600, 2400]))
    action = random.choice(["in place", "in place", "renamed", "gone"])
    if action == "in place":
        rewrite(file, content)
    elif action == "renamed":
        file.with_name("other").write_bytes(content)
        file.with_name("other").rename(file)
    else:  # or back again
        file.rename(file.with_suffix(".wav_" if file.suffix == ".wav" else ".wav"))


def edit_settings(corpus: Corpus, random: Random) -> None:
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
    corpus.settings[key] = random.choice(values)


def edit_code(corpus: Corpus, random: Random) -> None:
    """Change the user's module, or else sbkit's own code."""
    if corpus.form == "module":
        source = f"change = lambda text: f'{{text}} {random.randrange(10)}'\n"
        rewrite(corpus.helper, source.encode())
    else:
        corpus.version += 1


EDITS = (edit_table, edit_table, exchange_tables, edit_clip, edit_clip, edit_settings, edit_code)


# The oracle


def be_version(number: int, patches: pytest.MonkeyPatch) -> None:
    """Be a version of sbkit that decodes and normalizes in a way of its own."""
    normalizer, encode = recipe.transcript_normalizer, clip_decoding.encode_audio
    patches.setattr(content_cache, "code_identity", lambda: f"{number:08}")
    patches.setattr(cache, "audio_identity", lambda: f"{number:08}")
    patches.setattr(
        recipe, "transcript_normalizer", lambda *a: lambda text: f"{normalizer(*a)(text)} {number}"
    )
    patches.setattr(clip_decoding, "encode_audio", lambda x, *a, **o: encode(x + number, *a, **o))


def settings_of(corpus: Corpus, yaml: str) -> Settings:
    return read_settings(ROOT / f"hparams/{yaml}.yaml", {"min_seconds": 0, **corpus.settings})


def prepare(corpus: Corpus) -> Splits:
    return recipe.prepare_transcripts(settings_of(corpus, "ctc"))


def read_all(*splits: Dataset) -> list[tuple[bytes, str]]:
    rows = chain(*(read_rows(split, range(len(split))) for split in splits))
    return [(row.pop(AUDIO).tobytes(), f"{row}") for row in rows]


def clips_of(corpus: Corpus) -> list[tuple[bytes, str]]:
    return read_all(*prepare(corpus).named().values())


def observe(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return all that a run sees of a corpus, or the error."""
    for name in ("fresh_corpus", "fresh_helper"):
        sys.modules.pop(name, None)
    with monkeypatch.context() as patches:
        patches.syspath_prepend(corpus.folder.parent)
        if corpus.version:
            be_version(corpus.version, patches)
        try:
            prepared = prepare(corpus)
            facts = measure_data(prepared, sample_rate=16_000, language="en")
            told = prepared.excluded, prepared.filtered, prepared.fingerprints, facts
            seen = f"{read_all(*prepared.named().values())} {told}"
        except SbkitError as error:
            seen = f"error: {error}"
    return seen.replace(str(content_cache.default_cache()), "CACHE")


@pytest.mark.slow(40)
@pytest.mark.parametrize("form", ("release", "archive", "kaldi", "parquet", "module"))
def test_edited_data_are_as_with_an_empty_cache(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "MAX_UNUSABLE_SHARE", 1.0)
    whatever_happens = [
        note_calls(monkeypatch, content_cache, "_replace", lambda path, _: path),
        note_calls(monkeypatch, hashlib, "file_digest", lambda file, _: file),
        note_calls(monkeypatch, clip_decoding, "read_audio", lambda path, *_: path),
    ]
    random = Random(form)
    corpus = Corpus(tmp_path / "corpus", form)
    for edit in (lambda *_: None, *random.sample(EDITS * 2, k=14)):
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


def use_every_kind(corpus: Corpus) -> list[object]:
    """Prepare a recognizer's data and a voice's, measure them, and store rows of Python."""
    spoken = prepare_spoken(settings_of(corpus, "tts"))
    facts = measure_data(spoken, sample_rate=16_000, language="en")
    texts = read_column(spoken.train, "text")
    tokenizer = char_tokenizer(corpus.folder.parent, texts)
    labels = read_transcripts(spoken.train, tokenizer).tokens.tolist()
    features, norm, loader = Fbank(n_mels=23), GlobalNorm(n_mels=23), loader_of(spoken.train)
    inputs = inputs_of_statistics(loader, features, __name__, CPU)
    measure_normalization([norm], features, loader, CPU, inputs)
    stored = store_rows([{"audio": "a.wav", "text": "x"}]).name
    return [read_all(spoken.train), facts, labels, f"{norm.state_dict()}", stored]


# Where a user meets it


def test_statistics_are_not_those_of_a_lazy_clip_that_was_recorded_again(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "corpus")
    corpus.settings["audio_store"] = "lazy"
    rows = UtteranceDataset(prepare(corpus).train)
    before = rows.identity()
    assert before == rows.identity()
    rewrite(tmp_path / "corpus/clips/train1.wav", tone(50))
    assert before != rows.identity()


def test_symbols_follow_sentences_and_the_code_that_spells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus(tmp_path / "corpus")
    settings = settings_of(corpus, "tts")
    assert prepare_spoken(settings).train["symbols"][0] == "word zero."
    rewrite(corpus.tables[0], corpus.tables[0].read_bytes().replace(b".\t", b"\t"))
    assert prepare_spoken(settings).train["symbols"][0] == "word zero"
    monkeypatch.setattr(content_cache, "code_identity", lambda: "another!")
    monkeypatch.setattr(synthesis, "read_texts", lambda texts, *_: texts)
    assert prepare_spoken(settings).train["symbols"][0] == "Word 0"


def test_clip_that_changes_while_it_is_decoded_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus(tmp_path / "corpus")
    changed = tmp_path / "corpus/clips/train0.wav"
    with monkeypatch.context() as patches:
        note_calls(patches, clip_decoding, "read_audio", lambda *_: changed.write_bytes(tone(99)))
        with pytest.raises(SbkitError, match="train0.wav has changed while it was decoded"):
            prepare(corpus)
    found = clips_of(corpus)
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "empty"))
    assert found == clips_of(corpus)


# Copies, caches of several users, and damage


@pytest.mark.parametrize("is_original_here", [True, False])
def test_cache_that_is_copied_with_its_data_is_used(
    is_original_here: bool,
    tmp_path: Path,
    decoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    corpus = Corpus(tmp_path / "corpus")
    expected = clips_of(corpus)
    for source, target in (("corpus", "other name"), ("cache", "copied")):
        shutil.copytree(tmp_path / source, tmp_path / target)
        if not is_original_here:
            shutil.rmtree(tmp_path / source)
    for clip in corpus.folder.rglob("*.wav"):  # the copy has not changed
        rewrite(clip, tone(77))
    decoded.clear()
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "copied"))
    corpus.settings = {"data_folder": str(tmp_path / "other name")}
    assert clips_of(corpus) == expected
    prune_orphans(tmp_path / "copied")  # which leaves what the copy needs
    assert clips_of(corpus) == expected
    assert not decoded
    rewrite(tmp_path / "other name/clips/dev1.wav", tone(78))
    assert clips_of(corpus) != expected
    assert decoded == ["dev1"]
    assert "1 audio file of 12 changed" in caplog.text


def test_shared_cache_is_read_and_never_written_to(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus(tmp_path / "corpus", "archive")
    own, shared = tmp_path / "own", tmp_path / "shared"
    monkeypatch.setenv("SBKIT_CACHE", str(shared))
    seen = use_every_kind(corpus)
    before = times_of(shared)
    decoded.clear()
    monkeypatch.setenv("SBKIT_CACHE", f"{own}:{shared}")
    assert use_every_kind(corpus) == seen
    assert not decoded
    assert {path.parent.name for path in own.glob("*/*")} <= {content_cache.FILES_FOLDER}
    rewrite(tmp_path / "corpus/clips/dev1.wav", tone(78))
    corpus.pack()
    use_every_kind(corpus)
    assert decoded == ["dev1"]
    assert times_of(shared) == before


def truncate(file: Path) -> None:
    """Replace a file by a part of it; a process that maps it keeps it."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
def test_what_is_damaged_is_made_again(
    damage: Callable[[Path], None], tmp_path: Path, own_cache: Path
) -> None:
    corpus = Corpus(tmp_path / "corpus")
    seen = use_every_kind(corpus)
    for file in [path for path in own_cache.rglob("*") if path.is_file()]:
        damage(file)
    assert use_every_kind(corpus) == seen
