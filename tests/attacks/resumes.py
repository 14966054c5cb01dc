"""Hostile run folders that a training goes on in: what a checkpoint holds, and what lies beside."""

import contextlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import soundfile
import torch

from sbkit.base.errors import BAD_INPUT, SbkitError
from sbkit.base.process import exit_code
from sbkit.checkpoint.integrity import write_checksums
from sbkit.evaluate import summary
from sbkit.train.main import train
from tests.attacks.case import Case, Place
from tests.attacks.inputs import TRICKS
from tests.attacks.runs import LAUGHS, Call

TINY = ("--device=cpu", "--cnn_channels=8", "--d_model=16", "--nhead=2", "--d_ffn=16",
        "--num_encoder_layers=1", "--batch_seconds=2", "--check=False",
        "--log_every=1", "--beam_size=2")  # fmt: skip
WORDS = ("one", "two", "one two", "two two", "one one", "two one")


def make_resumable(folder: Path) -> None:
    """Train an epoch on noise, in a process of its own: autograd must not run before a fork."""
    clips = folder.parent / "data"
    clips.mkdir()
    noise = np.random.default_rng(1)
    for split in ("train", "dev", "test"):
        lines = ["path,text"]
        for number, text in enumerate(WORDS):
            name = f"{split}-{number}.wav"
            audio = noise.integers(-3000, 3000, 16_000 + 160 * number).astype(np.int16)
            soundfile.write(clips / name, audio, 16_000)
            lines.append(f"{name},{text}")
        (clips / f"{split}.csv").write_text("\n".join(lines) + "\n")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _train(folder, epochs=1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the healthy run failed"


def resume(folder: str) -> None:
    """Train on for an epoch; what the operating system refuses is a sentence, as of `run_main`."""
    none = {"git_commit": lambda _: None, "cpu_name": lambda: None}  # those start processes
    with patch.multiple(summary, **none):
        try:
            _train(Path(folder), epochs=2)
        except OSError as error:
            if exit_code(error) == BAD_INPUT:
                raise SbkitError(str(error)) from error
            raise


def _train(folder: Path, *, epochs: int) -> None:
    home = folder.parent
    os.environ["SBKIT_CACHE"] = str(home / "cache")
    tables = ", ".join(f"{each}: {home / 'data' / each}.csv" for each in ("train", "dev", "test"))
    train(
        [
            "hparams/ctc.yaml",
            *TINY,
            f"--manifest={{{tables}}}",
            f"--output_folder={folder / 'trained'}",
            f"--number_of_epochs={epochs}",
        ]
    )


def all_resumes() -> Iterator[Case]:
    """List every hostile run folder that a training goes on in."""
    for name, spoil in SPOILED.items():
        yield Case("resume", name, partial(_spoiled, spoil), harmless=name in HARMLESS)


def _spoiled(spoil: Callable[[Place], Any], place: Place) -> list[str]:
    spoil(place)
    return ["resume", str(place.folder)]


def _checkpoint(place: Place) -> Path:
    (found,) = (place.folder / "trained" / "checkpoints").glob("CKPT*")
    return found


def _instead(name: str, make: Callable[[Path], Any], place: Place) -> None:
    """Put something else in the place of a file of the checkpoint."""
    folder = _checkpoint(place)
    (folder / name).unlink()
    make(folder / name)
    if name != "checksums.json" and (folder / name).is_file() and not (folder / name).is_symlink():
        write_checksums(folder)


def _beside(name: str, make: Callable[[Path], Any], place: Place) -> None:
    """Put something else in the place of a file of the run folder."""
    file = place.folder / "trained" / name
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    make(file)


def _json(change: Callable[[dict[str, Any]], Any], place: Place) -> None:
    file = _checkpoint(place) / "brain.ckpt"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    write_checksums(file.parent)


def _set(name: str, value: Any) -> Callable[[Place], None]:
    return partial(_json, lambda state: state.update({name: value}))


def _random(name: str, value: Any) -> Callable[[Place], None]:
    return partial(_json, lambda state: state["random"].update({name: value}))


def _saved(name: str, change: Callable[[Any], Any]) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        file = _checkpoint(place) / name
        there = torch.load(file, weights_only=True)
        changed = change(there)
        torch.save(there if changed is None else changed, file)
        write_checksums(file.parent)

    return spoil


def _weights(change: Callable[[torch.Tensor], Any]) -> Callable[[Place], None]:
    return _saved("model.ckpt", lambda there: {name: change(each) for name, each in there.items()})


def _moments(change: Callable[[torch.Tensor], Any]) -> Callable[[Place], None]:
    def changed(state: dict[str, Any]) -> None:
        for kept in state["state"].values():
            for name in kept:
                kept[name] = change(kept[name])

    return _saved(OPTIMIZER, changed)


def _in_groups(name: str, value: Any, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group[name] = value


def _meta(text: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        file = _checkpoint(place) / "CKPT.yaml"
        file.write_text(text.replace("CANARY", str(place.canary)))
        write_checksums(file.parent)

    return spoil


def _text(name: str, content: str) -> Callable[[Place], None]:
    return partial(_instead, name, lambda file: file.write_text(content))


def _pickled(name: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        (_checkpoint(place) / name).write_bytes(pickle.dumps(Call(place.canary)))
        write_checksums(_checkpoint(place))

    return spoil


def _zipped(name: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        torch.save({"a": Call(place.canary)}, _checkpoint(place) / name)
        write_checksums(_checkpoint(place))

    return spoil


def _linked(place: Place) -> None:
    """Let the checkpoint be a link to a folder outside of the run."""
    folder = _checkpoint(place)
    folder.rename(place.folder / "elsewhere")
    folder.symlink_to(place.folder / "elsewhere")


def _future(place: Place) -> None:
    """Add a checkpoint of the far future whose files are those of the first."""
    folder = _checkpoint(place)
    copy = Path(shutil.copytree(folder, folder.with_name("CKPT+9999")))
    (copy / "CKPT.yaml").write_text("CER: 1\nunixtime: 1.0e+308\nepoch: 1\nend-of-epoch: true\n")
    write_checksums(copy)


OPTIMIZER = "optimizer.ckpt"
SPOILED: dict[str, Callable[[Place], Any]] = {
    "as it was": lambda place: None,
    **{
        f"{name} {trick}": partial(_instead, name, make)
        for name in ("model.ckpt", OPTIMIZER, "brain.ckpt", "epochs.ckpt", "CKPT.yaml",
                     "checksums.json")
        for trick, make in TRICKS.items()
    },
    **{
        f"{name} {trick}": partial(_beside, name, make)
        for name in ("train_log.jsonl", "train.log", "declaration.json", "hyperparams.yaml",
                     "tokenizer.model", "tensorboard", "checkpoints", "summary.json",
                     "checkpoints/averaged.json", "wer_test.txt")
        for trick, make in TRICKS.items()
        if trick in ("a pipe", "/dev/zero", "a link to itself", "a folder", "deep")
    },
    # -- counters and random state
    **{
        f"{name} {str(value)[:20]}": _set(name, value)
        for name in ("step", "optimizer_step", "nonfinite_count", "train_seconds", "so_far")
        for value in (-1, 10**30, "x", None)
    },
    "sums of texts": _set("so_far", {"loss_sum": "x"}),
    "more sums": _set("so_far", {"more": 1}),
    "step within the epoch": _set("step", 10**6),
    "no random state": _set("random", None),
    **{
        f"random {name} {number}": _random(name, value)
        for number, (name, value) in enumerate((
            ("python", [3, [0] * 624 + [625], None]), ("python", [3, [1] * 3, None]),
            ("python", [3, [0.5] * 625, None]), ("python", [3, [2**40] * 625, None]),
            ("python", [3, [1] * 624 + [624], "x"]), ("python", "x"),
            ("numpy", {}), ("numpy", {"bit_generator": "os", "state": {}}),
            ("numpy", {"bit_generator": "MT19937", "state": {"key": [1] * 3, "pos": 0}}),
            ("numpy", {"bit_generator": "MT19937", "state": {"key": [1] * 624, "pos": -9},
                       "has_gauss": 0, "gauss": 0.0}),
            ("numpy", {"bit_generator": "MT19937", "state": {"key": [1] * 624, "pos": 9**9},
                       "has_gauss": 0, "gauss": 0.0}),
            ("cpu", "00"), ("cpu", "x"), ("cpu", 1), ("cpu", "ff" * 5056), ("cpu", "00" * 5056),
        ))
    },
    # -- epochs and the meta file
    **{
        f"epoch {text[:20]!r}": _text("epochs.ckpt", text)
        for text in ("-1", "999999999", "1e9", "x", "", "1 2", "9" * 5000, "0")
    },
    **{
        f"meta {text[:40]!r}": _meta(text)
        for text in (
            "- 1\n", "CER: !!python/object/apply:os.system ['touch CANARY']\n",
            "CER: 1\nunixtime: .inf\n", "CER: 1\nunixtime: x\n",
            "CER: 1\nunixtime: 1\nend-of-epoch: 7\n",
            "CER: [1]\nunixtime: 1\nend-of-epoch: true\n",
            "CER: .nan\nunixtime: 1\nend-of-epoch: true\n",
            "CER: 1\nunixtime: 1\nepoch: [1]\nend-of-epoch: true\n",
            "CER: 1\nunixtime: 1\nepoch: 9e99\nend-of-epoch: true\n",
            "CER: 1\nunixtime: 1\ntokenizer: \"\\e[2J\"\nend-of-epoch: true\n",
            "CER: 1\nunixtime: 1\ndeclaration: [1]\nend-of-epoch: true\n",
            "CER: 1\nunixtime: 1\nend-of-epoch: false\n",
            f"a0: &a0 [x]\n{LAUGHS}\nCER: 1\nunixtime: 1\n",
        )
    },
    # -- weights and moments
    **{f"{name} a pickle that runs": _pickled(name) for name in ("model.ckpt", OPTIMIZER,
                                                                 "brain.ckpt", "epochs.ckpt")},
    **{f"{name} a pickle inside": _zipped(name) for name in ("model.ckpt", OPTIMIZER,
                                                             "brain.ckpt", "epochs.ckpt")},
    "weights NaN": _weights(lambda each: each * torch.nan),
    "weights infinite": _weights(lambda each: each / 0 if each.is_floating_point() else each),
    "weights int32": _weights(lambda each: each.to(torch.int32)),
    "weights complex": _weights(lambda each: each.to(torch.complex64)),
    "weights sparse": _weights(lambda each: each.to_sparse() if each.ndim else each),
    "weights meta": _weights(lambda each: each.to("meta")),
    "weights of other shapes": _weights(lambda each: each.unsqueeze(0)),
    "weights expanded": _weights(lambda each: torch.zeros(()).expand(each.shape)),
    "weights a list": _saved("model.ckpt", lambda there: [1]),
    "weights texts": _saved("model.ckpt", lambda there: dict.fromkeys(there, "x")),
    "weights of names that move the cursor": _saved(
        "model.ckpt", lambda there: {f"\x1b[2J{name}": each for name, each in there.items()}
    ),
    "names that are numbers": _saved("model.ckpt", lambda there: dict(enumerate(there.values()))),
    "moments NaN": _moments(lambda each: each * torch.nan),
    "moments too short": _moments(lambda each: each.flatten()[:1] if each.ndim else each),
    "moments int32": _moments(lambda each: each.to(torch.int32)),
    "moments negative": _moments(lambda each: -each - 1),
    "moments sparse": _moments(lambda each: each.to_sparse() if each.ndim else each),
    "moments meta": _moments(lambda each: each.to("meta")),
    "moments texts": _moments(lambda each: "x"),
    "optimizer a list": _saved(OPTIMIZER, lambda there: [1]),
    "optimizer without groups": _saved(OPTIMIZER, lambda there: {"state": {}}),
    "optimizer without state": _saved(OPTIMIZER, lambda there: {**there, "state": {}}),
    "optimizer state a list": _saved(OPTIMIZER, lambda there: {**there, "state": [1]}),
    "optimizer groups of texts": _saved(OPTIMIZER, lambda there: {**there, "param_groups": ["x"]}),
    **{
        f"optimizer {name} {value}": _saved(
            OPTIMIZER, partial(_in_groups, name, value)
        )
        for name, value in (
            ("lr", "x"), ("lr", float("nan")), ("lr", -1.0), ("lr", None), ("lr", [1]),
            ("lr", 1e30), ("lr", torch.ones(3)), ("initial_lr", "x"),
            ("params", []), ("params", "x"), ("params", [10**12]), ("betas", "x"),
            ("max_lr", "x"), ("\x1b[2J", 1),
        )
    },
    # -- folders
    "a checkpoint that is a link": _linked,
    "a checkpoint of the far future": _future,
    "a checkpoint that is a pipe": lambda place: os.mkfifo(
        _checkpoint(place).with_name("CKPT+2099")
    ),
    "a checkpoint that is a link to /": lambda place: _checkpoint(place).with_name(
        "CKPT+2099"
    ).symlink_to("/"),
    "a name that moves the cursor": lambda place: _checkpoint(place).with_name(
        "CKPT+\x1b[2J"
    ).mkdir(),
    "a staging folder that is a link": lambda place: _checkpoint(place).with_name(
        ".CKPT+2099.tmp"
    ).symlink_to(place.folder),
    "a lock that is a pipe": lambda place: os.mkfifo(
        _checkpoint(place).with_name("x.lock")
    ),
}  # fmt: skip
# What is written anew without being read, or what a run may go on with.
HARMLESS = {
    "as it was", "checksums.json a link to itself", "train_log.jsonl deep", "train.log deep",
    "tokenizer.model a link to itself", "tensorboard a folder", "checkpoints a folder",
    "train_seconds -1", f"train_seconds {str(10**30)[:20]}", "step within the epoch",
    "no random state", "epoch '0'", "optimizer without state", "optimizer lr 1e+30",
    "optimizer betas x", "optimizer \x1b[2J 1",
    *(name for name in SPOILED if name.startswith(("hyperparams.yaml", "summary.json",
                                                   "checkpoints/averaged.json", "wer_test.txt"))),
    *(name for name in SPOILED if name.startswith("meta ") and "unixtime: 1\\n" in name),
    *(name for name in SPOILED if name.startswith("a ")),
}  # fmt: skip
COMMANDS: dict[str, Callable[[str], None]] = {"resume": resume}
