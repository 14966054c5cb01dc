"""Files with a few things changed at random: bytes, lines, or values of JSON."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
# What might stand in the place of any value.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 2**31, 2**63, -(2**64), 10**400, 1e308, float("nan"), float("-inf"),
    "", "\x1b[2J\x1b[H", "\u202etxet", "\x9b2J", "a\nb", "\0", "../../mine/kept.txt", "/dev/zero",
    "\ud800", "x" * 100_000, "!!python/object/apply:os.system [ls]", "<script>alert(1)</script>",
    [], [None], {}, {"a": {}}, [[[1]]], DEEP,
)  # fmt: skip
WORDS = (
    b"NaN", b"1e999", b"-1", b"9" * 5000, b"\x1b[2J", b"\xff\xfe", b"\0", b"", b"\\", b'"', b"|",
    b"\t\t\t", b"{" * 2000, b"[" * 100_000, b"&a *a", b"../../mine/kept.txt", b"\xe2\x80\xae",
    b"0x7fffffffffffffff", b"99999999999", b"!!python/object/apply:os.system [ls]",
)  # fmt: skip


def mutate_bytes(content: bytes, seed: int) -> bytes:
    """Flip bits, cut, fill, repeat, or write a large number into bytes."""
    random = np.random.default_rng(seed)
    spoiled = bytearray(content)
    head = min(len(spoiled), 400) if seed % 2 else len(spoiled)
    place = int(random.integers(0, max(1, head)))
    length = int(random.integers(1, 64))
    match seed % 7:
        case 0 | 1:
            for each in random.integers(0, max(1, head), 1 + seed % 5):
                spoiled[each] ^= 1 << int(random.integers(8))
        case 2:
            del spoiled[place:]
        case 3:
            spoiled[place : place + length] = bytes(length)
        case 4:
            spoiled[place : place + 8] = (2**63 - 1 >> int(random.integers(63))).to_bytes(8)
        case 5:
            spoiled[place:place] = spoiled[: length * 40]
        case _:
            spoiled[place : place + length] = random.bytes(length)
    return bytes(spoiled)


def mutate_text(content: bytes, seed: int) -> bytes:
    """Put something else in the place of a word of a text, or repeat, move or drop a line."""
    random = np.random.default_rng(seed)
    lines = content.split(b"\n")
    at = int(random.integers(0, max(1, len(lines) - 1)))
    other = int(random.integers(0, len(lines)))
    match seed % 6:
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            words = lines[at].replace(b",", b" ").replace(b"\t", b" ").split()
            old = words[int(random.integers(0, len(words)))] if words else b""
            lines[at] = lines[at].replace(old, WORDS[int(random.integers(0, len(WORDS)))], 1)
    return b"\n".join(lines)


def mutate_json(content: bytes, seed: int) -> bytes:
    """Put something else in the place of a value of JSON, take it out, or have its key twice."""
    random = np.random.default_rng(seed)
    whole = {"": json.loads(content)}
    places = _places(whole)
    for each in random.integers(0, len(places), 1 + seed % 2):
        holder, key = places[each]
        if seed % 9 == 8 and key != "":
            holder.pop(key, None) if isinstance(holder, dict) else holder.clear()
        else:
            try:
                holder[key] = VALUES[int(random.integers(0, len(VALUES)))]
            except IndexError:  # it was cleared
                holder.append(None)
    text = json.dumps(whole.get(""))
    if seed % 10 == 9:
        text = text.replace('": ', '": 0, "\\u0000": ', 1).replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode()


def mutate_lines(content: bytes, seed: int) -> bytes:
    """Change a value in one line of JSON Lines."""
    lines = content.split(b"\n")
    at = seed % max(1, len(lines) - 1)
    lines[at] = mutate_json(lines[at], seed)
    return b"\n".join(lines)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """List every place of plain data, as what holds it and its key there."""
    match value:
        case dict():
            keys: list[Any] = list(value)
        case list():
            keys = list(range(len(value)))
        case _:
            return []
    return [pair for key in keys for pair in ((value, key), *_places(value[key]))]


Mutate = Callable[[bytes, int], bytes]


def mutating(mutate: Mutate, seed: int) -> Callable[[Path], None]:
    """Return what changes a file in its place."""
    return partial(_mutate, mutate, seed)


def _mutate(mutate: Mutate, seed: int, file: Path) -> None:
    file.write_bytes(mutate(file.read_bytes(), seed))
