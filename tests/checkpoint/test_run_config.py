"""A run is resumed only with the configuration that it began with."""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.files import RUN_CONFIG_FILE, RUN_YAML
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.run_config import (
    LIMIT_PATH,
    RunDescription,
    describe_spec,
    differences,
    machine_keys,
    require_resumable,
    require_same_on_ranks,
    write_description,
)
from sbkit.config.hparams import RunSpec, read_spec
from sbkit.config.keys import KEYS
from sbkit.data.forgetting import FORGOTTEN_FILE
from sbkit.evaluate.run_results import SUMMARY
from sbkit.train.setup import find_ends_of, require_own_folder
from sbkit.train.stopping import FIT_SECONDS, STALE_VALIDATIONS

YAML = """
seed: 1
output_folder: results/x
data_folder: null
language: en
number_of_epochs: 4
lr: 0.1
hidden: 3
compile: False
audio_store: pcm
noprogressbar: False
CNN: !new:torch.nn.Linear
    in_features: 2
    out_features: !ref <hidden>
head: !new:torch.nn.Linear [!ref <hidden>, 1]
decoder: !new:torch.nn.Dropout {p: 0.1}  # not the recognizer's of that name
model: !new:torch.nn.ModuleList
    - [!ref <CNN>, !ref <head>, !ref <decoder>]
opt_class: !name:torch.optim.SGD
    lr: !ref <lr>
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>
"""
TRAINED_EPOCHS = 3
DATA = {"train": "a" * 64, "test": "b" * 64}


def declare(
    folder: Path,
    text: str = YAML,
    *,
    data: Mapping[str, str] | None = DATA,
    labels: bytes = b"abc",
    **overrides: object,
) -> RunDescription:
    yaml = folder / "run.yaml"
    yaml.write_text(text)
    return describe_spec(read_spec(yaml, overrides), data=data, label_files={"labels.txt": labels})


def begun(folder: Path) -> Path:
    """Begin a run and save one checkpoint of it."""
    run = folder / "run"
    checkpointer = Checkpointer(run / "checkpoints", recoverables={"model": nn.Linear(1, 1)})
    checkpointer.save_checkpoint(meta={"epoch": TRAINED_EPOCHS})
    write_description(run, declare(folder))
    return run


