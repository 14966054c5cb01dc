"""A share of all attacks, of every kind: none runs code, ends in a traceback, hangs or swells."""

import pytest

from tests.attacks.__main__ import all_cases, report, try_all
from tests.attacks.case import Place
from tests.attacks.inputs import all_inputs
from tests.attacks.runner import prepare

HEARD = ("audio", "noise", "reverb")  # tests of tests/audio have those
EVERY = 61  # python -m tests.attacks tries all of them


def test_there_are_enough() -> None:
    cases = all_cases()
    assert len(cases) >= 2500
    assert len({(case.group, case.name) for case in cases}) == len(cases)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("attacks"))


@pytest.mark.timeout(400)
def test_a_share_of_the_attacks_is_withstood(
    healthy: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    share = [case for case in all_cases() if case.group not in HEARD][::EVERY]
    with capsys.disabled():  # the children write to streams of their own
        found = list(try_all(share, healthy))
    assert report(found) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_training_is_given_is_data(
    healthy: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        inputs = [case for case in all_inputs() if case.group not in HEARD]
        found = list(try_all(inputs[::3], healthy))
    assert report(found) == 0
