"""Shapes: whether the encoder has the frames that it declares, and each part fits the next one.

The chain is walked in a small step on the CPU, not on `meta`: SpeechBrain's encoder asks for the
value of the longest length, which a meta tensor does not have.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from ruamel.yaml.comments import CommentedMap
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.check.finding import Finding, cause_of, words_of
from sbkit.check.model.dry_run import ShapeMismatch, StepFailure, dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import Document, Keys, dotted, walk
from sbkit.config.references import Scope
from sbkit.models.encoder import Encoder, encoder_parts, make_encoder

CHECK = "shapes"
NAME = "encoder"
SECONDS = 1.3  # of silence


def check_encoder(planned: PlannedRun) -> Iterator[Finding]:
    """Find an encoder whose parts have other signatures or frames than they may have."""
    try:
        encoder = encoder_of(planned)
        if encoder is None:
            return
        samples = int(SECONDS * SAMPLE_RATE)
        expected = int(encoder.subsampling.count(torch.tensor(samples)))
        came = encoder.count_encoded(samples)
    except SbkitError as error:
        if "mel bins" not in str(error):  # sizes that do not fit are the check of shapes'
            keys = [key for key in encoder_parts(planned.hparams) if f"`{key}`" in str(error)]
            cause = cause_of(error.__cause__ or error)
            yield planned.finding(CHECK, *keys[:1], **words_of(str(error)), cause=cause)
        return
    if came != expected:
        key = encoder.subsampled_by
        yield planned.finding(
            CHECK,
            key,
            declared=f"`{key}` must have as many frames as it declares",
            effect=f"{samples} samples should have {expected}, and have {came}",
            fix="Correct its `frame_lengths` or `samples_per_frame`.",
        )


def encoder_of(planned: PlannedRun) -> Encoder | None:
    """Make the declared encoder, once; None where there is none of modules.

    Raises SbkitError when its parts are called in another way; what they raise themselves passes.
    """
    if NAME not in planned.parts:
        parts = encoder_parts(planned.hparams)
        if not parts or not all(isinstance(each, nn.Module) for each in parts.values()):
            return None
        planned.parts[NAME] = make_encoder(parts)
    made: Encoder = planned.parts[NAME]
    return made


def check_shapes(planned: PlannedRun) -> Iterator[Finding]:
    """Find where a part is given another size than it takes."""
    seen = dry_run(planned)
    left = list(seen.mismatches)
    sizes = Sizes(planned) if left else None
    while sizes and left:
        odd = sizes.commonest(left)
        about = [each for each in left if odd in (sizes.taker(each), sizes.giver(each))]
        left = [each for each in left if each not in about]
        yield _mismatch(planned, sizes, odd, about)
    if seen.broken is not None and not seen.mismatches:
        yield _broken(planned, seen.broken)


class Sizes:
    """The sizes that the YAML declares, as they take effect."""

    def __init__(self, planned: PlannedRun) -> None:
        self._document = planned.overridden

    def taker(self, mismatch: ShapeMismatch) -> Keys:
        """Return the key that sets the input size of a module."""
        return self._key(mismatch.taker, mismatch.takes)

    def giver(self, mismatch: ShapeMismatch) -> Keys:
        """Return the key that sets the output size of a module."""
        like = self.taker(mismatch)[-1]
        return self._key(mismatch.giver, mismatch.gives, like) if mismatch.giver else ()

    def commonest(self, mismatches: list[ShapeMismatch]) -> Keys:
        """Return the key that most mismatches have to do with, the taker's when all are alike."""
        keys = [self.taker(each) for each in mismatches] + [self.giver(each) for each in mismatches]
        return Counter(keys).most_common(1)[0][0]

    def _key(self, module: Keys, size: int, like: str | int = "") -> Keys:
        """Find the argument of this value nearest to a module, of a like name; else its part."""
        part = self._document.root.get(module[0])
        if not isinstance(part, CommentedMap):
            return module[:1]
        found = [
            (module[0], *below)
            for below, node in walk(part)
            if below and _value(self._document, node) == size
        ]
        near = {keys: (_shared(keys, module), keys[-1] == like) for keys in found}
        return max(found, key=near.__getitem__, default=module[:1])


def _value(document: Document, node: object) -> object:
    value = Scope(document).evaluate(node)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shared(one: Keys, other: Keys) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _mismatch(planned: PlannedRun, sizes: Sizes, odd: Keys, about: list[ShapeMismatch]) -> Finding:
    """Make one finding of all that does not fit one key."""
    first, told = about[0], {}
    for each in about:
        told[sizes.taker(each)] = each.takes
        told[sizes.giver(each)] = each.gives
    size = told.pop(odd)
    others = " and ".join(f"`{dotted(keys)}` {other}" for keys, other in told.items() if keys)
    giver = f" by `{dotted(first.giver)}`" if first.giver else ""
    return planned.finding(
        CHECK,
        *odd,
        declared=f"`{dotted(odd)}` must fit {others or 'what it is given'}",
        effect=f"is {size}: `{dotted(first.taker)}` takes {first.takes} and is given "
        f"{first.gives}{giver}",
        fix="Make them the same, best by a `!ref` to one knob.",
    )


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
