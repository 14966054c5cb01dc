"""Corpora: they name the splits of each role, and read the manifest of a split."""

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Protocol

from sbkit.base.errors import ConfigError
from sbkit.data.manifest import Manifest
from sbkit.data.sources import TableFolders

ROLES = ("train", "valid", "test")
USUAL_SPLITS = {"train": ("train",), "valid": ("dev",), "test": ("test",)}  # by role

KnobValues = Mapping[str, Any]  # the plain values of a YAML


class Corpus(Protocol):
    """A corpus of speech: a module with these two functions."""

    def splits(self, knobs: KnobValues) -> Mapping[str, Sequence[str]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``.

        The key ``splits`` chooses among these. A corpus with more splits applies it itself.
        """

    def read(self, knobs: KnobValues, split: str) -> Manifest | TableFolders:
        """Return the manifest of one split, or its table folders."""


def describe_corpus(corpus: Corpus | None, knobs: KnobValues) -> dict[str, str | None]:
    """Return the name and the license of a corpus, from its optional function ``about(knobs)``.

    Without it, the module or folder is the name, and the license is None, unknown.
    """
    if (about := getattr(corpus, "about", None)) is not None:
        return {**about(knobs)}
    name = knobs.get("corpus") or knobs.get("data_folder")
    return {"name": name and Path(str(name)).name, "license": None}


def splits_of(corpus: Corpus, knobs: KnobValues) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else the corpus's own."""
    roles = corpus.splits(knobs)
    return resolve_splits(knobs.get("splits"), roles, [*chain.from_iterable(roles.values())])


def resolve_splits(
    names: object, defaults: Mapping[str, Sequence[str]], available: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else the corpus's defaults.

    ``names`` is null, or maps ``train``, ``valid`` and ``test`` to a name or a list of names.

    >>> resolve_splits({"test": "b"}, {"train": ["train"], "valid": ["a"]}, ["train", "a", "b"])
    {'train': ('train',), 'valid': ('a',), 'test': ('b',)}

    Raises:
        ConfigError: a role or split is unknown, a split has two roles, there is nothing to train or
            validate on, or a split called ``train`` is not trained on.
    """
    by_role = {} if names is None else names
    if not isinstance(by_role, Mapping) or not {*by_role} <= {*ROLES}:
        raise ConfigError(
            f"`splits` must map {', '.join(ROLES)} to names of splits, but is {names!r}. Write "
            "splits: {train: train, valid: dev, test: [test-clean, test-other]}, or null."
        )
    roles: dict[str, tuple[str, ...]] = {}
    for role in ROLES:
        splits = by_role.get(role)
        splits = defaults.get(role, ()) if splits is None else splits
        splits = [splits] if isinstance(splits, str | int | float) else splits
        roles[role] = tuple(dict.fromkeys(map(str, splits)))
        _check_role(role, roles[role], available)
    for first, second in combinations(ROLES, 2):
        for name in {*roles[first]} & {*roles[second]}:
            raise ConfigError(
                f"{name!r} is in `splits.{first}` and in `splits.{second}`, but a split has one "
                "role. Take it out of one of them."
            )
    return roles


def _check_role(role: str, splits: Sequence[str], available: Sequence[str]) -> None:
    choices = ", ".join(available) or "none"
    for name in splits:
        if name not in available:
            raise ConfigError(
                f"`splits.{role}` names {name!r}, which is not a split of the corpus. Choose "
                f"among: {choices}{', or [] for none' * (role == 'test')}."
            )
    if not splits and role != "test":
        raise ConfigError(f"`splits.{role}` is empty. Choose at least one split: {choices}.")
    if "train" in splits and role != "train":
        raise ConfigError(
            f"`splits.{role}` names a split called train, which is the name of a run's training "
            "set. Rename it, or choose another split."
        )
