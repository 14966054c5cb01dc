"""Every entry of the list is the object that it names, and a bundle may name nothing else."""

import pytest
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.bundle.allowed import ALLOWED, canonical, find_allowed


def test_every_entry_is_the_object_that_it_names() -> None:
    assert [name for name in ALLOWED if canonical(name) != name] == []


def test_a_bundle_is_made_of_modules_and_activations() -> None:
    for made in (find_allowed("!new", name) for name, tags in ALLOWED.items() if "!new" in tags):
        assert isinstance(made, type) and issubclass(made, nn.Module), made


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("!new", "torch.nn.Linear"),  # a re-export of torch.nn.modules.linear.Linear
        ("!new", "speechbrain.lobes.models.transformer.TransformerASR.TransformerASR"),
        ("!name", "torch.nn.GELU"),
        ("!name", "torch.nn.functional.relu"),
    ],
)
def test_a_part_is_allowed_in_a_bundle(kind: str, name: str) -> None:
    assert find_allowed(kind, canonical(name))


@pytest.mark.parametrize(
    ("kind", "name"),
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
def test_nothing_else_is(kind: str, name: str) -> None:
    with pytest.raises(SbkitError, match="list"):
        find_allowed(kind, name)
