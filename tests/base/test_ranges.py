"""A value out of its range is refused, wherever the range is declared."""

import math
import pydoc
import re
from collections.abc import Iterator
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from speechbrain.core import RunOptions

from docs.reference import declared_keys, read_keys
from recipes.asr.recipe import AsrRecipe
from recipes.vad.recipe import VadRecipe
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import (
    UNCHECKED,
    Constraint,
    Range,
    require_in_range,
)
from sbkit.check.checked_run import CPU_OPTIONS
from sbkit.check.settings import check_ranges
from sbkit.config.document import REPLACED_WHOLE, read_document, tag_of, walk
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.config.keys import KEYS, Key, require_values
from sbkit.config.overrides import NAMED_VALUES, parse_overrides
from sbkit.data.prepared import DATA_KEYS
from sbkit.models.encoder import AUDIO_PART_KEYS
from sbkit.run.run import Run
from sbkit.train.brain import Brain
from sbkit.train.run_options import REFUSED_OPTIONS
from sbkit.train.setup import declare_run
from tests.runs import ROOT


def test_require_in_range_allows_values_that_switch_off() -> None:
    require_values({"stall_seconds": 0, "ckpt_interval_minutes": -1})
    require_values({"stall_seconds": 0.5})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("max_seconds: 20 s", "from 0 to 86400, but is '20 s'. Write the number without its unit."),
        ("lr: 0,001", "`lr` must be a number of at least 0, but is '0,001'. Use a point: 0.001."),
        ("max_seconds: 1.000,5", "Use a point: 1000.5."),
        ("number_of_epochs: 1,000", "Write 1000."),
        ('number_of_epochs: "2"', "but is '2'. Take out the quotes: 2."),
        ("keep_tags: noise, um", r"but is 'noise, um'. Write \[noise, um\]."),
        ("max_grad_norm: .nan", "`max_grad_norm` must be finite, but is nan. Pass 0 to clip"),
        ("log_every: true", "must be a whole number of at least 1, but is True. Pass 1 to log"),
        ("sample_rate: 0", "`sample_rate` must be a whole number from 1000 to 384000"),
        ("data_folder: {a: 1}", "`data_folder` must be null or text or a list of texts, but is {"),
        ("report_by: [null]", "`report_by` must be"),
        ("mix: {train-b: 0}", "but is {'train-b': 0}. For no row of a source, leave it out."),
        ("where: accents", "`where` must be null or {} or a mapping of texts, but is 'accents'"),
        ("remove_vector_weight_decay: 1", "must be true or false, but is 1"),
        ("lm_text: []", "`lm_text` must be null or text or a list of texts"),
        ("columns: wrd", "`columns` must be null or {} or a mapping of texts"),
        ('data_folder: ""', "must be null or text or a list of texts, but is ''. Write null for"),
        ("manifest: {}", "`manifest` must be null or a mapping of texts, but is {}. Write null"),
        ("batch_seconds: .inf", "`batch_seconds` must be finite, but is inf. 32 is usual."),
        ("lr_scale: {conv: .nan}", "`lr_scale` must be finite, but is {'conv': nan}. Write {}"),
        ("freeze: conv", r"but is 'conv'. Write \[conv\]."),
        ("gain_db: [10, -20]", r"must be \[LOWEST, HIGHEST\], each a number from -200 to 200, but"),
        ("snr_db: [0]", r"`snr_db` must be .*, but is \[0\]. \[0, 30\] is such a range."),
    ],
)
def test_recipes_refuse_other_kinds(line: str, text: str, tmp_path: Path) -> None:
    key = line.partition(":")[0]
    declared = (ROOT / "hparams/vad.yaml").read_text(encoding="utf-8")
    file = tmp_path / "vad.yaml"
    file.write_text(re.sub(rf"(?m)^{key}:.*\n", "", declared) + line)  # some leave the key out
    with pytest.raises(ConfigError, match=text):
        require_values(read_spec(file).settings, VadRecipe.keys)


def test_no_key_takes_an_empty_value_for_none() -> None:
    """An empty shell variable as `data_folder` used to train on the default corpus."""
    for name, key in KEYS.items():
        if key.type is UNCHECKED:  # of an object
            continue
        assert not [empty for empty in ("", " ", [""]) if empty in key.values], name
        assert ({} in key.values) is ("{}" in str(key.values)), name


