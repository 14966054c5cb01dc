"""Whether a checkpoint holds all that training changes in a model.

Checkpoints and bundles hold parameters and buffers. A statistic that is neither, as that of
SpeechBrain's InputNormalization, is in none of them; a layer that forward makes is in no optimizer.
"""

from collections.abc import Iterator

from sbkit.base.text import listed
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "state"


def check_state(planned: PlannedRun) -> Iterator[Finding]:
    """Find what `forward` makes or changes that a checkpoint would not hold."""
    seen = dry_run(planned)
    if seen.made:
        yield planned.finding(
            CHECK,
            *seen.made[0],
            declared="every part of the model must be made before training",
            effect=f"{_are(seen.made)} made by `forward` when it is first called: the "
            "optimizer would not know of it, and no checkpoint could be loaded again",
            fix="Make it in `__init__`.",
        )
    if seen.unsaved:
        yield planned.finding(
            CHECK,
            *seen.unsaved[0],
            declared="all that a model learns must be in its parameters and buffers",
            effect=f"{_are(seen.unsaved)} changed by training and neither: a model that is loaded "
            "from a checkpoint or a bundle would compute something else",
            fix="Register it with `register_buffer`; for features, "
            "sbkit.models.normalize.GlobalNorm has its statistics there.",
        )


def _are(found: tuple[Keys, ...]) -> str:
    named = listed(f"`{dotted(keys)}`" for keys in found)
    return f"{named} {'is' if len(found) == 1 else 'are'}"
