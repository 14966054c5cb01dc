"""Scripted and Spontaneous Speech of Common Voice, as fake releases with real MP3s."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import soundfile

from docs.reference import LOG_FIELDS, SUMMARY_FIELDS, compare_fields
from sbkit.base.errors import SbkitError
from sbkit.check.check import check_run
from sbkit.check.data import check_data
from sbkit.commands.cli import run as sbkit
from sbkit.data.corpus import corpus_of
from sbkit.data.manifest import Manifest
from sbkit.logs.run_log import read_log
from tests.check.harness import declared_run
from tests.runs import TINY, Workplace, read_json, rows_of, train_here
from tests.stores import read_split
from tools import fake_common_voice as fake

SCRIPTED, SPONTANEOUS = "cv-corpus-0.0-2026-01-01", "sps-corpus-0.0-2026-01-01-en"


@pytest.fixture(scope="module")
def releases(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a release of each product, as a folder and as an archive, by the command."""
    folder = tmp_path_factory.mktemp("releases")
    for product in ("scripted", "spontaneous"):
        command = ["fake", f"--product={product}", "--clips=64", f"--out={folder}"]
        with patch.object(sys, "argv", command):
            fake.main()
    return folder


@pytest.fixture
def table(releases: Path, tmp_path: Path) -> Path:
    """Return the table of a release of Spontaneous Speech to change."""
    release = tmp_path / SPONTANEOUS
    release.mkdir()
    (release / "audios").symlink_to(releases / SPONTANEOUS / "audios")
    return Path(shutil.copy(releases / SPONTANEOUS / "ss-corpus-en.tsv", release))


def read(release: Path, split: str, language: str = "en", **settings: object) -> Manifest:
    return read_split({"data_folder": release, "language": language, **settings}, split)


def change(table: Path, *columns: str, **values: str) -> None:
    """Set the values of columns in all rows, and leave out ``columns``."""
    rows = [{**row, **values} for row in rows_of(table)]
    fake.write_tsv(table, [{k: v for k, v in row.items() if k not in columns} for row in rows])


def test_spontaneous_rows_have_the_splits_of_the_table(table: Path) -> None:
    """A row without one follows its speaker, or is for training; older tables lack columns."""
    change(table, "quality_tags", "char_per_sec", "age", "accents", "variant")
    rows = rows_of(table)
    speaker = next(row["client_id"] for row in rows if row["split"] == "test")
    follower = next(row for row in rows if row["split"] == "dev")
    follower |= {"client_id": speaker, "split": ""}
    fake.write_tsv(table, rows)
    ids: dict[str, set[str]] = {name: set() for name in ("train", "dev", "test", "")}
    for row in rows:
        if row["transcription"]:
            ids[row["split"]].add(Path(row["audio_file"]).stem)
    own = {Path(follower["audio_file"]).stem}
    manifests = {split: read(table.parent, split) for split in ("train", "dev", "test")}
    assert {*manifests["test"].ids} == ids["test"] | own
    assert {*manifests["dev"].ids} == ids["dev"]
    assert {*manifests["train"].ids} == ids["train"] | ids[""] - own
    num_pending = sum(row["split"] == "unassigned" for row in rows)
    assert manifests["train"].filtered == {"not transcribed": num_pending}
    clip = manifests["train"][1]
    assert (clip.id, clip.columns["language"]) == ("spontaneous-speech-en-2", "en")
    assert {"speaker", "gender", "duration_ms"} <= {*clip.columns}


@pytest.mark.parametrize("assigned", ["", "unassigned"])
def test_speakers_are_dealt_if_the_table_assigns_none(assigned: str, table: Path) -> None:
    change(table, split=assigned)
    manifests = {split: read(table.parent, split) for split in ("train", "dev", "test")}
    sizes = Counter({split: len(manifest) for split, manifest in manifests.items()})
    assert min(sizes.values()) > 0
    assert sizes["train"] > 0.5 * sizes.total()
    speakers = [{clip.columns["speaker"] for clip in m} for m in manifests.values()]
    assert sum(map(len, speakers)) == len(set.union(*speakers))


def test_newest_release_in_a_folder_is_read(table: Path) -> None:
    for version, sentence in (("9.0-2026-04-01", "old"), ("10.0-2026-07-01", "new")):
        release = shutil.copytree(table.parent, table.parents[1] / f"sps-corpus-{version}-en")
        change(release / table.name, transcription=sentence)
    table.unlink()
    assert {*read(table.parents[1], "train").sentences} == {"new"}


def test_wrong_language_is_named(releases: Path) -> None:
    with pytest.raises(SbkitError, match=r"no ss-corpus-fr\.tsv, but ss-corpus-en\.tsv"):
        read(releases / SPONTANEOUS, "train", language="fr")


