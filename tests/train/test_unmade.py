"""Parameters without values are refused by name, before an optimizer is given them."""

import pytest
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.train.step_brain import refuse_unmade


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "`model.0.weight` is of a lazy module"),
        (nn.Linear(2, 3, device="meta"), "`model.weight` lies on the device meta"),
    ],
)
def test_a_parameter_without_values_is_named(part: nn.Module, words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        refuse_unmade({"model": part})
    refuse_unmade({"model": nn.Linear(2, 3)})
