"""The corpus of a Common Voice release, or of any folder of the same form.

<data_folder>[/LANGUAGE]/train.tsv   and a TSV for each other split
                         clips/      the audio files
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from sbkit.base.errors import ConfigError, DataError
from sbkit.data.cache import unpack_corpus
from sbkit.data.corpus import USUAL_SPLITS, KnobValues, resolve_splits
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions, read_releases
from sbkit.text.languages import check_language, language_tags


def recognizes(folder: Path) -> bool:
    """Check whether a folder has TSVs or ``clips/``, itself or in the folder of a language."""
    return any(any(folder.glob(pattern)) for pattern in ("*.tsv", "clips", "*/clips"))


def splits(knobs: KnobValues) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: the key ``splits``, else train, dev and test."""
    if not knobs.get("splits"):
        _find_releases(knobs, *chain.from_iterable(USUAL_SPLITS.values()))
        return USUAL_SPLITS
    available = [_split_names(release) for release in _find_releases(knobs).values()]
    return resolve_splits(knobs["splits"], USUAL_SPLITS, sorted(set.intersection(*available)))


def read(knobs: KnobValues, split: str) -> Manifest:
    """Read one split of the release, or of one release for each language of a list."""
    return read_releases(_find_releases(knobs, split), split, TableOptions.from_knobs(knobs))


def _find_releases(knobs: KnobValues, *splits: str) -> dict[str, Path]:
    releases = {
        language: find_release(knobs["data_folder"], language, splits)
        for language in language_tags(knobs["language"])
    }
    if len(set(releases.values())) < len(releases):
        raise ConfigError(
            f"`language` names {', '.join(releases)}, but {knobs['data_folder']} is the release of "
            "one language. Name one language, or a data folder with a folder for each."
        )
    return releases


def find_release(data_folder: str | Path | None, language: str, splits: Sequence[str] = ()) -> Path:
    """Return the folder with the TSVs: ``data_folder``, or the folder of the language in it."""
    check_language(language)  # it becomes the name of a folder
    tsvs = ", ".join(f"{split}.tsv" for split in splits or ("train", "dev", "test"))
    advice = f"Pass --data_folder=FOLDER of a Common Voice release, with {tsvs} and clips/."
    release = unpack_corpus(data_folder)
    if not release.is_dir():
        raise DataError(f"data_folder: {release} is not a folder. {advice}")
    if not any(release.glob("*.tsv")) and (release / language).is_dir():
        release /= language
    missing = [f"{split}.tsv" for split in splits if not (release / f"{split}.tsv").is_file()]
    if not (release / "clips").is_dir():
        missing.append("clips/")
    if missing:
        if available := _split_names(release):  # a delta release has no train, dev or test
            names = ", ".join(sorted(available))
            advice += f" Or choose among its splits, {names}, with --splits."
        raise DataError(f"data_folder: {release} has no {', '.join(missing)}. {advice}")
    return release


def _split_names(release: Path) -> set[str]:
    return {tsv.stem for tsv in release.glob("*.tsv")}
