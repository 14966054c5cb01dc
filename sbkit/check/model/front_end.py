"""Whether `CNN` takes and returns what a front-end must, before anything is fed by it."""

from collections.abc import Iterator

from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding, cause_of, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.models.acoustic_encoder import measure_subsampling
from sbkit.models.striding import Striding

KEY = "CNN"
NAME = "subsampling"


def check_front_end(planned: PlannedRun) -> Iterator[Finding]:
    """Find a front-end of another signature, arity, shape or counting than it may have."""
    try:
        measure_front_end(planned)
    except SbkitError as error:
        if "mel bins" not in str(error):  # sizes that do not fit are the check of shapes'
            yield planned.finding(
                "shapes", KEY, **words_of(str(error)), cause=cause_of(error.__cause__ or error)
            )


def measure_front_end(planned: PlannedRun) -> Striding | None:
    """Measure the declared front-end, once; None where there is none of modules.

    Raises SbkitError when it is no front-end; whatever error it raises itself goes through.
    """
    if NAME not in planned.parts:
        features, front_end = (planned.hparams.get(name) for name in ("compute_features", KEY))
        if not isinstance(features, nn.Module) or not isinstance(front_end, nn.Module):
            return None
        rate = int(planned.knobs.get("sample_rate", 16_000))
        planned.parts[NAME] = measure_subsampling(features, front_end, rate)
    measured: Striding = planned.parts[NAME]
    return measured
