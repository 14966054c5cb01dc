"""A bundle is what people exchange: whatever it holds, to load it runs no code of its own."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from sbkit.checkpoint.integrity import write_checksums
from sbkit.cli import run
from sbkit.text.tokenizer import Tokenizer
from tests.attacks.hostile import KINDS, refused
from tests.decoding.spoken import train_models
from tests.inference.bundles import edit_config, edit_weights, make_bundle

MISSING = object()
CALLED = ["touch CANARY"]  # arguments of whatever is named: a command that leaves a trace


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a bundle and a clip."""
    folder = tmp_path_factory.mktemp("healthy")
    make_bundle(folder)
    noise = np.random.default_rng(0).integers(-3000, 3000, 8000).astype(np.int16)
    soundfile.write(folder / "clip.wav", noise, 16_000)
    run(["transcribe", str(folder / "bundle"), str(folder / "clip.wav")])
    return folder


@pytest.fixture
def bundle(healthy: Path, tmp_path: Path) -> Path:
    """Copy the bundle; the clip lies beside it, and so would a canary."""
    shutil.copytree(healthy / "bundle", tmp_path / "bundle")
    shutil.copy(healthy / "clip.wav", tmp_path / "clip.wav")
    return tmp_path / "bundle"


def transcription_refused(bundle: Path, *options: str) -> str:
    """Transcribe the clip with a hostile bundle, and return what is said."""
    command = ["transcribe", str(bundle), str(bundle.parent / "clip.wav"), *options]
    return refused(partial(run, command), bundle.parent / "canary")


# -- config.json ----------------------------------------------------------------------------------

NAMES = (  # more of them: tests/inference/bundle/test_module_spec.py
    *("torch.hub.load", "torch.nn.Linear.__subclasses__", "torch.nn"),
    *(
        "speechbrain.inference.interfaces.foreign_class",
        "sbkit.cli.run",
        "functools.partial",
        "a..b",
    ),
)
CODE = {  # the chain of classes that once ran a command
    "new": "torch.fx.graph_module._CodeOnlyModule",
    "arguments": {
        "body": {
            "forward": {
                "name": "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
                "arguments": [["system"], "old", "os"],
            },
            "_modules": {},
            "training": False,
        }
    },
}
CHAINS: dict[str, Any] = {
    "code": CODE,
    "code in a Sequential": {"new": "torch.nn.Sequential", "arguments": [CODE]},
    "code in a mapping": {"new": "torch.nn.ModuleDict", "arguments": [{"a": CODE}]},
    "a list": [CODE],
    "a tuple": {"tuple": [CODE]},
    "text": "!new:os.system",
    "YAML": "!!python/object/apply:os.system ['touch CANARY']",
    "new in new": {"new": {"new": "os.system"}, "arguments": CALLED},
    "a class that is called": {"new": "torch.nn.Linear", "arguments": {"dtype": CODE}},
}


def with_part(bundle: Path, key: str, plain: Any) -> None:
    """Describe a part otherwise."""
    text = json.dumps(plain).replace("CANARY", str(bundle.parent / "canary"))
    edit_config(bundle, lambda config: config["parts"].update({key: json.loads(text)}))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_something_else_than_a_part_is_refused(name: str, bundle: Path) -> None:
    with_part(bundle, "seq_lin", {"new": name, "arguments": CALLED})
    transcription_refused(bundle)
    arguments = {"d_ffn": 16, "input_size": 16, "activation": {"name": name, "arguments": CALLED}}
    inner = {"new": "speechbrain.nnet.attention.PositionalwiseFeedForward", "arguments": arguments}
    with_part(bundle, "seq_lin", inner)
    transcription_refused(bundle)


@pytest.mark.parametrize("key", ["seq_lin", "compute_features"])
@pytest.mark.parametrize("plain", CHAINS.values(), ids=CHAINS.keys())
def test_a_chain_of_callables_is_refused(plain: Any, key: str, bundle: Path) -> None:
    with_part(bundle, key, plain)
    transcription_refused(bundle)


