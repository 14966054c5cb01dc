"""The transducer of docs/examples, which decodes no frames of CTC, does what a recognizer does."""

import re
import shutil
from operator import setitem
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.runtime.runtimes import load_in_thread
from sbkit.tasks.asr.predict import Transcriber
from tests.runs import ROOT, Workplace, losses_of, read_json
from tests.runtime.bundles import edit_weights
from tests.runtime.tones import RATE, noise
from tests.serve.server import running_server, wav

TINY = ("--device=cpu", "--batch_seconds=6", "--number_of_epochs=2", "--log_every=1", "--nhead=2")
SIZES = ("--cnn_channels=32", "--d_model=32", "--d_ffn=64", "--num_encoder_layers=1")
Captured = pytest.CaptureFixture[str]
MODULES = frozenset(["transducer", "transducer_recipe"])
IMPORT = [option for name in sorted(MODULES) for option in ("--import", name)]


@pytest.fixture(scope="module")
def run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    shutil.copytree(ROOT / "docs/examples/transducer", folder, dirs_exist_ok=True)
    (folder / "hparams").symlink_to(ROOT / "hparams")
    yaml, wrong = folder / "transducer.yaml", folder / "wrong.yaml"
    assert workplace.train_here(folder / "run", *SIZES, yaml=yaml, tiny=TINY) == 0
    wrong.write_text(yaml.read_text().replace("decoder: null", ""))
    assert workplace.train_here(folder / "wrong", *SIZES, yaml=wrong, tiny=TINY) == BAD_INPUT
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call", "fix"),
    [
        ("broken", "bundle.nothing(", ""),
        ("reaching", "bundle.model.network.predict(", r"\. .* Call `bundle.model.predict`"),
    ],
)
def test_check_names_the_line_where_predict_fails(
    name: str, call: str, fix: str, run: Path, workplace: Workplace, capsys: Captured
) -> None:
    """It runs as in `transcribe`, where a model has a thread."""
    folder = run.parent
    for file in ("transducer.py", "transducer_recipe.py", "transducer.yaml"):
        text = (folder / file).read_text().replace("transducer", name)
        assert file != "transducer.py" or "bundle.predict(" in text
        copy = folder / file.replace("transducer", name)
        copy.write_text(text.replace("bundle.predict(", call))
    yaml = folder / f"{name}.yaml"
    assert workplace.train_here(folder / name, *SIZES, yaml=yaml, tiny=TINY) == BAD_INPUT
    place = rf"`predict` or `result` .*, in line \d+ of .*/{name}.py \(\w+\)\){fix}"
    assert re.search(place, capsys.readouterr().err)


@pytest.mark.slow
def test_transducer_learns_and_its_bundle_is_scored_as_in_its_run(run: Path) -> None:
    losses = losses_of(run)
    assert losses[-1] < losses[0]
    assert sbkit(["score", str(run), "--out", str(run / "scores"), *IMPORT]) == 0
    expected, scored = (read_json(file / "summary.json")["test"] for file in (run, run / "scores"))
    assert scored == expected and "decoder" not in scored["test"]


@pytest.mark.slow
def test_transducer_transcribes_and_is_served_but_not_as_ctc(run: Path, tmp_path: Path) -> None:
    bundle, clips = tmp_path / "bundle", noise(1, 35)
    assert sbkit(["export", str(run), "--out", str(bundle), *IMPORT]) == 0
    # After so little training the blank is most probable in each frame.
    edit_weights(bundle, lambda weights: setitem(weights["5.bias"], slice(4), -9.0))
    threaded = load_in_thread(bundle, user_modules=MODULES)
    expected = threaded.transcribe(clips)
    assert all(expected)
    with (
        Transcriber(bundle=threaded) as transcriber,
        running_server(tmp_path, tones=(threaded, threaded.tokenizer, None)) as server,
    ):
        assert [*map(str, transcriber.stream(clips, RATE))] == expected
        assert [server.post(wav(clip)).json()["text"] for clip in clips] == expected
        refused = server.post(wav(clips[0]), data={"response_format": "srt"})
        assert refused.json()["error"]["message"] == "This model does not time words."
    talk = tmp_path / "talk.wav"
    talk.write_bytes(wav(clips[1]))
    text = bundle / "README.md"
    transcribe = ["transcribe", str(bundle), str(talk)]
    assert sbkit([*transcribe, "--format", "srt", *IMPORT]) != 0
    for command, feature in (
        ([*transcribe, "--live"], "Live speech"),
        ([*transcribe, "--runtime", "onnx"], "The runtime onnx"),
        ([*transcribe, "--decoder", "beam"], "The decoder beam"),
        ([*transcribe, "--compile", "default"], "`compile`"),
        (["tune", run, "--out", tmp_path / "x"], "`sbkit tune`"),
        (["segment", talk, text, "--model", bundle, "--out", tmp_path / "x"], "Alignment"),
    ):
        with pytest.raises(
            SbkitError, match=f"^{feature} needs a model that is decoded frame by frame"
        ):
            sbkit([*map(str, command), *IMPORT])
