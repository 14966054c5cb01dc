"""Shapes: whether `CNN` is a front-end, and each part's output fits the next one.

Sizes are compared in a small step on the CPU, not on `meta`: SpeechBrain's encoder asks for the
value of the longest length, which a meta tensor does not have.
"""

import operator
from collections.abc import Iterator
from itertools import takewhile

from ruamel.yaml.comments import CommentedMap
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding, cause_of, words_of
from sbkit.check.model.dry_run import ShapeMismatchError, StepFailure, dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Document, Keys, dotted, walk
from sbkit.config.references import Scope
from sbkit.models.acoustic_encoder import measure_subsampling
from sbkit.models.striding import Striding

CHECK = "shapes"
KEY = "CNN"
NAME = "subsampling"


def check_front_end(planned: PlannedRun) -> Iterator[Finding]:
    """Find a front-end of another signature, arity, shape or counting than it may have."""
    try:
        measure_front_end(planned)
    except SbkitError as error:
        if "mel bins" not in str(error):  # sizes that do not fit are the check of shapes'
            yield planned.finding(
                CHECK, KEY, **words_of(str(error)), cause=cause_of(error.__cause__ or error)
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


def check_shapes(planned: PlannedRun) -> Iterator[Finding]:
    """Find where a part is given another size than it takes, or a step fails otherwise."""
    broken = dry_run(planned).broken
    if broken is not None and isinstance(broken.error, ShapeMismatchError):
        yield _mismatch(planned, broken.error)
    elif broken is not None:
        yield _broken(planned, broken)


def _mismatch(planned: PlannedRun, error: ShapeMismatchError) -> Finding:
    """Name the keys that set the two sizes."""
    taker = _key(planned, error.taker, error.takes)
    giver = _key(planned, error.giver, error.gives, taker[-1]) if error.giver else ()
    given = f"`{dotted(giver)}` {error.gives}" if giver else f"its input, {error.gives}"
    by = f" by `{dotted(error.giver)}`" if error.giver else ""
    return planned.finding(
        CHECK,
        *taker,
        declared=f"`{dotted(taker)}` must fit {given}",
        effect=f"is {error.takes}: `{dotted(error.taker)}` takes {error.takes} and is given "
        f"{error.gives}{by}",
        fix="Make them the same, best by a `!ref` to one knob.",
    )


def _key(planned: PlannedRun, module: Keys, size: int, like: str | int = "") -> Keys:
    """Find the argument of this value nearest to a module, of a like name; else its part."""
    document = planned.overridden
    part = document.root.get(module[0])
    if not isinstance(part, CommentedMap):
        return module[:1]
    found = [
        (module[0], *below)
        for below, node in walk(part)
        if below and _value(document, node) == size
    ]
    near = {keys: (_shared(keys, module), keys[-1] == like) for keys in found}
    return max(found, key=near.__getitem__, default=module[:1])


def _shared(one: Keys, other: Keys) -> int:
    """Count the keys that two paths begin with together."""
    return len(list(takewhile(bool, map(operator.eq, one, other))))


def _value(document: Document, node: object) -> object:
    value = Scope(document).evaluate(node)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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
