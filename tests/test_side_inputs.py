"""What a network takes beside audio reaches it wherever it runs, or the run does not begin."""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sbkit.base.errors import BAD_INPUT, ConfigError, DataError, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.runtime.runtimes import load_bundle, load_in_thread
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer
from sbkit.tasks.asr.predict import Transcriber
from tests.runs import ROOT, Workplace, losses_of, read_json, rows_of
from tests.runtime.bundles import edit_weights
from tests.runtime.tones import RATE
from tests.serve.server import running_server, wav

EXAMPLES = ROOT / "docs/examples"
TINY = (
    *("--device=cpu", "--data_folder=null", "--batch_seconds=6", "--number_of_epochs=2"),
    *("--log_every=1", "--nhead=2"),
    *("--cnn_channels=32", "--d_model=32", "--d_ffn=64", "--num_encoder_layers=2", "--lr=0.02"),
)
SPLITS = ("train", "dev", "test")


class Example(NamedTuple):
    """An example of the docs, a field of its task, and two values of it."""

    name: str
    field: str
    values: tuple[str, str]

    @property
    def imports(self) -> tuple[str, ...]:
        return ("--import", self.name, "--import", f"{self.name}_recipe")

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(self.imports[1::2])


@pytest.fixture(scope="module", params=["target_speaker", "accents", "biasing"])
def example(request: pytest.FixtureRequest, workplace: Workplace) -> Example:
    clips = sorted(map(str, (workplace.release / "clips").iterdir()))
    values = {
        "target_speaker": ("enrolment", (clips[0], clips[-1])),
        "accents": ("accent", ("us", "uk")),
        "biasing": ("phrases", ("activated", "press one, hold")),
    }
    return Example(request.param, *values[request.param])


