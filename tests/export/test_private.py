"""What of a corpus bundles, runs and the cache have: a bundle is published, and has nothing."""

import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from sbkit.data.data_report import write_data_report
from sbkit.export.export import export_run
from sbkit.models.pretrained.folder import read_encoder_config
from sbkit.run.run import Run
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE
from sbkit.text.normalization import normalize
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import Workplace, rows_of
from tests.runtime.bundles import ROOT, make_run

# docs/security.md says what of the corpus these have: language models, and pieces of words.
FILES_OF_WORDS = ("lm.safetensors", "tokenizer.model", "tokenizer.json", "vocab.json", "tokens.txt")


def texts_of(release: Path) -> Iterator[str]:
    """Yield sentences of four words or more as written and as learned, and the speakers."""
    for row in [row for table in release.glob("*.tsv") for row in rows_of(table)]:
        yield row["client_id"]
        if len(row["sentence"].split()) >= 4:
            yield from (row["sentence"], normalize(row["sentence"], "en"))


def names_of(release: Path) -> Iterator[str]:
    """Yield ids of eight characters or more, and the path."""
    yield str(release)
    for row in [row for table in release.glob("*.tsv") for row in rows_of(table)]:
        if len(id := Path(row["path"]).stem) >= 8:
            yield id


def leaks(bundle: Path, release: Path, *folders: Path) -> set[tuple[str, str]]:
    """Return the facts of a corpus that the files of a bundle have, with the names of the files.

    folders: further ones whose paths belong to the user.
    """
    places = [str(bundle.parent), *map(str, folders), str(ROOT), sys.prefix, f"{Path.home()}/"]
    texts, names = {*texts_of(release)}, {*names_of(release), *places}
    assert len(texts) > 10 and len(names) > 10
    files = {file for file in bundle.rglob("*") if file.is_file()}
    assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    return {
        (str(file.relative_to(bundle)), fact)
        for file in files
        for content in [file.read_bytes().lower()]
        for fact in (names if file.name in FILES_OF_WORDS else names | texts)
        if fact.lower().encode() in content
    }


