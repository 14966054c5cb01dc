"""Which splits of a corpus are trained on, validated on and tested on."""

import re
from collections.abc import Mapping, Sequence

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
    if wanted is not None and not isinstance(wanted, Mapping):
        raise SbkitError(
            f"`splits` must map {', '.join(ROLES)} to names of splits, but is {wanted!r}. Write "
            "splits: {train: train, valid: dev, test: [test-clean, test-other]}, or null."
        )
    named = dict(wanted or {})
    if unknown := [role for role in named if role not in ROLES]:
        raise SbkitError(
            f"`splits` must have the keys {', '.join(ROLES)}, but has {unknown[0]!r}. Rename it."
        )
    roles = {role: _names(role, named.get(role), default.get(role, ())) for role in ROLES}
    for role, splits in roles.items():
        _refuse_unknown(role, splits, available)
        if "train" in splits and role != "train":
            raise SbkitError(
                "A split called train must be trained on, since a run calls its training set so, "
                f"but is in `splits.{role}`. Rename it, or choose another split."
            )
    _refuse_overlap(roles)
    return roles


def _names(role: str, wanted: object, default: Sequence[str]) -> tuple[str, ...]:
    if wanted is None:
        return tuple(default)
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SbkitError(
            f"`splits.{role}` must be the name of a split or a list of names, but is {wanted!r}. "
            f"Write {role}: NAME or {role}: [NAME, NAME]."
        )
    return tuple(dict.fromkeys(names))


def _refuse_unknown(role: str, splits: Sequence[str], available: Sequence[str]) -> None:
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


def _refuse_overlap(roles: Mapping[str, Sequence[str]]) -> None:
    owner: dict[str, str] = {}
    for role, splits in roles.items():
        for name in splits:
            if name in owner:
                raise SbkitError(
                    f"A split must have one role, but {name!r} is in `splits.{owner[name]}` and in "
                    f"`splits.{role}`. Take it out of one of them."
                )
            owner[name] = role


def require_split_name(name: str) -> None:
    """Refuse a name that cannot stand in the names of files.

    Raises:
        SbkitError: it has other characters than letters, digits and ``. + - _``.
    """
    if not SPLIT_NAME.fullmatch(name):
        raise SbkitError(
            "The name of a split must be made of letters, digits and . + - _, and begin with one "
            f"of the first two, but is {name!r}. Rename it."
        )
