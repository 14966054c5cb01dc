"""Which splits of a corpus are trained on, validated on and tested on."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from sbkit.base.errors import SbkitError

ROLES = ("train", "valid", "test")
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # names files, too


def resolve_splits(
    wanted: object, default: Mapping[str, Sequence[str]], available: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else the corpus's own.

    Args:
        wanted: null, or a mapping from ``train``, ``valid``, ``test`` to a name or a list of names.
        default: the corpus's own splits of each role.
        available: the names of all splits that the corpus has.

    Raises:
        SbkitError: an unknown role or split, a split with two roles, nothing to train or validate,
            or a split called ``train`` that is not trained on.
    """
    named = {} if wanted is None else wanted
    if not isinstance(named, Mapping) or not {*named} <= {*ROLES}:
        raise SbkitError(
            f"`splits` must map {', '.join(ROLES)} to names of splits, but is {wanted!r}. Write "
            "splits: {train: train, valid: dev, test: [test-clean, test-other]}, or null."
        )
    roles = dict[str, tuple[str, ...]]()
    for role in ROLES:
        names = named.get(role)
        names = default.get(role, ()) if names is None else names
        roles[role] = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
        _check_role(role, roles[role], available)
    for one, other in combinations(ROLES, 2):
        for name in {*roles[one]} & {*roles[other]}:
            raise SbkitError(
                f"A split must have one role, but {name!r} is in `splits.{one}` and in "
                f"`splits.{other}`. Take it out of one of them."
            )
    return roles


def _check_role(role: str, splits: Sequence[str], available: Sequence[str]) -> None:
    there = ", ".join(available) or "none"
    for name in splits:
        if name not in available:
            raise SbkitError(
                f"`splits.{role}` must name splits of the corpus, but {name!r} is none of them. "
                f"Choose among: {there}{', or [] for none' * (role == 'test')}."
            )
    if not splits and role != "test":
        raise SbkitError(
            f"`splits.{role}` must name at least one split, but there is none. "
            f"Choose among: {there}."
        )
    if "train" in splits and role != "train":
        raise SbkitError(
            "A split called train must be trained on, since a run calls its training set so, "
            f"but is in `splits.{role}`. Rename it, or choose another split."
        )


def require_split_name(name: str) -> None:
    """Raise SbkitError for a name with other characters than letters, digits and ``. + - _``."""
    if not SPLIT_NAME.fullmatch(name):
        raise SbkitError(
            "The name of a split must be made of letters, digits and . + - _, and begin with one "
            f"of the first two, but is {name!r}. Rename it."
        )
