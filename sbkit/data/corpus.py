"""Corpora: the splits of each role, the rows of a split, and the assignment of speakers to splits.

A speaker is in the same split in every table and in later releases.
"""

import hashlib
import re
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, chain, combinations, islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

from sbkit.base.errors import ConfigError, DataError, concerning
from sbkit.base.imports import import_recipe, user_digests
from sbkit.base.messages import plural
from sbkit.config.keys import with_defaults
from sbkit.data.audio_tables import AudioTable
from sbkit.data.cache import unpack_corpus
from sbkit.data.manifest import Clip, Excluded, Manifest

ROLES = ("train", "valid", "test")
RELEASE_SPLITS = ("train", "dev", "test")  # as Common Voice names them
USUAL_SPLITS = {"train": ("train",), "valid": ("dev",), "test": ("test",)}  # by role
ROLE_PREFIXES = {"train": ("train",), "valid": ("dev", "valid"), "test": ("test", "eval")}
DEFAULT_SHARES = {"dev": 0.1, "test": 0.1}  # approximately, of the speakers; the rest is train

ARCHIVE_ENDING = r"(?i)\.(tar|tgz|tar\.\w+)$"

SettingValues = Mapping[str, Any]  # the plain values of a YAML
CorpusRow = Clip | Excluded | Manifest | AudioTable  # one row, or a block of rows


