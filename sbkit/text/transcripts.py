"""From a transcript as it is written to the text that a model is trained on, and to its sentences.

Tags in brackets, such as ``[noise]``, are what a transcript of free speech says about its sound.
"""

import html
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from sbkit.base.errors import ConfigError
from sbkit.text.normalization import Orthography, compose, normalize

_BRACKET = re.compile(r"([\[\]])")
_NAME = r"[^\W_][\w-]*"
TOKEN = re.compile(rf"\[({_NAME})\]")  # of a tag that is kept
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-fA-F]{1,6}|[a-zA-Z]\w{1,30});")
_TAG = re.compile(r"\[([^][\n]+)\]|<(/?\w[^<>\n]{0,40})>|\{([^{}\n]{1,40})\}|\(([^()\n]{1,40})\)")
# Words in parentheses may have been spoken; these tell what else is heard.
SOUNDS = re.compile(
    r"\b(laugh|laughter|laughs|laughing|chuckles?|giggles?|noise|noises|cough|coughs|coughing|"
    r"breath|breathing|breathes|inhales?|exhales?|sighs?|sniffs?|sneezes?|throat|music|applause|"
    r"silence|pause|inaudible|unintelligible|indiscernible|unclear|crosstalk|foreign|unk|sniffles|"
    r"gasps?|cheers|cheering|beeps?|beeping|indistinct|sings|singing|whispers|whispering|sound|"
    r"crowd|claps|clapping|groans|crying|humming|ringing|clicks?|static|笑|笑い|笑声|拍手|掌声|咳)\b",
    re.IGNORECASE,
)

_NARROW = {ord(bracket) + 0xFEE0: bracket for bracket in "()[]{}<>"}  # by the code of a wide one
_WIDE_TAG = re.compile("[{0}]([^{0}]{{1,40}})[{0}]".format(re.escape("".join(map(chr, _NARROW)))))

Tag = tuple[str, ...]  # the names in a tag, which may contain other tags


def transcript_normalizer(
    table: Orthography, kept_names: Collection[str] = ()
) -> Callable[[str], str]:
    """Return the function that normalizes transcripts; training, scores and texts share it.

    kept_names: the names of tags that stay, written ``[name]``.

    Raises ConfigError if the table spells numbers in a language whose numbers sbkit cannot read.

    >>> transcript_normalizer(Orthography(numbers="en"), ["cough"])("I paid $3.50 (laughs) <Cough>")
    'i paid three dollars and fifty cents [cough]'
    """
    spell: Callable[[str], str] = str
    if table.numbers:
        # num2words takes 0.1 s to import.
        from sbkit.text.verbalize import languages_with_numbers, read_numbers

        languages = languages_with_numbers()
        if table.numbers not in languages:
            raise ConfigError(
                f"`text.numbers: spell` reads {', '.join(languages)}, but `language` is "
                f"{table.numbers}. Write the numbers of the transcripts as words, and take it out."
            )
        spell = partial(read_numbers, language=table.numbers)

    def normalize_transcript(text: str) -> str:
        text = select_tags(unify_tags(text), kept_names)
        parts = re.split(f"({_pattern(kept_names)})", text) if kept_names else [text]
        parts[::2] = [normalize(spell(compose(words)), "", table) for words in parts[::2]]
        return " ".join(filter(None, parts))

    return normalize_transcript


def check_tag_names(value: object) -> tuple[str, ...]:
    """Check the value of the key ``keep_tags``, and return its names; raises ConfigError."""
    names = [] if value is None else value
    if not isinstance(names, list | tuple) or not all(re.fullmatch(_NAME, str(n)) for n in names):
        raise ConfigError(
            "`keep_tags` must be a list of the names of tags without their brackets, with _ for a "
            f"space, but is {value!r}. Write keep_tags: [noise, laughter], or []."
        )
    return tuple(dict.fromkeys(str(name).lower() for name in names))


