"""The figures of calibration follow their definitions."""

from dataclasses import replace

import numpy as np
import pytest

from sbkit.evaluate.calibration import measure_calibration, reliability_bins


def test_calibration_of_four_words_by_hand() -> None:
    calibration = measure_calibration([0.8, 0.2, 0.4, 0.8], [True, True, False, False])
    assert calibration is not None
    assert pytest.approx((1 + 0.5 + 0 + 0) / 4) == calibration.AUC
    assert pytest.approx((abs(1.6 - 1) + 0.8 + 0.4) / 4) == calibration.ECE
    assert str(calibration) == "AUC 0.4, ECE 0.45 (2 right / 4 words)"
    of_many_words = replace(calibration, words=10_000)  # enough for a second decimal
    assert str(of_many_words).startswith("AUC 0.38, ECE 0.45")


@pytest.mark.parametrize(("right", "error"), [(False, 0.8), (True, 0.2)])
def test_words_that_are_all_right_or_wrong_have_no_auc(right: bool, error: float) -> None:
    calibration = measure_calibration([0.9, 0.7], [right, right])
    assert calibration is not None
    assert calibration.AUC is None
    assert pytest.approx(error) == calibration.ECE
    assert measure_calibration([], []) is None


def test_reliability_bins_are_tenths() -> None:
    confidences = [tenth / 10 + offset for tenth in range(10) for offset in (0.01, 0.09)]
    words, means, right = zip(*reliability_bins(confidences, [True, False] * 10), strict=True)
    assert (words, right) == ((2,) * 10, (0.5,) * 10)
    assert means == pytest.approx(np.arange(0.05, 1, 0.1))
