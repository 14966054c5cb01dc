"""Whole runs on real speech: train, stop, resume, score, tune, export, transcribe."""

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from speechbrain import Stage

from sbkit.base.checksums import checksum
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.config.document import read_document
from sbkit.config.hparams import Settings
from sbkit.config.overrides import parse_command
from sbkit.data.batch import TextCollate
from sbkit.evaluate.compare import COSTS, compare_runs
from sbkit.evaluate.wer_report import hash_references, read_utterances
from sbkit.export import onnx_format
from sbkit.run.run import Run
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.predict import Transcriber
from sbkit.text.normalization import normalize
from sbkit.text.tokenizer import ensure_tokenizer
from sbkit.train.setup import (
    build_run,
    choose_placement,
    declare_run,
    make_brain,
    prepare_data,
)
from tests.export.test_formats import off_by
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import (
    ROOT,
    Workplace,
    contents_of,
    last_parameters,
    one_thread,
    read_json,
    records_of,
    row_of,
    rows_of,
    times_of,
    train_overfitted,
)
from tests.test_golden import be_other_code

Captured = pytest.CaptureFixture[str]

TESTED_ELSEWHERE = {ROOT / f"hparams/{name}.yaml" for name in ("codec", "tts")}  # in tests/recipes
YAMLS = sorted({*(ROOT / "hparams").glob("*.yaml")} - TESTED_ELSEWHERE)
ONE_EPOCH = "--number_of_epochs=1"
SPEECHBRAINS_MASKS = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")


