"""Knobs that the run would refuse, and keys that no reference and no code reads.

The dry run reads what training reads, and the knobs remember their readers. A key that is read
only with certain values of others is declared in the ranges of sbkit or of the recipe.
"""

from collections.abc import Iterator, Set
from contextlib import suppress

from sbkit.check.dry_run import UNUSED_CHECK, dry_run
from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Document, did_you_mean, nearest, referenced, tag_of, walk
from sbkit.config.hparams import MissingKnobError, resolve
from sbkit.config.ranges import RANGES, out_of_range

READ_BEFORE = {"check", "recipe"}  # by the command that checks a run before it trains it


def check_ranges(planned: PlannedRun) -> Iterator[Finding]:
    """Find each knob, and each argument of a class that declares its ranges, out of its range."""
    ranges = dict(RANGES)
    with suppress(MissingPartError):
        ranges |= planned.load_recipe().ranges
    reported: set[str | int] = set()
    for name, sentence in out_of_range(planned.knobs, ranges):
        reported.add(name)
        yield planned.finding("ranges", name, **words_of(sentence))
    resolved = resolve(planned.yaml_file, planned.overrides)
    for keys, sentence in resolved.arguments_out_of_range():
        if keys[0] not in reported:
            yield planned.finding("ranges", *keys, **words_of(sentence))


def check_unread(planned: PlannedRun) -> Iterator[Finding]:
    """Find the keys that no reference and no code reads; keys of a base only if they are given.

    If a step failed, the code after it has not run: then only a key counts that looks like one
    whose absence made it fail.
    """
    with suppress(MissingPartError):
        planned.make_optimizers()
        dry_run(planned)
    names = planned.knobs.names_read | planned.results.get("hparams", planned.knobs).names_read
    absent = {e.name for e in planned.faults.values() if isinstance(e, MissingKnobError)}
    is_whole = not planned.faults and dry_run(planned).broken is None
    known = names - set(planned.document.root) if is_whole else absent
    declared = {*planned.document.own, *planned.given}
    for key in unread(planned.document, names):
        if key in declared and (is_whole or nearest(key, absent)):
            yield planned.finding(
                UNUSED_CHECK,
                key,
                declared=f"`{key}` must be read by something",
                effect="no reference and no code reads it: it does nothing",
                fix=f"Correct its name, or take it out.{did_you_mean(key, known)}",
            )


def unread(document: Document, names_read: Set[str]) -> Iterator[str]:
    """Yield the keys that no reference reaches and no code has read.

    An object reads all its arguments: it would have refused the others.
    """
    referred = {str(keys[0]) for _, node in walk(document.root) for keys in referenced(node)}
    for key, node in document.root.items():
        was_called = tag_of(node).startswith("!apply:")  # and may have had its effect
        if not (key in names_read | referred | READ_BEFORE or key.startswith("_") or was_called):
            yield key
