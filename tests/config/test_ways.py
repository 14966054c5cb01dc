"""A value takes effect by one rule: from a base, the command line or Python, in any order."""

import json
import re
from functools import reduce
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import ConfigError
from sbkit.base.ranges import FLAG_WORDS
from sbkit.check.settings import unread_keys
from sbkit.config.document import Only
from sbkit.config.hparams import build_hparams, load_hparams, read_spec
from sbkit.config.overrides import nest_overrides, parse_overrides
from sbkit.train.schedule import declared_rate
from tests.config.conftest import refusal

VALUES: tuple[Any, ...] = (
    *(None, {}, {"a": "x"}, {"a": ["y", "z"], "b": "x"}, {"c": "x"}),
    *(Only({"b": "w"}), Only()),
)
ORDERS = [*product(VALUES, repeat=3)]
TEXT: Any = {"case": "lower", "numbers": "keep"}
TEXTS = ({}, {"case": "keep"}, {"numbers": "spell"}, Only({"case": "keep"}))
TEXT_ORDERS = [(TEXT, *layers) for layers in product(TEXTS, repeat=2)]
Layers = tuple[Any, ...]


def after(old: Any, new: Any) -> Any:
    """The rule: a mapping changes its keys; any other value, such as {} or Only, replaces."""
    return {**(old or {}), **new} if new and not isinstance(new, Only) else new


def in_yaml(value: Any) -> str:
    return f"{'!only ' * isinstance(value, Only)}{json.dumps(value)}"


def write_files(folder: Path, key: str, layers: Layers) -> Path:
    """Write a YAML for each layer, with the one before as its base; return the last."""
    files = [folder / f"{index}.yaml" for index in range(len(layers))]
    files[0].write_text(f"{key}: {in_yaml(layers[0])}\n")
    for (base, file), value in zip(pairwise(files), layers[1:], strict=True):
        file.write_text(f"base: {base.name}\n{key}: {in_yaml(value)}\n")
    return files[-1]


def as_options(key: str, value: Any, way: str) -> list[str]:
    if not value or way == "mapping" or isinstance(value, Only):
        return [f"--{key}={in_yaml(value)}"]
    if way == "dotted":
        return [f"--{key}.{name}={json.dumps(item)}" for name, item in value.items()]
    return [f"--{key}={name}={item}" for name, item in value.items()]


@pytest.mark.parametrize(("key", "orders"), [("where", ORDERS), ("text", TEXT_ORDERS)])
def test_files_and_options_have_one_rule(key: str, orders: list[Layers], tmp_path: Path) -> None:
    for layers in orders:
        value = reduce(after, layers)
        assert read_spec(write_files(tmp_path, key, layers)).settings[key] == value, layers
        for ways in product(("mapping", "dotted"), repeat=2):
            pairs = zip(layers[1:], ways, strict=True)
            options = [option for layer, way in pairs for option in as_options(key, layer, way)]
            overrides = parse_overrides(options)
            for nested in (overrides, nest_overrides(overrides)):
                assert read_spec(tmp_path / "0.yaml", nested).settings[key] == value, (
                    layers,
                    options,
                )


def test_entries_of_a_mapping_are_layers_as_well(tmp_path: Path) -> None:
    texts = [value for value in VALUES if not value or "b" not in value]
    for layers in product(texts, repeat=3):
        options = [o for layer in layers[1:] for o in as_options("where", layer, "entry")]
        value = reduce(after, layers)
        if layers[1] == layers[2] and layers[1]:  # two entries of a name
            value |= {name: [text, text] for name, text in layers[1].items()}
        file = write_files(tmp_path, "where", layers[:1])
        assert read_spec(file, parse_overrides(options)).settings["where"] == value, (
            layers,
            options,
        )


def test_python_has_the_same_rule_and_no_order(tmp_path: Path) -> None:
    for first, outer, inner in ORDERS:
        file = write_files(tmp_path, "where", (first,))
        if isinstance(inner, Only):
            continue  # it has no dotted form
        dotted = {f"where.{name}": item for name, item in (inner or {}).items()}
        orders = ({"where": outer, **dotted}, {**dotted, "where": outer})
        is_refused = dotted and (outer is None or {*outer} & {*inner})
        for overrides in orders:
            if is_refused:
                with pytest.raises(ConfigError, match="^`where.* (overridden twice, by|sets to) "):
                    nest_overrides(overrides)
            else:
                value = reduce(after, (first, outer, inner) if dotted else (first, outer))
                assert read_spec(file, nest_overrides(overrides)).settings["where"] == value, orders