def test_training_on_validated_leaves_out_dev_and_test(releases: Path) -> None:
    release = releases / SCRIPTED / "en"
    sizes = {name: len(rows_of(release / f"{name}.tsv")) for name in ("validated", "dev", "test")}
    manifest = read(releases / SCRIPTED, "validated", splits={"train": "validated"})
    assert len(manifest) == sizes["validated"] - sizes["dev"] - sizes["test"]
    assert manifest.filtered == {"also in dev or test": sizes["dev"] + sizes["test"]}
    settings = {"splits": {"train": "train", "test": "validated"}}
    assert len(read(releases / SCRIPTED, "validated", **settings)) == sizes["validated"]
    settings = {"data_folder": releases / SCRIPTED, "language": "en"}
    with pytest.raises(SbkitError, match="Choose from: dev, other, test, train, validated"):
        corpus_of({**settings, "splits": {"train": "clip_durations"}}).roles()


def test_datasheet_names_the_corpus_and_its_license(releases: Path, tmp_path: Path) -> None:
    settings = {"data_folder": releases / SPONTANEOUS, "language": "en"}
    assert corpus_of(settings).describe() == {
        "name": f"Mozilla Common Voice Spontaneous Speech, invented speakers ({SPONTANEOUS[:-3]})",
        "license": "CC-BY-SA-3.0",
    }
    release = shutil.copytree(releases / SCRIPTED / "en", tmp_path / "en")
    text = "## Licence\n\nReleased under\nCC-0.\n\n## Authors\n"
    (release / "README.md").write_text(text)
    settings = {"data_folder": release, "language": "en"}
    corpus = corpus_of(settings).describe()
    assert corpus == {"name": None, "license": "Released under CC-0."}
    shards = tmp_path / "shards"
    command = ["prepare", "hparams/ctc.yaml", f"--out={shards}", "--language=en"]
    assert sbkit([*command, f"--data_folder={release}"]) == 0
    assert corpus_of({"data_folder": str(shards)}).describe().items() >= corpus.items()


@pytest.fixture
def scripted(releases: Path, tmp_path: Path, own_cache: Path) -> Path:
    """Copy the release of Scripted Speech, to change it, and use an empty cache."""
    return shutil.copytree(releases / SCRIPTED, tmp_path / SCRIPTED)


