"""A fetched corpus as a release folder of Common Voice: a TSV for each split, and ``clips/``.

Download Debian packages without root, from the mirrors that this machine already trusts.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from subprocess import CompletedProcess, run
from tempfile import TemporaryDirectory
from typing import Any

import soundfile

from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.base.units import SAMPLE_RATE, samples_to_seconds
from sbkit.data.corpus import resolve_splits
from sbkit.data.release import read_release
from sbkit.text.normalization import normalize

PASS_A_RELEASE = "Pass the folder of a Common Voice release as --data_folder instead."


@dataclass(frozen=True)
class Packages:
    """Packages that were unpacked: the version of the first, and where they are."""

    version: str
    root: Path


def fetch_packages(names: Sequence[str], folder: Path) -> Packages:
    """Download and unpack packages with apt-get, which needs no root for that.

    Raises:
        SbkitError: there is no apt-get, no mirror answers, or none has the packages.
    """
    for needed in ("lists/partial", "cache/archives/partial", "root"):
        (folder / needed).mkdir(parents=True)
    options = [
        f"Dir::State::lists={folder}/lists",
        f"Dir::Cache={folder}/cache",
        "Debug::NoLocking=1",
        "APT::Sandbox::User=",
    ]
    apt_get = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    update = _run([*apt_get, "update"], folder)
    _run([*apt_get, "download", *names], folder, heard=update.stderr)
    packages = sorted(folder.glob("*.deb"))
    for package in packages:
        _run(["dpkg-deb", "-x", str(package), str(folder / "root")], folder)
    version = _run(["dpkg-deb", "-f", str(packages[0]), "Version"], folder).stdout
    return Packages(version.strip(), folder / "root")


def _run(command: Sequence[str], folder: Path, heard: str = "") -> CompletedProcess[str]:
    """Run a program, and turn its failure into a sentence with its own words.

    ``apt-get update`` only warns when no mirror answers, so what was ``heard`` from it counts.
    """
    try:
        done = run(
            command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise SbkitError(
            f"This corpus must be fetched with apt-get and dpkg-deb, but {command[0]} is "
            f"not on this machine. {PASS_A_RELEASE}"
        ) from error
    if done.returncode:
        raise SbkitError(
            f"This corpus must be fetched from a Debian or Ubuntu mirror, but {command[0]} "
            f"failed ({_reason(heard + done.stderr)}). Check the network. {PASS_A_RELEASE}"
        )
    return done


def _reason(words: str) -> str:
    """Choose the line to show: the first failed connection, else the last line."""
    lines = words.strip().splitlines() or ["without a word"]
    return next((line for line in lines if "Failed to fetch" in line), lines[-1])


RELEASE_VERSION = 1  # raise it when the same packages would give another release
SPLITS = ("train", "dev", "test")
ROLES = {"train": ("train",), "valid": ("dev",), "test": ("test",)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a release's TSV, with the columns of Common Voice in their order."""

    client_id: str
    path: str
    sentence_id: str
    sentence: str
    sentence_domain: str = ""
    up_votes: int = 2
    down_votes: int = 0
    age: str = ""
    gender: str = ""
    accents: str = ""
    variant: str = ""
    locale: str
    segment: str = ""


def splits(knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else train, dev and test."""
    return resolve_splits(knobs.get("splits"), ROLES, SPLITS)


def ensure_release(
    folder: Path, language: str, packages: Sequence[str], write: Callable[[Path, Path], None]
) -> Path:
    """Return the release folder of a language, fetching and writing it where it is not there yet.

    Args:
        folder: holds a release for each version of the packages.
        language: of the release.
        packages: of Debian; the first has the version.
        write: makes a release of the root of the unpacked packages, in an empty folder.

    Raises:
        SbkitError: apt-get cannot fetch the packages, or they hold something else.
    """
    finished = sorted(folder.expanduser().glob(f"*-r{RELEASE_VERSION}/{language}/validated.tsv"))
    if finished:
        return finished[-1].parent
    with TemporaryDirectory() as scratch:
        found = fetch_packages(packages, Path(scratch))
        release = folder.expanduser() / f"{found.version}-r{RELEASE_VERSION}" / language
        with building(release) as beside:
            write(found.root, beside)
    return release


def sentence_id(sentence: str) -> str:
    """Return the SHA-256 of a sentence."""
    return hashlib.sha256(sentence.encode()).hexdigest()


def write_tsvs(release: Path, rows: Sequence[Row], *, kind: type[Row] = Row) -> None:
    """Write rows of a kind as train, dev, test and validated.tsv, a sentence in one split only."""
    kept: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row in rows:
        kept[choose_split(normalize(row.sentence, row.locale))].append(row)
    for split in SPLITS:
        _write_tsv(release / f"{split}.tsv", kept[split], kind)
    ordered = (row for split in SPLITS for row in kept[split])
    _write_tsv(release / "validated.tsv", ordered, kind)


def choose_split(text: str) -> str:
    """Choose by a hash of the normalized text, so that one sentence is in one split everywhere."""
    tenth = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "dev"}.get(tenth, "train")


def _write_tsv(file: Path, rows: Iterable[Row], kind: type[Row]) -> None:
    table = [tuple(field.name for field in fields(kind)), *map(astuple, rows)]
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in table), encoding="utf-8")


def only(root: Path, pattern: str) -> Path:
    """Return the one path of unpacked packages that fits; raises SbkitError for none or several."""
    found = sorted(root.glob(pattern))
    if len(found) != 1:
        raise SbkitError(
            f"The packages must hold one {pattern}, but hold {len(found)}. {PASS_A_RELEASE}"
        )
    return found[0]


def print_release(release: Path) -> None:
    """Print where a release is and how much it holds."""
    print(release, *_summarize(release), sep="\n")


def _summarize(release: Path) -> Iterator[str]:
    """Return a line for each split: its clips and minutes."""
    for split in SPLITS:
        clips = read_release(release / f"{split}.tsv", release.name).clips
        samples = sum(soundfile.info(clip.path).frames for clip in clips)
        minutes = samples_to_seconds(samples, SAMPLE_RATE) / 60
        yield f"{split:5} {len(clips):4} clips {minutes:5.1f} min"