class Corpus:
    """A corpus of speech: its splits, and the rows of each.

    The file corpus.py of a recipe folder, or a user's module, defines one subclass.

    >>> class Notes(Corpus):
    ...     def read(self, split: str) -> Iterable[Clip]:
    ...         folder = Path(self.settings["data_folder"], split)
    ...         for file in sorted(folder.glob("*.wav")):
    ...             yield Clip(file.stem, file, file.with_suffix(".txt").read_text())
    >>> Notes({"data_folder": "/data/notes"}).roles()["valid"]
    ('dev',)

    Attributes:
        name: for model cards; if it is empty, they show that of the module ``corpus``.
        layout: a phrase that describes its data folder, for help and errors.
        has_audio: whether its rows have the location of decoded audio.
    """

    name: ClassVar[str] = ""
    layout: ClassVar[str] = ""
    has_audio: ClassVar[bool] = False

    def __init__(self, settings: SettingValues) -> None:
        self.settings = with_defaults(settings)

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether settings choose this corpus without the key ``corpus``."""
        return False

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``."""
        return USUAL_SPLITS

    def available(self) -> Sequence[str]:
        """Return all splits that the key ``splits`` may name."""
        return [*chain.from_iterable(self.splits().values())]

    def read(self, split: str) -> Iterable[CorpusRow]:
        """Return the rows of one split: clips and excluded rows, or whole blocks of rows."""
        raise NotImplementedError

    def files(self) -> Sequence[Path] | None:
        """Return the tables, or their folders: rows are read again if a name, size or time changes.

        None: the rows are read at each start.
        """
        return None

    def about(self) -> Mapping[str, str | None]:
        """Return the ``name`` and the ``license`` if they are known."""
        return {}

    def require_fetched(self) -> None:
        """Raise DataError if reading would download anything."""

    # ---- what all corpora have in common

    def roles(self) -> dict[str, tuple[str, ...]]:
        """Return the splits of each role: the key ``splits``, else the corpus's own."""
        return resolve_splits(self.settings["splits"], self.splits(), self.available())

    def state(self) -> object:
        """Return plain data that changes if the tables do; None if they are not known."""
        files = self.files()
        if files is None:
            return None
        paths = [path.absolute() for path in files]
        tables = (sorted(path.iterdir()) if path.is_dir() else [path] for path in paths)
        stats = [(path, path.stat()) for path in chain(*tables) if path.is_file()]
        return [[str(p), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for p, stat in stats]

    def blocks(self, split: str) -> Iterator[Manifest | AudioTable]:
        """Yield the rows of one split in blocks, and tables with audio."""
        rows = iter(self.read(split))
        first = [*islice(rows, 1)]
        if not first or isinstance(first[0], Clip | Excluded):
            objects = cast(Iterator[Clip | Excluded], chain(first, rows))
            yield from Manifest.of(objects, *self.roots()).blocks()
            return
        yield from cast(Iterator[Manifest | AudioTable], chain(first, rows))

    def clips(self, split: str) -> Iterator[Clip]:
        """Yield the clips of one split that lie in files."""
        manifests = (block for block in self.blocks(split) if isinstance(block, Manifest))
        return chain.from_iterable(manifests)

    def describe(self) -> dict[str, str | None]:
        """Return the name and the license, for a model card; the name of no folder."""
        module = self.settings["corpus"]
        name = self.name or (module and Path(str(module)).name)
        stated = {key: value for key, value in self.about().items() if value}
        return {"name": name, "license": None, **stated}

    def roots(self) -> list[Path]:
        """Return the folders that clips may lie in: those with the tables, and the data folders."""
        tables = [path.absolute() for path in self.files() or ()]
        roots = [path if path.is_dir() else path.parent for path in tables]
        data_folder = self.settings["data_folder"] or ()
        folders = [data_folder] if isinstance(data_folder, str | Path) else data_folder
        roots += [Path(path).expanduser().absolute() for path in folders if "://" not in str(path)]
        return [*dict.fromkeys(roots)]

    def sources(self) -> dict[str, str]:
        """Return the checksums of the user's modules that read the corpus."""
        return user_digests(type(self).__module__)


# ---- choosing a corpus


def corpora() -> dict[str, type[Corpus]]:
    """Return the class of every recipes/FOLDER/corpus.py, by the name of its module."""
    folders = [Path(folder) for folder in import_recipe("recipes").__path__]
    files = chain.from_iterable(sorted(folder.glob("*/corpus.py")) for folder in folders)
    names = [f"recipes.{file.parent.name}.corpus" for file in files]
    return {name: _class_in(import_recipe(name)) for name in names}


def corpus_of(settings: SettingValues) -> Corpus:
    """Choose a corpus: the class in the module ``corpus``, else one that recognizes the settings.

    Several data folders are joined.
    """
    # All keys are read, so that `sbkit check` lists none as unread.
    names = ("corpus", "manifest", "data_folder", "split_shares")
    settings = with_defaults(settings)
    module, manifest, data_folder, _ = map(settings.__getitem__, names)
    if isinstance(data_folder, list) and not manifest:
        return JoinedCorpora(settings)
    if module:
        return _import_class(str(module))(settings)
    choices = {name: corpus for name, corpus in corpora().items() if corpus.recognizes(settings)}
    if len(choices) == 1:
        return choices.popitem()[1](settings)
    if choices:
        raise ConfigError(
            f"data_folder: {data_folder} has several layouts: "
            f"{'; '.join(corpus.layout for corpus in choices.values())}. "
            f"Choose one by `corpus: {'` or `corpus: '.join(choices)}`."
        )
    layouts = [corpus.layout for corpus in corpora().values() if corpus.layout]
    exists = Path(str(data_folder)).expanduser().exists()
    state = "is none of these" if exists else "does not exist"
    if "://" in str(data_folder):
        state = "has no such index, or cannot be reached"
    raise DataError(
        f"data_folder must be {', '.join(layouts[:-1])} or {layouts[-1]}, but {data_folder} "
        f"{state}. For tables, write `manifest: {{train: FILE, dev: FILE}}`."
    )


def named_folder(settings: SettingValues) -> Path | None:
    """Return the data folder of a corpus, unpacked if it is an archive; None for a URL.

    None is also returned if ``manifest`` is set: paths then only start from the data folder.
    """
    folder = settings["data_folder"]
    if not folder or settings["manifest"] or "://" in str(folder):
        return None
    return unpack_corpus(folder)


@concerning("corpus")
def _import_class(name: str) -> type[Corpus]:
    try:
        module = import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"The module {name!r} that `corpus` names cannot be imported ({error}). Put its file "
            "beside the YAML or on PYTHONPATH."
        ) from error
    return _class_in(module)


def _class_in(module: ModuleType) -> type[Corpus]:
    name = module.__name__
    types = [value for value in vars(module).values() if isinstance(value, type)]
    classes = [c for c in types if issubclass(c, Corpus) and c.__module__ == name]
    if len(classes) != 1:
        raise ConfigError(
            f"The module {name} of a corpus must have one class derived from sbkit.Corpus, but has "
            f"{' and '.join(c.__name__ for c in classes) or 'none'}."
        )
    return classes[0]


# ---- several data folders