@pytest.fixture(scope="module")
def finished(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check, and train four epochs without interruption; return the run folder."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    process = workplace.train_forked(folder, "--check=True")
    assert process.returncode == 0, process.stderr
    next_step = f"next: sbkit export {folder} --out my-model"
    for text in ("16 utterances", f"run folder: {folder}", f"report: {folder}/report.html"):
        assert text in process.stdout
    assert process.stdout.splitlines()[-1] == next_step
    return folder


def hypothesis_of(run: Path, clip: str) -> str:
    """Return the hypothesis that ``wer_test.txt`` has for a clip."""
    report = (run / "wer_test.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(clip)}: .*\n  reference.*\n  hypothesis(.*)$", report, re.M)
    assert match is not None
    return " ".join(match[1].replace("*", " ").split())


# -- the files of a run --------------------------------------------------------------------------

RUN_FILES = (
    *("train_log.jsonl", "train.log", "tensorboard", "checkpoints", "curves.png", "wer_test.txt"),
    *("utterances_test.jsonl", "report.html", "summary.json", "bundle"),
    *("hyperparams.yaml", "left_out.tsv", "tokenizer.model"),
)


@pytest.mark.slow
def test_run_folder_has_every_file(finished: Path) -> None:
    for name in RUN_FILES:
        file = finished / name
        assert file.exists(), name
        assert any(file.iterdir()) if file.is_dir() else file.stat().st_size > 0, name
    assert not list(finished.rglob("*.tmp"))


@pytest.mark.slow
def test_run_logs_every_step_epoch_and_test(finished: Path) -> None:
    steps, epochs = records_of(finished, "step"), records_of(finished, "epoch")
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4]
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert len(records_of(finished, "test")) == 1
    lines = (finished / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .", line) for line in lines)
    messages = [line[20:] for line in lines]
    assert messages[0].startswith("train.py hparams/ctc.yaml --data_folder=")
    assert len([message for message in messages if message.startswith("epoch ")]) == 4
    (test_line,) = (message for message in messages if message.startswith("test: CER "))
    for figure in ("WER ", "only 4 clips", "greedily CER ", "4 utterances", "checkpoint"):
        assert figure in test_line


@pytest.mark.slow
def test_summary_scores_every_test_utterance(finished: Path, workplace: Workplace) -> None:
    summary = read_json(finished / "summary.json")
    test, (logged,) = summary["test"]["test"], records_of(finished, "test")
    train, rows = (rows_of(workplace.release / f"{name}.tsv") for name in ("train", "test"))
    assert test["utterances"] == len(rows) == 4
    assert test["words"] == sum(len(normalize(row["sentence"], "en").split()) for row in rows)
    assert (test["CER"], test["WER"]) == (logged["CER"], logged["WER"])
    assert summary["parameters"] == sum(
        value.numel()
        for name, value in last_parameters(finished).items()
        if "normalize" not in name
    )
    clips = [soundfile.info(workplace.release / "clips" / row["path"]) for row in train]
    train_seconds = sum(clip.duration for clip in clips)
    assert summary["audio_seconds"] == pytest.approx(4 * train_seconds, abs=0.1)
    assert {"git_commit", "machine", *COSTS} <= summary.keys()
    assert summary["versions"]["torch"] == torch.__version__.split("+")[0]
    utterances = read_utterances(finished / "utterances_test.jsonl")
    assert test["references"] == hash_references(utterances)
    assert {utterance.speaker for utterance in utterances} == {"allison"}
    for row in rows:
        (utterance,) = [item for item in utterances if item.id == Path(row["path"]).stem]
        assert utterance.hypothesis == hypothesis_of(finished, utterance.id)
        clip = soundfile.info(workplace.release / "clips" / row["path"])
        assert utterance.seconds == pytest.approx(clip.duration, abs=1e-3)


def with_sentence(release: Path, text: str) -> None:
    """Replace a sentence of train."""
    rows = rows_of(release / "train.tsv")
    lines = (release / "train.tsv").read_text().split("\n")
    (release / "train.tsv").write_text("\n".join(lines).replace(rows[0]["sentence"], text))


def with_letters(folder: Path, text: str) -> None:
    """Write a model whose tokenizer has the letters of train and those of a text."""
    folder.mkdir(exist_ok=True)
    file = folder / "tokenizer.model"
    file.unlink(missing_ok=True)
    texts = [text, "abcdefghijklmnopqrstuvwxyz"]
    ensure_tokenizer(model_file=file, token_type="char", vocab_size=None, texts=lambda: texts)
    (folder / "hyperparams.yaml").write_text("language: en\n")


def test_labels_of_a_start_without_a_checkpoint_are_made_again_of_other_inputs(
    workplace: Workplace, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a new folder. A tokenizer of the user's is kept."""
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    text, other, start = tmp_path / "lm.txt", tmp_path / "other.tsv", tmp_path / "start"
    text.write_text("press one\nhold the line\n")
    other.write_text("sentence\twords\ncall the office\tfill the face\n")
    with_letters(start, "")
    base = {"data_folder": str(release), "device": "cpu", "batch_seconds": 6}
    base |= {"word_lm_order": 2, "token_lm_order": 3}
    texts = {"lm_text": str(text)}
    edits: list[tuple[dict[str, Any], Callable[[], object]]] = [
        ({"max_seconds": 1.5}, list),
        ({"min_seconds": 1.5}, list),
        (
            {"splits": {"train": ["train", "more"]}},
            lambda: shutil.copy(release / "test.tsv", release / "more.tsv"),
        ),
        ({}, list),
        ({}, lambda: with_sentence(release, "A sentence of others")),
        ({"language": "de"}, list),
        ({"text": {"case": "keep"}}, list),
        ({"token_type": "bpe", "vocab_size": 40}, list),
        ({"token_type": "bpe", "vocab_size": 42}, list),
        ({"init_from": str(start)}, list),
        ({"init_from": str(start)}, lambda: with_letters(start, "éü")),
        ({"word_lm_order": 3}, list),
        ({"token_lm_order": 2}, list),
        (texts, list),
        (texts, lambda: text.write_text("press two\nhold the line\n")),
        (texts, lambda: text.write_text("press one\nhold the lane\n", encoding="utf-16")),
        ({"lm_text": str(other)}, list),
        ({}, lambda: be_other_code(patches)),
    ]
    run, seen = tmp_path / "run", list[dict[str, bytes]]()
    with pytest.MonkeyPatch.context() as patches:
        for index, (options, edit) in enumerate(edits):
            edit()
            fresh = tmp_path / f"fresh{index}"
            for folder in (fresh, run):
                Run("hparams/ctc.yaml", {**base, **options, "output_folder": str(folder)}).prepare()
            assert contents_of(run) == contents_of(fresh), options
            assert contents_of(run) not in seen, options
            seen.append(contents_of(run))
            before = times_of(run)
            Run("hparams/ctc.yaml", {**base, **options, "output_folder": str(run)}).prepare()
            assert times_of(run) == before, options
        *earlier, last = (files["labels.json"] for files in seen)
        assert last not in earlier  # by other code
        elsewhere = shutil.copytree(
            release, tmp_path / "elsewhere"
        )  # as another process may have it
        options = {"data_folder": str(elsewhere), "output_folder": str(run), "num_workers": 2}
        before = times_of(run)
        Run("hparams/ctc.yaml", base | options).prepare()
        assert times_of(run) == before
    assert "was there before this run" not in caplog.text
    own = Path(shutil.copy(start / "tokenizer.model", run)).read_bytes()
    for options in ({}, {"max_seconds": 1.5}):
        caplog.clear()
        Run("hparams/ctc.yaml", {**base, **options, "output_folder": str(run)}).prepare()
        assert f"{run / 'tokenizer.model'} was there before this run" in caplog.text
        assert (run / "tokenizer.model").read_bytes() == own
    assert "training on" in caplog.text  # the language models have other sentences


def test_symbols_and_tokens_of_a_decoder_are_those_of_this_start(
    workplace: Workplace, tmp_path: Path, own_cache: Path
) -> None:
    release, whisper = tmp_path / "release", tmp_path / "whisper"
    shutil.copytree(workplace.release, release)
    make_whisper(whisper, seconds=30, max_tokens=120)
    tokens = whisper / "tokenizer.json"
    edits: dict[str, tuple[dict[str, object], str, Callable[[], object]]] = {
        "tts": ({}, "symbols.txt", lambda: with_sentence(release, "Ça va, où?")),
        "whisper": (
            {"pretrained": str(whisper)},
            "decoder_tokenizer.json",
            lambda: tokens.write_text(tokens.read_text() + "\n"),
        ),
    }
    for yaml, (options, name, edit) in edits.items():
        run = tmp_path / yaml
        options |= {"data_folder": str(release), "device": "cpu", "output_folder": str(run)}
        Run(f"hparams/{yaml}.yaml", options).prepare()
        before = (run / name).read_bytes()
        edit()
        Run(f"hparams/{yaml}.yaml", options).prepare()
        assert (run / name).read_bytes() != before


# -- a run that overfits -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overfitted(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and test on the same eight prompts; return the folder of the run and its release."""
    folder = tmp_path_factory.mktemp("overfitted")
    train_overfitted(asterisk_english, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(overfitted: Path) -> Path:
    assert sbkit(["export", str(overfitted / "run"), "--out", str(overfitted / "bundle")]) == 0
    return overfitted / "bundle"


@pytest.mark.slow
def test_bundle_transcribes_like_its_run(overfitted: Path, bundle: Path, capsys: Captured) -> None:
    run = overfitted / "run"
    assert read_json(run / "summary.json")["test"]["test"]["CER"] < 0.05
    clips = sorted((overfitted / "release" / "clips").iterdir())
    for model in (bundle, run):
        assert sbkit(["transcribe", str(model), *map(str, clips)]) == 0
        transcripts = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
        assert transcripts == {str(clip): hypothesis_of(run, clip.stem) for clip in clips}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["run", "bundle"])
def test_score_repeats_the_run(model: str, overfitted: Path, bundle: Path, tmp_path: Path) -> None:
    run = overfitted / "run"
    times = times_of(run)
    command = ["score", str(overfitted / model), str(overfitted / "release/test.tsv")]
    with pytest.raises(SbkitError, match="`--report-by` writes tables, so it needs --out"):
        sbkit([*command, "--report-by", "speaker"])
    command += ["--out", str(tmp_path)]
    assert sbkit([*command, "--report-by", "speaker", "--report-by", "length"]) == 0
    summary, scores = read_json(run / "summary.json"), read_json(tmp_path / "summary.json")
    at_the_end_of_training, scored = summary["test"]["test"], scores["test"]["test"]
    for name in ("provenance", "versions", "machine"):
        assert scores[name] == summary[name]
    weights = checksum(overfitted / "bundle/model.safetensors")
    assert scores["provenance"]["weights"] == weights
    decoder = read_json(run / "bundle/config.json")["decoder"]
    assert scores["provenance"]["decoder"].items() <= decoder.items()
    assert scores["values"]["sample_rate"] == 16_000  # `compare` reads them
    for slices in scored.pop("report_by").values():
        utterances = sum(scored_slice["utterances"] for scored_slice in slices.values())
        assert utterances == at_the_end_of_training["utterances"]
    assert scored == at_the_end_of_training
    assert compare_runs([run, tmp_path])["test"]["test"]["changed"] == []
    for name in ("wer_test.txt", "utterances_test.jsonl"):
        assert (tmp_path / name).read_text() == (run / name).read_text()
    pages = [(folder / "report.html").read_text("utf-8") for folder in (tmp_path, run)]
    rows = [re.findall('id="data">(.*?)</script>', page) for page in pages]
    assert rows[0] == rows[1] and 'clip": "//' in rows[0][0]
    (tmp_path / "run").mkdir()
    for name in ("hyperparams.yaml", "run_config.json"):
        (tmp_path / "run" / name).touch()
    for out in (tmp_path, tmp_path / "run"):
        with pytest.raises(SbkitError, match="is a run or already has scores"):
            sbkit([*command[:3], "--out", str(out)])
    without_data = ["score", str(overfitted / model), "--out", str(tmp_path / "without_data")]
    if model == "bundle":
        with pytest.raises(SbkitError, match="has no test sets"):
            sbkit(without_data)
    else:
        assert sbkit(without_data) == 0
        assert read_json(tmp_path / "without_data/summary.json")["test"]["test"] == scored
    assert times_of(run) == times


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.VALID, Stage.TEST])
def test_long_recording_is_evaluated_as_it_is_transcribed(
    stage: Stage, overfitted: Path, bundle: Path, tmp_path: Path
) -> None:
    """It is cut where it pauses, counts as one utterance, and not in the loss."""
    rows, clips = rows_of(overfitted / "release/dev.tsv"), overfitted / "release/clips"
    samples = [soundfile.read(clips / row["path"], dtype="int16")[0] for row in rows]
    audio = np.concatenate([part for clip in 4 * samples for part in (clip, clip[:4000] // 99)])
    soundfile.write(recording := tmp_path / "talk.wav", audio, 16_000)
    with one_thread(), Transcriber.load(bundle, device="cpu", decoder="greedy") as transcriber:
        encoded = [(segment, part.log_probs) for segment, part in transcriber.encode(recording)]
        text = transcriber.transcribe(recording).text
    spec = declare_run(overfitted / "run/hyperparams.yaml", {"eval_batch_seconds": 9.0})
    setup = build_run(prepare_data(spec), choose_placement(spec))
    brain = make_brain(setup, noprogressbar=True)
    brain.on_evaluate_start(min_key="CER")
    batch = TextCollate(setup.labels)([row_of("talk", audio, text=text)])
    brain.modules.eval()
    brain.on_stage_start(stage)
    loss = brain.evaluate_batch(batch, stage)
    assert (loss.sums.sum(), loss.counts.sum()) == (0, 0)
    with torch.no_grad():
        predictions = brain.compute_forward(batch, stage)
    frame_samples = brain.network.samples_per_frame  # only the last keeps the zeros behind it
    parts = [log_probs[: cut.num_frames(frame_samples)] for cut, log_probs in encoded[:-1]]
    parts.append(encoded[-1][1])
    np.testing.assert_allclose(predictions.log_probs[0], np.concatenate(parts), atol=1e-4)
    assert len(parts) > 1
    (scored,) = brain.evaluator.results[""]
    assert scored.hypothesis.split() == text.split()


@pytest.mark.slow
def test_score_reads_columns_and_encoding_of_the_run(overfitted: Path, tmp_path: Path) -> None:
    run, table = tmp_path / "run", overfitted / "release/said.tsv"
    shutil.copytree(overfitted / "run", run)
    yaml = (run / "hyperparams.yaml").read_text()
    for old, new in (
        ("columns: {}", "columns: {text: said}"),
        ("encoding: null", "encoding: utf-16-le"),
    ):
        yaml = yaml.replace(old, new)
    (run / "hyperparams.yaml").write_text(yaml)
    header, *rows = (overfitted / "release/test.tsv").read_text().splitlines()
    lines = [f"{header.replace('sentence', 'said')}\tsentence", *(f"{row}\toh" for row in rows)]
    table.write_text("\n".join(lines), encoding="utf-16-le")
    assert sbkit(["score", str(run), str(table), "--out", str(tmp_path / "scores")]) == 0
    summary = read_json(run / "summary.json")["test"]["test"]
    assert read_json(tmp_path / "scores/summary.json")["test"]["said"]["CER"] == summary["CER"]


@pytest.mark.slow
def test_score_of_the_training_split(overfitted: Path, tmp_path: Path) -> None:
    run = str(overfitted / "run")
    assert sbkit(["score", run, "--split", "train", "--out", str(tmp_path)]) == 0
    assert read_json(tmp_path / "summary.json")["test"]["train"]["utterances"] == 8
    for options, message in (
        (["--split", "trian"], "has no split `trian`. It has train, dev, test"),
        (["test.tsv", "--split", "train"], "--split names a split of the run"),
    ):
        with pytest.raises(SbkitError, match=message):
            sbkit(["score", run, *options])


@pytest.mark.slow
def test_tune_writes_another_decoder_and_leaves_the_run(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Language models are trained, and their weights chosen on dev.

    The attention decoder of the run no longer rescores. A format is kept, unless it has a link.
    """
    run, out = tmp_path / "run", tmp_path / "tuned"
    joint = ("--ctc_weight=0.5", "--num_decoder_layers=1", "--attention_rescoring=True")
    joint += ("--export_formats=[onnx]",)
    monkeypatch.setattr(onnx_format, "write_onnx", off_by(0.0))
    assert workplace.train_here(run, ONE_EPOCH, *joint) == 0
    decoder = read_json(run / "bundle/config.json")["decoder"]
    assert (decoder["attention_rescoring"], decoder["chosen_on"]) == (True, ["dev"])
    before = contents_of(run)
    command = ["tune", run, "--word-lm-order=2", "--beam-size=4", "--no-attention-rescoring"]
    with pytest.raises(SbkitError, match=f"{run}/bundle"):
        workplace.sbkit(*command, "--out", run / "bundle")
    capsys.readouterr()
    assert workplace.sbkit(*command, "--out", out) == 0
    output = capsys.readouterr().out
    rates = r"CER \S+ % \(\d+ / \d+ characters\), WER \S+ % \(\d+ / \d+ words\) \(dev\)"
    assert re.search(rf"^before \(beam\): {rates}\n(.*\n)*after \(beam\): {rates}$", output, re.M)
    assert "Resuming" not in output
    assert contents_of(run) == before
    assert contents_of(out / "onnx") == contents_of(run / "bundle/onnx")
    decoder = read_json(out / "config.json")["decoder"]
    assert (decoder["attention_rescoring"], decoder["chosen_on"]) == (False, ["dev"])
    assert decoder["beam_size"] == 4
    assert 0 <= decoder["CER"] <= 1
    assert read_json(out / "config.json")["confidence"] == {}  # dev has too few words
    bundle = load_bundle(out)
    assert bundle.decoder is not None
    assert asdict(bundle.decoder.weights) == decoder["weights"]
    assert not bundle.decoder.attention_rescoring
    models = bundle.decoder.language_models
    assert models.words is not None
    assert (models.words.order, models.tokens) == (2, None)
    with pytest.raises(SbkitError, match="sbkit tune RUN --out NEW, or sbkit tune BUNDLE"):
        bundle.with_decoder("greedy").with_decoder("beam")
    file, moved = run / "bundle/onnx/model.onnx", tmp_path / "model.pt2"
    file.rename(moved)
    file.symlink_to(moved)
    (talks := tmp_path / "talks.txt").write_text("it is a pleasure to be here\n")
    texts = ["--lm-text", f"[{talks}, {workplace.release / 'dev.tsv'}]"]
    assert workplace.sbkit(*command, *texts, "--out", out) == 0
    output = capsys.readouterr().out
    assert "lm_text: 4 sentences left out, because dev " in output
    assert "onnx is left out: a link may lead out of the bundle\n" in output
    assert not (out / "onnx").exists()


@pytest.mark.slow
def test_tune_takes_a_bundle(
    overfitted: Path, bundle: Path, tmp_path: Path, capsys: Captured
) -> None:
    run, dev, out = tmp_path / "run", overfitted / "release/dev.tsv", tmp_path / "tuned"
    (talks := tmp_path / "talks.txt").write_text("it is a pleasure to be here\nto be or not\n")
    assert re.search("model-index.*% \\|", (bundle / "README.md").read_text(), re.DOTALL)
    before = contents_of(bundle)
    command = ["tune", str(bundle), "--data", str(dev), "--lm-text", f"[{talks}, {dev}]"]
    with one_thread():
        sbkit([*command, "--word-lm-order=2", "--out", str(out)])
    assert "sentences left out, because dev " in capsys.readouterr().out
    assert contents_of(bundle) == before
    tuned = load_bundle(out).with_decoder("beam")
    assert tuned.decoder is not None and tuned.decoder.language_models.words is not None
    assert tuned.decoder.language_models.words.order == 2
    recognized = tuned.recognize([torch.randn(8000) / 32], times=True)[0]
    assert [word.text for word in recognized.words] == recognized.text.split()
    without = tmp_path / "without"
    orders = ("--word-lm-order=0", "--token-lm-order=0")
    sbkit([*command[:4], *orders, "--beam-size=4", "--out", str(without)])
    assert re.search(r"^after \(beam\): CER", capsys.readouterr().out, re.MULTILINE)
    decoder = load_bundle(without).with_decoder("beam").decoder
    assert decoder is not None and (decoder.beam_size, decoder.used_weights) == (4, [])
    card = (out / "README.md").read_text()
    assert "the model was not tested. Measure it: `sbkit score FOLDER test.csv`" in card
    assert not re.search(r"model-index|% \|", card)
    shutil.copytree(overfitted / "run", run)
    yaml = (run / "hyperparams.yaml").read_text()
    (run / "hyperparams.yaml").write_text(yaml.replace("ctc_weight: 0.85", "ctc_weight: 1.0"))
    for model, option, message in (
        (run, "--beam-size=4", "`word_lm_order` to 3"),
        (run, "--attention-rescoring", "`attention_rescoring` needs"),
        (bundle, "--word-lm-order=2", "--data is needed"),
    ):
        with pytest.raises(SbkitError, match=message):
            sbkit(["tune", str(model), option, "--out", str(tmp_path / "new")])


# -- other models --------------------------------------------------------------------------------


@pytest.mark.slow
@SPEECHBRAINS_MASKS
@pytest.mark.parametrize("yaml", YAMLS, ids=lambda yaml: yaml.stem)
def test_every_yaml_takes_a_step(
    yaml: Path, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the widths of the YAML, except for a pretrained encoder; depth and batch are small."""
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    small = ("--batch_seconds=4", "--num_workers=0", "--device=cpu")
    root = read_document(yaml).root
    folders = (f"--data_folder={workplace.release}", f"--output_folder={tmp_path}")
    depths = {"num_encoder_layers": 2, "num_decoder_layers": 1}
    options = [f"--{key}={min(depth, root[key])}" for key, depth in depths.items() if key in root]
    options += ["--vocab_size=50"] if root.get("token_type") == "unigram" else []
    if "pretrained" in root:
        folder = tmp_path / "tiny"
        if yaml.stem == "whisper":
            make_whisper(folder, seconds=30, max_tokens=120)
        elif yaml.stem == "ctc_whisper":
            make_folder(folder, "whisper")
        else:
            make_folder(folder, "wav2vec2", **FRAMES)
        options.append(f"--pretrained={folder}")
    file, overrides = parse_command([str(yaml), *small, *folders, *options])
    setup = Run(file, overrides).prepare()
    hparams = setup.hparams
    before = [value.detach().clone() for value in hparams["model"].parameters()]
    changed = Settings({**hparams, "lr_schedule": lambda progress: 0.1, "checkpointer": None})
    brain = make_brain(replace(setup, hparams=changed), optimizer_step_limit=1)
    brain.fit(hparams["epoch_counter"], setup.loaders.train)
    assert brain.optimizer_step == 1
    assert 0 < brain.training_metrics.of_epoch.loss < 1000
    after = list(hparams["model"].parameters())
    assert all(value.isfinite().all() for value in after)
    pairs = zip(before, after, strict=True)
    unchanged = [old for old, new in pairs if new.requires_grad and torch.equal(old, new)]
    assert len(unchanged) < 0.1 * len(after)
