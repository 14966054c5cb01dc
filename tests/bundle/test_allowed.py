"""The allow-list: every entry is the object that it names, and nothing else is allowed."""

import pytest
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.bundle.allowed import ALLOWED_TAGS, canonical, find_allowed


def test_every_entry_has_its_canonical_name() -> None:
    assert [name for name in ALLOWED_TAGS if canonical(name) != name] == []


def test_every_new_entry_is_a_module_class() -> None:
    for allowed in (
        find_allowed("!new", name) for name, tags in ALLOWED_TAGS.items() if "!new" in tags
    ):
        assert isinstance(allowed, type) and issubclass(allowed, nn.Module), allowed


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("!new", "torch.fx.graph_module._CodeOnlyModule"),
        ("!name", "torch.nn.utils._deprecation_utils.lazy_deprecated_import"),
        ("!name", "torch.nn.ParameterDict.get"),
        ("!name", "torch.nn.Sequential.forward"),
        ("!name", "torch.nn.Module._apply"),
        ("!name", "torch.nn.attention._fa4._fa4_import_module"),
        ("!new", "speechbrain.lobes.models.MSTacotron2.TextMelCollate"),
        ("!name", "speechbrain.nnet.schedulers.NoamScheduler.save"),
        ("!new", "speechbrain.nnet.schedulers.NoamScheduler"),
        ("!new", "speechbrain.lobes.models.discrete.dac.DAC"),
        ("!new", "torch.nn.Module"),
        ("!new", "torch.nn.ParameterDict"),
        ("!new", "torch.nn.DataParallel"),
        ("!new", "torch.nn.functional.relu"),
        ("!new", "sbkit.text.tokenizer.Tokenizer"),
        ("!new", "sbkit.checkpoint.checkpointer.Checkpointer"),
        ("!apply", "torch.manual_seed"),
        ("!name", "torch.nn.init.normal_"),
    ],
)
def test_find_allowed_refuses_other_names(tag: str, name: str) -> None:
    with pytest.raises(SbkitError, match="list"):
        find_allowed(tag, name)
