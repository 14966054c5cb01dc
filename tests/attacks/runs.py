"""Hostile run folders: what is exported and replayed."""

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sbkit.checkpoint.integrity import write_checksums
from tests.attacks.bundles import NAMES
from tests.attacks.case import Case, Place

LAUGHS = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
FEATURES = "compute_features: !new:sbkit.audio.fbank.Fbank"


class Call:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def all_runs() -> Iterator[Case]:
    """List every hostile run folder, and every file that is replayed."""
    for name, change in YAMLS.items():
        spoil = partial(_with_yaml, change)
        yield Case("export", name, partial(_export, spoil), harmless=name in UNUSED)
    for name in NAMES[:40]:
        call = partial(_replaced, "!new:sbkit.audio.fbank.Fbank", f"!new:{name} [touch CANARY] #")
        yield Case("export", f"features {name}", partial(_export, partial(_with_yaml, call)))
    for name, spoil in FILES.items():
        yield Case("export", name, partial(_export, spoil))
    for name, spoil in CHECKPOINTS.items():
        harmless = name == "meta laughs"  # an alias of a list is that list
        yield Case("export", f"checkpoint {name}", partial(_export, spoil), harmless)
    for name, spoil in REPLAYED.items():
        yield Case("replay", name, partial(_replay, spoil), harmless=name == "as it was")
    for name, make in OUTS.items():
        yield Case("export", f"--out {name}", partial(_export_to, make))


# Under keys that an export has no use for: nothing is built, or the test had chosen before.
AVERAGES = {f"average {kind}" for kind in ("abc", "-1", "null", ".inf", "list")}
UNUSED = {"!applyref", "includes", *AVERAGES}


def _export(spoil: Callable[[Place], Any], place: Place) -> list[str]:
    spoil(place)
    return place.export()


def _replay(spoil: Callable[[Place], Any], place: Place) -> list[str]:
    folder = place.run / "nonfinite"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps({"what": "loss", "step": 1}))
    _pt(_planned(((0,), 16_000)), place)
    os.environ["SBKIT_CACHE"] = str(place.folder / "cache")
    (place.folder / "data.csv").write_text("path,text\nclip.wav,fox\n")
    yaml = place.run / "hyperparams.yaml"
    data = ", ".join(f"{name}: {place.folder}/data.csv" for name in ("train", "dev", "test"))
    text = yaml.read_text()
    yaml.write_text(re.sub("^manifest:.*$", f"manifest: {{{data}}}", text, flags=re.MULTILINE))
    spoil(place)
    return place.replay()


def _planned(*plan: Any) -> Callable[[Place], Any]:
    """Return what makes the model of a run, and a micro-batch of its data."""

    def make(place: Place) -> Any:
        weights = torch.load(_checkpoint(place) / "model.ckpt", weights_only=True)
        batch = {"ids": ["clip"], "plan": [*plan], "random": {"cpu": torch.get_rng_state()}}
        named = {f"model.{name}": each for name, each in weights.items()}
        return {"modules": named, "micro_batches": [batch]}

    return make


def _with_yaml(change: Callable[[str], str], place: Place) -> None:
    file = place.run / "hyperparams.yaml"
    file.write_text(change(file.read_text()).replace("CANARY", str(place.canary)))


def _replaced(old: str, new: str, text: str) -> str:
    assert old in text, old
    return text.replace(old, new)


def _added(line: str, text: str) -> str:
    return f"{text}\n{line}\n"


YAMLS: dict[str, Callable[[str], str]] = {
    "!apply under a part": partial(
        _replaced, "n_mels: 80\n", "n_mels: !apply:os.system ['touch CANARY']\n"
    ),
    "python under a part": partial(
        _replaced, "n_mels: 80\n", "n_mels: !!python/object/apply:os.system ['touch CANARY']\n"
    ),
    "a tuple that runs": partial(
        _replaced, "n_mels: 80\n", "n_mels: (!!python/object/apply:os.system ['touch CANARY'])\n"
    ),
    "!applyref": partial(_added, "evil: !applyref:os.system ['touch CANARY']"),
    "average_checkpoints abc": partial(_added, "average_checkpoints: abc"),
    "average abc": partial(_replaced, "average_checkpoints: 2", "average_checkpoints: abc"),
    "average -1": partial(_replaced, "average_checkpoints: 2", "average_checkpoints: -1"),
    "average null": partial(_replaced, "average_checkpoints: 2", "average_checkpoints:"),
    "average .inf": lambda text: text.replace(
        "average_checkpoints: 2", "average_checkpoints: .inf"
    ),
    "average -2": partial(_replaced, "average_checkpoints: 2", "average_checkpoints: -2"),
    "sample_rate": partial(_added, "sample_rate: abc"),
    "another sample_rate": partial(_added, "sample_rate: 8000"),
    "no features": partial(_replaced, "compute_features:", "features:"),
    "model a text": partial(_replaced, "!new:torch.nn.ModuleList", "!new:x"),
    "no model": partial(_replaced, "\nmodel:", "\nmodell:"),
    "empty": lambda text: "",
    "a list": lambda text: "- 1",
    "deep": partial(_added, "x: " + "[" * 5000),
    "a number of 100 000 digits": partial(_added, f"x: {'9' * 100_000}"),
    "getattr of another": lambda text: text.replace("vocab_size", "__class__"),
    "includes": partial(_added, "x: !include:/etc/passwd"),
}