def test_durations_plan_and_report_without_decoding(
    scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for clip in (scripted / "en/clips").iterdir():
        clip.write_bytes(b"no audio")
    options = ["hparams/ctc.yaml", f"--data_folder={scripted}"]
    report = tmp_path / "report"
    assert sbkit(["prepare", *options, "--audio_store=lazy", f"--report={report}"]) == 0
    durations = rows_of(scripted / "en/clip_durations.tsv")
    facts = read_json(report / "data_report.json")["splits"]
    tables = [scripted / f"en/{name}.tsv" for name in ("train", "dev", "test")]
    rows = [row for table in tables for row in rows_of(table)]
    milliseconds = {row["clip"]: int(row["duration[ms]"]) for row in durations}
    hours = sum(milliseconds[row["path"]] for row in rows) / 3_600_000
    assert sum(split["hours"] for split in facts.values()) == pytest.approx(hours, abs=2e-5)
    with pytest.raises(SbkitError, match="train .* unreadable audio"):
        sbkit(["prepare", *options])
    fake.write_tsv(scripted / "en/clip_durations.tsv", durations[9:])
    with pytest.raises(SbkitError, match=r"`audio_store: lazy` needs .* and 5 more have none"):
        sbkit(["prepare", *options, "--audio_store=lazy"])


@pytest.mark.slow
def test_clip_of_another_length_is_named(
    scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rows_of(scripted / "en/train.tsv")[2]
    clip = scripted / "en/clips" / row["path"]
    samples, rate = soundfile.read(clip)
    soundfile.write(clip, samples[: -int(0.06 * rate)], rate)
    options = ["hparams/ctc.yaml", f"--data_folder={scripted}", f"--report={tmp_path / 'report'}"]
    assert sbkit(["prepare", *options]) == 0
    assert f"train: 1 clip not as long as stated: {clip.stem}" in capsys.readouterr().out
    clips = read_json(tmp_path / "report/data_report.json")["splits"]["train"]["other_durations"]
    assert [item["id"] for item in clips] == [clip.stem]
    workplace = Workplace(scripted, tmp_path / "cache")
    with declared_run(workplace, tmp_path / "run", "--max_seconds=6") as declared:
        findings = check_run(declared, checks=[check_data]).findings
    assert "shorter than their corpus states: 1 of" in "\n".join(map(str, findings))
    lazy = ("--audio_store=lazy", "--max_seconds=6", "--number_of_epochs=1")
    assert workplace.train_here(tmp_path / "lazy", *lazy) == 0
    text = (tmp_path / "lazy/train.log").read_text()
    assert text.count("but its corpus states") == text.count(f"{clip.stem} lasts") == 1


IF_ANY = ("greedy.KEY", "normalized.KEY", "confidence.KEY", "notes")


@pytest.mark.slow
def test_both_products_train_in_one_run(
    releases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = f"[{releases / SCRIPTED}, {releases / SPONTANEOUS}.tar.gz]"
    run = tmp_path / "run"
    options = [*TINY, "--max_seconds=6", "--number_of_epochs=1", f"--output_folder={run}"]
    options += [f"--data_folder={folders}", "--report_by=[variant, accents]", "--keep_tags=[noise]"]
    assert train_here(["train.py", "hparams/ctc.yaml", *options], tmp_path / "cache") == 0
    tests = [f"test-{SCRIPTED}", f"test-{SPONTANEOUS}"]
    summary = read_json(run / "summary.json")
    assert [*summary["test"]] == tests
    assert all((run / f"wer_{name}.txt").is_file() for name in tests)
    log = read_log(run / "train_log.jsonl")
    unknown, missing = compare_fields(SUMMARY_FIELDS, [summary])
    if_any = {
        "before_training.SET.KEY",
        "ends_with_start",
        *(f"test.SET.{name}" for name in IF_ANY),
    }
    assert not unknown and missing <= if_any
    assert compare_fields(LOG_FIELDS, log) == (set(), {"source_loss/SOURCE", "grad_scale"})
    assert [record["split"] for record in log if record["kind"] == "test"] == tests
    (epoch,) = [record for record in log if record["kind"] == "epoch"]
    assert {"CER", f"dev-{SCRIPTED}/CER", f"dev-{SPONTANEOUS}/WER"} <= epoch.keys()
    assert {*summary["test"][tests[1]]["report_by"]["variant"]} <= {"en-north", "en-south"}
    report = read_json(run / "data_report.json")
    assert report["corpus"]["license"] == "CC-BY-SA-3.0"
    assert report["corpus"]["name"].count("Mozilla Common Voice") == 2
    assert "[noise]" in (run / "tokenizer.model").read_bytes().decode("latin-1")
    out = tmp_path / "scores"
    table = releases / SPONTANEOUS / "ss-corpus-en.tsv"
    capsys.readouterr()
    assert sbkit(["score", str(run), str(table), f"--out={out}", "--decoder=greedy", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert compare_fields(SUMMARY_FIELDS, [printed])[0] == set()
    scored = json.loads((out / "summary.json").read_text())["test"]["ss-corpus-en"]
    assert printed == {"test": {"ss-corpus-en": scored}, "model": str(run)}
    assert scored["utterances"] == sum(row["transcription"] != "" for row in rows_of(table))
    assert sbkit(["export", str(run), f"--out={tmp_path / 'bundle'}"]) == 0
    assert "- license of the corpus: CC-BY-SA-3.0" in (tmp_path / "bundle/README.md").read_text()


def test_joined_folders_have_names_of_their_own(releases: Path, tmp_path: Path) -> None:
    """The name of one may be the end of another's: `cv-corpus/en` beside `sps-en`."""
    full, delta = releases / SCRIPTED / "en", tmp_path / "delta"
    delta.mkdir()
    for name in ("clips", "validated.tsv"):
        (delta / name).symlink_to(full / name)
    (tmp_path / "sps-en").symlink_to(releases / SPONTANEOUS)
    folders = [str(full), str(tmp_path / "sps-en"), str(delta)]
    chosen = {"train": ["validated-en", "validated-delta"], "valid": "dev-sps-en"}
    settings = {"data_folder": folders, "language": "en", "splits": chosen}
    roles = corpus_of(settings).roles()
    assert roles == {
        "train": ("validated-en", "validated-delta"),
        "valid": ("dev-sps-en",),
        "test": ("test-en", "test-sps-en"),
    }
    ids = read(full, "validated").ids
    assert read_split(settings, "validated-delta").ids == ids  # which has no dev and test
    validated = read_split(settings, "validated-en")
    assert len(validated) == len(ids) - validated.filtered["also in dev or test"] < len(ids)
    assert read_split(settings, "dev-sps-en").ids == read(tmp_path / "sps-en", "dev").ids
    (tmp_path / "x").mkdir()
    (tmp_path / "x/en").symlink_to(full)
    settings["data_folder"] = [str(full), str(tmp_path / "x/en")]
    assert "dev-x-en" in corpus_of(settings | {"splits": None}).roles()["valid"]
    with pytest.raises(SbkitError, match="Two of the folders in `data_folder` have the same name"):
        corpus_of(settings | {"data_folder": [str(full), str(full)]})
