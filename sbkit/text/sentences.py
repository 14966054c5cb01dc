"""Split a text that somebody reads aloud into its sentences, and long ones into parts."""

import re

MAX_SENTENCE_SECONDS = 20.0  # a longer sentence is split, at the average speed of the recording
# Limits of the longest sentence: a text of more recordings looks fast, one of a part looks slow.
MIN_LETTERS, MAX_LETTERS = 40, 300
_CLOSING = "\"'\xbb\u201d\u2019)\\]\u300d\u300f"  # quotes and brackets
# Sentences of Chinese and Japanese end without a space, and those of Indic languages with a danda.
_SENTENCE_END = re.compile(
    rf"(?:[.!?\u2026\u0964\u061f\u06d4\u0589\u1362]+[{_CLOSING}]*(?=\s)"
    r"|[\u3002\uff01\uff1f]+[\u201d\u300d\u300f]*)\s*"
)
_ABBREVIATION = re.compile(r"\b(?:[^\W\d_]|[A-Z][a-z]{1,2})\.\s*$")  # J. Mr. St.
_CLAUSE_ENDS = (
    re.compile(r"[,;:\u2014\u3001\uff0c\uff1b\u061b\u060c]\s*"),
    re.compile(r"\s+"),
    re.compile(""),
)


def split_text(text: str, seconds: float) -> list[str]:
    r"""Split a text that takes ``seconds`` to speak into sentences, and long ones into parts.

    An empty line ends a sentence; other line ends do not.

    >>> split_text("Mr. Wu came\nhome. It rained.", 4)
    ['Mr. Wu came home.', 'It rained.']
    """
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    speed = sum(map(len, paragraphs)) / max(seconds, 1.0)
    max_letters = max(MIN_LETTERS, min(MAX_LETTERS, round(speed * MAX_SENTENCE_SECONDS)))
    sentences: list[str] = []
    for paragraph in paragraphs:
        start = 0
        for mark in _SENTENCE_END.finditer(paragraph):
            sentence = paragraph[start : mark.end()]
            if not _ABBREVIATION.search(sentence):
                sentences.append(sentence)
                start = mark.end()
        sentences.append(paragraph[start:])
    return [part for sentence in sentences for part in _split_long(sentence.strip(), max_letters)]


def _split_long(sentence: str, max_letters: int) -> list[str]:
    """Split a sentence at the comma, else the space, in its middle, until no part is too long."""
    if len(sentence) <= max_letters:
        return [sentence] if sentence else []
    quarter = len(sentence) // 4
    for pattern in _CLAUSE_ENDS:
        cuts = [match.end() for match in pattern.finditer(sentence, quarter, 3 * quarter)]
        if cuts:
            break
    middle = min(cuts, key=lambda cut: abs(cut - len(sentence) / 2))
    halves = (sentence[:middle].strip(), sentence[middle:].strip())
    return [part for half in halves for part in _split_long(half, max_letters)]