class JoinedCorpora(Corpus):
    """The corpora of several data folders; their splits are named SPLIT-FOLDER.

    A folder is named by the last part of its path, or by the last two.
    """

    def __init__(self, settings: SettingValues) -> None:
        super().__init__(settings)
        folders: Sequence[str] = settings["data_folder"]
        parts = [re.sub(ARCHIVE_ENDING, "", folder.rstrip("/")).split("/") for folder in folders]
        last_names = Counter(part[-1] for part in parts)
        names = [part[-1] if last_names[part[-1]] == 1 else "-".join(part[-2:]) for part in parts]
        names = [re.sub(r"[^\w.+-]+", "-", name).strip("-") for name in names]
        if len({*names}) < len(names):
            raise ConfigError(
                f"Two of the folders in `data_folder` have the same name: {', '.join(folders)}."
            )
        # The key `splits` names joined splits, so it is not passed on.
        folder_settings = [{**settings, "data_folder": f, "splits": None} for f in folders]
        self.corpora = dict(zip(names, map(corpus_of, folder_settings), strict=True))

    def splits(self) -> Mapping[str, Sequence[str]]:
        splits = {name: corpus.splits() for name, corpus in self.corpora.items()}
        return {
            role: [f"{split}-{name}" for name in splits for split in splits[name][role]]
            for role in ROLES
        }

    def available(self) -> Sequence[str]:
        return [f"{s}-{name}" for name, corpus in self.corpora.items() for s in corpus.available()]

    def files(self) -> list[Path] | None:
        files = [corpus.files() for corpus in self.corpora.values()]
        return None if None in files else [*chain.from_iterable(filter(None, files))]

    def read(self, split: str) -> Iterable[CorpusRow]:
        # The name of one folder may be the end of another name: fr and sps-fr.
        name = max((name for name in self.corpora if split.endswith(f"-{name}")), key=len)
        corpus, inner_split = self.corpora[name], split.removesuffix(f"-{name}")
        splits = {"train": inner_split} if split in self.roles()["train"] else None
        return type(corpus)({**corpus.settings, "splits": splits}).blocks(inner_split)

    def state(self) -> object:
        states = [corpus.state() for corpus in self.corpora.values()]
        return None if None in states else states

    def require_fetched(self) -> None:
        for corpus in self.corpora.values():
            corpus.require_fetched()

    def about(self) -> Mapping[str, str | None]:
        facts = [corpus.describe() for corpus in self.corpora.values()]
        licenses = dict.fromkeys(str(fact["license"] or "unknown") for fact in facts)
        return {
            "name": " and ".join(fact["name"] for fact in facts if fact["name"]) or None,
            "license": " and ".join(licenses) if [*licenses] != ["unknown"] else None,
        }

    def sources(self) -> dict[str, str]:
        return {n: s for corpus in self.corpora.values() for n, s in corpus.sources().items()}


# ---- splits


@concerning("splits")
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
                    f"from: {choices}{', or [] for none' * (role == 'test')}."
                )
        if not splits and role != "test":
            raise ConfigError(f"`splits.{role}` is empty. Choose at least one split: {choices}.")
        if "train" in splits and role != "train":
            raise ConfigError(
                f"`splits.{role}` names the split train, which can only be the training set."
            )
    for first, second in combinations(ROLES, 2):
        for name in {*roles[first]} & {*roles[second]}:
            raise ConfigError(
                f"{name!r} is in both `splits.{first}` and `splits.{second}`. Remove one of them."
            )
    return roles


def splits_by_prefix(names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the splits of each role, by the prefixes in `ROLE_PREFIXES`."""
    return {
        role: [split for split in names if split.lower().startswith(prefixes)]
        for role, prefixes in ROLE_PREFIXES.items()
    }


def to_names(value: Any) -> list[str]:
    """Return the names in a value of ``splits``: null, a name or a list of names."""
    names = [value] if isinstance(value, str | int | float) else value or []
    return [str(name) for name in names]


# ---- speakers


@concerning("split_shares")
def parse_split_shares(shares: object) -> dict[str, float]:
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


@concerning("split_shares")
def deal_speakers(
    speakers: Collection[str], shares: Mapping[str, float], source: object, *, fill: bool = True
) -> dict[str, str]:
    """Return the split of each speaker, which follows from the speaker's name and the shares.

    Speakers that are added later do not move the others, except out of filled splits.

    source: the file of the speakers, for an error.
    fill: whether each split must have a speaker. An empty split gets the speaker with the smallest
        hash from the largest split.
    """
    if fill and len(speakers) <= len(shares):
        raise DataError(
            f"{source} has {plural(len(speakers), 'speaker')}, but each of {len(shares) + 1} "
            "splits needs at least one. Add a column `split`, or name fewer splits in "
            "`split_shares`."
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
