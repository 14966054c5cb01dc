"""The errors of voice activity detection follow their definition."""

import pytest

from sbkit.tasks.detection.task import Detection, FrameCounts


@pytest.mark.parametrize(
    ("utterances", "miss", "false_alarm"),
    [
        ([FrameCounts(8, 2, 100, 5), FrameCounts(12, 3, 0, 0)], 5 / 20, 5 / 100),
        ([FrameCounts(speech=0, missed=0, silence=50, false_alarms=50)], 0.0, 1.0),
        ([FrameCounts(speech=50, missed=50, silence=0, false_alarms=0)], 1.0, 0.0),
    ],
)
def test_frame_errors_weigh_misses_and_false_alarms_as_nist_does(
    utterances: list[FrameCounts], miss: float, false_alarm: float
) -> None:
    """The plan of OpenSAT has DCF = 0.75 P(miss) + 0.25 P(false alarm), over all utterances."""
    assert Detection().measure(utterances) == pytest.approx(
        {"DCF": 0.75 * miss + 0.25 * false_alarm, "miss": miss, "false_alarm": false_alarm}
    )
