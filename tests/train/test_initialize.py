"""A run starts from another one's weights, as far as names and shapes fit; nothing is built."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sbkit.base.checksums import write_checksums
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.bundle.config import BUNDLE_FORMAT
from sbkit.bundle.task import Task
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.config.hparams import read_spec
from sbkit.config.overrides import parse_overrides
from sbkit.models.layers import GlobalNorm
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.text.vocabulary import ensure_labels
from sbkit.train.initialize import check_same_settings, initialize_from
from tests.runs import ROOT

ORDER = ("CNN", "ctc_lin")


def parts(value: float, *, vocabulary: int = 4, order: tuple[str, ...] = ORDER) -> dict[str, Any]:
    named: dict[str, nn.Module] = {"CNN": nn.Linear(2, 3), "ctc_lin": nn.Linear(3, vocabulary)}
    for parameter in nn.ModuleList(named.values()).parameters():
        nn.init.constant_(parameter, value)
    return {**named, "model": nn.ModuleList(named[name] for name in order)}


def write_run(folder: Path, hparams: dict[str, Any], order: tuple[str, ...] = ORDER) -> Path:
    folder.mkdir()
    (folder / "hyperparams.yaml").write_text(
        "CNN: &cnn !new:os.system [touch built]\nctc_lin: &ctc_lin !new:torch.nn.Linear [3, 4]\n"
        f"model: !new:torch.nn.ModuleList\n- [{', '.join(f'*{name.lower()}' for name in order)}]\n"
    )
    checkpointer = Checkpointer(folder / "checkpoints", recoverables={"model": hparams["model"]})
    checkpointer.save_checkpoint(meta={"CER": 1.0})
    return folder


def write_bundle(folder: Path, hparams: dict[str, Any], order: tuple[str, ...] = ORDER) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"format": BUNDLE_FORMAT, "task": "", "sample_rate": 16_000}
    config |= {"model": order, "parts": {}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(hparams["model"].state_dict(), folder / "model.safetensors")
    write_checksums(folder)
    return folder


@pytest.mark.parametrize("write", [write_run, write_bundle])
@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]])
def test_init_from_loads_fitting_tensors_and_keeps_a_new_head(
    tmp_path: Path, write: Any, order: tuple[str, ...]
) -> None:
    source = write(tmp_path / "source", parts(7.0))
    ours = parts(1.0, vocabulary=9, order=order)
    loaded, new, unused = initialize_from([source], ours, AsrTask(), {})
    assert loaded == f"init_from {source}: 2 tensors are loaded: CNN.weight, CNN.bias."
    assert ": 2 tensors are new: " in new
    assert "ctc_lin.weight (4x3 there, 9x3 here)" in new
    assert unused.endswith(": 0 tensors there are not used.")
    assert ours["CNN"].weight.unique().tolist() == [7.0]
    assert ours["ctc_lin"].weight.unique().tolist() == [1.0]


def test_init_from_several_loads_the_mean_of_one_model(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "a", parts(1.0)), write_bundle(tmp_path / "b", parts(4.0))
    ours = parts(0.0) | {"tokenizer": letters(tmp_path / "a", "hello")}
    shutil.copy(first / "tokenizer.model", other)
    write_checksums(other)
    initialize_from([first, other], ours, AsrTask(), {})
    assert {float(p) for p in ours["model"].state_dict().values() for p in p.flatten()} == {2.5}
    (yaml := first / "hyperparams.yaml").write_text(yaml.read_text() + "language: en\n")
    with pytest.raises(SbkitError, match="/b has another text table than .*/a"):
        initialize_from([first, other], ours, AsrTask(), {})
    wider = write_bundle(tmp_path / "c", parts(1.0, vocabulary=9))
    with pytest.raises(SbkitError, match="/c has another tokenizer than .*/b"):
        initialize_from([other, wider], ours, AsrTask(), {})
    shutil.copy(first / "tokenizer.model", wider)
    with pytest.raises(SbkitError, match="/c are of another model: 2 .*bias: 9 instead of 4"):
        initialize_from([other, wider], ours, AsrTask(), {})


def test_init_from_measures_statistics_of_other_features(tmp_path: Path) -> None:
    """The count of frames alone would fit, and a mean of zero would count as measured."""
    theirs, ours = parts(7.0), parts(1.0)
    theirs["CNN"].normalize, ours["CNN"].normalize = GlobalNorm(n_mels=80), GlobalNorm(n_mels=40)
    theirs["CNN"].normalize.set_statistics(torch.ones(2, 80), torch.tensor(5))
    run = write_run(tmp_path / "run", theirs)
    loaded, new, _ = initialize_from([run], ours, AsrTask(), {})
    assert "CNN.normalize.frames (beside buffers that do not fit)" in new
    assert ours["CNN"].normalize.frames == 0
    assert "CNN.weight" in loaded


def test_init_from_loads_a_mask_of_infinities(tmp_path: Path) -> None:
    theirs, ours = parts(7.0), parts(1.0)
    for part, value in ((theirs["CNN"], -math.inf), (ours["CNN"], 0.0)):
        part.register_buffer("mask", torch.full((2,), value))
    theirs["ctc_lin"].bias.data[0] = math.inf
    _, new, _ = initialize_from([write_run(tmp_path / "run", theirs)], ours, AsrTask(), {})
    assert ours["CNN"].mask.tolist() == [-math.inf] * 2
    assert ": 1 tensors are new: ctc_lin.bias (not finite there)." in new


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_init_from_explains_malformed_bundle(tmp_path: Path, name: str) -> None:
    source = write_bundle(tmp_path / "source", parts(7.0))
    (source / name).write_text("{")
    write_checksums(source)
    with pytest.raises(SbkitError, match="must be"):
        initialize_from([source], parts(1.0), AsrTask(), {})


def test_init_from_refuses_a_run_without_weights(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "hyperparams.yaml").write_text("a: 1\n")
    with pytest.raises(SbkitError, match="no undamaged checkpoint"):
        initialize_from([tmp_path], parts(1.0), AsrTask(), {})


def letters(folder: Path, text: str) -> Tokenizer:
    return ensure_tokenizer(
        model_file=folder / "tokenizer.model",
        token_type="char",
        vocab_size=None,
        texts=lambda: [text],
    )


class Spelling(nn.Module):
    """A part with an embedding that is none of the task's heads."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(tokens, 3)