def _file(name: str, make: Callable[[Path], Any], place: Place) -> None:
    (place.run / name).unlink()
    make(place.run / name)


def _write(content: bytes, file: Path) -> None:
    file.write_bytes(content)


FILES: dict[str, Callable[[Place], Any]] = {
    f"{name} as {kind}": partial(_file, name, make)
    for name in ("tokenizer.model",)
    for kind, make in {
        "pipe": os.mkfifo,
        "/dev/zero": lambda file: file.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "random": partial(_write, b"\x80\x81\xff" * 50),
        "nothing": lambda file: None,
    }.items()
}


def _checkpoint(place: Place) -> Path:
    return next((place.run / "checkpoints").glob("CKPT*"))


def _saved(make: Callable[[Place], Any], place: Place) -> None:
    torch.save(make(place), _checkpoint(place) / "model.ckpt")
    write_checksums(_checkpoint(place))


def _weights(change: Callable[[torch.Tensor], Any]) -> Callable[[Place], Any]:
    def changed(place: Place) -> Any:
        there = torch.load(_checkpoint(place) / "model.ckpt", weights_only=True)
        return {name: change(each) for name, each in there.items()}

    return partial(_saved, changed)


def _pickled(place: Place) -> None:
    (_checkpoint(place) / "model.ckpt").write_bytes(pickle.dumps(Call(place.canary)))
    write_checksums(_checkpoint(place))


def _meta(text: str, place: Place) -> None:
    (_checkpoint(place) / "CKPT.yaml").write_text(text.replace("CANARY", str(place.canary)))
    write_checksums(_checkpoint(place))


CHECKPOINTS: dict[str, Callable[[Place], Any]] = {
    "a pickle that runs": partial(_saved, lambda place: {"a": Call(place.canary)}),
    "a bare pickle": _pickled,
    "a list": partial(_saved, lambda place: [1]),
    "a mapping of texts": partial(_saved, lambda place: {"a": "b"}),
    "nothing in it": partial(_saved, lambda place: {}),
    "NaN": _weights(lambda each: each * torch.nan),
    "infinite": _weights(lambda each: each / 0 if each.is_floating_point() else each),
    "complex": _weights(lambda each: each.to(torch.complex64)),
    "int32": _weights(lambda each: each.to(torch.int32)),
    "sparse": _weights(lambda each: each.to_sparse() if each.ndim else each),
    "meta": _weights(lambda each: each.to("meta")),
    "other shapes": _weights(lambda each: each.unsqueeze(0)),
    "CER a text": partial(_meta, "CER: abc\nunixtime: 1\n"),
    "CER a list": partial(_meta, "CER: [1]\nunixtime: 1\n"),
    "CER missing": partial(_meta, "unixtime: 1\n"),
    "meta python": partial(_meta, "CER: !!python/object/apply:os.system ['touch CANARY']\n"),
    "meta a list": partial(_meta, "- 1\n"),
    "meta laughs": partial(_meta, f"a0: &a0 [x]\n{LAUGHS}\nCER: 1\nunixtime: 1\n"),
}


def _pt(make: Callable[[Place], Any], place: Place) -> None:
    torch.save(make(place), place.run / "nonfinite" / "1.pt")


REPLAYED: dict[str, Callable[[Place], Any]] = {
    "as it was": lambda place: None,
    "a pickle that runs": partial(_pt, lambda place: Call(place.canary)),
    "a pickle inside": partial(_pt, lambda place: {"modules": {"a": Call(place.canary)}}),
    "no YAML": lambda place: (place.run / "hyperparams.yaml").unlink(),
}


def _export_to(make: Callable[[Path], Any], place: Place) -> list[str]:
    out = place.folder / "out"
    made = make(out)
    return ["export", str(place.run), "--out", str(made or out)]


def _project(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text('{"format": 2, "parts": {}}')
    (out / "thesis.txt").write_text("mine")


OUTS: dict[str, Callable[[Path], Any]] = {
    ".": lambda out: ".",
    "/": lambda out: "/",
    "a link": lambda out: out.symlink_to("/etc"),
    "a link to nowhere": lambda out: out.symlink_to("/nowhere"),
    "a file": Path.touch,
    "a pipe": os.mkfifo,
    "another project": _project,
    "a folder in a file": lambda out: "/etc/passwd/out",
    "/proc": lambda out: "/proc/out",
    "a long name": lambda out: out.with_name("x" * 300),
    "the run": lambda out: out.with_name("run"),
}
