"""Hostile archives of a corpus."""

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.data.storage.archive import is_archive, unpack
from tests.attacks.case import Case, Place
from tests.attacks.inputs import TRICKS
from tests.attacks.mutate import mutate_bytes

ZEROS = 1 << 20  # bytes of a block that is compressed once, and written often


def all_archives() -> Iterator[Case]:
    """List every hostile archive."""
    for name, write in ARCHIVES.items():
        yield Case("archive", name, partial(_unpack, write), harmless=name in UNPACKED)
    for seed in range(60):
        write = partial(_changed, seed)
        yield Case("archive", f"mutant {seed}", partial(_unpack, write), harmless=True)
    for name, make in TRICKS.items():
        yield Case("archive", f"that is {name}", partial(_unpack, make))


def _unpack(write: Callable[[Path], Any], place: Place) -> list[str]:
    os.environ["SBKIT_CACHE"] = str(place.folder / "cache")
    file = place.folder / "corpus.tar.gz"
    write(file)
    return ["unpack", str(file)]


def _read(file: str) -> None:
    if not is_archive(Path(file)):
        raise SbkitError("It must be an archive, but is none. Name one.")
    unpack(Path(file))


def _tar(*members: tuple[str, bytes, dict[str, Any]], **options: Any) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", **options) as tar:
        for name, text, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(text)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(text))
    return content.getvalue()


def _file(name: str, text: bytes = b"x", **fields: Any) -> tuple[str, bytes, dict[str, Any]]:
    return name, text, fields


def _zipped(*members: tuple[str, bytes, dict[str, Any]]) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(gzip.compress(_tar(*members)))


def _bomb(head: bytes, blocks: int) -> Callable[[Path], Any]:
    """Write a head and blocks of zeros, compressed a thousand times."""

    def write(file: Path) -> None:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        first = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
        block = packer.compress(bytes(ZEROS)) + packer.flush(zlib.Z_FULL_FLUSH)
        with file.open("wb") as target:
            target.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first)
            for _ in range(blocks):
                target.write(block)
            target.write(packer.flush() + bytes(8))

    return write


def _header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo("clips/a.wav")
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def _sparse(**pax: str) -> tuple[str, bytes, dict[str, Any]]:
    return _file("a.wav", b"1\n0\n1\n" + bytes(506), pax_headers=pax)


def _changed(seed: int, file: Path) -> None:
    whole = _tar(_file("train.tsv", b"path\tsentence\na\tb\n" * 30), _file("clips/a.mp3"))
    spoiled = mutate_bytes(whole, seed) if seed % 3 else whole
    packed = gzip.compress(spoiled, mtime=0)
    file.write_bytes(packed if seed % 3 else mutate_bytes(packed, seed))


LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
ARCHIVES: dict[str, Callable[[Path], Any]] = {
    "as it is": _zipped(_file("train.tsv"), _file("clips/a.mp3")),
    "a path up": _zipped(_file("../mine/kept.txt")),
    "a path up, within": _zipped(_file("a/../../../../mine/kept.txt")),
    "a path from the root": _zipped(_file("/tmp/sbkit-attack")),
    "a name that moves the cursor": _zipped(_file("\x1b[2J/../x")),
    "a name without end": _zipped(_file("a" * 5000)),
    "folders without end": _zipped(_file("a/" * 2500 + "b")),
    "no name": _zipped(_file("")),
    "a dot": _zipped(_file(".")),
    "a name of two lines": _zipped(_file("a\nb")),
    "a name of other bytes": _zipped(_file("\udcff\udcfe.wav")),
    "its own mark": _zipped(_file("corpus.json", b'{"folder": "/"}'), _file("a.wav")),
    "a file that is a folder": _zipped(_file("a"), _file("a/b")),
    "a link, and a file in it": _zipped(
        _file("a", b"", type=LINK, linkname="../../../mine"), _file("a/kept.txt")
    ),
    "a link, and a file over it": _zipped(
        _file("a", b"", type=LINK, linkname="../../../mine/kept.txt"), _file("a")
    ),
    "a hard link, and a file over it": _zipped(
        _file("a", b"", type=HARD, linkname="../../../mine/kept.txt"), _file("a")
    ),
    "a link to itself": _zipped(_file("a", b"", type=LINK, linkname="a"), _file("a/b")),
    "a pipe": _zipped(_file("clips/a.wav", b"", type=tarfile.FIFOTYPE)),
    "a device": _zipped(_file("clips/a.wav", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "the same file a thousand times": _zipped(*[_file("a.wav")] * 1000),
    "a sparse file of a terabyte": _zipped(
        _sparse(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.wav",
                   "GNU.sparse.realsize": str(1 << 40)})
    ),
    "a sparse map of text": _zipped(_sparse(**{"GNU.sparse.map": "abc", "GNU.sparse.size": "1"})),
    "a sparse size of text": _zipped(_sparse(**{"GNU.sparse.map": "0,1", "GNU.sparse.size": "x"})),
    "a sparse map below nothing": _zipped(
        _sparse(**{"GNU.sparse.map": "-5,-9", "GNU.sparse.size": "-1"})
    ),
    "a size below nothing": _zipped(_file("a.wav", pax_headers={"size": "-512"})),
    "a size beyond": _zipped(_file("a.wav", pax_headers={"size": "9" * 30})),
    "a size of text": _zipped(_file("a.wav", pax_headers={"size": "x"})),
    "a path of another size": _zipped(_file("a.wav", pax_headers={"path": "../../mine/kept.txt"})),
    "an encoding that is none": _zipped(
        _file("a.wav", pax_headers={"hdrcharset": "BINARY", "path": "\udcff"})
    ),
    "a file of zeros": _bomb(_header(3 << 30), 3072),
    "zeros after the end": _bomb(_tar(_file("a.wav")), 6000),
    "attributes of zeros": _bomb(_header(2 << 30, tarfile.XHDTYPE), 2048),
    "a long name of zeros": _bomb(_header(2 << 30, tarfile.GNUTYPE_LONGNAME), 2048),
    "a link of zeros": _bomb(_header(3 << 30, LINK), 3072),
    "a file of more than there is": _bomb(_header(8 << 30), 1),
    "cut": lambda file: file.write_bytes(gzip.compress(_tar(_file("a.wav")))[:60]),
    "two": lambda file: file.write_bytes(gzip.compress(_tar(_file("a.wav"))) * 2),
    "a zip": lambda file: file.write_bytes(b"PK\3\4" + bytes(500)),
    "xz of a large dictionary": lambda file: file.write_bytes(
        b"\x5d\x00\x00\x00\xff" + b"\xff" * 8 + bytes(100)
    ),
    "bzip2 of nothing": lambda file: file.write_bytes(b"BZh9" + bytes(100)),
}  # fmt: skip
UNPACKED = ("as it is", "a name of two lines", "a name of other bytes", "its own mark", "a pipe",
            "a device", "a link, and a file in it", "a link, and a file over it", "two",
            "a hard link, and a file over it", "a link to itself", "no name", "a size of text",
            "the same file a thousand times", "an encoding that is none")  # fmt: skip
COMMANDS: dict[str, Callable[[str], None]] = {"unpack": _read}