@pytest.mark.parametrize("layers", [*product(VALUES, repeat=2)])
def test_mapping_of_parts_is_replaced_as_a_whole(layers: Layers, tmp_path: Path) -> None:
    assert read_spec(write_files(tmp_path, "freeze", layers)).settings["freeze"] == layers[1]
    for way in ("mapping", "dotted"):
        overrides = parse_overrides(as_options("freeze", layers[1], way))
        assert read_spec(tmp_path / "0.yaml", overrides).settings["freeze"] == layers[1]


@pytest.mark.parametrize("key", ["ratio", "also", "bare", "later"])
def test_empty_mapping_cannot_remove_the_arguments_of_an_object(key: str, path: Path) -> None:
    own = path.with_name("own.yaml")
    replacing = path.with_name("replacing.yaml")
    own.write_text(f"base: {path.name}\n{key}: {{}}\n")
    replacing.write_text(f"base: {path.name}\n{key}: !only {{}}\n")
    for file, overrides in (
        (own, {}),
        *[(replacing, {})] * (key != "also"),  # a reference, which it replaces
        (path, {key: {}}),
        (path, parse_overrides([f"--{key}={{}}"])),
    ):
        assert f"`{key}`" in refusal(file, overrides)


def test_only_and_null_remove_what_a_base_declares(path: Path) -> None:
    own, last, one_file = (path.with_name(f"{name}.yaml") for name in ("own", "last", "one"))
    own.write_text(
        f"base: {path.name}\nmany: null\naugment: {{masks: !only {{frequency: 3}}}}\n"
        "sizes: !only [7]\nmodules: !only {new: !only {a: 1}}\n"
    )
    last.write_text("base: own.yaml\naugment: {masks: {both: 1}}\n")
    option = ["--augment.masks=!only {both: 1}", "--many=null", "--augment={masks: {a: 1}}"]
    python = {"augment.masks": Only({"a": 1}), "many": None}
    for file, overrides, masks in (
        (own, {}, {"frequency": 3}),
        (last, {}, {"frequency": 3, "both": 1}),
        (path, parse_overrides(option), {"both": 1, "a": 1}),
        (path, nest_overrides(python), {"a": 1}),
    ):
        one_file.write_text(read_spec(file, overrides).one_file)
        for hparams in (load_hparams(file, overrides), load_hparams(one_file, {})):
            assert hparams["augment"]["masks"] == masks and "many" not in hparams
    settings = read_spec(own).settings
    assert (settings["sizes"], settings["modules"]) == ([7], {"new": {"a": 1}})
    assert "there is no `ratio`" in refusal(path, {"ratio": None})  # which `also` refers to


def test_merged_mapping_sees_what_is_changed_in_its_source(tmp_path: Path) -> None:
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text(
        "deep: {usual: &usual {a: 1, b: 2}}\nmore: &more {<<: *usual, c: 3}\n"
        "mine: {b: 4, <<: [*more, {c: 5, d: 6}]}\n"
    )
    own.write_text("base: base.yaml\ndeep: {usual: {a: 7}}\n")
    mine = {"a": 1, "b": 4, "c": 3, "d": 6}
    for file, option, changed in (
        (base, "--deep.usual.b=8", {}),  # it has its own
        (own, "--mine.b=8", {"a": 7, "b": 8}),
        (own, "--more.c=8", {"a": 7, "c": 8}),
        (own, "--deep.usual.a=8", {"a": 8}),
        (own, "--mine.a=8", {"a": 8}),
    ):
        assert load_hparams(file, parse_overrides([option]))["mine"] == {**mine, **changed}


# -- flags in words, as arguments ------------------------------------------------------------------

OBJECTS = {  # with the argument that takes a flag
    "!new:torch.nn.Linear {in_features: 2, out_features: 2, bias: %s}": "bias",
    "!new:torch.nn.Linear [2, 2, %s]": "2",
    "!name:torch.optim.AdamW {lr: 0.1, amsgrad: %s}": "amsgrad",
    "!new:speechbrain.nnet.linear.Linear {n_neurons: 2, input_size: 2, bias: %s}": "bias",
    f"!apply:{__name__}.describe {{flag: %s}}": "flag",
    f"!new:{__name__}.Derived {{flag: %s, text: a}}": "flag",
}
TEXTS_OF_OBJECTS = (f"!new:{__name__}.Derived {{text: off}}",)
NESTINGS = ("{}", "[1, {}]", "{{a: {}}}", "!new:builtins.dict {{a: {}}}")


def describe(flag: "bool | None" = None) -> str:
    return f"{flag}"


class Base:
    def __init__(self, flag=False, text: str = "") -> None:  # type: ignore[no-untyped-def]
        self.flag, self.text = flag, text


class Derived(Base):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


