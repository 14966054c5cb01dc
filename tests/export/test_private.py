"""A bundle has no text, id, speaker or path of its corpus, because it is published."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbkit.data.data_report import write_data_report
from sbkit.export.export import export_run
from sbkit.run.run import Run
from sbkit.text.normalization import normalize
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import SHORT, TINY, Workplace, rows_of
from tests.runtime.bundles import make_run

# docs/security.md says what of the corpus these have: language models, and pieces of words.
EXEMPT = ("lm.safetensors", "tokenizer.model", "tokenizer.json", "vocab.json", "tokens.txt")


def facts_of(release: Path) -> Iterator[str]:
    """Yield sentences of four words or more, ids of eight characters or more, speakers, paths."""
    yield str(release)
    for row in [row for table in release.glob("*.tsv") for row in rows_of(table)]:
        yield row["client_id"]
        if len(row["sentence"].split()) >= 4:
            yield from (row["sentence"], normalize(row["sentence"], "en"))
        if len(id := Path(row["path"]).stem) >= 8:
            yield id


def leaks(bundle: Path, release: Path) -> set[tuple[str, str]]:
    """Return the facts of a corpus that the files of a bundle have, with the names of the files."""
    facts = {*facts_of(release)}
    assert len(facts) > 10
    files = [file for file in bundle.rglob("*") if file.is_file() and file.name not in EXEMPT]
    assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    contents = {str(file.relative_to(bundle)): file.read_bytes().lower() for file in files}
    return {(name, f) for f in facts for name, c in contents.items() if f.lower().encode() in c}


def test_card_has_counts_of_the_corpus_only(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "talks of ann"
    release.symlink_to(workplace.release)
    settings = {"data_folder": str(release), "where": {"speaker": "allison"}}
    run = make_run(tmp_path / "run", **settings, lm_text=[str(release / "allison.txt")])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    splits = Run.open(run).prepare_splits()
    facts = write_data_report(splits, run, sample_rate=16_000, language="en")
    assert facts["splits"]["train"]["transcripts"]  # the report of the run has them
    words = [f"--data_folder={release}", "--where", "speaker=allison", "--lm_text", str(release)]
    title = shlex.join(["train.py", "hparams/ctc.yaml", *words, "--lr=0.001"])
    (run / "train.log").write_text(f"2026-11-21 08:23:38 {title}\n")
    export_run(run, tmp_path / "bundle")
    assert not leaks(tmp_path / "bundle", release)
    card = (tmp_path / "bundle/README.md").read_text()
    assert f"| train | {len(splits.train)} | 0." in card
    command = "train.py hparams/ctc.yaml --data_folder=... --where ... --lm_text ... --lr=0.001"
    assert f"\n    {command}\n" in card and "batch_seconds 32.0" in card
    assert "talks of ann" not in card


@pytest.mark.slow(120)
def test_bundles_of_all_tasks_and_formats_have_nothing_of_the_corpus(
    task_bundles: Path, workplace: Workplace, tmp_path: Path
) -> None:
    bundles = [task_bundles / name for name in ("codec", "tts", "vad")]
    wav2vec2, whisper = tmp_path / "hub/wav2vec2", tmp_path / "hub/whisper"
    make_folder(wav2vec2, **FRAMES)
    make_whisper(whisper, seconds=30, max_tokens=120)
    recognizers = {
        "ctc": (["onnx", "sherpa-onnx"], TINY),
        "ctc_pretrained": (
            ["huggingface"],
            (*SHORT, "--mask_channel_length=4", f"--pretrained={wav2vec2}"),
        ),
        "whisper": (["huggingface"], (*SHORT, f"--pretrained={whisper}")),
    }
    for name, (formats, tiny) in recognizers.items():
        run = tmp_path / name
        options = ("--number_of_epochs=1", "--word_lm_order=2", "--token_lm_order=3")
        assert workplace.train_here(run, *options, yaml=f"hparams/{name}.yaml", tiny=tiny) == 0
        export_run(run, tmp_path / f"{name}-exported", formats=formats)
        bundles += [run / "bundle", tmp_path / f"{name}-exported"]
    for bundle in bundles:
        assert not leaks(bundle, workplace.release), bundle