def test_yamls_say_in_the_same_words_what_a_key_means() -> None:
    """The comments of a YAML without a base begin with the meaning that its key declares."""
    comments: dict[str, list[str]] = {}
    for file in (ROOT / "hparams").glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        if "\nbase: " in text:
            continue  # it says why it has another value than its base
        recipe: Any = pydoc.locate(read_document(file).root["recipe"])
        for _, name, _, comment in read_keys(text):
            if not comment:
                continue
            key = recipe.keys.get(name, Key())
            assert comment.startswith(key.meaning), (file.stem, name)
            if key.type is not UNCHECKED and not key.meaning:  # else a class may declare it
                comments.setdefault(name, []).append(comment)
    for name, words in comments.items():
        assert all(comment.startswith(min(words, key=len)) for comment in words), (name, words)


BORDERS = (0, 1, -1, 0.5, None, True, "", "a", [], [0], [2, 1], ["a"], {}, {"a": 0}, {"a": None})
INFINITE = (math.inf, -math.inf, math.nan, [math.nan], [1.0, [math.inf]], {"a": {"b": math.inf}})
# The recipe, names of the run's files, and values that a library checks when it builds its class
UNDECLARED = {
    *("recipe", "model_file", "language_models", "checkpoints_dir", "file"),
    *("torch.", "speechbrain.", "sbkit.models.speechbrain_parts.", "cnn_channels"),
}


def declared_constraints(yaml: Path) -> Iterator[tuple[str, Constraint]]:
    """Yield the keys of a YAML and the arguments of its classes, with their constraints."""
    declared = declared_keys(yaml)
    spec = read_spec(yaml, {"data_folder": "x"})
    for argument in spec.arguments():
        refers_to = declared.get(str(argument.key[0]), Key())
        is_declared = argument.constraint is not UNCHECKED or argument.key == argument.path
        name = f"{argument.builder}.{argument.path[-1]}"
        yield name, argument.constraint if is_declared else refers_to.values
    for key in spec.document.own_keys & {*spec.settings}:
        yield key, declared.get(key, Key()).values


