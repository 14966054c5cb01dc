"""Module specifications: modules become plain data and are rebuilt, if they are on the list."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from torch import nn

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.imports import import_user_modules
from sbkit.bundle.allowed_classes import ALLOWED_TAGS, canonical, find_allowed
from sbkit.bundle.module_spec import SpecWriter, build_from_spec


class Sizes:
    vocab_size = 7
    threshold = math.nan


def plain_of(text: str) -> Any:
    root = YAML().load(text)
    return SpecWriter("part", {id(root.get("tokenizer")): Sizes()}).write(root["part"])


def test_build_restores_a_tree_of_modules() -> None:
    plain = plain_of(
        """
tokenizer: &t !new:some.Tokenizer {file: x}
part: !new:torch.nn.Sequential
    - !new:torch.nn.Linear {in_features: 3, out_features: !apply:getattr [*t, vocab_size]}
    - !new:torch.nn.ReLU
    - !new:torch.nn.AvgPool2d
        kernel_size: (2, 3)
"""
    )
    model = build_from_spec(plain)
    assert isinstance(model, nn.Sequential)
    assert model[0].out_features == 7
    assert isinstance(model[1], nn.ReLU)
    assert model[2].kernel_size == (2, 3)


def test_build_of_a_name_returns_the_class_or_a_partial() -> None:
    assert build_from_spec(plain_of("part: !name:torch.nn.GELU")) is nn.GELU
    leaky_relu = build_from_spec(plain_of("part: !name:torch.nn.LeakyReLU {negative_slope: 0.5}"))
    assert leaky_relu()(torch.tensor(-1.0)).item() == -0.5


LAYER = "part: !new:torch.nn.Linear"


def test_export_refuses_what_loading_would_refuse() -> None:
    other = "other: &o !new:some.Other {file: x}"
    for text, message in (
        (f"{LAYER} {{a: !apply:os.getpid []}}", "!apply:os.getpid"),
        (f"{LAYER} {{a: .nan}}", "it holds nan"),
        (f"{LAYER} {{a: {{new: 1}}}}", "has the key 'new'"),
        (f"{LAYER} {{a: {{1: a, '1': b}}}}", "has the key 1"),
        (f"{LAYER} 5", "!new:torch.nn.Linear has the single argument '5'"),
        (f"{other}\n{LAYER} {{a: !apply:getattr [*o, size]}}", "refers to an attribute"),
    ):
        with pytest.raises(ConfigError) as error:
            plain_of(text)
        assert message in str(error.value)


def test_build_uses_only_module_classes_of_imported_user_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_layers.py").write_text(
        "import os\nfrom torch import nn\n\nclass Layer(nn.Module):\n    pass\n\n"
        "def leave():\n    os._exit(9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = {"new": "my_own_layers.Layer", "arguments": {}}
    with pytest.raises(SbkitError, match="pass --import my_own_layers"):
        build_from_spec(plain)
    assert "my_own_layers" not in sys.modules
    user_modules = import_user_modules(["my_own_layers"])
    assert type(build_from_spec(plain, user_modules=user_modules)).__name__ == "Layer"
    for name in ("leave", "os.system", "nn.Module"):
        for tag in ("new", "name"):
            with pytest.raises(SbkitError, match="list"):
                spec = {tag: f"my_own_layers.{name}", "arguments": []}
                build_from_spec(spec, user_modules=user_modules)


def test_every_entry_of_the_list_has_its_canonical_name_and_is_what_its_tag_says() -> None:
    for name, tags in ALLOWED_TAGS.items():
        assert canonical(name) == name
        if "!new" in tags:
            allowed = find_allowed("!new", name)
            assert isinstance(allowed, type) and issubclass(allowed, nn.Module), allowed
