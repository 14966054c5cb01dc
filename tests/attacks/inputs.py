"""Hostile data to train with: sources of weights, manifests, saved datasets, noise and the cache.

Each command has a name in COMMANDS, or is one of `sbkit`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from tests.attacks.audio import FILES, HARMLESS
from tests.attacks.case import Case, Place
from tests.attacks.runs import Call
from torch import nn

from recipes.OwnData import corpus as own_data
from sbkit.audio.noise import AddNoise, AddReverb
from sbkit.checkpoint.integrity import write_checksums
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION
from sbkit.train.initialize import initialize_from

datasets.disable_progress_bars()
TRICKS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "/dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to itself": lambda file: file.symlink_to(file),
    "a folder": Path.mkdir,
    "deep": lambda file: file.write_text("[" * 200_000),
    "no UTF-8": lambda file: file.write_bytes(b"\xff\xfe\x80"),
    "nothing": Path.touch,
}
DIGITS = "9" * 100_000


def all_inputs() -> Iterator[Case]:
    """List every hostile input of a training."""
    for name, spoil in SOURCES.items():
        yield Case("init_from", name, partial(_spoiled, spoil), harmless=name in UNREAD)
    for name, spoil in DATASETS.items():
        yield Case("dataset", name, partial(_dataset, spoil), harmless=name in NOT_DECODED)
    for name, write in MANIFESTS.items():
        yield Case("manifest", name, partial(_manifest, write), harmless=True)
    for name, make in FILES.items():
        for command in ("noise", "reverb"):
            yield Case(command, name, partial(_noise, command, make), harmless=name in HARMLESS)
    for name, write in CACHES.items():
        for arguments in (["cache"], ["cache", "prune", "--unused"]):
            yield Case(
                "cache", f"{' '.join(arguments)}: {name}", partial(_cache, write, arguments), True
            )
    for name in IMPORTS:
        yield Case("import", repr(name)[:60], partial(_import, name))


# -- init_from ------------------------------------------------------------------------------------


def _spoiled(spoil: Callable[[Place], Any], place: Place) -> list[str]:
    used = spoil(place)
    return ["init_from", str(used if isinstance(used, Path) else place.bundle)]


def _instead(folder: str, name: str, make: Callable[[Path], Any], place: Place) -> Path:
    home = place.folder / folder
    (home / name).unlink()
    make(home / name)
    return home


def _in_checkpoint(name: str, make: Callable[[Path], Any], place: Place) -> Path:
    checkpoint = next((place.run / "checkpoints").glob("CKPT*"))
    (checkpoint / name).unlink(missing_ok=True)
    make(checkpoint / name)
    if name != "checksums.json" and (checkpoint / name).is_file():
        write_checksums(checkpoint)
    return place.run


def _pickle(place: Place) -> Path:
    return _in_checkpoint(
        "model.ckpt", lambda file: torch.save({"a": Call(place.canary)}, file), place
    )


def _safetensors(header: Any, place: Place) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (place.bundle / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
SOURCES: dict[str, Callable[[Place], Any]] = {
    **{
        f"{folder}/{name} {trick}": partial(_instead, folder, name, make)
        for folder, name in (
            ("bundle", "config.json"),
            ("bundle", "model.safetensors"),
        )
        for trick, make in TRICKS.items()
    },
    **{
        f"checkpoint {name} {trick}": partial(_in_checkpoint, name, make)
        for name in ("model.ckpt", "CKPT.yaml", "checksums.json")
        for trick, make in TRICKS.items()
    },
    "a pickle that runs": _pickle,
    "digits in config.json": partial(
        _instead, "bundle", "config.json", lambda file: file.write_text(f'{{"model": {DIGITS}}}')
    ),
    "names that move the cursor": partial(_safetensors, {"\x1b[2J\x1b[H": TENSOR}),
    "metadata that is a list": partial(_safetensors, {"__metadata__": [1]}),
    "metadata of tensors": partial(_safetensors, {"__metadata__": {"a": TENSOR}}),
    "a shape beyond all memory": partial(_safetensors, {"a": {**TENSOR, "shape": [2**40, 2**20]}}),
    "offsets that go back": partial(_safetensors, {"a": {**TENSOR, "data_offsets": [4, 0]}}),
    "a type that is none": partial(_safetensors, {"a": {**TENSOR, "dtype": "pickle"}}),
    "a header of NUL": partial(_safetensors, b"\0" * 1000),
    "nowhere": lambda place: place.folder / "\x1b[2Jnowhere",
}
UNREAD: set[str] = set()


def _init_from(source: str) -> None:
    """Load into parts of the names that are there."""
    parts = {name: nn.Linear(2, 2) for name in ("CNN", "Transformer", "seq_lin", "ctc_lin")}
    initialize_from(
        Path(source), {**parts, "model": nn.ModuleList(parts.values())}, SPEECH_RECOGNITION
    )


# -- datasets and manifests -----------------------------------------------------------------------


def _dataset(spoil: Callable[[Path], Any], place: Place) -> list[str]:
    saved = place.folder / "saved"
    rows = {"path": [str(place.clip)], "text": ["hi"]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(saved))
    spoil(saved)
    return ["manifest", str(saved)]


def _edit(name: str, change: Callable[[dict[str, Any]], Any], saved: Path) -> None:
    content = json.loads((saved / name).read_text())
    change(content)
    (saved / name).write_text(json.dumps(content))


def _feature(feature: Any, saved: Path) -> None:
    _edit("dataset_info.json", lambda info: info["features"].update(text=feature), saved)


def _file_named(name: str, saved: Path) -> None:
    _edit("state.json", lambda state: state.update(_data_files=[{"filename": name}]), saved)


def _dataset_file(name: str, make: Callable[[Path], Any], saved: Path) -> None:
    (saved / name).unlink()
    make(saved / name)


def _remote(several: bool, feature: Any, saved: Path) -> None:
    """Save a column that would be fetched where it is decoded."""
    media = {"bytes": None, "path": "http://127.0.0.1:9/a.wav"}
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    text = datasets.Value("string")
    kept = datasets.Features(
        {"path": text, "text": text, "media": datasets.List(plain) if several else plain}
    )
    rows = {"path": ["a.wav"], "text": ["hi"], "media": [[media] if several else media]}
    shutil.rmtree(saved)
    datasets.Dataset.from_dict(rows, features=kept).save_to_disk(str(saved))
    _edit("dataset_info.json", lambda info: info["features"].update(media=feature), saved)


DATASETS: dict[str, Callable[[Path], Any]] = {
    **{
        f"{name} {trick}": partial(_dataset_file, name, make)
        for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow")
        for trick, make in TRICKS.items()
    },
    **{
        f"data file {name[:30]!r}": partial(_file_named, name)
        for name in (
            "../run/hyperparams.yaml", "/etc/passwd", "/dev/zero", "", ".", "\0", "x" * 999,
        )
    },
    **{
        f"feature {str(feature)[:60]}": partial(_feature, feature)
        for feature in (
            {"_type": "Path"}, {"_type": "os.system"}, {"_type": "__import__"}, {"_type": 1},
            {"_type": "Pdf"}, {"_type": "Value", "dtype": "pickle"}, {"_type": "Array2D"},
            {"_type": "ClassLabel", "names_file": "/dev/zero"}, [[[[1]]]], None, "x",
            {"_type": "Value", "dtype": "string", "id": {"_type": "Value"}},
        )
    },
    "a format that is none": partial(
        _edit, "state.json", lambda state: state.update(_format_type="\x1b[2J")
    ),
    "a format of torch": partial(
        _edit, "state.json", lambda state: state.update(_format_type="torch")
    ),
    "arguments of a format": partial(
        _edit, "state.json", lambda state: state.update(_format_kwargs={"transform": "os.system"})
    ),
    "remote audio": partial(_remote, False, {"_type": "Audio"}),
    "remote images": partial(_remote, False, {"_type": "Image"}),
    "a list of remote audio": partial(
        _remote, True, {"_type": "List", "feature": {"_type": "Audio"}}
    ),
}  # fmt: skip
NOT_DECODED = {name for name in DATASETS if "format" in name or "remote" in name or "'id'" in name}


def _manifest(write: Callable[[Path], Any], place: Place) -> list[str]:
    file = place.folder / "train.csv"
    write(file)
    return ["manifest", str(file)]


MANIFESTS: dict[str, Callable[[Path], Any]] = {
    **TRICKS,
    **{
        f"path {path[:30]!r}": partial(
            lambda path, file: file.write_text(f"path,text\n{path},hi\n"), path
        )
        for path in (
            "../../../etc/passwd", "/dev/zero", "a\x1b[2J.wav", "~root/a.wav", "~nobody\x07/a.wav",
            "file:///etc/passwd", "http://127.0.0.1:9/a.wav", "| touch CANARY", "$(touch CANARY)",
            "a" * 300, "\u202ewav.exe", "a\rb.wav", "//host/share/a.wav", ".", "",
        )
    },
    "a field without end": lambda file: file.write_text('path,text\n"' + "x" * 10**7),
    "a column without end": lambda file: file.write_text("path,text" + ",a" * 10**5 + "\n"),
    "a column that moves the cursor": lambda file: file.write_text("\x1b[2J,b\na,b\n"),
    "digits": lambda file: file.write_text('{"path": ' + DIGITS + ", \"text\": \"a\"}"),
    "deep JSON": lambda file: file.write_text('{"path": ' + "[" * 10**5),
}  # fmt: skip


def _read_manifest(source: str) -> None:
    own_data.read({"manifest": {"train": source}, "language": "en"}, "train")


# -- noise, cache, --import -----------------------------------------------------------------------


def _noise(command: str, make: Callable[[Path], Any], place: Place) -> list[str]:
    (place.folder / "noise").mkdir()
    make(place.folder / "noise" / "a.wav")
    return [command, str(place.folder / "noise")]


def _augment(kind: type[nn.Module], folder: str) -> None:
    augment = kind(folder=folder, prob=1.0)
    audio, _ = augment(torch.ones(2, 1600), torch.tensor([1600, 800]))
    assert audio.isfinite().all(), "not finite"


def _cache(write: Callable[[Path, Place], Any], arguments: list[str], place: Place) -> list[str]:
    os.environ["SBKIT_CACHE"] = str(place.folder / "cache")
    entry = place.folder / "cache" / "audio" / "entry"
    entry.mkdir(parents=True)
    write(entry, place)
    return arguments


def _to_the_run(entry: Path, place: Place) -> None:
    entry.rmdir()
    entry.symlink_to(place.folder)


def _holding(name: str, make: Callable[[Path], Any]) -> Callable[[Path, Place], Any]:
    return lambda entry, place: make(entry / name)


CACHES: dict[str, Callable[[Path, Place], Any]] = {
    "a link to another folder": _to_the_run,
    "a link within": lambda entry, place: (entry / "a").symlink_to(place.folder),
    "a name that moves the cursor": lambda entry, place: entry.rename(entry.with_name("\x1b[2J")),
    **{f"corpus.json {name}": _holding("corpus.json", make) for name, make in TRICKS.items()},
    **{f"table {name}": _holding("a.parquet", make) for name, make in TRICKS.items()},
}  # fmt: skip
IMPORTS = ("os", "../x", "/etc/passwd", "a.b.c", "", ".", "..x", "x;os", "\x1b[2J", "no such",
           "os.path", "subprocess")  # fmt: skip


def _import(name: str, place: Place) -> list[str]:
    return [*place.transcribe(), "--import", name]


COMMANDS: dict[str, Callable[[str], None]] = {
    "init_from": _init_from,
    "manifest": _read_manifest,
    "noise": partial(_augment, AddNoise),
    "reverb": partial(_augment, AddReverb),
}
