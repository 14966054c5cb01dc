"""Arguments of the command line are read, take effect, or are refused."""

import math
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import ConfigError
from sbkit.config.hparams import read_spec
from sbkit.config.overrides import nest_overrides, parse_command, parse_overrides
from tests.config.conftest import refusal
from tests.runs import ROOT


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--a", "-.inf"], {"a": -math.inf}),
        (["--a=x # y: z"], {"a": "x # y: z"}),
        (["--a=a=b"], {"a": "a=b"}),
        (["--a='1'"], {"a": "1"}),
        (['--a=""'], {"a": ""}),
        (["--flag", "--b", "false"], {"flag": True, "b": False}),
        (["--a=True", "--b=FALSE", "--c=Null"], {"a": True, "b": False, "c": None}),
        (["--a=2026-11-27"], {"a": "2026-11-27"}),  # a folder, such as `output_folder`
        (["--a=[0.9, 1e-3]"], {"a": [0.9, 0.001]}),
        (["--a={b: 1}"], {"a": {"b": 1}}),
        (["--a=1", "--a=2"], {"a": 2}),
        (["--a=1", "--a.b=2"], {"a": {"b": 2}}),
        (
            ["--manifest", "train=a.csv", "--manifest=test-x=1", "--manifest", "train=b=c.tsv"],
            {"manifest": {"train": ["a.csv", "b=c.tsv"], "test-x": "1"}},
        ),
    ],
)
def test_parse_overrides_reads_values(arguments: list[str], expected: dict[str, object]) -> None:
    overrides = parse_overrides(arguments)
    assert overrides == expected
    for name, value in expected.items():
        assert isinstance(overrides[name], type(value))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("lr", "`lr` is not of the form --key=value"),
        ("--a[b]=3", "is not of the form"),
        ("--a=", "`--a=` needs a value. Write null for none."),
        ("--a=!new:os.system", "needs a plain value"),
        ("--a=[1,", "is not a list"),
        ("--manifest=a.csv", "needs NAME=VALUE, not 'a.csv'"),
    ],
)
def test_parse_overrides_refuses_a_malformed_argument(argument: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([argument])
    assert text in str(caught.value)


def test_parse_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-h"], ["a.yaml", "--help"]):
        with pytest.raises(SystemExit, match="^0$"):
            parse_command(arguments)
        assert capsys.readouterr().out.startswith("usage: train.py FILE.yaml")


@pytest.mark.parametrize(
    ("argument", "key", "expected"),
    [
        ("--batch_seconds=12", "batch_seconds", 12.0),
        ("--seed=1e3", "seed", 1000),
        ("--mixed", "mixed", True),
        ("--betas=(0.8, 0.9)", "betas", (0.8, 0.9)),
        ("--free.new=1", "free", {"new": 1}),
        ("--freeze=[Transformer]", "freeze", ["Transformer"]),
        ("--augment.speeds.1=2.0", "augment", {"speeds": [0.9, 2.0], "masks": {"time": 2}}),
        ("--ratio.numerator=4", "third", 4),
        ("--limit=1e-4", "limit", 1e-4),
        ("--augment.speeds=[1, 0.90]", "augment", {"speeds": [1.0, 0.9], "masks": {"time": 2}}),
        ("--snr_db=[0, 2.5]", "snr_db", [0, 2.5]),
    ],
)
def test_override_takes_effect(path: Path, argument: str, key: str, expected: object) -> None:
    value = read_spec(path, parse_overrides([argument])).settings[key]
    assert value == expected
    assert isinstance(value, type(expected))


def test_minutes_and_seconds_take_fractions_where_the_yaml_has_none() -> None:
    arguments = ["--ckpt_interval_minutes=0.5", "--stall_seconds=1.5"]
    settings = read_spec(ROOT / "hparams/ctc.yaml", parse_overrides(arguments)).settings
    assert (settings["ckpt_interval_minutes"], settings["stall_seconds"]) == (0.5, 1.5)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--batch_secnds=3", "Did you mean `batch_seconds`?"),
        ("--augment.masks.tim=1", "Did you mean `augment.masks.time`?"),
        ("--numerator=1", "Did you mean `ratio.numerator`?"),
        ("--later.other=1", "has no such key under `later`"),
        ("--ratio=3", "would replace the object at {path}:21"),
        ("--modules=3", "must be a mapping"),
        ("--also.numerator=3", "refers to <ratio>"),
        ("--batch_seconds=abc", "must be a number, as in {path}:3, not 'abc' (text)"),
        ("--seed=1.5", "but is 1.5"),
        ("--batch_seconds=0,5", "not '0,5' (text). Use a point: 0.5."),
        ("--mixed=maybe", "must be true or false"),
        ("--augment.speeds=0.9, 1.0", "not '0.9, 1.0' (text). Write [0.9, 1.0]."),
        ("--augment.speeds=[a]", "`augment.speeds.0` must be a number, as in {path}:8, not 'a'"),
    ],
)
def test_override_without_effect_is_refused(path: Path, argument: str, text: str) -> None:
    assert text.format(path=path) in refusal(path, parse_overrides([argument]))


def test_overrides_from_python_may_be_numbers_of_numpy_and_paths_but_not_objects(
    path: Path,
) -> None:
    overrides = {"a": {"b": {"c": np.float32(0.5)}}, "a.b.d": (1,)}
    assert nest_overrides(overrides) == {"a": {"b": {"c": 0.5, "d": [1]}}}
    settings = read_spec(path, {"output_folder": path.parent}).settings
    assert settings["output_folder"] == str(path.parent)
    assert "`limit` must be a plain value" in refusal(path, {"limit": object()})
