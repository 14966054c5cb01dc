"""Third-party tables, graphs and weights are read as data."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.data.corpus import corpus_of
from sbkit.models.pretrained.folder import check_tensors, read_encoder_config
from sbkit.runtime.onnx_model import OnnxModel
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.task import AsrTask
from sbkit.train.initialize import initialize_from
from tests.attacks.hostile import ESCAPE, refused, watched
from tests.models.pretrained.folders import FRAMES, change_json, make_folder
from tests.models.pretrained.recognizers import make_ctc, make_whisper
from tests.recipes.test_common_voice import make_release
from tests.runtime.bundles import make_bundle, make_run
from tests.stores import read_split


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file that must stay unchanged, and a cache beside it."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("kept")
    return tmp_path / "mine" / "kept.txt"


# -- tables ---------------------------------------------------------------------------------------

TABLES = {
    "no path.csv": f"{ESCAPE},text\na,b\n",
    "an id that is a path.csv": "id,path,text\n../../mine/kept,a.wav,hi\n",
    "numbers.jsonl": '{"path": "a.wav", "text": 1e999, "offset": NaN, "duration": -1e308}\n',
}


def read_table(file: Path) -> None:
    """Read a table as training does."""
    read_split({"manifest": {"train": str(file)}}, "train")


@pytest.mark.parametrize("name", TABLES)
def test_hostile_tables_are_read_as_text(name: str, mine: Path, tmp_path: Path) -> None:
    file = tmp_path / f"train{Path(name).suffix}"
    file.write_text(TABLES[name])
    try:
        with watched(tmp_path / "canary"):
            read_table(file)
    except SbkitError as error:
        assert "\x1b" not in str(error)
    assert mine.read_text() == "kept"


def test_command_of_a_kaldi_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "data/train"
    folder.mkdir(parents=True)
    (folder / "wav.scp").write_text(f"a touch {tmp_path}/canary |\n")
    (folder / "text").write_text("a hi\n")
    settings = {"data_folder": str(folder.parent)}
    with watched(tmp_path / "canary"):
        manifest = read_split(settings, "train")
    assert not len(manifest) and [row.detail for row in manifest.excluded] == ["command"]


# -- addresses ------------------------------------------------------------------------------------

ADDRESS = "http://localhost:9/tracker"
NAMING_KEYS = (
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "base_model", "source"),
    *("repo_id", "url", "homepage", "data_files", "chat_template_url", "tracker"),
)


def plant(folder: Path) -> None:
    """Name an address in all files of a folder that describe its content."""
    for file in folder.rglob("*.json"):
        if file.name not in ("checksums.json", "vocab.json", "tokenizer.json"):
            change_json(file, **dict.fromkeys(NAMING_KEYS, ADDRESS))
    card = f"---\nlicense: mit\nbase_model: {ADDRESS}\n---\n## License\n![]({ADDRESS})\n"
    (folder / "README.md").write_text(card)
    if (folder / "checksums.json").exists():
        write_checksums(folder)


def transcribe(bundle: Path) -> None:
    soundfile.write(bundle.parent / "a.wav", np.zeros(8000), 16_000)
    assert sbkit(["transcribe", str(bundle), str(bundle.parent / "a.wav")]) == 0


FOLDERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "bundle": (
        lambda folder: make_bundle(folder.parent).rename(folder),
        transcribe,
    ),
    "pretrained encoder": (
        lambda folder: make_folder(folder, **FRAMES),
        lambda folder: check_tensors(folder, read_encoder_config(folder)),
    ),
    "Whisper of transformers": (
        lambda folder: make_whisper(folder, seconds=30),
        lambda folder: load_bundle(folder, language="en"),
    ),
    "CTC model of transformers": (make_ctc, lambda folder: load_bundle(folder, language="en")),
    "release": (
        make_release,
        lambda folder: corpus_of({"data_folder": str(folder), "language": "it"}).describe(),
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_address_in_a_folder_is_not_opened(kind: str, mine: Path, tmp_path: Path) -> None:
    """`test_run_folders.py` has run folders."""
    make, read = FOLDERS[kind]
    make(tmp_path / "folder")
    plant(tmp_path / "folder")
    with watched(tmp_path / "canary"):
        read(tmp_path / "folder")


# -- weights to start from -------------------------------------------------------------------------


class Call:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("name", ["model.ckpt", "CKPT.yaml", "checksums.json"])
def test_init_from_a_hostile_checkpoint_runs_no_code(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (checkpoint,) = (run / "checkpoints").glob("CKPT*")
    parts = {name: torch.nn.Linear(2, 2) for name in ("CNN", "Transformer", "seq_lin", "ctc_lin")}
    hparams = {**parts, "model": torch.nn.ModuleList(parts.values())}
    read = partial(initialize_from, [run], hparams, AsrTask(), {})
    call = Call(tmp_path / "canary")
    for content in (pickle.dumps({"a": call}), b"[" * 200_000):
        (checkpoint / name).write_bytes(content)
        if name != "checksums.json":
            write_checksums(checkpoint)
        refused(read, tmp_path / "canary")
    torch.save({"a": call}, checkpoint / name)
    refused(read, tmp_path / "canary")


# -- ONNX -----------------------------------------------------------------------------------------


def onnx_model(**changes: Any) -> Any:
    """Make a graph of one product; ``changes``: its metadata, and `location` of the weight."""
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    if location := changes.pop("location", None):
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    audio, out = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", 4])
        for name in ("audio", "log_probs")
    )
    node = onnx.helper.make_node("MatMul", ["audio", "w"], ["log_probs"])
    graph = onnx.helper.make_graph([node], "g", [audio], [out], [weight])
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.helper.set_model_props(model, changes)
    return model.SerializeToString()


@pytest.mark.parametrize("location", ["/etc/passwd", "../mine/kept.txt", "/dev/zero"])
def test_onnx_with_an_external_file_is_refused(location: str, mine: Path, tmp_path: Path) -> None:
    refused(partial(OnnxModel, onnx_model(location=location)), tmp_path / "canary")


@pytest.mark.parametrize("samples", ["1000000000000", "-1", "", "1.5", "9" * 5000])
def test_onnx_metadata_with_impossible_sizes_is_refused(samples: str, tmp_path: Path) -> None:
    model = OnnxModel(onnx_model(samples_per_frame=samples))
    refused(lambda: model.samples_per_frame, tmp_path / "canary")
