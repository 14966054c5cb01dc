"""Whether `CNN` takes and returns what a front-end must, before anything is fed by it."""

from collections.abc import Iterator

import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding, cause_of, words_of
from sbkit.check.model.dry_run import unchanged
from sbkit.check.planned_run import PlannedRun
from sbkit.models.subsampling import measure_subsampling

KEY = "CNN"


def check_front_end(planned: PlannedRun) -> Iterator[Finding]:
    """Find a front-end of another signature, arity, shape or counting than it may have."""
    part, features = planned.hparams.get(KEY), planned.hparams.get("compute_features")
    if not isinstance(part, nn.Module) or not isinstance(features, nn.Module):
        return
    rate = int(planned.knobs.get("sample_rate", 16_000))
    try:
        with unchanged(part), torch.no_grad():
            measure_subsampling(features, part, rate)
    except SbkitError as error:
        if "mel bins" not in str(error):  # sizes that do not fit are the check of shapes'
            yield planned.finding(
                "shapes", KEY, **words_of(str(error)), cause=cause_of(error.__cause__ or error)
            )
