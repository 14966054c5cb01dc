"""One road, walked from end to end: train, stop, resume, score, export, transcribe."""

import re
import shutil
from pathlib import Path

import pytest
import soundfile
import torch

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.config.document import read_document
from sbkit.config.overrides import parse_command
from sbkit.evaluate import wer_report
from sbkit.evaluate.compare import compare_runs
from sbkit.evaluate.run_results import read_clips
from sbkit.evaluate.wer_report import hash_references, read_utterances
from sbkit.logs.run_log import Record, read_log
from sbkit.runtime.torch_model import load_bundle
from sbkit.text.normalization import normalize
from sbkit.train.run import Run
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.runs import (
    ROOT,
    Workplace,
    last_parameters,
    make_workplace,
    one_thread,
    read_json,
    rows_of,
)

OF_SOUND = {ROOT / f"hparams/{name}.yaml" for name in ("codec", "tts")}  # tests/recipes has theirs
YAMLS = sorted({*(ROOT / "hparams").glob("*.yaml")} - OF_SOUND)
ONE = ("--number_of_epochs=1", "--check=false")
SPEECHBRAINS_MASKS = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")


@pytest.fixture(scope="module")
def finished(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four epochs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = workplace.train_forked(folder)
    assert done.returncode == 0, done.stderr
    assert "16 utterances" in done.stdout
    assert f"run folder: {folder}" in done.stdout.splitlines()
    assert "\ntest: CER " in done.stdout
    return folder


def figures(run: Path, kind: str) -> list[Record]:
    return [each for each in read_log(run / "train_log.jsonl") if each["kind"] == kind]


def hypothesis_of(run: Path, clip: str) -> str:
    """Find what ``wer_test.txt`` says was heard."""
    body = (run / "wer_test.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(clip)}: .*\n  reference.*\n  hypothesis(.*)$", body, re.M)
    assert found is not None
    return " ".join(found[1].replace("*", " ").split())


# -- what a run leaves ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    for name in (
        "train_log.jsonl",
        "train.log",
        "tensorboard",
        "checkpoints",
        "curves.png",
        "wer_test.txt",
        "utterances_test.jsonl",
        "report.html",
        "summary.json",
        "confidence.json",
        "hyperparams.yaml",
        "left_out.tsv",
        "tokenizer.model",
    ):
        file = finished / name
        assert file.exists(), name
        assert any(file.iterdir()) if file.is_dir() else file.stat().st_size > 0, name
    assert not list(finished.rglob("*.tmp"))