@pytest.mark.parametrize("yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_key_and_argument_has_a_range_without_infinity(yaml: Path) -> None:
    """Each value is accepted, or refused by an error that names the key."""
    for key, constraint in declared_constraints(yaml):
        if constraint is UNCHECKED:
            assert any(key.startswith(name) or key.endswith(name) for name in UNDECLARED), key
        name = key.rpartition(".")[2]
        for value in (*BORDERS, *INFINITE):
            try:
                require_in_range(name, value, constraint)
            except ConfigError as error:
                assert str(error).startswith(f"`{name}` must be "), error
            else:
                assert value not in INFINITE or constraint is UNCHECKED, key


ADVISED = re.compile(
    r"(?:\b[Pp]ass|\b[Ww]rite|\bor|\bsuch as) (\[.*?\]|\{.*?\}|[\w.]*\w)"
    r"|^(\[.*?\]|[\w.]*\w)(?: \w+)? (?:is|are|suits) "
)
NO_VALUE = {"any", "text", "hertz"}  # words of an advice that names no value


@pytest.mark.parametrize("yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda p: p.stem)
def test_value_that_a_range_advises_is_in_the_range(yaml: Path) -> None:
    num_checked = 0
    for key, constraint in declared_constraints(yaml):
        advice = constraint.advice
        texts = [first or second for first, second in ADVISED.findall(advice)]
        for value in [parse_overrides([f"--k={text}"])["k"] for text in {*texts} - NO_VALUE]:
            assert value in constraint, (key, advice, value)
            num_checked += 1
    assert num_checked > 20


def test_infinity_is_refused_at_its_line(tmp_path: Path) -> None:
    lines = (ROOT / "hparams/ctc.yaml").read_text(encoding="utf-8").splitlines()
    keys = {}
    for number, line in enumerate(lines, 1):
        key, colon, value = line.partition(": ")
        if colon and isinstance(AsrRecipe.keys.get(key, Key()).values, Range):
            lines[number - 1], keys[key] = f"{key}: .inf", number
    file = tmp_path / "ctc.yaml"
    file.write_text("\n".join(lines), encoding="utf-8")
    found = {finding.where: finding.problem for finding in check_ranges(declare_run(file, {}))}
    assert len(keys) > 15
    for key, number in keys.items():
        assert found[f"{file}:{number}"].startswith(f"`{key}` must be finite, but is inf.")
    with pytest.raises(ConfigError) as refused:  # as training does, also without the check
        Run(file, {"output_folder": str(tmp_path / "run"), "check": False}).train()
    assert str(refused.value).endswith(f"({file}:{keys[str(refused.value.keys[0])]})")


@pytest.mark.parametrize(
    ("yaml", "overrides", "text"),
    [
        ("vad", {"n_mels": 256}, "`n_mels` must be at most 126 for 16000 Hz, but is 256: 25 bins "),
        ("vad", {"n_mels": 96, "sample_rate": 8000}, "`n_mels` must be at most 95 for 8000 Hz, "),
        ("codec", {"hop": 100, "n_mels": 111}, "must be at most 110 for a hop of 100 at 16000 Hz"),
        ("codec", {"hop": 2}, "`n_mels` must be at most 2 for a hop of 2 at 16000 Hz, but is 80:"),
    ],
)
def test_mel_bin_without_a_frequency_is_refused_at_its_key(
    yaml: str, overrides: dict[str, object], text: str, tmp_path: Path
) -> None:
    file = ROOT / f"hparams/{yaml}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.startswith("n_mels:"))
    place = "override of n_mels" if "n_mels" in overrides else f"{yaml}.yaml:{number}"
    with pytest.raises(ConfigError) as refused:
        load_hparams(file, {"output_folder": str(tmp_path), **overrides})
    assert text in str(refused.value) and str(refused.value).endswith(f"{place})")
    assert refused.value.keys == ("n_mels",)
    within = {"n_mels": 126} if yaml == "vad" else {"hop": 100, "n_mels": 110}
    load_hparams(file, {"output_folder": str(tmp_path), **within})


def test_lists_of_keys_and_arguments_name_those_that_exist() -> None:
    """A renamed one would stay in a list, without an effect."""
    yamls = [read_document(file).root for file in (ROOT / "hparams").glob("*.yaml")]
    lists = [
        REPLACED_WHOLE,
        NAMED_VALUES,
        DATA_KEYS,
        AUDIO_PART_KEYS,
    ]
    lists += [CPU_OPTIONS, REFUSED_OPTIONS]
    lists += [pydoc.locate(yaml["recipe"]).keys for yaml in yamls]
    assert {*chain(*lists)} <= {*KEYS, *RunOptions().as_dict(), *chain(*yamls)}
    names = {tag_of(node).partition("!new:")[2] for yaml in yamls for _, node in walk(yaml)}
    for name in names - {""}:
        builder: Any = pydoc.locate(name)
        owners = getattr(builder, "__mro__", [builder])  # a base may have some of the arguments
        arguments = chain.from_iterable(signature(owner).parameters for owner in owners)
        assert getattr(builder, "ARGUMENTS", {}).keys() <= {*arguments}


def test_brain_made_by_hand_refuses_value_out_of_range() -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least"):
        Brain(hparams={"nonfinite_patience": 3}, run_opts={"nonfinite_patience": -1})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"spec_augment": {"freq_width": -2}}, "`spec_augment.freq_width` must be a whole number"),
        ({"dropout": 1}, "`dropout` must be a number from 0 to 0.99, but is 1."),
        ({"vocab_size": "abc"}, "`vocab_size` must be null or a whole number of at least 5"),
        ({"opt_class": {"lr": -1}}, "`opt_class.lr` must be a number of at least 0, but is -1."),
        ({"epoch_counter": {"limit": 0}}, "`epoch_counter.limit` must be a whole number of at le"),
    ],
    ids=str,
)
def test_ranges_of_a_class_apply_to_its_arguments(
    overrides: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_hparams(ROOT / "hparams/ctc.yaml", {"output_folder": str(tmp_path), **overrides})
    assert str(refused.value).startswith(text)
