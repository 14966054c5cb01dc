"""While modules are imported, old objects are looked through less often; and then as before."""

import gc

import pytest

from sbkit.base.garbage import rarely_collected


def test_old_objects_are_looked_through_less_often_and_then_as_before() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError), rarely_collected():
        assert gc.get_threshold() == (*before[:2], 10 * before[2])
        raise ImportError
    assert gc.get_threshold() == before
