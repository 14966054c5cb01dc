"""Language tags, in the notation of Common Voice."""

import re
import unicodedata
from collections import Counter, defaultdict

from sbkit.base.errors import ConfigError, concerning

# The codes of ISO 639-1, each followed by the three-letter codes of ISO 639-2 and of corpora, then
# English names of one word, from CLDR and Whisper.
_CODES = """
aa aar afar, ab abk abkhazian, ae ave avestan, af afr afrikaans, ak aka akan, am amh amharic, an arg
aragonese, ar ara arb arabic, as asm assamese, av ava avaric, ay aym aymara, az aze azerbaijani, ba
bak bashkir, be bel belarusian, bg bul bulgarian, bh bih, bi bis bislama, bm bam bambara, bn ben
bangla bengali, bo bod tib tibetan, br bre breton, bs bos bosnian, ca cat catalan valencian, ce che
chechen, ch cha chamorro, co cos corsican, cr cre cree, cs ces cze czech, cu chu, cv chv chuvash, cy
cym wel welsh, da dan danish, de deu ger german, dv div divehi, dz dzo dzongkha, ee ewe, el ell gre
greek, en eng english, eo epo esperanto, es spa spanish castilian, et est estonian, eu eus baq
basque, fa fas per persian farsi, ff ful fula, fi fin finnish, fj fij fijian, fo fao faroese, fr fra
fre french, fy fry frisian, ga gle irish, gd gla gaelic, gl glg galician, gn grn guarani, gu guj
gujarati, gv glv manx, ha hau hausa, he heb hebrew, hi hin hindi, ho hmo, hr hrv croatian, ht hat
haitian, hu hun hungarian, hy hye arm armenian, hz her herero, ia ina interlingua, id ind
indonesian, ie ile interlingue, ig ibo igbo, ii iii, ik ipk inupiaq, io ido, is isl ice icelandic,
it ita italian, iu iku inuktitut, ja jpn japanese, jv jav javanese, ka kat geo georgian, kg kon
kongo, ki kik kikuyu, kj kua kuanyama, kk kaz kazakh, kl kal kalaallisut, km khm khmer, kn kan
kannada, ko kor korean, kr kau kanuri, ks kas kashmiri, ku kur kurdish, kv kom komi, kw cor cornish,
ky kir kyrgyz kirghiz, la lat latin, lb ltz luxembourgish letzeburgesch, lg lug ganda, li lim
limburgish, ln lin lingala, lo lao, lt lit lithuanian, lu lub, lv lav latvian, mg mlg malagasy, mh
mah marshallese, mi mri mao maori, mk mkd mac macedonian, ml mal malayalam, mn mon mongolian, mr mar
marathi, ms msa may malay, mt mlt maltese, my mya bur burmese myanmar, na nau nauru, nb nob bokmål,
nd nde, ne nep nepali, ng ndo ndonga, nl nld dut dutch flemish, nn nno nynorsk, no nor norwegian, nr
nbl, nv nav navajo, ny nya nyanja, oc oci occitan, oj oji ojibwa, om orm oromo, or ori odia oriya,
os oss ossetic, pa pan punjabi panjabi, pi pli pali, pl pol polish, ps pus pashto pushto, pt por
portuguese, qu que quechua, rm roh romansh, rn run rundi, ro ron rum romanian moldavian moldovan, ru
rus russian, rw kin kinyarwanda, sa san sanskrit, sc srd sardinian, sd snd sindhi, se sme, sg sag
sango, si sin sinhala sinhalese, sk slk slo slovak, sl slv slovenian, sm smo samoan, sn sna shona,
so som somali, sq sqi alb albanian, sr srp serbian, ss ssw swati, st sot sotho, su sun sundanese, sv
swe swedish, sw swa swahili, ta tam tamil, te tel telugu, tg tgk tajik, th tha thai, ti tir
tigrinya, tk tuk turkmen, tl tgl tagalog, tn tsn tswana, to ton tongan, tr tur turkish, ts tso
tsonga, tt tat tatar, tw twi, ty tah tahitian, ug uig uyghur, uk ukr ukrainian, ur urd urdu, uz uzb
uzbek, ve ven venda, vi vie vietnamese, vo vol volapük, wa wln walloon, wo wol wolof, xh xho xhosa,
yi yid yiddish, yo yor yoruba, za zha zhuang, zh zho chi cmn chinese mandarin, zu zul zulu
"""


_TWO_LETTER_CODE = {  # by three-letter code and English name
    synonym: two_letter_code
    for two_letter_code, *synonyms in map(str.split, _CODES.split(","))
    for synonym in synonyms
}
TWO_LETTER_CODES = frozenset(_TWO_LETTER_CODE.values())