@pytest.fixture(scope="module")
def folder(
    example: Example, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a folder with the example and tables whose values of the field take turns."""
    folder = tmp_path_factory.mktemp("mine") / "project"
    shutil.copytree(EXAMPLES / example.name, folder)
    (folder / "hparams").symlink_to(ROOT / "hparams")
    for split in SPLITS:
        with (folder / f"{split}.csv").open("w", newline="") as lines:
            table = csv.writer(lines)
            table.writerow(("path", "text", example.field))
            for number, row in enumerate(rows_of(workplace.release / f"{split}.tsv")):
                clip = workplace.release / "clips" / row["path"]
                table.writerow((clip, row["sentence"], example.values[number % 2]))
    return folder


def train(
    workplace: Workplace, example: Example, folder: Path, run: Path, *options: str, **more: Any
) -> int:
    tables = ", ".join(f"{split}: {folder / split}.csv" for split in SPLITS)
    words = (f"--manifest={{{tables}}}", "--concat_prob=0", *options)
    yaml = folder / f"{example.name}.yaml"
    return workplace.train_here(run, *words, yaml=yaml, tiny=TINY, **more)


@pytest.fixture(scope="module")
def run(example: Example, folder: Path, workplace: Workplace) -> Path:
    assert train(workplace, example, folder, folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exported(example: Example, run: Path, folder: Path) -> Path:
    """Return a bundle that writes tokens, though after so little training blanks are likely."""
    out = folder / "bundle"
    assert sbkit(["export", str(run), "--out", str(out), *example.imports]) == 0

    def forbid_blank(weights: dict[str, Any]) -> None:
        *_, bias = sorted(name for name in weights if re.fullmatch(r"\d+\.bias", name))
        weights[bias][0] = -99.0

    edit_weights(out, forbid_blank)
    return out


@pytest.fixture(scope="module")
def bundle(example: Example, exported: Path) -> AsrBundle[Any]:
    return as_recognizer(load_bundle(exported, user_modules=example.modules))


def read_test(folder: Path) -> Iterator[dict[str, str]]:
    with (folder / "test.csv").open(newline="") as lines:
        yield from csv.DictReader(lines)


@pytest.mark.slow
def test_every_way_to_a_network_passes_its_side_inputs(
    example: Example, run: Path, exported: Path, bundle: AsrBundle[Any], tmp_path: Path
) -> None:
    """In a batch, alone, in the model's thread, by the commands and by a request."""
    assert losses_of(run)[-1] < losses_of(run)[0]
    clip = (3000 * np.random.default_rng(0).standard_normal(RATE)).astype(np.int16)
    rows = [{example.field: value} for value in example.values]
    together = [item.log_probs for item in bundle.encode([clip, clip], rows)]
    assert np.abs(together[0] - together[1]).max() > 1e-3  # it has an effect
    threaded = as_recognizer(load_in_thread(exported, user_modules=example.modules, device="cpu"))
    transcriber = Transcriber(bundle=threaded)
    for row, expected in zip(rows, together, strict=True):
        ways = {
            "alone": bundle.encode([clip], [row])[0],
            "thread": threaded.encode([clip], [row])[0],
            "transcriber": next(item for _, item in transcriber.encode(clip, RATE, row=row)),
        }
        for name, way in ways.items():
            np.testing.assert_allclose(way.log_probs, expected, atol=1e-4, err_msg=name)
    with running_server(tmp_path, tones=(threaded, threaded.tokenizer, None)) as server:
        for row in rows:
            value: Any = row[example.field]
            is_file = example.name == "target_speaker"
            files = {"file": ("talk.wav", wav(clip))}
            files |= {example.field: ("x.flac", Path(value).read_bytes())} if is_file else {}
            answer = server.post(data={} if is_file else row, files=files)
            text = answer.json()["text"]
            assert text and text == transcriber.transcribe(clip, RATE, row=row).text
    assert sbkit(["score", str(run), "--out", str(tmp_path / "s"), *example.imports]) == 0
    scored, tested = (read_json(path / "summary.json") for path in (tmp_path / "s", run))
    assert scored["test"] == tested["test"]


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_take_the_steps_of_one(
    example: Example, folder: Path, workplace: Workplace, tmp_path: Path
) -> None:
    tables = ", ".join(f"{split}: {folder / split}.csv" for split in SPLITS)
    options = (f"--manifest={{{tables}}}", "--concat_prob=0", "--dropout=0", "--lr=0.001")
    yaml = folder / f"{example.name}.yaml"
    one, two = workplace.parameters_by_ranks(tmp_path, *options, yaml=yaml, tiny=TINY)
    for name, parameter in one.items():
        torch.testing.assert_close(two[name], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_transcribe_gives_the_texts_of_the_test(
    example: Example, exported: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, scores = [*read_test(folder)], folder / "scores"
    words = ["score", str(exported), str(folder / "test.csv"), "--out", str(scores)]
    assert sbkit([*words, *example.imports]) == 0
    lines = (scores / "utterances_test.jsonl").read_text().splitlines()
    texts = {json.loads(line)["reference"]: json.loads(line)["hypothesis"] for line in lines}
    for row in rows[:2]:
        options = ["--side", f"{example.field}={row[example.field]}", "--quiet", "--device=cpu"]
        capsys.readouterr()
        assert sbkit(["transcribe", str(exported), row["path"], *options, *example.imports]) == 0
        reference = next(text for text in texts if text in row["text"].lower())
        assert capsys.readouterr().out.strip() == texts[reference] != ""


@pytest.mark.slow
def test_what_cannot_pass_side_inputs_is_refused_by_name(
    example: Example,
    run: Path,
    folder: Path,
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    field, options = example.field, {"user_modules": example.modules, "device": "cpu"}
    for formats in ("onnx", "sherpa-onnx", "huggingface"):
        with pytest.raises(ConfigError, match=f"`{field}`.*cannot be passed to {formats}"):
            sbkit(["export", str(run), "--out=x", "--formats", formats, *example.imports])
    for more in ({"compile": "default"}, {"streaming": "only"}, {"runtime": "onnx"}):
        with pytest.raises(ConfigError, match=f"cannot pass `{field}`"):
            load_bundle(run, **options, **more)
    assert train(workplace, example, folder, folder / "o", "--export_formats=[onnx]") == BAD_INPUT
    assert train(workplace, example, folder, folder / "c", "--concat_prob=0.5") == BAD_INPUT
    errors = capsys.readouterr().err
    assert f"`{field}`, which this" in errors and "`concat_prob` joins" in errors
    with pytest.raises(ConfigError, match=f"takes {field} beside audio, but --side names x"):
        sbkit(["transcribe", str(run), "a.wav", "--side=x=1", "--quiet", *example.imports])


@pytest.mark.slow
def test_clip_without_its_value_is_named(
    example: Example, bundle: AsrBundle[Any], folder: Path, workplace: Workplace
) -> None:
    if example.name == "biasing":  # it has a default
        assert len(bundle.transcribe([np.zeros(RATE, np.int16)])) == 1
        return
    with pytest.raises(DataError, match=f"needs `{example.field}` beside the audio"):
        bundle.transcribe([np.zeros(RATE, np.int16)])
    table = folder / "dev.csv"
    text = table.read_text()
    try:
        table.write_text(text.replace(f",{example.field}", ",other"))
        assert train(workplace, example, folder, folder / "d") == BAD_INPUT
    finally:
        table.write_text(text)


@pytest.mark.slow
def test_side_input_that_no_part_takes_is_an_error(
    example: Example, bundle: AsrBundle[Any]
) -> None:
    network = bundle.model.network
    audio, lengths = (x for x in bundle.model._batch_of([np.zeros(RATE, np.int16)]))
    sides = bundle.side_inputs([{example.field: example.values[0]}], 1)
    batch = bundle.model._batch_of_sides(sides)
    with pytest.raises(SbkitError, match="`other` has no effect"):
        network.encode(audio, lengths, **batch, other=lengths)
