"""People exchange bundles: whatever a bundle holds, loading it runs none of its code."""

import json
import py_compile
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile

from sbkit.base.checksums import write_checksums
from sbkit.commands.cli import run
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.text.tokenizer import Tokenizer
from tests.attacks.hostile import DAMAGES, refused, watched
from tests.decoding.spoken import train_models
from tests.runtime.bundles import edit_config, edit_weights
from tests.runtime.tones import noise

MISSING = object()
CALLED = ["touch CANARY"]  # a command that leaves a trace


@pytest.fixture(scope="module")
def healthy(plain_bundle: Path) -> Path:
    """Transcribe with a bundle once, so that later commands import nothing."""
    soundfile.write(plain_bundle.parent / "clip.wav", noise(0.5)[0], 16_000)
    run(["transcribe", str(plain_bundle), str(plain_bundle.parent / "clip.wav")])
    return plain_bundle


@pytest.fixture
def bundle(healthy: Path, tmp_path: Path) -> Path:
    """Copy the bundle and the clip; a canary would appear beside them."""
    shutil.copy(healthy.parent / "clip.wav", tmp_path / "clip.wav")
    return Path(shutil.copytree(healthy, tmp_path / "bundle"))


def transcription_refused(bundle: Path, *options: str) -> str:
    """Transcribe the clip with a hostile bundle, and return the error."""
    command = ["transcribe", str(bundle), str(bundle.parent / "clip.wav"), "--format", "json"]
    return refused(partial(run, [*command, *options]), bundle.parent / "canary")


# -- config.json ----------------------------------------------------------------------------------

CODE = {  # these nested classes once ran a command
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
    "YAML": "!!python/object/apply:os.system ['touch CANARY']",
    "arguments that are an object": {  # ran the command in an earlier version
        "new": "torch.nn.modules.linear.Identity",
        "arguments": {"new": "posix.system", "arguments": CALLED},
    },
}


def with_part(bundle: Path, plain: Any) -> None:
    """Replace the description of a part."""
    text = json.dumps(plain).replace("CANARY", str(bundle.parent / "canary"))
    edit_config(bundle, lambda config: config["parts"].update(seq_lin=json.loads(text)))


@pytest.mark.parametrize("plain", CHAINS.values(), ids=CHAINS.keys())
def test_parts_with_chains_of_callables_are_refused(plain: Any, bundle: Path) -> None:
    """`test_parts.py` puts such names into every place of a part."""
    with_part(bundle, plain)
    transcription_refused(bundle)


VALUES = (-(10**30), "a\x1b[2Jb", CODE, json.loads("[" * 200 + "]" * 200))
FIELDS = [
    *((field, MISSING) for field in ("format", "task", "sample_rate", "model", "parts")),
    *((field, value) for field in ("format", "task", "sample_rate", "parts") for value in VALUES),
    *((field, value) for field in ("decoder", "confidence", "normalizer") for value in VALUES),
    *(("model", value) for value in VALUES[::2]),
    ("decoder", {"beam_size": 10**9, "weights": {}}),
    ("confidence", {"greedy": {"bias": 10**400, "posterior": 1.0, "length": 0.0, "lm": 0.0}}),
    ("language", ["en"]),
    ("sample_rate", 1_000_000),
    *(  # a word of the transcript would become gigabytes
        ("normalizer", {"version": 4, "rewrite": rewrite})
        for rewrite in ({"a": "b" * 900, "b": "c" * 90}, {"a": "b" * 10**6}, {"": "a"}, [])
    ),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: f"{value!r:.20}")
def test_config_field_of_another_type_is_refused(field: str, value: Any, bundle: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config[field] = value
        if value is MISSING:
            del config[field]

    edit_config(bundle, change)
    transcription_refused(bundle)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 100_000],
    ids=lambda value: f"{value!r:.20}",
)
@pytest.mark.parametrize("name", ["config.json", "checksums.json"])
def test_malformed_json_is_refused(name: str, content: bytes, bundle: Path) -> None:
    (bundle / name).write_bytes(content)
    if name == "config.json":
        write_checksums(bundle)
    transcription_refused(bundle)


def add_decoder(bundle: Path, words: int = 0, size: object = 8) -> None:
    """Add language models, that of words of an order, and a decoder."""
    tokenizer, texts = Tokenizer(model_file=bundle / "tokenizer.model"), ["hello there"]
    train_models(bundle / LANGUAGE_MODELS_FILE, tokenizer, texts, words=words, tokens=2)
    decoder = {"attention_rescoring": False, "weights": {}, "beam_size": size}
    edit_config(bundle, lambda config: config.update(decoder=decoder))


