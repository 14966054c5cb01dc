"""Hostile bundles."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbkit.checkpoint.integrity import write_checksums
from tests.attacks.case import Case, Place
from tests.inference.bundles import edit_config, edit_tokenizer, edit_weights

# What a chain was made of, or might be: modules with any `forward`, closures over any function,
# callables of torch and SpeechBrain that read, write, import or connect, and plain functions.
NAMES = [
    "torch.fx.graph_module._CodeOnlyModule",
    "torch.fx.GraphModule",
    "torch.nn.ParameterDict.get",
    "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
    "torch.nn.Module._apply",
    "torch.nn.Module",
    "torch.nn.Sequential.forward",
    "torch.nn.ParameterDict",
    "torch.nn.ParameterList",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.TripletMarginWithDistanceLoss",
    "torch.nn.attention._fa4._fa4_import_module",
    "torch.nn.utils.stateless.functional_call",
    "torch.nn.LazyLinear",
    "torch.nn.SyncBatchNorm",
    "torch.nn.modules.module.register_module_forward_hook",
    "torch.nn.modules.linear.Linear.__init__",
    "torch.nn.Linear.__class__",
    "torch.nn.Linear.__subclasses__",
    "torch.jit.ScriptModule",
    "torch.jit.load",
    "torch.load",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.ops.load_library",
    "torch.utils.cpp_extension.load_inline",
    "torch._dynamo.optimize",
    "torch.package.PackageImporter",
    "torch.serialization.load",
    "torch.storage._load_from_bytes",
    "torch.utils.data.DataLoader",
    "torch.multiprocessing.spawn",
    "torch.distributed.rpc.rpc_sync",
    "speechbrain.lobes.models.MSTacotron2.TextMelCollate",
    "speechbrain.lobes.models.discrete.dac.DAC",
    "speechbrain.lobes.models.discrete.dac.download",
    "speechbrain.lobes.models.huggingface_transformers.wav2vec2.Wav2Vec2",
    "speechbrain.lobes.models.fairseq_wav2vec.FairseqWav2Vec2",
    "speechbrain.nnet.schedulers.NoamScheduler",
    "speechbrain.nnet.schedulers.NoamScheduler.save",
    "speechbrain.nnet.schedulers.NoamScheduler.load",
    "speechbrain.processing.PLDA_LDA.StatObject_SB",
    "speechbrain.processing.PLDA_LDA.StatObject_SB.save_stat_object",
    "speechbrain.processing.features.InputNormalization._save",
    "speechbrain.processing.features.InputNormalization._load",
    "speechbrain.processing.features.torch.save",
    "speechbrain.processing.features.torch.load",
    "speechbrain.nnet.linear.logging.os.system",
    "speechbrain.core.os.system",
    "speechbrain.inference.ASR.EncoderASR",
    "speechbrain.inference.interfaces.foreign_class",
    "speechbrain.utils.importutils.lazy_export_all",
    "speechbrain.utils.parameter_transfer.Pretrainer",
    "speechbrain.augment.time_domain.AddNoise",
    "speechbrain.tokenizers.SentencePiece.SentencePiece",
    "speechbrain.utils.epoch_loop.EpochCounter",
    "speechbrain.utils.train_logger.FileTrainLogger",
    "sbkit.checkpoint.checkpointer.Checkpointer",
    "sbkit.text.tokenizer.Tokenizer",
    "sbkit.cli.run",
    "sbkit.base.files.write_text_atomically",
    "sbkit.inference.bundle.export.export_run",
    "sbkit.models.asr.AsrModel",
    "sbkit.models.asr.torch.load",
    "sbkit.audio.io.read_audio",
    "os.system",
    "posix.system",
    "os.popen",
    "subprocess.run",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.__import__",
    "eval",
    "exec",
    "open",
    "pydoc.locate",
    "pydoc.pipepager",
    "importlib.import_module",
    "functools.partial",
    "functools.reduce",
    "operator.methodcaller",
    "pickle.loads",
    "pickle.load",
    "shutil.rmtree",
    "ctypes.CDLL",
    "runpy.run_path",
    "code.interact",
    "socket.create_connection",
    "urllib.request.urlopen",
    "webbrowser.open",
    "marshal.loads",
    "types.FunctionType",
    "multiprocessing.Process",
    "timeit.timeit",
    "pty.spawn",
    "antigravity",
    "this",
    "no.such.thing",
    "a..b",
    ".torch",
    "torch.",
    "torch.nn",
]


def all_bundles() -> Iterator[Case]:
    """List every hostile bundle."""
    yield from names()
    yield from chains()
    yield from fields()
    yield from files()
    yield from weights()
    yield from tokenizers()
    yield from sizes()


def _case(group: str, name: str, spoil: Callable[[Place], Any], harmless: bool = False) -> Case:
    def prepare(place: Place) -> list[str]:
        spoil(place)
        return place.transcribe()

    return Case(group, name, prepare, harmless)


def _with_part(key: str, plain: Any, place: Place) -> None:
    text = json.dumps(plain).replace("CANARY", str(place.canary))
    edit_config(place.bundle, lambda config: config["parts"].update({key: json.loads(text)}))


def names() -> Iterator[Case]:
    """Name what must not be named: as a part, and as an activation of one."""
    for name in NAMES:
        direct = {"new": name, "arguments": ["touch CANARY"]}
        yield _case("bundle name", f"new {name}", partial(_with_part, "seq_lin", direct))
        held = {"name": name, "arguments": ["touch CANARY"]}
        inside = {
            "new": "speechbrain.nnet.attention.PositionalwiseFeedForward",
            "arguments": {"d_ffn": 16, "input_size": 16, "activation": held},
        }
        yield _case("bundle name", f"activation {name}", partial(_with_part, "seq_lin", inside))


def chains() -> Iterator[Case]:
    """Put callables together, as the attack did that ran a command."""
    late = {
        "name": "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
        "arguments": [["system"], "old", "os"],
    }
    body = {"forward": late, "_modules": {}, "training": False}
    code = {"new": "torch.fx.graph_module._CodeOnlyModule", "arguments": {"body": body}}
    sequence = {
        "name": "torch.nn.Sequential",
        "arguments": [{"name": "os.system", "arguments": []}],
    }
    chain = [
        ("code only module", code),
        ("code only module in a Sequential", {"new": "torch.nn.Sequential", "arguments": [code]}),
        ("partial of Sequential", {"new": "torch.nn.Sequential", "arguments": [sequence]}),
        ("new in a mapping", {"new": "torch.nn.ModuleDict", "arguments": [{"a": code}]}),
        ("unhidden by a second key", {**code, "tuple": []}),
        ("a part that is a list", [code]),
        ("a part that is a text", "!new:os.system"),
        ("a part that is YAML", "!!python/object/apply:os.system ['touch CANARY']"),
        ("a tuple of objects", {"tuple": [code]}),
        ("arguments of arguments", {"new": {"new": "os.system"}, "arguments": []}),
        ("a class that is called", {"new": "torch.nn.Linear", "arguments": {"dtype": code}}),
    ]
    for name, plain in chain:
        yield _case("bundle chain", name, partial(_with_part, "seq_lin", plain))
        yield _case(
            "bundle chain", f"features: {name}", partial(_with_part, "compute_features", plain)
        )


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


BAD = {
    "missing": "MISSING",
    "null": None,
    "number": 7,
    "negative": -(10**30),
    "text": "a\x1b[2Jb",
    "list": [1, None, {}],
    "mapping": {"new": "os.system", "arguments": ["touch CANARY"]},
    "deep": _deep(200),
}
ALSO_FINE = {("tokenizer", "x"), ("labels", "null"), ("labels", "missing"), ("imports", "missing")}


def fields() -> Iterator[Case]:
    """Put something of another type into every field of config.json."""
    known = (
        "format",
        "task",
        "sample_rate",
        "model",
        "parts",
        "tokenizer",
        "labels",
        "imports",
    )
    for field in known:
        for name, value in BAD.items():
            harmless = (field, name) in ALSO_FINE
            yield _case(
                "bundle field", f"{field} {name}", partial(_with_field, field, value), harmless
            )
    for key in ("CNN", "Transformer", "seq_lin", "ctc_lin", "compute_features"):
        for name in ("missing", "null", "number", "list"):
            spoil = partial(_with_part_value, key, BAD[name])
            yield _case("bundle field", f"parts.{key} {name}", spoil)
    whole = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}']
    whole += [b'{"format": 2, "format": 2}', b"9" * 100_000, b'{"format": 1e999}', b"{}"]
    for content in whole:
        yield _case(
            "bundle field", f"config {content[:20]!r}", partial(_with_bytes, "config.json", content)
        )
    for model in ([], ["CNN"], ["CNN"] * 4, ["ctc_lin", "seq_lin", "Transformer", "CNN"]):
        yield _case("bundle field", f"model {model}", partial(_with_field, "model", model))
    swapped = "sbkit.models.classifier.UtteranceClassifier"
    yield _case("bundle field", "another model", partial(_with_field, "task", swapped))
    yield _case(
        "bundle field", "imports of Python's", partial(_with_field, "imports", ["os"]), True
    )
    yield _case("bundle field", "another sample rate", partial(_with_field, "sample_rate", 8000))


def _with_field(field: str, value: Any, place: Place) -> None:
    def change(config: dict[str, Any]) -> None:
        config[field] = value
        if value == "MISSING":
            del config[field]

    edit_config(place.bundle, change)


def _with_part_value(key: str, value: Any, place: Place) -> None:
    def change(config: dict[str, Any]) -> None:
        config["parts"][key] = value
        if value == "MISSING":
            del config["parts"][key]

    edit_config(place.bundle, change)


def _with_bytes(name: str, content: bytes, place: Place) -> None:
    (place.bundle / name).write_bytes(content)
    if name != "checksums.json":
        write_checksums(place.bundle)


def files() -> Iterator[Case]:
    """Put something else in the place of every file."""
    for name in ("config.json", "model.safetensors", "tokenizer.model", "checksums.json"):
        for kind, spoil in KINDS.items():
            yield _case("bundle file", f"{name} {kind}", partial(_spoil_file, name, spoil))
    for content in (
        b"{}",
        b"[]",
        b"null",
        b'{"config.json": 1}',
        b"[" * 50_000,
        b"\xff",
        b'{"../x": ""}',
    ):
        spoil_sums = partial(_with_bytes, "checksums.json", content)
        yield _case("bundle file", f"checksums {content[:20]!r}", spoil_sums)


def _spoil_file(name: str, spoil: Callable[[Path], None], place: Place) -> None:
    spoil(place.bundle / name)


def _replace(make: Callable[[Path], Any], file: Path) -> None:
    file.unlink()
    make(file)


def _sparse(file: Path) -> None:
    with file.open("wb") as content:
        content.truncate(1 << 40)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


KINDS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "pipe": partial(_replace, os.mkfifo),
    "link to /dev/zero": partial(_replace, lambda file: file.symlink_to("/dev/zero")),
    "link to /etc/passwd": partial(_replace, lambda file: file.symlink_to("/etc/passwd")),
    "link to itself": partial(_replace, lambda file: file.symlink_to(file.name)),
    "folder": partial(_replace, Path.mkdir),
    "empty": partial(_replace, Path.touch),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "a flipped bit": _flip,
    "a terabyte": _sparse,
}


def weights() -> Iterator[Case]:
    """Put other tensors into model.safetensors."""
    changes: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        "all NaN": lambda all_: {
            name: torch.full_like(each, torch.nan) if each.is_floating_point() else each
            for name, each in all_.items()
        },
        "one NaN": lambda all_: (
            next(each for each in all_.values() if each.ndim > 1).view(-1)[:1].fill_(torch.nan)
        ),
        "one infinite": lambda all_: all_["3.weight"].view(-1)[:1].fill_(torch.inf),
        "int32": lambda all_: {name: each.to(torch.int32) for name, each in all_.items()},
        "complex": lambda all_: {name: each.to(torch.complex64) for name, each in all_.items()},
        "bool": lambda all_: {name: each.bool() for name, each in all_.items()},
        "none": lambda all_: {},
        "one more": lambda all_: all_.update(more=torch.zeros(1)),
        "one less": lambda all_: {name: each for name, each in all_.items() if name != "3.weight"},
        "other shape": lambda all_: all_.update({"3.weight": all_["3.weight"][:1].clone()}),
        "other name": lambda all_: all_.update({"\x1b[2J": all_.pop("3.weight")}),
    }
    for name, change in changes.items():
        yield _case("bundle weights", name, partial(_with_weights, change))
    for number in (2**63, 2**40, 10**7, 0):
        content = number.to_bytes(8, "little") + b"{" * 100
        yield _case(
            "bundle weights",
            f"a header of {number}",
            partial(_with_bytes, "model.safetensors", content),
        )
    for text in (
        b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}',
        b"[" * 60_000,
    ):
        content = len(text).to_bytes(8, "little") + text + b"\0" * 4
        yield _case(
            "bundle weights",
            f"header {text[:12]!r}",
            partial(_with_bytes, "model.safetensors", content),
        )
    pickle = b"cos\nsystem\n(S'touch x'\ntR."
    yield _case("bundle weights", "a pickle", partial(_with_bytes, "model.safetensors", pickle))


def _with_weights(change: Callable[[dict[str, torch.Tensor]], Any], place: Place) -> None:
    def changed(all_: dict[str, torch.Tensor]) -> Any:
        made = change(all_)
        return made if isinstance(made, dict) else None

    edit_weights(place.bundle, changed)


def tokenizers() -> Iterator[Case]:
    """Put another tokenizer there, with its hash where that is looked for."""
    for name, content in {
        "random": os.urandom(500),
        "empty": b"",
        "a text": b"hello",
        "large": b"\n\x06" * 20_000_000,
        "a field without end": b"\n\xff\xff\xff\xff\x7f" + b"a" * 100,
        "pieces that are no UTF-8": b"\n\x0b\n\x02\xff\xfe\x15\x00\x00\x80\xbf" * 40,
    }.items():
        yield _case("bundle tokenizer", name, partial(_with_tokenizer, content))
    yield _case(
        "bundle tokenizer", "swapped, hash kept", partial(_with_bytes, "tokenizer.model", b"x")
    )


def _with_tokenizer(content: bytes, place: Place) -> None:
    edit_tokenizer(place.bundle, content)


def sizes() -> Iterator[Case]:
    """Ask for sizes and numbers of values that no bundle has."""
    for key, argument, number in (
        ("Transformer", "d_model", 10**6),
        ("Transformer", "num_encoder_layers", 10**5),
        ("Transformer", "nhead", 0),
        ("compute_features", "n_mels", 0),
        ("compute_features", "n_mels", -1),
        ("compute_features", "n_mels", 1e300),
    ):
        spoil = partial(_with_argument, key, argument, number)
        yield _case("bundle size", f"{key}.{argument} {number}", spoil)
    for name, value in (("many values", [0] * 200_000), ("a long text", ["a" * 100_000])):
        plain = {"new": "torch.nn.Identity", "arguments": value}
        yield _case("bundle size", name, partial(_with_part, "seq_lin", plain))


def _with_argument(key: str, argument: str, number: float, place: Place) -> None:
    def change(config: dict[str, Any]) -> None:
        config["parts"][key]["arguments"][argument] = number

    edit_config(place.bundle, change)
