"""Check of the folders of noises and rooms: whether all of their files are heard in training."""

from collections.abc import Iterator

from torch import nn

from sbkit.audio.noise import FromFolder
from sbkit.check.finding import Finding
from sbkit.check.planned_run import PlannedRun


def check_noises(planned: PlannedRun) -> Iterator[Finding]:
    """Find folders of so many files that only some are taken."""
    augment = planned.hparams.get("wave_augment")
    for part in augment.modules() if isinstance(augment, nn.Module) else ():
        if isinstance(part, FromFolder) and len(part.files) < part.found:
            yield planned.finding(
                "noises",
                "wave_augment",
                declared=f"the folder of {type(part).__name__} must be small enough to be kept on "
                "the device",
                effect=f"it has {part.found:,} audio files, of which {len(part.files):,} are "
                "taken, evenly",
                fix="Name a folder of fewer files, to choose them yourself.",
                stops=False,
            )
