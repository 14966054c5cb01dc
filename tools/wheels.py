"""Download the wheels that pip would install, and write their hashes, for `tools/offline`.

python -m tools.wheels FOLDER cpu|cuda WHEEL EXTRAS
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CPU_HINT = """\
With cpu, pip must find torch and torchaudio in the versions of constraints.txt and with +cpu. Let
PIP_EXTRA_INDEX_URL be the address of PyTorch's index for CPUs, which pytorch.org shows."""


def main() -> None:
    """Say the size, fill the folder, and try whether it suffices."""
    folder, device, wheel, extras = sys.argv[1:]
    with TemporaryDirectory() as temporary:
        packages = resolve(wheel, extras, device, Path(temporary))
        print(describe_size([package["download_info"]["url"] for package in packages]), flush=True)
        versions = {
            canonicalize_name(package["metadata"]["name"]): Version(package["metadata"]["version"])
            for package in packages
        }
        pinned = (f"{name}==={version}" for name, version in versions.items() if name != "sbkit")
        pip("wheel", "--no-deps", f"--wheel-dir={folder}", wheel, *pinned)
    requirements = Path(folder, "requirements.txt")
    requirements.write_text(hashed(Path(folder), versions))
    pip(  # a trial, which installs nothing
        *("install", "--dry-run", "--ignore-installed", "--require-hashes", "--no-index"),
        *(f"--find-links={folder}", f"--requirement={requirements}"),
    )


def pip(*words: str, hint: str = "") -> None:
    """Run pip, which explains its errors; it ends this program, with a hint if there is one."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    if code := subprocess.run(command).returncode:
        sys.exit(hint or code)


def resolve(wheel: str, extras: str, device: str, temporary: Path) -> list[dict[str, Any]]:
    """Return pip's report on each package that an empty environment needs."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    pin = r"\g<0>+cpu" if device == "cpu" else r"\g<0>,!=\1+cpu"
    text = re.sub(r"(?m)^(?:torch|torchaudio)==(\S+)", pin, text)
    constraints, report = temporary / "constraints.txt", temporary / "report.json"
    constraints.write_text(text)
    pip(
        *("install", "--dry-run", "--ignore-installed", f"--report={report}"),
        *(f"--constraint={constraints}", f"{wheel}[{extras}]" if extras else wheel),
        hint=CPU_HINT if device == "cpu" else "",
    )
    packages: list[dict[str, Any]] = json.loads(report.read_bytes())["install"]
    (sbkit,) = (package for package in packages if package["metadata"]["name"] == "sbkit")
    known = sbkit["metadata"]["provides_extra"]
    if unknown := {*filter(None, extras.split(","))} - {*known}:  # pip only warns
        sys.exit(f"sbkit has no extra {', '.join(unknown)}. It has {', '.join(known)}.")
    return packages


def describe_size(urls: Sequence[str]) -> str:
    """Say how much there is to download, by the sizes that the index tells."""
    with ThreadPoolExecutor() as pool:
        sizes = [*pool.map(size_of, urls)]
    text = f"{len(urls)} packages, {sum(filter(None, sizes)) / 1e6:.0f} MB"
    return f"{text}, and {sizes.count(None)} of unknown size" if None in sizes else text


def size_of(url: str) -> int | None:
    """Return the size of a file of an index in bytes."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=60) as response:
            return int(response.headers["Content-Length"])
    except (OSError, TypeError):  # only pip can open the address, or no size is told
        return None


def hashed(folder: Path, versions: Mapping[NormalizedName, Version]) -> str:
    """Return a line for each package: its version, and the hashes of its wheels in the folder.

    `==2.11.0` would admit 2.11.0+cpu, too, which pip prefers if it finds it.
    """
    lines: dict[str, list[str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        if versions.get(name) == version:
            line = lines.setdefault(name, [f"{name}==={version}"])
            with wheel.open("rb") as file:
                line.append(f"--hash=sha256:{file_digest(file, 'sha256').hexdigest()}")
    return "".join(f"{' '.join(line)}\n" for line in lines.values())


if __name__ == "__main__":
    main()
