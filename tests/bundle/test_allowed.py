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
        ("!name", "torch.nn.ParameterDict.get"),
        ("!new", "torch.nn.ParameterDict"),
        ("!new", "torch.nn.DataParallel"),
        ("!new", "torch.nn.functional.relu"),
        ("!new", "sbkit.checkpoint.checkpointer.Checkpointer"),
        ("!apply", "torch.manual_seed"),
    ],
)
def test_find_allowed_refuses_other_names(tag: str, name: str) -> None:
    with pytest.raises(SbkitError, match="list"):
        find_allowed(tag, name)
