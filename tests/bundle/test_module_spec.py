"""Module specifications: modules become plain data and are rebuilt from it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.imports import import_user_modules
from sbkit.bundle.module_spec import build, to_plain


class Sizes:
    vocab_size = 7


def plain_of(text: str) -> Any:
    root = YAML().load(text)
    return to_plain(root["part"], key="part", objects={id(root.get("tokenizer")): Sizes()})


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
    model = build(plain)
    assert isinstance(model, nn.Sequential)
    assert model[0].out_features == 7
    assert isinstance(model[1], nn.ReLU)
    assert model[2].kernel_size == (2, 3)


def test_build_of_a_name_returns_the_class_or_a_partial() -> None:
    assert build(plain_of("part: !name:torch.nn.GELU")) is nn.GELU
    leaky_relu = build(plain_of("part: !name:torch.nn.LeakyReLU {negative_slope: 0.5}"))
    assert leaky_relu()(torch.tensor(-1.0)).item() == -0.5


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("part: !new:torch.nn.Linear {in_features: !apply:os.getpid []}", "!apply:os.getpid"),
        ("part: !!python/object/apply:os.getcwd []", "python/object/apply"),
    ],
)
def test_to_plain_refuses_values_that_need_running_code(text: str, word: str) -> None:
    with pytest.raises(SbkitError) as error:
        plain_of(text)
    assert word in str(error.value)


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
        build(plain)
    assert "my_own_layers" not in sys.modules
    user_modules = import_user_modules(["my_own_layers"])
    assert type(build(plain, user_modules=user_modules)).__name__ == "Layer"
    for name in ("leave", "os.system", "nn.Module"):
        for tag in ("new", "name"):
            with pytest.raises(SbkitError, match="list"):
                build({tag: f"my_own_layers.{name}", "arguments": []}, user_modules=user_modules)


def test_import_user_modules_names_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(SbkitError, match="`no_such_module` raised ModuleNotFoundError"):
        import_user_modules(["no_such_module"])