def test_card_has_counts_of_the_corpus_only(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, base = tmp_path / "talks of ann", "../models of ann/base"
    release.symlink_to(workplace.release)
    settings = {"data_folder": str(release), "where": {"speaker": "allison"}, "init_from": base}
    run = make_run(tmp_path / "run", **settings, lm_text=[str(release / "allison.txt")])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    splits = Run.open(run).prepare_splits()
    facts = write_data_report(splits, run, sample_rate=16_000, language="en")
    assert facts["splits"]["train"]["transcripts"]  # the report of the run has them
    words = [f"--data_folder={release}", "--where", "speaker=3407", "--where.age", "77"]
    words += ["--lm_text", str(release), f"--init_from={base}", "--lr=0.001", "--precision=fp32"]
    title = shlex.join(["train.py", "../yamls of ann/ctc.yaml", *words, "--Transformer.dropout=0"])
    (run / "train.log").write_text(f"2026-11-21 08:23:38 {title}\n")
    export_run(run, tmp_path / "bundle")
    assert not leaks(tmp_path / "bundle", release)
    card = (tmp_path / "bundle/README.md").read_text()
    assert f"| train | {len(splits.train)} | 0." in card and "batch_seconds 32.0" in card
    command = "train.py ctc.yaml --data_folder=... --where=... --lm_text=... --init_from=..."
    assert f'\n    {command} --lr=0.001 --precision="fp32" --Transformer=...\n' in card
    assert "fine-tuned from: base" in card and "of ann" not in card


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a recognizer with language models, without its longer clips."""
    run = tmp_path_factory.mktemp("private") / "run_of_ctc"
    options = ["--number_of_epochs=1", "--word_lm_order=2", "--token_lm_order=3"]
    options += ["--max_seconds=1.8", "--report_by=[speaker]"]
    assert workplace.train_here(run, *options) == 0
    return run


def make_pretrained_run(name: str, folder: Path, release: Path) -> Path:
    """Make a run with a pretrained encoder of the folder `hub`, as if it was trained."""
    hub, run = folder / "hub" / name, folder / name
    run.mkdir()
    settings: dict[str, object] = {"pretrained": str(hub), "data_folder": str(release)}
    if name == "whisper":
        make_whisper(hub)
        (run / DECODER_TOKENIZER_FILE).write_bytes((hub / "tokenizer.json").read_bytes())
        settings |= {"context_seconds": 3.0}
    else:
        make_folder(hub, **FRAMES)
    yaml = ROOT / f"hparams/{name}.yaml"
    return make_run(run, yaml, **settings, encoder_config=read_encoder_config(hub))


@pytest.mark.slow(60)
def test_bundles_of_all_tasks_and_formats_have_nothing_of_the_corpus(
    task_bundles: Path, trained: Path, workplace: Workplace, tmp_path: Path
) -> None:
    bundles = {name: task_bundles / name for name in ("codec", "tts", "vad")}
    bundles["ctc in its run"] = trained / "bundle"
    runs = {"ctc": (trained, ["onnx", "sherpa-onnx"])}
    for name in ("ctc_pretrained", "whisper"):
        run = make_pretrained_run(name, tmp_path, workplace.release)
        runs[name] = (run, ["huggingface"])
    for name, (run, formats) in runs.items():
        bundles[name] = tmp_path / "exported" / name
        export_run(run, bundles[name], formats=formats)
        for form in formats:
            assert len([*(bundles[name] / form).iterdir()]) > 2, form  # it was written
    for name, bundle in bundles.items():
        assert not leaks(bundle, workplace.release, tmp_path, trained.parent), name


# -- what runs and the cache have ------------------------------------------------------------------

KINDS = ("texts", "ids", "speakers", "paths", "sound")
SOUND = re.compile(rb"\A(ID3|\xff[\xf2\xf3\xfa\xfb])|RIFF....WAVE|fLaC|data:audio")


def kinds_in(content: bytes, release: Path) -> set[str]:
    """Return what of a corpus a file has; texts may be spaced, as in columns."""
    rows = [row for table in release.glob("*.tsv") for row in rows_of(table)]
    texts = [normalize(row["sentence"], "en").split() for row in rows]
    ids = {Path(row["path"]).stem for row in rows}
    words = {
        "texts": [rb"\W+".join(re.escape(w.encode()) for w in text) for text in texts if text[3:]],
        "ids": [re.escape(id.encode()) for id in ids if len(id) >= 8],
        "speakers": [row["client_id"].encode() for row in rows],
        "paths": [re.escape(str(release).encode())],
    }
    kinds = {
        kind for kind, patterns in words.items() if re.search(b"|".join({*patterns}), content, re.I)
    }
    return kinds | ({"sound"} if SOUND.search(content) else set())


class Row(NamedTuple):
    """What of a corpus a file always has, and what it may have, by the page."""

    always: set[str]
    allowed: set[str]


def table_of_files() -> dict[str, Row]:
    """Return the rows of the page by the names of their files."""
    page = (ROOT / "docs/security.md").read_text("utf-8")
    (section,) = re.findall(r"(?s)### Where texts.*?\n\n((?:\|.*\n)+)", page)
    table: dict[str, Row] = {}
    for names, content in re.findall(r"(?m)^\| (`.+?`) \| ([^|;]+)", section):
        kinds = re.findall(rf"(sometimes )?\b({'|'.join(KINDS)})\b", content)
        row = Row({kind for rare, kind in kinds if not rare}, {kind for _, kind in kinds})
        table |= dict.fromkeys(re.findall("`(.+?)`", names), row)
    return table


def is_named(file: Path, name: str) -> bool:
    pattern = re.sub("SET|N", r"\\w+", re.escape(name.rstrip("/")))
    names = file.parts if name.endswith("/") else [file.name]
    return any(re.fullmatch(pattern, part) for part in names)


@pytest.mark.slow(30)
def test_page_says_what_of_the_corpus_each_file_of_runs_and_the_cache_has(
    task_bundles: Path, trained: Path, workplace: Workplace, tmp_path: Path
) -> None:
    options = [f"--data_folder={workplace.release}", "--report", tmp_path / "report"]
    assert workplace.sbkit("prepare", "hparams/ctc.yaml", *options) == 0
    runs = [trained, *(task_bundles.parent / f"run_of_{name}" for name in ("codec", "tts", "vad"))]
    table = table_of_files()
    found = defaultdict[str, set[str]](set)
    for folder in (*runs, tmp_path / "report", workplace.cache):
        for file in [path for path in folder.rglob("*") if path.is_file()]:
            kinds = kinds_in(file.read_bytes(), workplace.release)
            names = [name for name in table if is_named(file.relative_to(folder), name)]
            assert kinds <= {*chain(*(table[name].allowed for name in names))}, (file, kinds)
            for name in names:
                found[name] |= kinds
    unseen = {"heartbeat-N", "archives/", "asterisk-prompts/", "festvox-ru/"}
    assert table.keys() - found.keys() <= unseen  # other tests write into the same cache
    for name, kinds in found.items():
        assert table[name].always <= kinds, name
