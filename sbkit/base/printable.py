"""Text that came from elsewhere, made safe to print on a terminal."""

KEPT = "\n\t"


def printable(text: str) -> str:
    """Return the text with every control character escaped, but for line breaks and tabs."""
    return "".join(
        each if each in KEPT or each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )
