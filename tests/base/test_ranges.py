"""A value out of its range is refused, wherever the range is declared."""

import pydoc
import re
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from speechbrain.core import RunOptions

from recipes.vad.recipe import VadRecipe
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import KEYS, RANGES, ranges_of, require_in_range
from sbkit.check.checked_run import CPU_OPTIONS
from sbkit.checkpoint.run_config import CHANGEABLE_KEYS, PER_PROCESS_KEYS
from sbkit.config.document import REPLACED_WHOLE, read_document, tag_of, walk
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.config.overrides import NAMED_VALUES
from sbkit.data.prepared import DATA_KEYS
from sbkit.models.encoder import AUDIO_PART_KEYS
from sbkit.train.brain import Brain
from sbkit.train.run_options import REFUSED_OPTIONS
from tests.runs import ROOT


def test_require_in_range_allows_values_that_switch_off() -> None:
    require_in_range({"stall_seconds": 0, "ckpt_interval_minutes": -1})
    require_in_range({"stall_seconds": 0.5})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("max_seconds: 20 s", "from 0 to 86400, but is '20 s'. Write the number without its unit."),
        ("lr: 0,001", "`lr` must be a number of at least 0, but is '0,001'. Use a point: 0.001."),
        ("max_seconds: 1.000,5", "Use a point: 1000.5."),
        ("number_of_epochs: 1,000", "Write 1000."),
        ('number_of_epochs: "2"', "but is '2'. Take out the quotes: 2."),
        ("keep_tags: noise, um", r"but is 'noise, um'. Write \[noise, um\]."),
        ("max_grad_norm: .nan", "`max_grad_norm` must be a number, but is nan. Pass 0 to clip"),
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
    ],
)
def test_recipes_refuse_other_kinds(line: str, text: str, tmp_path: Path) -> None:
    key = line.partition(":")[0]
    declared = (ROOT / "hparams/vad.yaml").read_text(encoding="utf-8")
    file = tmp_path / "vad.yaml"
    file.write_text(re.sub(rf"(?m)^{key}:.*\n", "", declared) + line)  # some leave the key out
    with pytest.raises(ConfigError, match=text):
        require_in_range(read_spec(file).settings, {**RANGES, **VadRecipe.ranges})


def test_no_key_takes_an_empty_value_for_none() -> None:
    """An empty shell variable as `data_folder` used to train on the default corpus."""
    for name, key in KEYS.items():
        assert not [empty for empty in ("", " ", [""]) if empty in key.values], name
        assert ({} in key.values) is ("{}" in str(key.values)), name


def test_lists_of_keys_and_arguments_name_those_that_exist() -> None:
    """A renamed one would stay in a list, without an effect."""
    yamls = [read_document(file).root for file in (ROOT / "hparams").glob("*.yaml")]
    lists = [
        CHANGEABLE_KEYS,
        PER_PROCESS_KEYS,
        REPLACED_WHOLE,
        NAMED_VALUES,
        DATA_KEYS,
        AUDIO_PART_KEYS,
    ]
    lists += [CPU_OPTIONS, REFUSED_OPTIONS]
    lists += [ranges_of(yaml["recipe"]) for yaml in yamls]
    assert {*chain(*lists)} <= {*KEYS, *RunOptions().as_dict(), *chain(*yamls)}
    names = {tag_of(node).partition("!new:")[2] for yaml in yamls for _, node in walk(yaml)}
    for name in names - {""}:
        builder: Any = pydoc.locate(name)
        owners = getattr(builder, "__mro__", [builder])  # a base may have some of the arguments
        arguments = chain.from_iterable(signature(owner).parameters for owner in owners)
        assert getattr(builder, "RANGES", {}).keys() <= {*arguments}


def test_brain_made_by_hand_refuses_value_out_of_range() -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least"):
        Brain(hparams={"nonfinite_patience": 3}, run_opts={"nonfinite_patience": -1})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"spec_augment": {"freq_width": -2}}, "`spec_augment.freq_width` must be a whole number"),
        ({"dropout": 1.5}, "`dropout` must be a number from 0 to 1, but is 1.5."),
        ({"vocab_size": "abc"}, "`vocab_size` must be null or a whole number of at least 5"),
    ],
    ids=str,
)
def test_ranges_of_a_class_apply_to_its_arguments(
    overrides: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_hparams(ROOT / "hparams/ctc.yaml", {"output_folder": str(tmp_path), **overrides})
    assert str(refused.value).startswith(text)