@pytest.mark.parametrize(("text", "loaded_rows"), [("aab", 6), ("bbbac", 6), ("ccd", 4)])
def test_init_from_loads_heads_and_embeddings_token_by_token(
    tmp_path: Path, text: str, loaded_rows: int
) -> None:
    """Characters are numbered by how often they occur, so ids differ between corpora."""

    def spelling(tokenizer: Tokenizer, value: float) -> dict[str, Any]:
        """Give each token a row of its own."""
        model_parts = parts(value, vocabulary=tokenizer.vocab_size)
        model_parts |= {"spelling": Spelling(tokenizer.vocab_size), "tokenizer": tokenizer}
        for rows in (
            model_parts["ctc_lin"].weight,
            model_parts["ctc_lin"].bias,
            model_parts["spelling"].letters.weight,
        ):
            numbers = [value + ord(piece[-1]) for piece in tokenizer.pieces()]
            rows.data[:] = torch.tensor(numbers).reshape(-1, *[1] * (rows.ndim - 1))
        model_parts["model"].append(model_parts["spelling"])
        return model_parts

    there, target = letters(tmp_path / "there", "aab"), letters(tmp_path / "here", text)
    source = write_bundle(tmp_path / "source", spelling(there, 0.0), (*ORDER, "spelling"))
    shutil.copy(tmp_path / "there/tokenizer.model", source)
    write_checksums(source)
    ours = spelling(target, 1000.0)
    loaded, *by_token, _, _ = initialize_from([source], ours, AsrTask(), {})
    if text == "aab":  # the same tokens in the same order
        assert "ctc_lin.weight" in loaded
    else:
        assert "ctc_lin" not in loaded
        named = "by label: ctc_lin.weight, ctc_lin.bias, spelling.letters.weight"
        assert by_token == [f"init_from: {loaded_rows} of {target.vocab_size} rows {named}."]
    source_pieces = [*there.pieces()]
    expected = [ord(piece[-1]) + 1000 * (piece not in source_pieces) for piece in target.pieces()]
    assert ours["ctc_lin"].bias.tolist() == expected
    assert ours["ctc_lin"].weight[:, 0].tolist() == expected
    assert ours["spelling"].letters.weight[:, 2].tolist() == expected


