"""Numbers of things, and the first of their names."""

import pytest

from sbkit.base.words import listed, plural


def test_one_thing_is_singular() -> None:
    assert [plural(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]


@pytest.mark.parametrize(
    ("names", "written"),
    [([], ""), ("abc", "a, b, c"), (range(5), "0, 1, 2 and 2 more"), (iter("a"), "a")],
)
def test_the_first_names_and_the_number_of_the_others_are_written(
    names: list[object], written: str
) -> None:
    assert listed(names) == written
