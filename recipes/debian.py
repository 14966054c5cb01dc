"""Download Debian packages without root, from the mirrors that this machine already trusts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, run

from sbkit.base.errors import SbkitError

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