# Languages with a two-letter code, each with the three-letter code of its usual form, such as
# Northern Uzbek: CLDR's aliases for macrolanguages, as Babel 2.18 has them. They are not refused,
# because folders of corpora are named by them.
_USUAL_FORMS = """
ak fat, ay ayr, az azj, cr cwd, et ekk, fa pes, ff fuc, gn gug, ik esk, iu ike, kg kng, kr knc, ku
kmr, kv kpv, lv lvs, mg plt, mn khk, ms zsm, ne npi, oj ojg, om gaz, or ory, ps pbu, qu quz, sc src,
sq als, sw swh, uz uzn, yi ydd, za zyb
"""
_LANGUAGE_OF_FORM = {form: code for code, form in map(str.split, _USUAL_FORMS.split(","))}

SEVERAL_LANGUAGES = "mul"  # in ISO 639
WHISPER_CODES = {"jv": "jw", "nb": "no"}  # where Whisper's code differs from ISO 639

# A language, then a script, a region and variants: de, sv-SE, zh-Hant-TW, rm-sursilv.
_LANGUAGE_TAG = re.compile(
    r"[a-z]{2,3}([-_][a-z]{4})?([-_]([a-z]{2}|\d{3}))?([-_][a-z0-9]{5,8})*", re.IGNORECASE
)


@concerning("language")
def parse_language(value: object) -> str:
    """Check a language tag, an ISO 639 code with or without a region, and return it.

    A three-letter code is accepted unless its language has a two-letter one: ISO 639-3 has 7,800.
    """
    code = primary_language(str(value))
    if not _LANGUAGE_TAG.fullmatch(str(value)) or (len(code) == 2 and code not in TWO_LETTER_CODES):
        raise ConfigError(
            f"`language` must be the tag of a known language, such as sv-SE, but is {value!r}. "
            "Write its ISO 639 code."
        )
    if code in _TWO_LETTER_CODE:
        tag = _TWO_LETTER_CODE[code] + str(value)[len(code) :]
        raise ConfigError(f"`language` must be a two-letter code, but is {value!r}. Write {tag}.")
    return str(value)


@concerning("language")
def language_tags(value: object) -> tuple[str, ...]:
    """Check the value of the key ``language``, a tag or a list, and return its tags."""
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise ConfigError("`language` must name a language, such as en, but is an empty list.")
    tags: dict[str, str] = {}
    for item in values:
        tag = parse_language(item)
        tags.setdefault(tag.lower(), tag)
    return tuple(tags.values())


def single_language_tag(value: object) -> str:
    """Return the first tag of the key ``language``, or "" if it names several languages.

    Regions do not count: de and de-AT are one language.
    """
    tags = language_tags(value)
    languages = {primary_language(tag) for tag in tags}
    return tags[0] if len(languages) == 1 else ""


def primary_language(tag: str) -> str:
    """Return the language of a tag without its script and region.

    >>> primary_language("sv-SE"), primary_language("uzn_Latn"), primary_language("hsb")
    ('sv', 'uz', 'hsb')
    """
    code = re.split("[-_]", tag.strip())[0].lower()
    return _LANGUAGE_OF_FORM.get(code, code)


def whisper_language(tag: str) -> str:
    """Return Whisper's code of a language, as in its token ``<|en|>``."""
    code = primary_language(tag)
    return WHISPER_CODES.get(code, code)


def language_code(text: str) -> str:
    """Return the code of a language that a tag or an English name stands for.

    >>> language_code("German"), language_code("deu-DE"), language_code("hsb")
    ('de', 'de', 'hsb')
    >>> language_code("Language.EN"), language_code("English (US)")
    ('en', 'en')
    """
    name = re.sub(r"^[A-Z][A-Za-z]+\.(?=[A-Za-z_]+$)", "", text.strip())  # an enumeration's name
    code = primary_language(re.split(r"\W", name)[0])
    return _TWO_LETTER_CODE.get(code, code)


def script_of(letter: str) -> str:
    """Return the first word of a letter's name, which is its script, such as CYRILLIC."""
    return unicodedata.name(letter, "").partition(" ")[0]


def languages_of(letters: Counter[str]) -> list[str]:
    """Return likely languages of counted letters: first by frequent letters, then by script.

    >>> languages_of(Counter("თბილისი")), languages_of(Counter("сегодня вечером"))[0]
    (['ka'], 'ru')
    """
    from charset_normalizer.constant import FREQUENCIES  # a server has no such package

    scripts = {script_of(letter).lower(): None for letter in letters}
    alphabets = defaultdict[str, set[str]](set)  # Japanese has three
    for name, frequent in FREQUENCIES.items():
        alphabets[name.strip("—").lower()].update(frequent)
    counts = {name: sum(letters[char] for char in chars) for name, chars in alphabets.items()}
    # Many languages share most Latin letters.
    min_count = letters.total() / 2 if "latin" in scripts else 0
    names = [name for name, count in Counter(counts).most_common() if count > min_count]
    codes = map(_TWO_LETTER_CODE.get, (*names, *scripts))
    return [*filter(None, dict.fromkeys(codes))]
