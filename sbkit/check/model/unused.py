"""Parts of the model that no step trains."""

from collections.abc import Iterator, Mapping

from torch import nn

from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run, inactive
from sbkit.check.model.walk import reached
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Keys, dotted
from sbkit.data.batches.sampler import TrainSampler
from sbkit.train.freezing import ALWAYS, KNOB

CHECK = "unused"


def check_unused(planned: PlannedRun) -> Iterator[Finding]:
    """Find what of the model small steps leave without a gradient.

    A knob may turn a part off (`ctc_weight: 1.0` runs no decoder): the Brain declares
    it in `inactive`.
    """
    seen = dry_run(planned)
    if seen.broken is not None:
        return
    used = seen.trained | inactive(planned.brain)
    dead = {id(p) for p in planned.model.parameters() if p.requires_grad and id(p) not in used}
    groups: dict[tuple[str | int, bool], list[Keys]] = {}
    for keys, part in _topmost(planned, dead):
        inside = part.modules() if isinstance(part, nn.Module) else ()
        ran = not inside or any(id(each) in seen.ran for each in inside)
        groups.setdefault((keys[0], ran), []).append(keys)
    for (_, ran), found in groups.items():
        yield planned.finding(
            CHECK,
            *found[0],
            declared=f"{', '.join(f'`{dotted(keys)}`' for keys in found)} must be trained",
            effect=f"{'does not reach the loss' if ran else 'is never run'}, so that it gets no "
            "gradient and stays as it was made",
            fix="Use it in the recipe, or take it out of the YAML. What a knob turns off belongs "
            "into `inactive` of the Brain.",
        )


def check_freezing(planned: PlannedRun) -> Iterator[Finding]:
    """Find what `freeze` frees after the last step only: more steps than a small corpus has."""
    declared, sampler = planned.knobs.get(KNOB), planned.loaders.train.batch_sampler
    if not (isinstance(declared, Mapping) and isinstance(sampler, TrainSampler)):
        return
    steps = len(sampler.steps()) * planned.knobs["number_of_epochs"]
    late = [path for path, end in declared.items() if end != ALWAYS and end >= steps]
    if late:
        yield planned.finding(
            CHECK,
            KNOB,
            declared=f"`freeze` of {', '.join(late)} must end within the run",
            effect=f"the run has about {steps:,} steps, so that nothing of it ever learns",
            fix=f"Lower its steps, or write `{ALWAYS}`.",
            stops=False,
        )


def _topmost(planned: PlannedRun, dead: set[int]) -> Iterator[tuple[Keys, object]]:
    """Yield the largest modules all of whose parameters are dead, then the parameters left."""
    left = set(dead)
    for keys, each in reached(planned):
        inside = {id(p) for p in each.parameters()} if isinstance(each, nn.Module) else {id(each)}
        if inside and inside <= left:
            left -= inside
            yield keys, each
