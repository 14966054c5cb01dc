"""Shapes: whether the encoder has the frames that it declares, and each part fits the next one.

Sizes are compared in a small step on the CPU, not on `meta`: SpeechBrain's encoder asks for the
value of the longest length, which a meta tensor does not have.
"""

from collections.abc import Iterator

import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.check.finding import Finding, cause_of, words_of
from sbkit.check.model.dry_run import StepFailure, dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import dotted
from sbkit.models.encoder import AcousticModel, Encoder, copy_encoder, encoder_parts

CHECK = "shapes"
NAME = "encoder"
SECONDS = 2.3  # of silence


def check_encoder(planned: PlannedRun) -> Iterator[Finding]:
    """Find an encoder whose parts have other signatures or frames than they may have."""
    try:
        encoder = encoder_of(planned)
        if encoder is None:
            return
        samples = int(SECONDS * SAMPLE_RATE)
        expected = int(encoder.subsampling.count(torch.tensor(samples)))
        made = encoder.of_silence(samples).shape[1]
    except SbkitError as error:
        keys = [key for key in encoder_parts(planned.hparams) if f"`{key}`" in str(error)]
        yield planned.finding(CHECK, *keys[:1], **words_of(str(error)), cause=cause_of(error))
        return
    except Exception:  # of a part that is given another size than it takes, which a step finds, too
        return
    if made != expected:
        key = encoder.subsampled_by
        yield planned.finding(
            CHECK,
            key,
            declared=f"`{key}` must have as many frames as it declares",
            effect=f"{samples} samples should have {expected}, and have {made}",
            fix="Correct its `frame_lengths` or `samples_per_frame`.",
        )


def encoder_of(planned: PlannedRun) -> Encoder | None:
    """Make the declared encoder of copies, once; None where there is none of modules.

    Raises SbkitError when its parts are called in another way; what they raise themselves passes.
    """
    if NAME not in planned.parts:
        parts = encoder_parts(planned.hparams) if _is_acoustic(planned) else {}
        if not parts or not all(isinstance(each, nn.Module) for each in parts.values()):
            return None
        planned.parts[NAME] = copy_encoder(planned.hparams)
    made: Encoder = planned.parts[NAME]
    return made


def _is_acoustic(planned: PlannedRun) -> bool:
    """Check whether the model of the task has an encoder; others may name parts as they like."""
    if not planned.has_recipe:
        return True
    try:
        return issubclass(planned.recipe.task.import_model(), AcousticModel)
    except (SbkitError, TypeError):  # no class, which `check_export` reports
        return False


def check_shapes(planned: PlannedRun) -> Iterator[Finding]:
    """Find the part in which a step fails, as where it is given another size than it takes."""
    broken = dry_run(planned).broken
    if broken is not None:
        yield _broken(planned, broken)


def _broken(planned: PlannedRun, broken: StepFailure) -> Finding:
    where = broken.module if broken.module and broken.module[0] in planned.document.root else ()
    name = f"`{dotted(where)}`" if where else "the recipe"
    reason = str(broken.error).strip().partition("\n")[0]
    return planned.finding(
        CHECK,
        *where,
        declared="a step of training on two short utterances must run",
        effect=f"fails in {name} ({type(broken.error).__name__}: {reason})",
        fix="Correct that part, or what it is given.",
        cause=cause_of(broken.error),
    )