def deep(levels: int) -> Any:
    """Nest lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


FIELDS = [
    (field, value)
    for field in ("format", "task", "sample_rate", "model", "parts")
    for value in (MISSING, None, -(10**30), "a\x1b[2Jb", [1, None, {}], CODE, deep(200))
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda each: f"{each!r:.20}")
def test_a_field_of_another_type_is_refused(field: str, value: Any, bundle: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config[field] = value
        if value is MISSING:
            del config[field]

    edit_config(bundle, change)
    transcription_refused(bundle)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}', b"9" * 100_000],
    ids=lambda each: f"{each!r:.20}",
)
@pytest.mark.parametrize("name", ["config.json", "checksums.json"])
def test_what_is_no_description_is_refused(name: str, content: bytes, bundle: Path) -> None:
    (bundle / name).write_bytes(content)
    if name == "config.json":
        write_checksums(bundle)
    transcription_refused(bundle)


# -- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model"])
def test_something_else_in_the_place_of_a_file_is_refused(
    name: str, kind: Callable[[Path], Any], bundle: Path
) -> None:
    kind(bundle / name)
    transcription_refused(bundle)


Weights = dict[str, torch.Tensor]
WEIGHTS: dict[str, Callable[[Weights], Any]] = {
    "complex": lambda all_: {name: each.to(torch.complex64) for name, each in all_.items()},
    "none": lambda all_: {},
    "one less": lambda all_: {name: each for name, each in all_.items() if name != "3.weight"},
    "another shape": lambda all_: all_.update({"3.weight": all_["3.weight"][:1].clone()}),
    "another name": lambda all_: all_.update({"\x1b[2J": all_.pop("3.weight")}),
}


@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_of_another_model_are_refused(
    change: Callable[[Weights], Any], bundle: Path
) -> None:
    def changed(weights: Weights) -> Weights | None:
        made = change(weights)
        return made if isinstance(made, dict) else None

    edit_weights(bundle, changed)
    transcription_refused(bundle)


def header(text: bytes, size: int | None = None) -> bytes:
    """Write a file of safetensors with a header of choice."""
    return (len(text) if size is None else size).to_bytes(8, "little") + text + bytes(4)


PICKLE = b"cos\nsystem\n(S'touch canary'\ntR."


@pytest.mark.parametrize(
    "content",
    [
        header(b"{" * 99, 2**63),
        header(b"{" * 99, 10**7),
        header(b"[" * 60_000),
        header(b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'),
        PICKLE,
    ],
    ids=lambda each: f"{each!r:.20}",
)
def test_what_are_no_weights_is_refused(content: bytes, bundle: Path) -> None:
    (bundle / "model.safetensors").write_bytes(content)
    write_checksums(bundle)
    transcription_refused(bundle)


# -- decoder, language models and confidence ------------------------------------------------------

GOOD: dict[str, Any] = {"beam_size": 4, "weights": {"word": 0.5, "token": 0.3}}


@pytest.fixture
def decoding(bundle: Path) -> Path:
    """Give the bundle language models of its tokenizer, and a decoder that uses them."""
    tokenizer = Tokenizer(model_file=bundle / "tokenizer.model")
    texts = ["hello there", "a quick brown fox", "the fox there"]
    train_models(bundle / "lm.safetensors", tokenizer, texts)
    edit_config(bundle, lambda config: config.update(decoder=GOOD))
    return bundle


@pytest.mark.parametrize(
    "decoder",
    [
        [GOOD],
        "beam",
        {"beam_size": 4},
        *({**GOOD, "weights": {"word": weight}} for weight in ("0.5", 1e300, deep(400))),
        {**GOOD, "weights": {"__class__": 1.0}},
    ],
    ids=lambda each: f"{each!r:.40}",
)
def test_a_decoder_that_cannot_be_is_refused(decoder: Any, decoding: Path) -> None:
    edit_config(decoding, lambda config: config.update(decoder=decoder))
    transcription_refused(decoding)


def test_what_are_no_language_models_is_refused(decoding: Path) -> None:
    (decoding / "lm.safetensors").write_bytes(PICKLE)
    write_checksums(decoding)
    transcription_refused(decoding)


@pytest.mark.parametrize(
    "confidence",
    [
        [{"bias": 0.0}],
        {"greedy": {}},
        {"greedy": {"weights": {"entropy": 1.0}}},
        {"greedy": {"weights": {"bias": 0.0, "format": 1.0}}},
        {"greedy": {"weights": {"bias": "0.0"}}},
        {"greedy": {"weights": {"bias": float("nan")}}},
        {"greedy": {"weights": {"bias": 10**400}}},
    ],
    ids=lambda each: f"{each!r:.40}",
)
def test_a_confidence_that_cannot_be_is_refused(confidence: Any, bundle: Path) -> None:
    edit_config(bundle, lambda config: config.update(confidence=confidence))
    transcription_refused(bundle, "--format", "json")
