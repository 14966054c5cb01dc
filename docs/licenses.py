"""Write docs/licenses.md: the licenses of the packages that sbkit needs, and of what they contain.

    python -m docs.licenses

Run it with the packages of constraints.txt. A test compares the committed page with what this
writes.
"""

import re
from collections.abc import Mapping
from configparser import ConfigParser
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.reference import ROOT, table

PAGE = ROOT / "docs/licenses.md"
COPYLEFT = re.compile("GPL|MPL")
UNKNOWN = "unknown: name it in docs/licenses.py"
# Of packages whose metadata states none, or only "Dual License".
STATED_ELSEWHERE = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
}
# The metadata of a wheel has the license of its own code, but not of libraries that it contains.
LIBRARIES = {
    "Apache-2.0": "opencore-amrnb opencore-amrwb",
    "BSD-2-Clause": "dav1d",
    "BSD-3-Clause": "opus scipy_openblas scipy_openblas64_ sharpyuv vpx webp webpmux",
    "BSD-3-Clause-Clear": "SvtAv1Enc",
    "GPL-2.0-or-later": "x264 x265",
    "GPL-3.0-or-later WITH GCC-exception-3.1": "gfortran gomp",
    "LGPL-2.0-or-later": "mp3lame",
    "LGPL-2.1-or-later": "asound gnutls quadmath sndfile",
    # FFmpeg's libraries report this license themselves, also in a wheel with x264 and x265.
    "LGPL-3.0-or-later": "avcodec avdevice avfilter avformat avutil swresample swscale",
    "LGPL-3.0-or-later OR GPL-2.0-or-later": "gmp hogweed nettle unistring",
    "MIT": "Xau drm vpl xcb xcb-shape xcb-shm xcb-xfixes",
}
INTRODUCTION = """\
# Licenses

<!-- `python -m docs.licenses` writes this page. -->

sbkit has the [Apache License 2.0](../LICENSE). Without extras, it needs the packages of this page,
on Linux with CUDA and in the versions of [constraints.txt](../constraints.txt). Their metadata
states these licenses. A bundle contains none of the packages. [A
command](start/install.md#without-a-network) lists the licenses of an environment with extras.
"""
COPYLEFT_NOTE = """
The libraries are files in the wheels, whose metadata does not mention them. sbkit calls no encoder
of video: `libx264` and `libx265` are in the wheel of `av` for other users of PyAV. Whoever passes
on an environment or an image passes them on, too. To avoid that, build `av` from its source with an
FFmpeg without them.
"""
LIBRARIES_NOTE = """
Other libraries are compiled into a module: libsoxr (LGPL-2.1-or-later) into `soxr`; mpg123
(LGPL-2.1), LAME (LGPL-2.0-or-later), FLAC, Ogg, Vorbis and Opus (BSD-3-Clause) into `libsndfile`.
Some packages list such parts below `licenses` or `sboms` of their `dist-info`.
"""


def default_packages() -> list[Distribution]:
    """Return the installed packages that sbkit needs without extras, by their names."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].partition("\n")[2].splitlines()
    wanted = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    packages: dict[tuple[str, str], Distribution] = {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for n, extra in packages if n == name}:
            packages[name, extra] = package = distribution(name)
            for needed in map(Requirement, package.requires or ()):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    wanted.append(needed)
    return [packages[key] for key in sorted(packages) if not key[1]]


def license_of(package: Distribution) -> str:
    """Return the license that the metadata states: an expression, a short text, or classifiers."""
    metadata = package.metadata
    if stated := STATED_ELSEWHERE.get(canonicalize_name(metadata["Name"])):
        return stated
    expressions, texts, classifiers = (
        metadata.get_all(field) or [] for field in ("License-Expression", "License", "Classifier")
    )
    names = [text for text in texts if text and "\n" not in text]
    tails = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    return ", ".join(expressions or names or tails)


def libraries_of(package: Distribution) -> Mapping[str, str]:
    """Return the licenses of the libraries by others that the wheel contains as files."""
    licenses = {f"lib{name}": key for key, names in LIBRARIES.items() for name in names.split()}
    names = set()
    for file in package.files or ():
        # libx264-d6533a8d.so.165 and libsndfile_x86_64.so
        name = re.sub(r"(-[0-9a-f]{8})*\.so.*|_x86_64\.so", "", file.name)
        if file.parent.name.endswith(".libs") or name in ("libgomp", "libsndfile"):
            names.add(name)
    return {name: licenses.get(name, UNKNOWN) for name in sorted(names)}


def licenses() -> str:
    """Write the page."""
    packages = {
        canonicalize_name(package.metadata["Name"]): package for package in default_packages()
    }
    stated = [(name, license_of(package) or UNKNOWN) for name, package in packages.items()]
    contained: dict[tuple[str, str], list[str]] = {}
    for name, package in packages.items():
        for library, license in libraries_of(package).items():
            contained.setdefault((name, license), []).append(library)
    libraries = [(name, ", ".join(names), license) for (name, license), names in contained.items()]
    rows = [*((name, "", license) for name, license in stated), *libraries]
    copyleft = [row for row in rows if COPYLEFT.search(row[-1])]
    others = [row for row in libraries if row not in copyleft]
    columns = ("package", "libraries in its wheel", "license")
    text = INTRODUCTION + table("Copyleft", columns, copyleft) + COPYLEFT_NOTE
    text += table("Other libraries in wheels", columns, others) + LIBRARIES_NOTE
    return text + table("Packages", ("package", "license"), stated)


if __name__ == "__main__":
    PAGE.write_text(licenses(), encoding="utf-8")
