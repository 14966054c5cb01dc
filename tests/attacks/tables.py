"""Hostile texts, language models and hotwords."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.attacks.bundles import KINDS
from tests.attacks.case import Case, Place
from tests.attacks.mutate import mutate_bytes, mutate_text

from sbkit.lm.arpa import read_arpa
from tests.attacks.decoders import GOOD, with_models
from tests.attacks.inputs import TRICKS
from tests.inference.bundles import edit_config

STRANGE: dict[str, Callable[[Path], Any]] = {**TRICKS, "a terabyte": KINDS["a terabyte"]}
ESCAPE = "\x1b[2J\x1b[H"


def all_tables() -> Iterator[Case]:
    """List every hostile text, language model and list of hotwords."""
    for name, content in ARPAS.items():
        yield Case("arpa", name, partial(_arpa, partial(_write, content)), harmless=name in LOADED)
    for name, make in STRANGE.items():
        yield Case("arpa", name, partial(_arpa, make))
        yield Case("lm text", name, partial(_lm, make))
        yield Case("hotwords", name, partial(_hotwords, make), harmless=True)
    for seed in range(40):
        mutate = mutate_text if seed % 2 else mutate_bytes
        write = partial(_write, mutate(ARPA, seed))
        yield Case("arpa", f"mutant {seed}", partial(_arpa, write), harmless=True)
    for name, content in TEXTS.items():
        yield Case("lm text", name, partial(_lm, partial(_write, content)), harmless=True)
        yield Case("hotwords", name, partial(_hotwords, partial(_write, content)), harmless=True)
    for name, listed in LISTS.items():
        yield Case("hotwords", f"a list {name}", partial(_listed, listed), harmless=True)


def _write(content: bytes, file: Path) -> None:
    file.write_bytes(content)


# -- language models and hotwords -----------------------------------------------------------------

ARPA = rb"""\data\
ngram 1=5
ngram 2=3

\1-grams:
-1.0	<unk>
-99	<s>	-0.3
-1.0	</s>
-0.7	hello	-0.2
-0.7	fox	-0.2

\2-grams:
-0.3	<s> hello
-0.3	hello fox
-0.3	fox </s>

\end\
"""
ARPAS: dict[str, bytes] = {
    "as it is": ARPA,
    "a line without end": b"\\data\\\nngram 1=" + b"9" * 50_000_000,
    "a first line without end": b"x" * 100_000_000,
    "a word without end": ARPA.replace(b"fox", b"x" * 10_000_000),
    "a count without end": ARPA.replace(b"1=5", b"1=" + b"9" * 5000),
    "a count beyond": ARPA.replace(b"1=5", b"1=99999999999999"),
    "words that move the cursor": ARPA.replace(b"-0.7\tfox", b"-0.7\t\x1b[2J \x1b[2J"),
    "a word of hidden letters": ARPA.replace(b"fox", "\u202exof".encode()),
    "no number": ARPA.replace(b"-0.7\tfox", b"nan\tfox"),
    "infinite": ARPA.replace(b"-0.7\tfox", b"-inf\tfox"),
    "1e308": ARPA.replace(b"-0.7\tfox", b"-1e308\tfox"),
    "a back-off beyond": ARPA.replace(b"fox\t-0.2", b"fox\t1e300"),
}  # fmt: skip
LOADED = ("as it is", "a word without end", "a word of hidden letters")
TEXTS: dict[str, bytes] = {
    "a line without end": b"one two " * 1_000_000,
    "a word without end": b"x" * 5_000_000,
    "words that move the cursor": b"\x1b[2J\x1b[H fox\nfox \x9b2J\n",
    "changes of direction": "fox \u202exof\u202c\nthe \u2066fox".encode(),
    "marks without end": ("e" + "\u0301" * 1_000_000).encode(),
    "many lines": b"".join(b"%d fox\n" % n for n in range(200_000)),
    "zero bytes": b"fox\0the fox\n" * 1000,
    "spaces": b" " * 5_000_000 + b"\nfox\n",
}
LISTS = {
    "of many": ",".join(f"fox {n}" for n in range(300)),
    "that moves the cursor": f"{ESCAPE},fox",
    "of nothing": ",,,",
    "with a zero byte": "fox\0,the fox",
    "that is a folder": "/",
    "that is a device": "/dev/zero",
    "of half a pair": "\ud800,fox",
}


def _arpa(make: Callable[[Path], Any], place: Place) -> list[str]:
    file = place.folder / "a.arpa"
    make(file)
    return ["arpa", str(file)]


def _read_arpa(file: str) -> None:
    read_arpa(Path(file))


def _lm(make: Callable[[Path], Any], place: Place) -> list[str]:
    make(place.folder / "text.txt")
    return ["lm", str(place.folder / "text.txt"), "--out", str(place.folder / "out.arpa")]


def _hotwords(make: Callable[[Path], Any], place: Place) -> list[str]:
    make(place.folder / "words.txt")
    return _listed(str(place.folder / "words.txt"), place)


def _listed(listed: str, place: Place) -> list[str]:
    with_models(place.bundle)
    edit_config(place.bundle, lambda config: config.update(decoder=GOOD))
    return [*place.transcribe(), "--hotwords", listed]


COMMANDS: dict[str, Callable[[str], None]] = {"arpa": _read_arpa}
