"""Errors of the user's code name its file, line and function, whatever library it called."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from sbkit.base.libraries import place_of

CODE = """
import torch


def mix(x):
    return torch.cat([x, x[0]])
"""


def test_place_of_an_error_is_in_the_users_code(tmp_path: Path) -> None:
    file = tmp_path / "my_parts.py"
    file.write_text(CODE)
    spec = spec_from_file_location("my_parts", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    places = []
    for call in (module.mix, torch.linalg.cholesky):
        try:
            torch.utils.checkpoint.checkpoint(call, -torch.eye(2), use_reentrant=False)
        except Exception as error:
            # As where sbkit catches it: frames of this test are no part of the user's code.
            places.append(place_of(error.with_traceback(error.__traceback__.tb_next)))
    assert places == [f", in line 6 of {file} (mix)", ""]