@pytest.mark.parametrize(("node", "argument"), OBJECTS.items())
def test_flag_in_words_is_refused_as_an_argument(node: str, argument: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    words = [word.title() for word in FLAG_WORDS if word not in ("true", "false")]
    for nesting, word in product(NESTINGS, [*words, "'False'", '"true"']):
        file.write_text(f"flag: {word}\nk: {nesting.format(node % word)}\n")
        refused = r"`[\w.\[\]]*{}` must be (null or )?true or false(, not in words)?, but is "
        assert re.match(refused.format(argument), (error := refusal(file, {})))
        assert "Write True or False. " in error and error.endswith(f" ({file}:2)")
        file.write_text(f"flag: {word}\nk: {nesting.format(node % '!ref <flag>')}\n")
        assert re.match(refused.format("flag"), refusal(file, {}))
    file.write_text(f"k: {node % 'true'}\n")
    for overrides in (parse_overrides([f"--k.{argument}=off"]), {"k": {argument: "Off"}}):
        assert "off" not in read_spec(file, overrides).text.lower()
        assert load_hparams(file, overrides)


@pytest.mark.parametrize("node", TEXTS_OF_OBJECTS)
def test_word_for_an_argument_that_may_be_text_is_kept(node: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"k: {node}\n")
    assert vars(load_hparams(tmp_path / "a.yaml", {})["k"])["text"] == "off"


# -- a key, and the argument that refers to it -----------------------------------------------------

REFERENCE, REMOVED = "!ref <rate>", object()
KEYS = [*product((None, 2), (None, 3))]  # in the file, in the options
ARGUMENTS = [
    (in_base, in_file, in_options)
    for in_base, in_file, in_options in product(
        (REFERENCE, 5), (None, 6, REMOVED, "!name"), (None, 7, REMOVED)
    )
    if in_file is not REMOVED or in_options is None  # else there is nothing to change
]


def part_lines(argument: Any, *, tag: str = "") -> list[str]:
    """Write the part `optimizer` of a YAML; none for None."""
    if argument is None:
        return []
    tag = tag or "!name:torch.optim.SGD" * (argument == "!name")
    value = 6 if argument == "!name" else argument
    return ["optimizer: null"] if value is REMOVED else [f"optimizer: {tag}", f"    lr: {value}"]


def option_forms(key: Any, argument: Any) -> list[dict[str, object]]:
    """Return the same overrides in both orders, of the command line and of Python."""
    pairs = {} if key is None else {"rate": key}
    if argument is not None:
        pairs |= {"optimizer": None} if argument is REMOVED else {"optimizer.lr": argument}
    orders = [pairs, dict(reversed(pairs.items()))]
    lines = [[f"--{name}={json.dumps(value)}" for name, value in o.items()] for o in orders]
    nested = {"rate": key} if key is not None else {}
    if argument is not None:
        nested["optimizer"] = None if argument is REMOVED else {"lr": argument}
    return [*map(parse_overrides, lines), *map(nest_overrides, orders), nested]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_object_decides_and_a_key_that_it_no_longer_refers_to_is_named(
    keys: tuple[Any, Any], arguments: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    """A key is named if it is given where its reference is gone, or later."""
    in_base, in_file, in_options = arguments
    lines = ["rate: 1", *part_lines(in_base, tag="!name:torch.optim.SGD")]
    (tmp_path / "base.yaml").write_text("\n".join(lines) + "\n")
    lines = [f"rate: {keys[0]}"] * (keys[0] is not None) + part_lines(in_file)
    (tmp_path / "own.yaml").write_text("\n".join(["base: base.yaml", *lines]) + "\n")
    layers = (None if in_base is REFERENCE else in_base, in_file, in_options)
    key_layer = max((layer for layer, key in enumerate(keys, 1) if key is not None), default=0)
    is_named = key_layer > 0 and any(argument is not None for argument in layers[: key_layer + 1])
    rate = next((key for key in reversed(keys) if key is not None), 1)
    value = next((a for a in reversed(layers) if a is not None), rate)
    for overrides in option_forms(keys[1], in_options):
        spec = read_spec(tmp_path / "own.yaml", overrides)
        assert [*unread_keys(spec, {"optimizer"})] == ["rate"] * is_named
        if value is REMOVED:
            assert "optimizer" not in spec.tree
        else:
            assert spec.tree["optimizer"]["lr"] == (6 if value == "!name" else value)
            assert declared_rate(build_hparams(spec)["optimizer"]) == spec.tree["optimizer"]["lr"]
        assert spec.source_of("optimizer", "lr")[0] == (
            "rate" if value is not REMOVED and {*layers} == {None} else "optimizer"
        )
