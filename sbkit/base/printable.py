"""Text of others on a terminal: what would move the cursor or hide letters is written out."""

import json
import unicodedata

JOINERS = "\u200c\u200d"  # invisible, and part of words in Persian and Hindi
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Escape control characters, line ends and changes of direction: ESC becomes ``\x1b``."""
    return "".join(_escaped(each) if _is_hidden(each) else each for each in text)


def printable_json(text: str) -> str:
    r"""Escape in JSON what `printable` does, but its own line ends: ESC stays ``\u001b``."""
    return "".join(json.dumps(c)[1:-1] if c != "\n" and _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN and character not in JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
