"""Text of others on a terminal: what would move the cursor or hide letters is written out."""

import unicodedata

JOINERS = "\u200c\u200d"  # invisible, and part of words in Persian and Hindi
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Escape control characters, line ends and changes of direction: ESC becomes ``\x1b``."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN or character in JOINERS:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