@pytest.mark.slow
def test_run_logs_every_step_epoch_and_test(finished: Path) -> None:
    steps, epochs = figures(finished, "step"), figures(finished, "epoch")
    assert [each["step"] for each in steps] == list(range(1, len(steps) + 1))
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4]
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert len(figures(finished, "test")) == 1
    lines = (finished / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .", line) for line in lines)
    said = [line[20:] for line in lines]
    assert said[0].startswith("train.py hparams/ctc.yaml --data_folder=")
    assert len([each for each in said if each.startswith("epoch ")]) == 4
    plain = r"CER \d+\.\d % \(\d+ / 69 characters\), WER \d+\.\d % \(\d+ / 13 words\)"
    score = plain.replace(r"\)", r"; \d+\.\d to \d+\.\d, only 4 clips\)")  # of one speaker
    weights = r"(best checkpoint|mean of \d checkpoints)"
    assert re.fullmatch(f"test: {score}; greedily {score}, 4 utterances, {weights}", said[-2])
    assert said[-1].startswith("test: greedy decoding wrote ")  # it has hardly learned


@pytest.mark.slow
def test_its_summary_scores_every_test_utterance(finished: Path, workplace: Workplace) -> None:
    summary = read_json(finished / "summary.json")
    test, (logged,) = summary["test"]["test"], figures(finished, "test")
    train, rows = (rows_of(workplace.release / f"{name}.tsv") for name in ("train", "test"))
    assert test["utterances"] == len(rows) == 4
    assert test["words"] == sum(len(normalize(row["sentence"], "en").split()) for row in rows)
    assert 0 < test["CER"] <= 1.5
    assert (test["CER"], test["WER"]) == (logged["CER"], logged["WER"])
    assert summary["parameters"] == sum(
        value.numel()
        for name, value in last_parameters(finished).items()
        if "normalize" not in name
    )
    clips = [soundfile.info(workplace.release / "clips" / each["path"]) for each in train]
    seconds = sum(clip.duration for clip in clips)
    assert summary["audio_seconds"] == pytest.approx(4 * seconds, abs=0.1)
    assert summary["versions"]["torch"] == torch.__version__.split("+")[0]
    utterances = read_utterances(finished / "utterances_test.jsonl")
    assert test["references"] == hash_references(utterances)
    assert {each.speaker for each in utterances} == {"allison"}
    for row in rows:
        (heard,) = [each for each in utterances if each.id == Path(row["path"]).stem]
        assert heard.hypothesis == hypothesis_of(finished, heard.id)
        clip = soundfile.info(workplace.release / "clips" / row["path"])
        assert heard.seconds == pytest.approx(clip.duration, abs=1e-3)


@pytest.mark.slow
def test_the_same_command_again_does_not_train_again(finished: Path, workplace: Workplace) -> None:
    log, summary = read_log(finished / "train_log.jsonl"), read_json(finished / "summary.json")
    scored = (finished / "wer_test.txt").read_text(encoding="utf-8")
    done = workplace.train_forked(finished)
    assert done.returncode == 0, done.stderr
    again = read_json(finished / "summary.json")
    for name in ("test", "parameters", "train_seconds", "audio_seconds"):
        assert again[name] == summary[name], name
    assert (finished / "wer_test.txt").read_text(encoding="utf-8") == scored
    assert read_log(finished / "train_log.jsonl") == log


# -- a run that learns ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained, and is tested, on the same eight prompts."""
    folder = tmp_path_factory.mktemp("learned")
    workplace = make_workplace(asterisk_english, folder, {"train": 8})
    for split in ("dev", "test"):
        shutil.copy(workplace.release / "train.tsv", workplace.release / f"{split}.tsv")
    learn = ("--d_model=96", "--d_ffn=192", "--cnn_channels=96", "--number_of_epochs=60")
    plain = ("--dropout=0.0", "--speeds=[1.0]", "--time_masks=0", "--freq_masks=0")
    options = (*learn, *plain, "--average_checkpoints=1", "--check=false")
    assert workplace.train_here(folder / "run", *options) == 0
    return folder


@pytest.fixture(scope="module")
def bundle(learned: Path) -> Path:
    assert sbkit(["export", str(learned / "run"), "--out", str(learned / "bundle")]) == 0
    return learned / "bundle"


@pytest.mark.slow
def test_run_overfits_and_its_bundle_transcribes_the_same(
    learned: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_json(learned / "run" / "summary.json")["test"]["test"]["CER"] < 0.05
    clips = sorted((learned / "release" / "clips").iterdir())
    for model in (bundle, learned / "run"):
        assert sbkit(["transcribe", str(model), *map(str, clips)]) == 0
        heard = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
        assert heard == {str(clip): hypothesis_of(learned / "run", clip.stem) for clip in clips}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["run", "bundle"])
def test_a_model_is_scored_elsewhere_as_its_run_was(
    model: str, learned: Path, bundle: Path, tmp_path: Path
) -> None:
    files = {file: file.stat().st_mtime_ns for file in (learned / "run").rglob("*")}
    command = ["score", str(learned / model), str(learned / "release/test.tsv")]
    with pytest.raises(SbkitError, match="`--report-by` writes tables, so it needs --out"):
        sbkit([*command, "--report-by", "speaker"])
    command += ["--out", str(tmp_path)]
    with pytest.raises(SbkitError, match="names `client_id`, but test has no such column. It has"):
        sbkit([*command, "--report-by", "client_id"])
    assert sbkit([*command, "--report-by", "speaker", "--report-by", "length"]) == 0
    trained = read_json(learned / "run" / "summary.json")["test"]["test"]
    written = read_json(tmp_path / "scores.json")
    scored = written["test"]["test"]
    assert written["decoder"] == trained["decoder"]
    summary = read_json(learned / "run" / "summary.json")
    assert written["provenance"] == summary["provenance"]
    for slices in scored.pop("report_by").values():
        assert sum(each["utterances"] for each in slices.values()) == trained["utterances"]
    assert scored == {
        name: value for name, value in trained.items() if name not in ("greedy", "decoder")
    }
    assert compare_runs([learned / "run", tmp_path])["test"]["test"]["changed"] == []
    for name in ("wer_test.txt", "utterances_test.jsonl"):
        assert (tmp_path / name).read_text() == (learned / "run" / name).read_text()
    assert read_clips(tmp_path / "report.html") == read_clips(learned / "run" / "report.html")
    with pytest.raises(SbkitError, match="already has scores, which are not overwritten"):
        sbkit(command)
    alone = ["score", str(learned / model), "--out", str(tmp_path / "alone")]
    if model == "bundle":
        with pytest.raises(SbkitError, match="is a bundle, which has no test sets"):
            sbkit(alone)
        return
    assert sbkit(alone) == 0
    assert read_json(tmp_path / "alone/scores.json")["test"]["test"] == scored
    own, other = tmp_path / "own", tmp_path / "of_own"  # a run of a column of its own
    shutil.copytree(learned / "run", own)
    text = (own / "hyperparams.yaml").read_text()
    (own / "hyperparams.yaml").write_text(text.replace("text_column: null", "text_column: said"))
    header, *rows = (learned / "release/test.tsv").read_text().splitlines()
    lines = [f"{header.replace('sentence', 'said')}\tsentence", *(f"{row}\toh" for row in rows)]
    (learned / "release/own.tsv").write_text("\n".join(lines))
    assert sbkit(["score", str(own), str(learned / "release/own.tsv"), "--out", str(other)]) == 0
    assert read_json(other / "scores.json")["test"]["own"]["CER"] == scored["CER"]
    assert {file: file.stat().st_mtime_ns for file in (learned / "run").rglob("*")} == files


@pytest.mark.slow
def test_a_trained_run_gets_another_decoder(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Language models are made, weights chosen on dev, and the export has both.

    And the attention decoder, which was trained here, no longer rescores.
    """
    run, old = tmp_path / "run", tmp_path / "old"
    joint = ("--ctc_weight=0.5", "--num_decoder_layers=1", "--attention_rescoring=True")
    monkeypatch.setattr(wer_report, "MAX_SILENT_SHARE", 9)  # so small a model babbles
    assert workplace.train_here(run, *ONE, *joint) == 0
    note = "of 4 utterances; the beam's words come from its language model"
    assert capsys.readouterr().out.splitlines()[-1].endswith(note)
    assert note.replace("'", "&#39;") in (run / "report.html").read_text("utf-8")
    decoder = read_json(run / "decoder.json")
    assert (decoder["attention_rescoring"], decoder["chosen_on"]) == (True, ["dev"])
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    shutil.copytree(run, old)
    command = ["tune", str(run), "--word-lm-order=2", "--beam-size=4", "--no-attention-rescoring"]
    capsys.readouterr()
    with one_thread(), monkeypatch.context() as patch:
        patch.setattr("sbkit.commands.tune.error_of", lambda *_, **__: 1.0)
        assert sbkit(command) == 0
    said = capsys.readouterr().out
    rates = r"CER \S+ % \(\d+ / \d+ characters\), WER \S+ % \(\d+ / \d+ words\) \(dev\)"
    assert re.search(rf"^before \(beam\): {rates}\n(.*\n)*after \(beam\): {rates}$", said, re.M)
    assert "keeps its decoder, because the new one is no better" in said
    assert "Resuming" not in said
    assert "removed" not in said
    assert files_of(run) == files_of(old)
    with one_thread():
        assert sbkit([*command, "--force"]) == 0
    for name in ("decoder.json", "confidence.json", "lm.safetensors"):  # the way back
        assert (run / "earlier_decoder" / name).read_bytes() == (old / name).read_bytes()
    decoder = read_json(run / "decoder.json")
    assert (decoder["attention_rescoring"], decoder["chosen_on"]) == (False, ["dev"])
    assert decoder["beam_size"] == 4
    assert 0 <= decoder["CER"] <= 1
    confidence = read_json(run / "confidence.json")
    assert confidence["beam"]["weights"] is None  # dev has too few words
    sbkit(["export", str(run), "--out", str(tmp_path / "bundle")])
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.decoder is not None
    assert bundle.decoder.weights.plain() == decoder["weights"]
    assert not bundle.decoder.attention_rescoring
    models = bundle.decoder.language_models
    assert models.words is not None
    assert (models.words.order, models.tokens) == (2, None)
    with pytest.raises(SbkitError, match="Tune it first: sbkit tune RUN --decoder graph, or sbkit"):
        bundle.with_decoder("graph")


@pytest.mark.slow
def test_runs_and_bundles_are_tuned_to_new_bundles(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run that was moved; the model stays as it is."""
    run, talks, dev = tmp_path / "moved", tmp_path / "talks.txt", workplace.release / "dev.tsv"
    assert workplace.train_here(tmp_path / "run", *ONE, "--ctc_weight=1.0") == 0
    (tmp_path / "run").rename(run)
    talks.write_text("it is a pleasure to be here\nto be or not to be\n")
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    sbkit(["export", str(run), "--out", str(tmp_path / "bundle")])
    graph = ("--decoder=graph", "--word-lm-order=2")
    made = {"bundle": ["--lm-text", str(talks), "--data", str(dev)], "moved": []}
    for model, options in made.items():
        before, out = files_of(tmp_path / model), tmp_path / f"{model}-tuned"
        command = ["tune", str(tmp_path / model), *options, *graph]
        if model == "bundle":
            with pytest.raises(SbkitError, match="name the data and a folder .*--out NEW"):
                sbkit(command)
        with one_thread():
            sbkit([*command, "--out", str(out)])
        assert files_of(tmp_path / model) == before
        bundle = load_bundle(out).with_decoder("graph")
        assert bundle.decoder is not None
        assert bundle.decoder.decoder_type == "graph"
        recognized = bundle.recognize([torch.randn(8000) / 32], times=True)[0]
        assert [word.text for word in recognized.words] == recognized.text.split()
    card = (tmp_path / "bundle-tuned/README.md").read_text()
    assert "Not measured with this decoder" in card
    assert "model-index" not in card
    assert "% |" not in card
    with pytest.raises(SbkitError, match="fits the weights of language models, but there is none"):
        sbkit(["tune", str(run)])
    with pytest.raises(SbkitError, match="`--attention-rescoring` needs a trained attention dec"):
        sbkit(["tune", str(run), "--attention-rescoring", "--word-lm-order=2"])


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*.*")
        if each.is_file()
    }


# -- other models --------------------------------------------------------------------------------


@pytest.mark.slow
@SPEECHBRAINS_MASKS
def test_speechbrains_parts_train_export_and_transcribe(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    yaml = "hparams/ctc_speechbrain.yaml"
    assert workplace.train_here(run, *ONE, "--cnn_channels=8", yaml=yaml) == 0
    assert sbkit(["export", str(run), "--out", str(tmp_path / "bundle")]) == 0
    clip = workplace.release / "clips" / rows_of(workplace.release / "test.tsv")[0]["path"]
    capsys.readouterr()
    assert sbkit(["transcribe", str(tmp_path / "bundle"), str(clip)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
@SPEECHBRAINS_MASKS
@pytest.mark.parametrize("yaml", YAMLS, ids=lambda yaml: yaml.stem)
def test_every_yaml_takes_a_step(
    yaml: Path, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own widths, but for a pretrained encoder; depth, batch and text are small."""
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    small = ("--batch_seconds=4", "--num_workers=0", "--device=cpu")
    root, release = read_document(yaml).root, workplace.release
    if "label" in root:  # a classifier, here of sentences: no split may have classes of its own
        release = Path(shutil.copytree(release, tmp_path / "release"))
        for split in ("dev", "test"):
            shutil.copy2(release / "train.tsv", release / f"{split}.tsv")
    folders = (f"--data_folder={release}", f"--output_folder={tmp_path}")
    depths = {"num_encoder_layers": 2, "num_decoder_layers": 1}
    own = [f"--{name}={min(most, root[name])}" for name, most in depths.items() if name in root]
    own += ["--vocab_size=50"] if root.get("token_type") == "unigram" else []
    own += ["--language=[en]", "--label=sentence"] if "label" in root else []
    if "pretrained" in root:
        own.append(f"--pretrained={make_folder(tmp_path / 'tiny', **FRAMES)}")
    file, overrides = parse_command([str(yaml), *small, *folders, *own])
    run = Run(file, overrides)
    hparams = run.build_hparams()
    before = [value.detach().clone() for value in hparams["model"].parameters()]
    run.results["hparams"] = {**hparams, "lr_schedule": lambda progress: 0.1, "checkpointer": None}
    brain = run.make_brain(optimizer_step_limit=1)
    brain.loaders = run.make_loaders()
    brain.fit(hparams["epoch_counter"], run.make_loaders().train)
    assert brain.optimizer_step == 1
    assert 0 < brain.training_metrics.so_far.loss < 1000
    after = list(hparams["model"].parameters())
    assert all(value.isfinite().all() for value in after)
    pairs = zip(before, after, strict=True)
    still = [one for one, two in pairs if two.requires_grad and torch.equal(one, two)]
    assert len(still) < 0.1 * len(after)


# -- two processes -------------------------------------------------------------------------------
