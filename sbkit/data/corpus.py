"""What a corpus can do: name its splits, and list the rows of one.

A split that is streamed: parquet or JSON Lines, in a folder or at a URL.

It is read part by part into shards, and never in memory or on the disk as a whole.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from sbkit.base.errors import SbkitError
from sbkit.data.manifest import Manifest
from sbkit.data.sources import StreamedSplit


class Corpus(Protocol):
    """What a corpus can do; a module with these two functions is one."""

    def splits(self, knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``."""
        ...

    def read(self, knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
        """Return the rows of one split, or what streams them."""
        ...


def describe_corpus(corpus: Corpus | None, knobs: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the name and the licence of a corpus: what its function `about` says, if it has one.

    The name is else that of the module or folder, and the licence None, for unknown.
    """
    about = getattr(getattr(corpus, "module", corpus), "about", None)
    if about is not None:
        return {**about(knobs)}
    named = knobs.get("corpus") or knobs.get("data_folder")
    return {"name": named and Path(str(named)).name, "licence": None}


def read_listed(corpus: Corpus, knobs: Mapping[str, Any], split: str) -> Manifest:
    """Return the rows of one split; raises SbkitError where they are only streamed."""
    source = corpus.read(knobs, split)
    if isinstance(source, StreamedSplit):
        raise SbkitError(
            f"The data of {split} must be listed or in shards, but {source.files[0]} is streamed. "
            "Make shards of it first, sbkit prepare YAML --shards FOLDER, and pass "
            "--data_folder=FOLDER then."
        )
    return source


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
