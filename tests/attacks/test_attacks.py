"""A share of all attacks, of every kind: none runs code, ends in a traceback, hangs or swells."""

from pathlib import Path

import pytest

from tests.attacks.__main__ import all_cases, report, try_all
from tests.attacks.inputs import all_inputs

HEARD = ("audio", "noise", "reverb")  # tests of tests/audio have those
EVERY = 61  # python -m tests.attacks tries all of them


def test_there_are_enough() -> None:
    cases = all_cases()
    assert len(cases) >= 3500
    assert len({(case.group, case.name) for case in cases}) == len(cases)


@pytest.mark.timeout(400)
def test_a_share_of_the_attacks_is_withstood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share = [case for case in all_cases() if case.group not in HEARD][::EVERY]
    with capsys.disabled():  # the children write to streams of their own
        found = list(try_all(share, tmp_path))
    assert report(found) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_training_is_given_is_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        inputs = [case for case in all_inputs() if case.group not in HEARD]
        found = list(try_all(inputs[::3], tmp_path))
    assert report(found) == 0
