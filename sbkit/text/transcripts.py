"""Turn transcripts into the text that a model is trained on, and split texts into sentences.

Tags in brackets, such as ``[noise]``, describe sounds in transcripts of spontaneous speech.
"""

import html
import re
from collections.abc import Callable, Collection
from functools import partial

import regex

from sbkit.base.errors import ConfigError, concerning
from sbkit.text.normalization import TextTable, compose, normalize

_NAME = r"[^\W_][\w-]*"
TAG_TOKEN = re.compile(rf"\[({_NAME})\]")  # the token of a tag that is kept
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-fA-F]{1,6}|[a-zA-Z]\w{1,30});")
_JSON_CODES = re.compile(r"(?:\\u[\da-fA-F]{4})+")  # "f\u00fcr"
_ESCAPED_APOSTROPHE = re.compile(r"\\+(?=['\u2019])")
_NESTED = r"[^][]*+"  # tags inside tags, up to three levels
for _ in range(3):
    _NESTED = rf"[^][]*+(?:\[{_NESTED}\][^][]*+)*+"
# How transcription conventions mark sounds and more. A `tag` is dropped or kept, a `sound` is a tag
# if it is one of `SOUNDS`, a `word` was spoken and stays, and a `mark` is punctuation.
_CONVENTIONS = {
    "Whisper": r"<\|(?P<tag>[^<>|\n]{1,40})\|>",  # <|en|><|0.00|>
    "GigaSpeech": r"\s*<(?P<mark>COMMA|PERIOD|QUESTIONMARK|EXCLAMATIONPOINT)>",
    # [laughter-word], and in the Dialog Act Corpus {F uh, }
    "Switchboard": r"\[laughter-(?P<word>[^][\n]+)\]|\{[CDEF] (?P<word>[^{}\n]*)\}",
    "HTK, Kaldi": r"(?<![\w!])!(?P<tag>(?i:SIL|NULL|ENTER|EXIT))\b|(?<!\S)(?P<tag>SPN|NSN)(?!\S)",
    # %uh is the word uh; (%hesitation) of NIST's STM stands for any.
    "LDC": r"%(?P<tag>(?i:hesitation))\b|(?<![\w%]|\d\s)%(?P<word>[^\W\d_]\w*)",
    # Sounds &=laughs, fragments &+fr, fillers &-uh, <retraced words> [/], pauses (.), and xxx.
    "CHAT": r"(?<![\w&])&(?:[=+~](?P<tag>[\w:]+)|-(?P<word>\w+))"
    r"|<(?P<word>[^<>\n]+)>(?=\s*\[[/?=!*<>:%])|\((?P<tag>\.{1,3})\)"
    r"|(?<![\w.])(?P<tag>xxx|yyy|www(?! (?:dot|point|punkt|punto)\b))(?![\w.]*\w)",
    "ends of CHAT": r"(?<!\S)\+(?P<tag>\"?/{0,2}[.?]|/?\.\.[.?]|!\?)(?!\S)",  # +... and +//.
    "plus signs": r"(?<!\S)\+{2,3}(?P<tag>\w[\w -]{0,38}?)\+{2,3}(?!\S)",  # ++cough++
    "chats": r"(?<![\w*])\*{1,2}(?P<sound>\w[^*\n]{0,38}?)\*{1,2}(?![\w*])|(?<!\S)#(?P<sound>\w+)",
    "brackets": rf"\[(?P<tag>{_NESTED})\]|\uff3b(?P<tag>[^\n]+?)\uff3d"
    r"|[(\uff08](?P<sound>[^()\n]{1,40})[)\uff09]"
    r"|[<\uff1c](?P<tag>[/#]?\w[^<>\n]{0,40})[>\uff1e]|[{\uff5b](?P<tag>[^{}\n]{1,40})[}\uff5d]",
    "single brackets": r"\[(?P<tag>[^][\s]*)|(?<![^][\s])(?P<tag>[^][\s]*+)\]",  # at a word
}
_UNSPOKEN = regex.compile("|".join(_CONVENTIONS.values()))
_MAY_HAVE_TAGS = re.compile(r"[^\w\s.,;:?'\"-]|SPN|NSN|xxx|yyy|www")  # four times as fast
_GIGASPEECH = {"COMMA": ",", "PERIOD": ".", "QUESTIONMARK": "?", "EXCLAMATIONPOINT": "!"}
# Words in parentheses may have been spoken, unless they contain one of these.
SOUNDS = re.compile(
    r"\b(laugh|laughter|laughs|laughing|chuckles?|giggles?|noise|noises|cough|coughs|coughing|"
    r"breath|breathing|breathes|inhales?|exhales?|sighs?|sniffs?|sneezes?|throat|music|applause|"
    r"silence|pause|inaudible|unintelligible|indiscernible|unclear|crosstalk|foreign|unk|sniffles|"
    r"gasps?|cheers|cheering|beeps?|beeping|indistinct|sings|singing|whispers|whispering|sound|"
    r"crowd|claps|clapping|groans|crying|humming|ringing|clicks?|static|笑|笑い|笑声|拍手|掌声|咳)\b",
    re.IGNORECASE,
)

_NARROW = {ord(bracket) + 0xFEE0: bracket for bracket in "()[]{}<>"}  # by their full-width codes