@pytest.mark.parametrize("size", [10**9, 1.5, "32"])
def test_impossible_beam_size_is_refused(size: Any, bundle: Path) -> None:
    add_decoder(bundle, 2, size)
    assert "`beam_size`" in transcription_refused(bundle)


@pytest.mark.parametrize("task", ["codec.task.CodecTask", "vad.task.VadTask"])
def test_decoder_of_a_task_without_texts_is_refused(task: str, bundle: Path) -> None:
    add_decoder(bundle)
    edit_config(bundle, lambda config: config.update(task=f"sbkit.tasks.{task}"))
    assert "has a decoder, but" in transcription_refused(bundle)


@pytest.mark.parametrize("orders", [b"[]", b'""', b'["tokens"]'])
def test_malformed_orders_of_language_models_are_refused(orders: bytes, bundle: Path) -> None:
    add_decoder(bundle)
    file = bundle / LANGUAGE_MODELS_FILE
    before = rb"{\"tokens\": 2}"
    content = file.read_bytes()
    assert before in content
    file.write_bytes(content.replace(before, orders.replace(b'"', b'\\"').ljust(len(before))))
    write_checksums(bundle)
    assert "its orders are" in transcription_refused(bundle)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torch.nn.modules.linear.Linear", {"in_features": 30_000, "out_features": 30_000}),
        ("torch.nn.modules.rnn.GRU", {"input_size": 9, "hidden_size": 99, "num_layers": 10**12}),
        ("torch.nn.modules.batchnorm.BatchNorm1d", {"num_features": 10**10, "affine": False}),
        ("speechbrain.lobes.features.Fbank", {"n_mels": 10**5, "n_fft": 10**6}),  # no buffer
    ],
)
def test_oversized_parts_are_refused(name: str, arguments: dict[str, int], bundle: Path) -> None:
    with_part(bundle, {"new": name, "arguments": arguments})
    assert "twice as large" in transcription_refused(bundle)


# -- the files ------------------------------------------------------------------------------------


MODULE = "module_in_a_hostile_bundle"


def leave_trace(bundle: Path) -> str:
    return f"open({str(bundle.parent / 'canary')!r}, 'w').close()\n"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("model.safetensors", []), ("tokenizer.model", [])),
        *((name, ["--import", MODULE]) for name in ("config.json", f"{MODULE}.py")),
    ],
)
def test_damaged_files_are_refused_before_a_user_module_runs(
    name: str, options: list[str], damage: Callable[[Path], Any], bundle: Path
) -> None:
    (bundle / f"{MODULE}.py").write_text(leave_trace(bundle) * 2)  # half of it still runs
    write_checksums(bundle)
    damage(bundle / name)
    transcription_refused(bundle, *options)


def test_bundle_as_working_folder_runs_only_the_verified_source(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would run a package or a compiled file of that name instead, without a checksum."""
    name = f"{MODULE}_in_the_working_folder"
    (bundle / f"{name}.py").write_text(leave_trace(bundle))
    py_compile.compile(
        str(bundle / f"{name}.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    (bundle / f"{name}.py").write_text("is_verified = True\n")
    write_checksums(bundle)
    (bundle / name).mkdir()
    (bundle / name / "__init__.py").write_text(leave_trace(bundle))
    monkeypatch.chdir(bundle)
    monkeypatch.syspath_prepend("")
    with watched(bundle.parent / "canary"):
        assert run(["transcribe", ".", "../clip.wav", "--import", name]) == 0
    assert sys.modules[name].is_verified


def test_weights_of_another_model_are_refused(bundle: Path) -> None:
    edit_weights(bundle, lambda weights: weights.update({"\x1b[2J": weights.pop("3.weight")}))
    assert "\x1b" not in transcription_refused(bundle)


def header(text: bytes, size: int | None = None) -> bytes:
    """Return a safetensors file with this header."""
    return (len(text) if size is None else size).to_bytes(8, "little") + text + bytes(4)


PICKLE = b"cos\nsystem\n(S'touch canary'\ntR."


@pytest.mark.parametrize(
    "content",
    [
        header(b"{" * 99, 10**7),
        header(b"[" * 30_000),
        header(b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'),
        PICKLE,
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_files_that_are_no_weights_are_refused(content: bytes, bundle: Path) -> None:
    (bundle / "model.safetensors").write_bytes(content)
    write_checksums(bundle)
    transcription_refused(bundle)