class Classification(Task):
    label_file = "labels.txt"
    heads = ("label_lin",)


@pytest.mark.parametrize("has_labels", [True, False])
def test_init_from_makes_new_head_for_other_classes(tmp_path: Path, has_labels: bool) -> None:
    parts_of_run = {"label_lin": nn.Linear(3, 2)}
    model = nn.ModuleList(parts_of_run.values())
    source = write_bundle(tmp_path / "source", {"model": model}, tuple(parts_of_run))
    if has_labels:
        ensure_labels(source / "labels.txt", ["left", "right"])
    for names, fits in ((["left", "right"], has_labels), (["down", "up"], False)):
        ours = {"label_lin": nn.Linear(3, 2), "other": nn.Linear(1, 1)}
        ours["model"] = nn.ModuleList([ours["label_lin"]])
        ours["labels"] = ensure_labels(tmp_path / f"{names[0]}.txt", names)
        if fits:
            assert ": 2 tensors are" in initialize_from([source], ours, Classification(), {})[0]
        else:
            with pytest.raises(SbkitError, match="none of the"):
                initialize_from([source], ours, Classification(), {})


# ---- settings that change what weights mean without changing a shape


def compare(folder: Path, *overrides: str, compared: str = "compute_features") -> list[str]:
    """Compare a YAML as it is with the same under overrides."""
    yaml_file = ROOT / "hparams/ctc.yaml"
    (folder / "hyperparams.yaml").write_text(read_spec(yaml_file).one_file)
    tree = read_spec(yaml_file, parse_overrides(overrides)).tree
    return check_same_settings(folder, tree, [compared])


@pytest.mark.parametrize(
    ("override", "key", "difference"),
    [
        ("--sample_rate=8000", "sample_rate", "is 16000 there and 8000 here"),
        ("--level=none", "compute_features", 'is {"new": "sbkit.audio.fbank.Fbank"'),
        ("--language=ru", "language", "is en there and ru here"),
        ("--text.case=keep", "text", 'is {"case": "lower", "punctuation": []'),
    ],
)
def test_difference_that_is_not_declared_is_an_error(
    tmp_path: Path, override: str, key: str, difference: str
) -> None:
    message = rf"`{key}` {re.escape(difference)}.*_differs: \[{key}\]"
    with pytest.raises(ConfigError, match=message):
        compare(tmp_path, override, compared=key)
    declared = f"--init_from_differs=[{key}]"
    (line,) = compare(tmp_path, override, declared, compared=key)
    assert difference in line
    assert compare(tmp_path, declared, compared=key) == [
        f"init_from_differs: `{key}` does not differ"
    ]


def test_languages_of_one_text_table_do_not_differ(tmp_path: Path) -> None:
    assert compare(tmp_path, "--language=en-GB", compared="language") == []


def test_settings_of_a_bundle_are_compared(tmp_path: Path) -> None:
    """The text counts only where outputs are loaded."""
    source = write_bundle(tmp_path / "source", parts(7.0))
    root = {"language": "ru"}
    initialize_from([source], parts(1.0, vocabulary=9), AsrTask(), root)
    with pytest.raises(ConfigError, match="`language` is und there and ru here"):
        initialize_from([source], parts(1.0), AsrTask(), root)
