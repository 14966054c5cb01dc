"""Hostile YAML, for `sbkit check --untrusted` and for building what it lets pass."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.attacks.bundles import NAMES
from tests.attacks.case import Case, Place
from tests.check.yaml.test_untrusted import LIVE, REFUSED, bombs

CALL = "!!python/object/apply:os.system ['touch CANARY']"
# How a value may be written so that its text is not what stands there.
SPELLINGS = [
    "",
    "~",
    "null",
    "017",
    "08",
    "0_1",
    "1__0",
    "0o17",
    "0x1F",
    "1e3",
    ".5",
    "1.",
    "+1",
    ">-\n  1",
    "|\n  1",
    "'1'",
    '"1"',
    "!!str 1",
    "!!int '1'",
    "!!float 1",
    "yes",
    "2020-01-01",
    "!ref <z>",
    "!ref <later>",
    "!copy <z>",
    "&q",
    "!PLACEHOLDER",
]
# What may stand around such a value to make a tuple, or a text that is computed to one.
FRAMES = [
    "'({call})%.0s' % <x>",
    "'({call})' * (<x> == <x>)",
    "('({call})' + '%.0s' % <x>)",
    "({call})<x>",
    "<x>({call})",
    '"({call})"[<x>:]',
]


def all_yamls() -> Iterator[Case]:
    """List every hostile YAML."""
    texts = {text: "by hand" for text, _ in (*LIVE, *REFUSED, *bombs())}
    for spelling in SPELLINGS:
        for frame in FRAMES:
            text = frame.format(call=CALL).replace("\\", "\\\\").replace('"', '\\"')
            texts[f'z: null\nx: {spelling}\nm: !ref "{text}"\nlater: 1'] = "spelling"
    for name in NAMES:
        for tag in ("!new", "!name", "!apply", "!applyref", "!module"):
            texts[f"x: {tag}:{name} [touch CANARY]"] = "name"
    for number in (
        "<x>**9**9**9",
        "<x> ** 9999999",
        "<x>*9999999*9999999",
        "9**9**9 + <x>",
        "<x> % 0",
    ):
        texts[f"x: 9\na: !ref {number}"] = "arithmetic"
    texts[f"x: {'9' * 100_000}\ny: !ref <x> * <x>"] = "arithmetic"
    texts["a: &a\n  <<: *a\n  b: 1"] = "merge"
    texts["a: &a {b: 1}\nc: &c\n  <<: [*a, *c]"] = "merge"
    texts["x: " + "[" * 40 + "]" * 40] = "deep"
    texts["? [a]\n: b"] = "key"
    texts["a: 1\na: 2"] = "key"
    texts["- 1"] = "root"
    texts["!new:os.system ['touch CANARY']"] = "root"
    for index, (text, group) in enumerate(texts.items()):
        yield Case(
            f"yaml {group}", f"{index} {text[:60]!r}", partial(_written, text), harmless=True
        )
    yield from included()


def _written(text: str, place: Place) -> list[str]:
    file = place.folder / "foreign.yaml"
    file.write_text(text.replace("CANARY", str(place.canary)), encoding="utf-8")
    return ["build", str(file)]


def included() -> Iterator[Case]:
    """Include what lies elsewhere, or does not end."""
    targets = [
        "/etc/passwd",
        "/etc/shadow",
        "../secret.yaml",
        "sub/../../secret.yaml",
        "link.yaml",
        "pipe.yaml",
        "/dev/zero",
        "zero.yaml",
        "sub",
        "gone.yaml",
        "foreign.yaml",
        "",
        "folder/secret.yaml",
        "\\x00",
        "~/x.yaml",
        "./foreign.yaml",
    ]
    for target in targets:
        yield Case("yaml include", f"include {target}", partial(_including, target))
    for name in ("pipe.yaml", "zero.yaml", "sub", "gone.yaml"):
        yield Case("yaml file", name, partial(_opening, name))


def _including(target: str, place: Place) -> list[str]:
    _strange_files(place.folder)
    return _written(f"x: !include:{target}", place)


def _opening(name: str, place: Place) -> list[str]:
    _strange_files(place.folder)
    return ["build", str(place.folder / name)]


def _strange_files(folder: Path) -> None:
    outside = folder.with_name(f"{folder.name}.outside")
    outside.mkdir(exist_ok=True)
    (outside / "secret.yaml").write_text("token: secret")
    (folder / "link.yaml").symlink_to(outside / "secret.yaml")
    (folder / "folder").symlink_to(outside)
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe.yaml")