def select_tags(text: str, kept_names: Collection[str] = ()) -> str:
    """Drop the tags of a text, except for those with a kept name, which are written ``[name]``.

    A tag ends where its bracket is closed, so the tags in it belong to it. If a bracket
    lacks its partner, the tag is the word that it touches.

    >>> select_tags("I [Noise] see [um [laughter]] a [noise ship", ["noise", "laughter"])
    'I [noise] see [laughter] a [noise] ship'
    """
    parts: list[str | Tag] = []
    opened: list[int] = []  # the indices of the parts after brackets that are still open
    for part in _BRACKET.split(text):
        if part == "[":
            opened.append(len(parts))
        elif part != "]":
            parts.append(part)
        elif opened:
            start = opened.pop()
            parts[start:] = [_join_names(parts[start:])]
        else:
            before = str(parts.pop())
            word = re.split(r"\s", before)[-1]
            parts += [before.removesuffix(word), _join_names([word])]
    for start in reversed(opened):
        if isinstance(after := parts[start], str):
            word = re.split(r"\s", after)[0]
            parts[start : start + 1] = [_join_names([word]), after.removeprefix(word)]
    return " ".join("".join(_write(part, kept_names) for part in parts).split())


def unify_tags(text: str) -> str:
    """Write the characters of HTML's entities, and the tags of other brackets as ``[name]``.

    What stands in parentheses is a tag if it names a sound (`SOUNDS`).

    >>> unify_tags("Tom &amp; I (laughs) <unk> left (yes) {cough}")
    'Tom & I [laughs] [unk] left (yes) [cough]'
    """
    text = _unescape(text)
    return _TAG.sub(lambda match: f"[{_content(match)}]" if _is_tag(match) else match[0], text)


def kept_tags(texts: Iterable[str]) -> set[str]:
    """Return the names of the tags that normalized texts have."""
    return {name for text in texts if "[" in text for name in TOKEN.findall(text)}


def count_dropped_tags(texts: Iterable[str], kept_names: Collection[str] = ()) -> Counter[str]:
    """Count the tags of texts that are not kept, as they are written."""
    dropped = Counter[str]()
    for text in texts:
        for match in _TAG.finditer(_unescape(text)):
            if _is_tag(match) and not select_tags(f"[{_content(match)}]", kept_names):
                dropped[match[0]] += 1
    return dropped


def _unescape(text: str) -> str:
    """Write the characters of entities, and narrow brackets around tags that have wide ones."""
    text = _ENTITY.sub(lambda match: html.unescape(match[0]), text)
    return _WIDE_TAG.sub(_to_narrow, text)


def _to_narrow(match: re.Match[str]) -> str:
    narrow = match[0].translate(_NARROW)
    tag = _TAG.fullmatch(narrow)
    return narrow if tag and _is_tag(tag) else match[0]


def _content(match: re.Match[str]) -> str:
    return str(next(filter(None, match.groups())))


def _is_tag(match: re.Match[str]) -> bool:
    in_parentheses = match[4]
    return in_parentheses is None or SOUNDS.search(in_parentheses) is not None


def _join_names(parts: Sequence[str | Tag]) -> Tag:
    """Return all names in the parts of a tag."""
    names: list[str] = []
    for part in parts:
        names += ["_".join(part.lower().split())] if isinstance(part, str) else part
    return tuple(names)


def _write(part: str | Tag, kept_names: Collection[str]) -> str:
    if isinstance(part, str):
        return part
    return " ".join(["", *(f"[{name}]" for name in part if name in kept_names), ""])


def remove_tags(text: str, names: Collection[str]) -> str:
    """Return a normalized text without its tags ``[name]``."""
    return re.sub(_pattern(names), "", text) if names else text


def _pattern(names: Collection[str]) -> str:
    return "|".join(re.escape(f"[{name}]") for name in names)


# Sentences of a text that somebody reads aloud

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