OnDropped = Callable[[str], object]


def transcript_normalizer(
    table: TextTable, kept_names: Collection[str] = ()
) -> Callable[[str], str]:
    """Return the function that normalizes transcripts, for training and scoring alike.

    kept_names: the names of tags that stay, written ``[name]``.

    >>> transcript_normalizer(TextTable(numbers="en"), ["cough"])("I paid $3.50 (laughs) <Cough>")
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
                f"{table.numbers}.",
                keys=("text", "numbers"),
            )
        spell = partial(read_numbers, language=table.numbers, whole=True)

    def normalize_transcript(text: str) -> str:
        text = select_tags(text, kept_names)
        parts = re.split(f"({_pattern(kept_names)})", text) if kept_names else [text]
        for index, words in enumerate(parts[::2]):
            spelled = spell(compose(words, table.punctuation))
            parts[2 * index] = normalize(spelled, "", table)
        return " ".join(filter(None, parts))

    return normalize_transcript


@concerning("keep_tags")
def parse_tag_names(value: object) -> tuple[str, ...]:
    """Check the value of the key ``keep_tags``, and return its names."""
    names = [] if value is None else value
    if not isinstance(names, list | tuple) or not all(re.fullmatch(_NAME, str(n)) for n in names):
        raise ConfigError(
            "`keep_tags` must be a list of names without their brackets, such as [noise], but is "
            f"{value!r}."
        )
    return tuple(dict.fromkeys(str(name).lower() for name in names))


def select_tags(
    text: str, kept_names: Collection[str] = (), on_dropped: OnDropped = lambda written: None
) -> str:
    """Drop the tags of a text, except for those with a kept name, which are written ``[name]``.

    If a square bracket lacks its partner, the tag is the word that it touches. Escapes become the
    characters that they stand for.

    on_dropped: called with each tag that is dropped.

    >>> select_tags("I &amp; [um [laughter]] (yes) *coughs* %uh [noise ship", ["noise", "laughter"])
    'I & [laughter] (yes) uh [noise] ship'
    """

    def write(match: regex.Match[str]) -> str:
        kind = next(kind for kind in ("tag", "sound", "word", "mark") if match[kind] is not None)
        content = match[kind]
        if kind == "mark":
            return _GIGASPEECH[content]
        if kind == "word":
            return str(content)
        if kind == "sound" and not SOUNDS.search(content):
            return f"{match[0][0]}{_UNSPOKEN.sub(write, match[0][1:])}"  # it may contain tags
        names = ["_".join(re.findall(r"[^\s:=!]+", part)) for part in re.split(r"[][]", content)]
        tags = [f"[{name.lower()}]" for name in names if name.lower() in kept_names]
        if not tags:
            on_dropped(match[0].translate(_NARROW))
        return f" {' '.join(tags)} "

    text = undo_escapes(text)
    return " ".join((_UNSPOKEN.sub(write, text) if _MAY_HAVE_TAGS.search(text) else text).split())


def undo_escapes(text: str) -> str:
    r"""Write characters for entities of HTML, for codes of JSON, and for an escaped apostrophe.

    >>> undo_escapes(r"it&amp;apos;s, f\u00fcr, it\'s")
    "it's, für, it's"
    """
    if "&" not in text and "\\" not in text:
        return text
    while (unescaped := _ENTITY.sub(lambda match: html.unescape(match[0]), text)) != text:
        text = unescaped
    text = _JSON_CODES.sub(_decode_json, text)
    return _ESCAPED_APOSTROPHE.sub("", text)


def _decode_json(codes: re.Match[str]) -> str:
    units = b"".join(int(code, 16).to_bytes(2, "big") for code in codes[0].split("\\u")[1:])
    return units.decode("utf-16-be", "replace")


def remove_tags(text: str, names: Collection[str]) -> str:
    """Return a normalized text without its tags ``[name]``."""
    return re.sub(_pattern(names), "", text) if names else text


def _pattern(names: Collection[str]) -> str:
    return "|".join(re.escape(f"[{name}]") for name in names)


# ---- sentences of a text that is read aloud

MAX_SENTENCE_SECONDS = 20.0  # a longer sentence is split, at the average speed of the recording
# Limits of the longest sentence, because the text may cover more than the recording, or less.
MIN_LETTERS, MAX_LETTERS = 40, 300
_CLOSING = "\"'\xbb\u201d\u2019)\\]\u300d\u300f"  # quotes and brackets
# Chinese and Japanese sentences end without a space, and Indic ones with a danda.
_SENTENCE_END = regex.compile(
    rf"(?:[\p{{STerm}}\u2026\u0f0d-\u0f12]+[{_CLOSING}]*(?=\s)"
    r"|[\u3002\uff01\uff1f]+[\u201d\u300d\u300f]*)\s*"
)
_ABBREVIATION = re.compile(r"\b(?:[^\W\d_]|[A-Z][a-z]{1,2})\.\s*$")  # J. Mr. St.
_CLAUSE_ENDS = (
    re.compile(r"[,;:\u2014\u3001\uff0c\uff1b\u061b\u060c]\s*"),
    re.compile(r"\s+"),
    re.compile(""),
)


def split_text(text: str, seconds: float) -> list[str]:
    r"""Split a text into sentences, and long ones into parts.

    seconds: the duration of the recording of the text.

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
