"""Corpora in Debian packages, fetched without root and written as Common Voice releases.

The packages come from the mirrors that this machine already trusts.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess, run
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sbkit.audio.io import encode_audio
from sbkit.base.errors import DataError
from sbkit.base.files import atomic_folder
from sbkit.base.user_folders import cache_folder, make_cache_folder
from sbkit.base.versions import data_versions
from sbkit.data.common_voice import read_releases
from sbkit.data.corpus import RELEASE_SPLITS, Corpus
from sbkit.data.filesystem import disk_errors
from sbkit.data.manifest import Manifest
from sbkit.data.tables import TableOptions
from sbkit.data.work_units import short_digest
from sbkit.text.normalization import normalize

RELEASE_VERSION = 1  # raised with each change of written releases
MAKE_IT_ELSEWHERE = (
    "On any Debian or Ubuntu, `python -m recipes.AsteriskPrompts.corpus` makes its folder; copy "
    "that here, and name it as `data_folder`."
)


@dataclass(frozen=True, kw_only=True)
class ReleaseRow:
    """One row of a release's TSV, with the columns of Common Voice in their order."""

    client_id: str
    path: str
    sentence_id: str = ""  # `write_release` fills it in: the SHA-256 of the sentence
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


Clip = tuple[ReleaseRow, npt.NDArray[np.int16], int]  # with its samples, and their rate


class ReleaseCorpus(Corpus):
    """A corpus from packages, which are written as a release for each language.

    Attributes:
        folder: its folder in the cache.
    """

    folder: ClassVar[str]

    def languages(self) -> Sequence[str]:
        """Return the tags of the languages."""
        raise NotImplementedError

    def release(self, language: str) -> Path:
        """Return the release folder of a language; fetch and write it if the cache lacks it."""
        raise NotImplementedError

    def releases(self) -> Mapping[str, Path]:
        return {tag: self.release(tag) for tag in self.languages()}

    def require_fetched(self) -> None:
        for tag in self.languages():
            if find_release(self.folder, tag) is None:
                module = type(self).__module__
                raise DataError(
                    f"The run was trained on {self.name} in `{tag}`, which is not on this machine. "
                    "For safety it is fetched only if you name it yourself: sbkit prepare "
                    f"hparams/ctc.yaml --corpus={module} --language={tag}"
                )

    def files(self) -> list[Path]:
        return [*self.releases().values()]

    def read(self, split: str) -> Iterator[Manifest]:
        options = TableOptions.from_settings(self.settings)
        return read_releases(self.releases(), split, options)


def ensure_release(
    name: str, language: str, packages: Sequence[str], read_clips: Callable[[Path], Iterable[Clip]]
) -> Path:
    """Return the release folder of a language; fetch and write it if the cache lacks it.

    The folder ``name`` of the cache has a release for each version of the first package, and of the
    code that writes it. ``read_clips`` takes the root of the unpacked packages.
    """
    if (finished := find_release(name, language)) is not None:
        return finished
    with TemporaryDirectory() as scratch:
        version, root = fetch_packages(packages, Path(scratch))
        with disk_errors(cache_folder()):
            release = make_cache_folder(name) / f"{version}-{_code()}" / language
            with atomic_folder(release) as beside:
                write_release(beside, read_clips(root))
    return release


def find_release(name: str, language: str) -> Path | None:
    """Return the release folder of a language that the folder ``name`` of the cache has, if any."""
    pattern = f"*-{_code()}/{language}/validated.tsv"
    finished = sorted((cache_folder() / name).glob(pattern))
    return finished[-1].parent if finished else None


def _code() -> str:
    return short_digest({"code": RELEASE_VERSION, **data_versions()})[:8]


def fetch_packages(names: Sequence[str], folder: Path) -> tuple[str, Path]:
    """Download and unpack packages by apt-get; return the version of the first, and the root."""
    for subfolder in ("lists/partial", "cache/archives/partial", "root"):
        (folder / subfolder).mkdir(parents=True)
    options = [
        f"Dir::State::lists={folder}/lists",
        f"Dir::Cache={folder}/cache",
        "Debug::NoLocking=1",
        "APT::Sandbox::User=",
    ]
    apt_get = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    update = _run([*apt_get, "update"], folder)
    _run([*apt_get, "download", *names], folder, previous_errors=update.stderr)
    for package in folder.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(folder / "root")], folder)
    first = find_one(folder, f"{names[0]}_*.deb")
    version = _run(["dpkg-deb", "-f", str(first), "Version"], folder).stdout
    return version.strip(), folder / "root"


def _run(command: Sequence[str], folder: Path, previous_errors: str = "") -> CompletedProcess[str]:
    """Run a program; the error of a failure quotes it.

    ``apt-get update`` only warns if no mirror answers, so the next command gets its errors.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = run(command, cwd=folder, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise DataError(
            f"This corpus is fetched with apt-get and dpkg-deb, but {command[0]} is not on this "
            f"machine. {MAKE_IT_ELSEWHERE}"
        ) from error
    if process.returncode:
        lines = (previous_errors + process.stderr).strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "Failed to fetch" in line), lines[-1])
        raise DataError(
            f"This corpus is fetched from a Debian or Ubuntu mirror, but {command[0]} failed "
            f"({reason}). {MAKE_IT_ELSEWHERE}"
        )
    return process


def find_one(root: Path, pattern: str) -> Path:
    """Return the one path in unpacked packages that matches a pattern; raises DataError."""
    paths = sorted(root.glob(pattern))
    if len(paths) != 1:
        raise DataError(f"The packages have {len(paths)} {pattern} instead of one.")
    return paths[0]


def write_release(release: Path, clips: Iterable[Clip]) -> None:
    """Write clips into an empty folder, with train, dev, test and validated.tsv.

    A sentence is in one split only.
    """
    (release / "clips").mkdir()
    header = "\t".join(field.name for field in fields(ReleaseRow))
    lines: dict[str, list[str]] = {split: [] for split in RELEASE_SPLITS}
    for row, samples, rate in clips:
        content = encode_audio(samples, rate, "FLAC")
        (release / "clips" / row.path).write_bytes(content)  # libsndfile hides that a disk is full
        row = replace(row, sentence_id=hashlib.sha256(row.sentence.encode()).hexdigest())
        split = choose_split(normalize(row.sentence, row.locale))
        lines[split].append("\t".join(map(str, astuple(row))))
    lines["validated"] = [*chain.from_iterable(lines.values())]
    for name, split_lines in lines.items():
        text = "\n".join([header, *split_lines]) + "\n"
        (release / f"{name}.tsv").write_text(text, encoding="utf-8")


def choose_split(text: str) -> str:
    """Choose by a hash of the normalized text, so that a sentence has the same split everywhere."""
    tenth = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "dev"}.get(tenth, "train")
