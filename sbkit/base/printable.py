"""Text of others on a terminal: what would move the cursor or hide letters is written out."""

import json
import unicodedata

JOINERS = "\u200c\u200d"  # invisible, and part of words in Persian and Hindi
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Escape control characters, line ends and changes of direction: ESC becomes ``\x1b``."""
    return "".join(_escaped(each) if _is_hidden(each) else each for each in text)


def printable_json(text: str) -> str:
    r"""Escape in JSON what `printable` does, as JSON has it: ESC stays ``\u001b``.

    A line end is the JSON's own: one within a text has been written as ``\n``.
    """
    hidden = (each != "\n" and _is_hidden(each) for each in text)
    return "".join(json.dumps(c)[1:-1] if h else c for c, h in zip(text, hidden, strict=True))


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN and character not in JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