def test_allowed_changes_are_accepted_and_logged(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert require_resumable(run, declare(tmp_path)) is None
    new_folders = {"output_folder": "elsewhere", "data_folder": "/other/place"}
    assert require_resumable(run, declare(tmp_path, **new_folders)) is None
    changes = require_resumable(run, declare(tmp_path, number_of_epochs=9, lr=0.5))
    assert changes == (
        "Resuming with changed values:\n  number_of_epochs: 4 before, 9 now\n"
        "  lr: 0.1 before, 0.5 now\n"
        "  the learning rate follows the schedule over the new number of epochs"
    )
    with_momentum = YAML.replace("lr: !ref <lr>", "lr: !ref <lr>\n    momentum: 0.9")
    changes = require_resumable(run, declare(tmp_path, with_momentum))
    assert changes == "Resuming with changed values:\n  opt_class.momentum: nothing before, 0.9 now"
    changes = require_resumable(run, declare(tmp_path, compile=True, noprogressbar=True))
    assert str(changes).endswith(
        "compile: false before, true now\n  noprogressbar: false before, true now"
    )


@pytest.mark.parametrize(
    ("old", "new", "overrides", "allowed"),
    [
        ("", "", {"opt_class.lr": 0.5}, True),
        ("", "", {"epoch_counter.limit": 9}, True),
        ("!ref <number_of_epochs>", "9", {}, True),
        ("!ref <number_of_epochs>", "!ref <number_of_epochs> * 2", {}, True),
        ("!ref <lr>", "!ref <rate>\nlr_schedule: {start: !ref <peak>}", {"peak": 0.5}, True),
        ("!ref <lr>", "!ref <rate>", {"peak": 0.5}, True),
        ("!ref <lr>", "!ref <rate>\nscale: !ref <peak>", {"peak": 0.5}, False),
        ("!ref <lr>", "!ref <lr>\nlr_schedule: {start: !ref <peak>}", {"peak": 0.5}, False),
        ("!ref <lr>", "!ref <hidden> * 0.1", {"hidden": 4}, False),
        ("!ref <lr>", "!ref <seed> * 0.1", {"seed": 4}, False),
        ("!ref <lr>", "0.1\n    b: !ref <pair>\npair: [0.9, 0.98]", {"pair": [0.5, 0.98]}, True),
        ("!ref <lr>", "0.1\nscales: !ref <pair>\npair: [0.9, 0.98]", {"pair": [0.5, 0.98]}, False),
        ("", "", {"peak": 0.5}, False),  # code may read it
    ],
)
def test_what_may_change_follows_the_arguments_of_objects(
    tmp_path: Path, old: str, new: str, overrides: dict[str, Any], *, allowed: bool
) -> None:
    text = f"peak: 0.1\nrate: !ref <peak>\n{YAML}"
    changed = text.replace(old, new, int(old != ""))
    before = text if not overrides else changed
    after = [*differences(declare(tmp_path, before), declare(tmp_path, changed, **overrides))]
    assert after and all(difference.is_allowed for difference in after) is allowed


def test_ended_run_takes_only_what_has_an_effect(tmp_path: Path) -> None:
    """Its folder used to say bf16 of a run in fp32 that was opened with it."""
    run, machine = begun(tmp_path), machine_keys(KEYS)
    resumed = {name for name, key in KEYS.items() if key.may_change == "when resumed"}
    training = resumed - machine | {"opt_class.betas"}
    assert training >= {"precision", "compile", "lr", "early_stopping"}
    end = {name for name, key in KEYS.items() if key.may_change == "after training"}
    end |= {"decoder.weights"}
    names = {*training, *end, *machine}
    values = dict.fromkeys(names, 5) | {"lm_text": "a.txt"}
    write_description(run, RunDescription(values, {}, files={"a.txt": "hello"}))

    def note(text: str = "hello", file: str = "a.txt", **changes: object) -> str | None:
        now = RunDescription(values | {"lm_text": file} | changes, {}, files={file: text})
        return require_resumable(run, now, ends={"early_stopping": 2, "my_epochs": TRAINED_EPOCHS})

    def require_refused(keys: Iterable[str]) -> None:
        for key in keys:
            fix = "raise `early_stopping` above 2 and `my_epochs` above 3"
            with pytest.raises(SbkitError, match=rf"\({key}: .* now\). To train on, {fix}. "):
                note(**{key: 6})
            now = RunDescription(values | {key: 6}, {}, files={"a.txt": "hello"})
            with pytest.raises(SbkitError, match="call `train`, which resumes the run"):
                require_resumable(run, now, trains=False)

    assert None not in [note(**{key: 6}) for key in end]  # for a test that has not ended
    require_refused(training)
    with pytest.raises(SbkitError, match=r"lm_text: other content of a.txt before, a.txt now"):
        note("other")
    (run / SUMMARY).write_text("{}")
    require_refused({*training, *end})
    with pytest.raises(
        SbkitError, match=rf"export {run} with --out NEW\. .*another `output_folder`"
    ):
        note(average_checkpoints=6)
    assert {note(**{key: 6}) for key in machine} == {None}
    assert note(**{LIMIT_PATH: TRAINED_EPOCHS}) is not None
    assert note(file="moved.txt") is None


ENDS = {  # keys that end a run, with values that have ended one of two epochs and its checkpoint
    "number_of_epochs": TRAINED_EPOCHS,
    "early_stopping": 2,
    "max_minutes": 0.1,
}


@pytest.mark.parametrize("ended_by", [*chain(*(combinations(ENDS, n) for n in (1, 2, 3)))], ids=str)
@pytest.mark.parametrize("limit", ["!ref <number_of_epochs>", "!ref <my_epochs>", "9"])
def test_advice_of_an_ended_run_is_accepted(
    tmp_path: Path, limit: str, ended_by: tuple[str, ...]
) -> None:
    values = {"number_of_epochs": 9, "early_stopping": 0, "max_minutes": 0}
    values |= {key: ENDS[key] for key in ended_by}
    text = YAML.replace("number_of_epochs: 4", "early_stopping: 0\nmax_minutes: 0\nmy_epochs: 9")
    text = f"number_of_epochs: 9\n{text}".replace("!ref <number_of_epochs>", limit)
    limit_key = limit[6:-1] if limit != "9" else LIMIT_PATH
    values[limit_key] = values["number_of_epochs"]
    (tmp_path / "run.yaml").write_text(text)
    run = tmp_path / "run"
    checkpointer = Checkpointer(run / "checkpoints", recoverables={"model": nn.Linear(1, 1)})
    meta = {"epoch": TRAINED_EPOCHS, STALE_VALIDATIONS: 2, FIT_SECONDS: 6.0}
    checkpointer.save_checkpoint(meta=meta)

    def spec_of(**changes: object) -> RunSpec:
        return read_spec(tmp_path / "run.yaml", {"output_folder": str(run), **values, **changes})

    write_description(run, describe_spec(spec_of()))
    assert [*find_ends_of(spec_of())] == [
        limit_key if key == "number_of_epochs" else key
        for key in ("early_stopping", "number_of_epochs", "max_minutes")
        if key in ended_by
    ]
    with pytest.raises(
        SbkitError, match=r"\(lr: 0.1 before, 0.5 now\)\. To train on, raise"
    ) as told:
        require_own_folder(spec_of(lr=0.5), describe_spec(spec_of(lr=0.5)))
    advice = re.findall(r"`(\S+)` above ([\d.]*\d)", str(told.value))
    assert len(advice) == len(ended_by)
    for value in (0.01, 1):
        raised = {key: float(text) + (value if key == "max_minutes" else 1) for key, text in advice}
        spec = spec_of(lr=0.5, **raised)
        assert find_ends_of(spec) == {}
        assert "lr: 0.1 before, 0.5 now" in str(require_own_folder(spec, describe_spec(spec)))


def test_run_with_forgotten_clips_says_so_and_is_not_resumed(
    tmp_path: Path, own_cache: Path
) -> None:
    run = begun(tmp_path)
    spec = read_spec(tmp_path / "run.yaml", {"output_folder": str(run)})
    now = {name: describe_spec(spec, data={**DATA, name: "d" * 64}) for name in DATA}
    own_cache.mkdir()
    (own_cache / FORGOTTEN_FILE).write_text(f"{'c' * 16}\n{'b' * 16}\n")
    with pytest.raises(SbkitError, match="Clips of test were forgotten.*another `output_folder`"):
        require_own_folder(spec, now["test"])
    with pytest.raises(SbkitError, match="another configuration: 1 thing differs"):
        require_own_folder(spec, now["train"])
    # The user's tables may list the clips again.
    assert require_own_folder(spec, describe_spec(spec, data=DATA)) is None


def test_run_that_the_clock_may_end_is_not_repeatable(tmp_path: Path) -> None:
    for minutes in (0, 5):
        described = declare(tmp_path, f"{YAML}\nmax_minutes: {minutes}")
        assert described.is_repeatable is (minutes == 0)


def test_ranks_refuse_one_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, same = declare(tmp_path), declare(tmp_path, data_folder="/of/this/node")
    short = declare(tmp_path, data={**DATA, "train": "c" * 64})
    ranks = [(first, "rank 0 on a"), (same, "rank 1 on a"), (short, "rank 2 on b")]
    monkeypatch.setattr("sbkit.checkpoint.run_config.gather_over_ranks", lambda _: ranks)
    for rank, _ in ranks:
        with pytest.raises(SbkitError, match="a{12} for rank 0 on a, c{12} for rank 2 on b"):
            require_same_on_ranks(rank)
    ranks.pop()
    require_same_on_ranks(first)
    ranks.append((declare(tmp_path, number_of_epochs=9), "rank 2 on b"))  # may change, but for all
    with pytest.raises(SbkitError, match="number_of_epochs: 4 for rank 0 on a, 9 for rank 2 on b"):
        require_same_on_ranks(first)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"labels": b"xyz"}, "1 thing differs (the labels in labels.txt: "),
        ({"language": "de"}, "1 thing differs (language: en before, de now)"),
        ({"data": {**DATA, "train": "c" * 64}}, "the data of `train`: aaaa"),
        ({"data": None, "data_folder": "/other"}, "data_folder: null before, /other now"),
        ({"audio_store": "lazy"}, "(audio_store: pcm before, lazy now)"),
        ({"decoder": {"p": 0.2}}, "(decoder.p: 0.1 before, 0.2 now)"),
        ({"text": YAML.replace("SGD", "Adam")}, "opt_class: !name:torch.optim.SGD before"),
        ({"text": YAML + "more: 1\n"}, "more: nothing before, 1 now"),
        ({"text": YAML + "my_opt_class: !new:torch.nn.ReLU {inplace: true}\n"}, "2 things differ"),
        (
            {"text": YAML.replace("[!ref <CNN>, !ref <head>", "[!ref <head>, !ref <CNN>")},
            "model.0.0: <CNN> before, <head> now",
        ),
    ],
)
def test_refusal_names_both_values(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    run = begun(tmp_path)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(SbkitError) as caught:
        require_resumable(run, declare(tmp_path, **change))
    assert error in str(caught.value)
    assert "choose another `output_folder`" in str(caught.value)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_changed_key_in_mapping_is_named(tmp_path: Path) -> None:
    text = YAML + "encoder_config: {size: 2, source: {name: base, sha256: HASH}}\n"
    one, two = (declare(tmp_path, text.replace("HASH", digest)) for digest in ("aa", "bb"))
    assert differences(one, two) == [("encoder_config.source.sha256", "aa", "bb", False)]


def test_value_that_only_follows_another_is_not_named(tmp_path: Path) -> None:
    """Beside it in a list, another value is; so is a reference that was edited."""
    text = YAML + "pair: [!ref <lr>, 1]\n"
    before = declare(tmp_path, text)
    assert differences(before, declare(tmp_path, text, lr=0.5)) == [("lr", 0.1, 0.5, True)]
    edited = text.replace("<lr>, 1]", "<lr>, 2]").replace(
        "s: !ref <hidden>", "s: !ref <hidden> * 2"
    )
    rate, pair, size = differences(before, declare(tmp_path, edited, lr=0.5))
    assert rate == ("lr", 0.1, 0.5, True)
    assert pair == ("pair.1", 1, 2, False)
    assert size == ("CNN.out_features", 3, 6, False)


def test_extended_run_can_be_tuned_by_its_own_yaml(tmp_path: Path) -> None:
    """Its references are resolved: 9 epochs in `number_of_epochs` and in the counter."""
    run, later = begun(tmp_path), {"number_of_epochs": 9}
    (run / RUN_YAML).write_text(read_spec(tmp_path / "run.yaml", later).text)
    write_description(run, declare(tmp_path, **later))
    assert require_resumable(run, describe_spec(read_spec(run / RUN_YAML), data=DATA)) is None
    with pytest.raises(SbkitError, match="hidden: 3 before, 9 now"):
        require_resumable(run, describe_spec(read_spec(run / RUN_YAML, {"hidden": 9}), data=DATA))


def test_damaged_run_config_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run / RUN_CONFIG_FILE).write_text((run / RUN_CONFIG_FILE).read_text()[:-9])
    with pytest.raises(SbkitError, match="run_config.json must hold the description"):
        require_resumable(run, declare(tmp_path))


def test_folder_without_checkpoint_starts_from_scratch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_description(run, declare(tmp_path))
    other = declare(tmp_path, language="de")
    assert require_resumable(run, other) is None
    write_description(run, other)
    assert json.loads((run / RUN_CONFIG_FILE).read_text())["values"]["language"] == "de"
