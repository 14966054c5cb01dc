"""Corpora: they name the splits of each role, and read the manifest of a split.

Speakers are dealt to the splits, the same in every table and in later releases.
"""

import hashlib
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, combinations
from pathlib import Path
from typing import Any, Protocol

from sbkit.base.errors import ConfigError, DataError
from sbkit.base.imports import user_sources
from sbkit.base.messages import plural
from sbkit.data.manifest import Manifest
from sbkit.data.read_manifests import TableFolders

ROLES = ("train", "valid", "test")
RELEASE_SPLITS = ("train", "dev", "test")  # of Common Voice
USUAL_SPLITS = {"train": ("train",), "valid": ("dev",), "test": ("test",)}  # by role
PREFIXES = {"train": ("train",), "valid": ("dev", "valid"), "test": ("test", "eval")}  # by role
DEFAULT_SHARES = {"dev": 0.1, "test": 0.1}  # of the speakers, about; the others are for training

SettingValues = Mapping[str, Any]  # the plain values of a YAML


class Corpus(Protocol):
    """A corpus of speech: a module with these two functions."""

    def splits(self, settings: SettingValues) -> Mapping[str, Sequence[str]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``.

        The key ``splits`` chooses among these. A corpus with more splits applies it itself.
        """

    def read(self, settings: SettingValues, split: str) -> Manifest | TableFolders:
        """Return the manifest of one split, or its table folders."""


def describe_corpus(corpus: Corpus | None, settings: SettingValues) -> dict[str, str | None]:
    """Return the name and the license of a corpus, from its optional ``about(settings)``."""
    name = settings.get("corpus") or settings.get("data_folder")
    facts: dict[str, str | None] = {"name": name and Path(str(name)).name, "license": None}
    about = getattr(corpus, "about", None)
    stated = {} if about is None else about(settings)
    return facts | {key: value for key, value in stated.items() if value}


def list_files(corpus: Corpus, settings: SettingValues) -> Sequence[Path] | None:
    """Return the tables of a corpus, or their folders, from its optional ``files(settings)``."""
    files = getattr(corpus, "files", None)
    paths: Sequence[Path] | None = files and files(settings)
    return paths and [path.absolute() for path in paths]


def corpus_sources(corpus: Corpus) -> dict[str, str]:
    """Return the checksums of the modules of the user's that read a corpus, or will."""
    corpora = corpus.corpora if isinstance(corpus, JoinedCorpora) else [("", "", corpus)]
    names = [str(getattr(module, "__name__", "")) for _, _, module in corpora]
    sources = user_sources(*names, with_unimported=True)
    return {name: hashlib.sha256(source).hexdigest() for name, source in sources.items()}


def list_roots(corpus: Corpus, settings: SettingValues) -> list[Path]:
    """Return the folders that the paths of a corpus start from: of its tables, and its own."""
    tables = list_files(corpus, settings) or ()
    roots = [path if path.is_dir() else path.parent for path in tables]
    named = settings.get("data_folder") or ()
    folders = [named] if isinstance(named, str | Path) else named
    roots += [Path(path).expanduser().absolute() for path in folders if "://" not in str(path)]
    return [*dict.fromkeys(roots)]


def iter_blocks(corpus: Corpus, settings: SettingValues, split: str) -> Iterator[Manifest]:
    """Return the manifest of one split in blocks, by the corpus's optional ``read_blocks``."""
    read_blocks = getattr(corpus, "read_blocks", None)
    if read_blocks is not None:
        blocks: Iterator[Manifest] = read_blocks(settings, split)
        return blocks
    manifest = corpus.read(settings, split)
    if isinstance(manifest, TableFolders):
        raise DataError(
            f"{split} is in a table folder ({manifest.files[0]}), which cannot be trained on. Make "
            "shards of it by `sbkit prepare YAML --shards FOLDER`, and set `data_folder: FOLDER`."
        )
    return manifest.blocks()


JOINED_FOLDERS = "joined_folders"  # a setting of a corpus: its folders, if there are several


class JoinedCorpora:
    """The corpora of several data folders; their splits are named SPLIT-FOLDER.

    corpora: the name of each folder, its path or URL, and its corpus.
    """

    def __init__(self, corpora: Sequence[tuple[str, str, Corpus]]) -> None:
        self.corpora = corpora

    def splits(self, settings: SettingValues) -> Mapping[str, Sequence[str]]:
        """Return the splits of all corpora, or those that the key ``splits`` names.

        It must name those of a corpus without the usual ones, such as a delta of Common Voice.
        """
        chosen = settings.get("splits")
        named = [*chain(*map(to_names, chosen.values()))] if isinstance(chosen, Mapping) else []
        roles: dict[str, list[str]] = {role: [] for role in ROLES}
        for name, folder, corpus in self.corpora:
            try:
                own_roles = corpus.splits({**settings, "data_folder": folder, "splits": None})
            except DataError:
                if not any(split.endswith(f"-{name}") for split in named):
                    raise
                continue
            for role, splits in own_roles.items():
                roles[role] += [f"{split}-{name}" for split in splits]
        if not isinstance(chosen, Mapping):
            return roles
        endings = tuple(f"-{name}" for name, _, _ in self.corpora)
        extra = [split for split in named if split.endswith(endings)]
        return resolve_splits(chosen, roles, [*dict.fromkeys([*chain(*roles.values()), *extra])])

    def files(self, settings: SettingValues) -> list[Path] | None:
        paths: list[Path] = []
        for _, folder, corpus in self.corpora:
            own_paths = list_files(corpus, {**settings, "data_folder": folder})
            if own_paths is None:
                return None
            paths += own_paths
        return paths

    def read(self, settings: SettingValues, split: str) -> Manifest | TableFolders:
        corpus, own_settings, own_split = self._find(settings, split)
        return corpus.read(own_settings, own_split)

    def read_blocks(self, settings: SettingValues, split: str) -> Iterator[Manifest]:
        return iter_blocks(*self._find(settings, split))

    def _find(self, settings: SettingValues, split: str) -> tuple[Corpus, SettingValues, str]:
        """Return the corpus of a split, its values, and its own name of the split."""
        # The name of one folder may be the end of another name: fr and sps-fr.
        matching = [c for c in self.corpora if split.endswith(f"-{c[0]}")]
        name, folder, corpus = max(matching, key=lambda c: len(c[0]))
        train = [s.removesuffix(f"-{name}") for s in self.splits(settings)["train"]]
        own_split = split.removesuffix(f"-{name}")
        folders = [other for _, other, other_corpus in self.corpora if other_corpus is corpus]
        own_settings = {**settings, "data_folder": folder, JOINED_FOLDERS: folders}
        own_settings["splits"] = {"train": own_split} if own_split in train else None
        return corpus, own_settings, own_split

    def about(self, settings: SettingValues) -> Mapping[str, str | None]:
        facts = [
            describe_corpus(corpus, {**settings, "data_folder": folder})
            for _, folder, corpus in self.corpora
        ]
        licenses = dict.fromkeys(str(fact["license"] or "unknown") for fact in facts)
        return {
            "name": " and ".join(str(fact["name"]) for fact in facts),
            "license": " and ".join(licenses) if [*licenses] != ["unknown"] else None,
        }


def splits_of(corpus: Corpus, settings: SettingValues) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else the corpus's own."""
    roles = corpus.splits(settings)
    return resolve_splits(settings.get("splits"), roles, [*chain.from_iterable(roles.values())])


def resolve_splits(
    names: object, defaults: Mapping[str, Sequence[str]], available: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else the corpus's defaults.

    ``names`` is null, or maps ``train``, ``valid`` and ``test`` to a name or a list of names.

    >>> resolve_splits({"test": "b"}, {"train": ["train"], "valid": ["a"]}, ["train", "a", "b"])
    {'train': ('train',), 'valid': ('a',), 'test': ('b',)}
    """
    by_role = {} if names is None else names
    if not isinstance(by_role, Mapping) or not {*by_role} <= {*ROLES}:
        raise ConfigError(
            f"`splits` must map {', '.join(ROLES)} to names of splits, but is {names!r}. Write "
            "splits: {train: train, valid: dev, test: [test-clean, test-other]}."
        )
    roles: dict[str, tuple[str, ...]] = {}
    for role in ROLES:
        splits = defaults.get(role, ()) if by_role.get(role) is None else to_names(by_role[role])
        roles[role] = tuple(dict.fromkeys(splits))
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
                f"`splits.{role}` names a split called train, which is a run's training set."
            )
    for first, second in combinations(ROLES, 2):
        for name in {*roles[first]} & {*roles[second]}:
            raise ConfigError(
                f"{name!r} is in `splits.{first}` and in `splits.{second}`, but has one role."
            )
    return roles


def splits_by_prefix(names: Sequence[str], settings: SettingValues) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else those that begin as `PREFIXES`."""
    defaults = {
        role: [split for split in names if split.lower().startswith(prefixes)]
        for role, prefixes in PREFIXES.items()
    }
    return resolve_splits(settings.get("splits"), defaults, names)


def to_names(value: Any) -> list[str]:
    """Return the names in a value of ``splits``: null, a name or a list of names."""
    names = [value] if isinstance(value, str | int | float) else value or []
    return [str(name) for name in names]


# Speakers


def check_shares(shares: object) -> dict[str, float]:
    """Check the value of the key ``split_shares``, and return it in the order of the splits."""
    shares = DEFAULT_SHARES if shares is None else shares
    if (
        not isinstance(shares, Mapping)
        or not {*shares} <= {*RELEASE_SPLITS[1:]}
        or not all(type(share) in (int, float) and 0 < share < 1 for share in shares.values())
        or not 0 < sum(shares.values()) < 1
    ):
        raise ConfigError(
            "`split_shares` must map dev and test to shares of the speakers that together are "
            f"below 1, such as {DEFAULT_SHARES}, but is {shares!r}."
        )
    return {split: shares[split] for split in RELEASE_SPLITS if split in shares}


def deal_speakers(
    speakers: Collection[str], shares: Mapping[str, float], source: object, *, fill: bool = True
) -> dict[str, str]:
    """Return the split of each speaker, which follows from the speaker's name and the shares.

    So speakers that come later move nobody, except those who fill a split.

    source: of the speakers, for an error.
    fill: whether each split must have a speaker. An empty one takes the speaker with the smallest
        hash from the split that has the most.
    """
    if fill and len(speakers) <= len(shares):
        raise DataError(
            f"{source} has {plural(len(speakers), 'speaker')}, and {len(shares) + 1} splits need "
            "one each. Write a column `split`, or fewer splits in `split_shares`."
        )
    splits, ends = [*shares, RELEASE_SPLITS[0]], [*accumulate(shares.values())]
    in_order = sorted(speakers, key=_position)
    split_of = {speaker: splits[bisect(ends, _position(speaker))] for speaker in in_order}
    for split in splits if fill else ():
        sizes = Counter(split_of.values())
        if not sizes[split]:
            largest = max(RELEASE_SPLITS, key=lambda name: sizes[name])
            filler = next(speaker for speaker in in_order if split_of[speaker] == largest)
            split_of[filler] = split
    return split_of


def _position(speaker: str) -> float:
    """Return a number from 0 to 1 that follows from the name of a speaker."""
    digest = hashlib.sha256(speaker.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)
