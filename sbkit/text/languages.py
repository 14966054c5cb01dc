"""Language tags: the known ones, and advice for the others."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from sbkit.base.errors import SbkitError

# The codes of ISO 639-1, and those of three letters that ISO 639-2, and corpora, have for them.
_CODES = """
aa aar, ab abk, ae ave, af afr, ak aka, am amh, an arg, ar ara arb, as asm, av ava, ay aym, az aze,
ba bak, be bel, bg bul, bh bih, bi bis, bm bam, bn ben, bo bod tib, br bre, bs bos, ca cat, ce che,
ch cha, co cos, cr cre, cs ces cze, cu chu, cv chv, cy cym wel, da dan, de deu ger, dv div, dz dzo,
ee ewe, el ell gre, en eng, eo epo, es spa, et est, eu eus baq, fa fas per, ff ful, fi fin, fj fij,
fo fao, fr fra fre, fy fry, ga gle, gd gla, gl glg, gn grn, gu guj, gv glv, ha hau, he heb, hi hin,
ho hmo, hr hrv, ht hat, hu hun, hy hye arm, hz her, ia ina, id ind, ie ile, ig ibo, ii iii, ik ipk,
io ido, is isl ice, it ita, iu iku, ja jpn, jv jav, ka kat geo, kg kon, ki kik, kj kua, kk kaz, kl
kal, km khm, kn kan, ko kor, kr kau, ks kas, ku kur, kv kom, kw cor, ky kir, la lat, lb ltz, lg lug,
li lim, ln lin, lo lao, lt lit, lu lub, lv lav, mg mlg, mh mah, mi mri mao, mk mkd mac, ml mal, mn
mon, mr mar, ms msa may, mt mlt, my mya bur, na nau, nb nob, nd nde, ne nep, ng ndo, nl nld dut, nn
nno, no nor, nr nbl, nv nav, ny nya, oc oci, oj oji, om orm, or ori, os oss, pa pan, pi pli, pl pol,
ps pus, pt por, qu que, rm roh, rn run, ro ron rum, ru rus, rw kin, sa san, sc srd, sd snd, se sme,
sg sag, si sin, sk slk slo, sl slv, sm smo, sn sna, so som, sq sqi alb, sr srp, ss ssw, st sot, su
sun, sv swe, sw swa, ta tam, te tel, tg tgk, th tha, ti tir, tk tuk, tl tgl, tn tsn, to ton, tr tur,
ts tso, tt tat, tw twi, ty tah, ug uig, uk ukr, ur urd, uz uzb, ve ven, vi vie, vo vol, wa wln, wo
wol, xh xho, yi yid, yo yor, za zha, zh zho chi cmn, zu zul
"""
_LONG_CODES = {
    long: short for short, *others in map(str.split, _CODES.split(",")) for long in others
}
KNOWN_CODES = frozenset(_LONG_CODES.values())

# Names in English and in the language itself, and codes of countries.
_OTHER_NAMES: Mapping[str, str] = {
    "ar": "arabic",
    "ca": "catalan català",
    "cs": "czech čeština",
    "cy": "welsh cymraeg",
    "da": "danish dansk",
    "de": "german deutsch",
    "el": "greek",
    "en": "english",
    "es": "spanish español espanol castellano",
    "fa": "persian farsi",
    "fi": "finnish suomi",
    "fr": "french français francais",
    "he": "hebrew",
    "hi": "hindi",
    "hu": "hungarian magyar",
    "it": "italian italiano",
    "ja": "japanese jp",
    "ko": "korean kr",
    "nb": "bokmål bokmal",
    "nl": "dutch nederlands",
    "nn": "nynorsk",
    "no": "norwegian norsk",
    "pl": "polish polski",
    "pt": "portuguese português portugues",
    "ro": "romanian română",
    "ru": "russian русский",
    "sv": "swedish svenska",
    "sw": "swahili kiswahili",
    "th": "thai",
    "tr": "turkish türkçe turkce",
    "uk": "ukrainian українська ua",
    "vi": "vietnamese",
    "yue": "cantonese",
    "zh": "chinese mandarin cn 中文",
}
_MEANT = _LONG_CODES | {name: tag for tag, names in _OTHER_NAMES.items() for name in names.split()}
# A language, then a script, a region and variants: de, sv-SE, zh-Hant-TW, rm-sursilv.
_TAG = re.compile(
    r"[a-z]{2,3}([-_][a-z]{4})?([-_]([a-z]{2}|\d{3}))?([-_][a-z0-9]{5,8})*",
    re.IGNORECASE,
)


def check_language(value: object) -> str:
    """Return a language tag: a code of ISO 639, alone or with a region, as Common Voice writes it.

    A code of three letters is taken for one of ISO 639-3, unless there is one of two letters.
    Raises SbkitError where it is no tag, or one of no known language.
    """
    if value is False:
        raise SbkitError(
            "`language` must be a tag as de or sv-SE, but is false: YAML reads no without quotes "
            'as false. For Norwegian write language: "no", or nb-NO or nn-NO.'
        )
    if isinstance(value, str) and _TAG.fullmatch(value) and _is_known(primary(value)):
        return value
    raise SbkitError(
        "`language` must be the tag of a known language, as de, sv-SE or zh-CN, but is "
        f"{value!r}. {_advice(str(value))}"
    )


def _is_known(code: str) -> bool:
    return code in KNOWN_CODES or (len(code) == 3 and code not in _LONG_CODES)


def language_tags(value: object) -> tuple[str, ...]:
    """Return the tags of the knob ``language``: of one language or of a list of languages.

    Raises SbkitError where the list is empty, or one of them is no known tag.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise SbkitError("`language` must name a language, but is an empty list. Write en.")
    return tuple(dict.fromkeys(map(check_language, values)))


def spoken_language(value: object) -> str:
    """Return the tag of the knob ``language``, or "" for several languages."""
    tags = language_tags(value)
    return tags[0] if len(tags) == 1 else ""


def primary(tag: str) -> str:
    """Return the language of a tag without its region: ``sv`` of ``sv-SE``."""
    return re.split("[-_]", tag.strip())[0].lower()


def _advice(value: str) -> str:
    """Name the nearest tag: by name, by its first part, or by its letters."""
    given = value.strip().lower()
    first = re.split(r"[\W_]", given)[0]
    for name in (given, first):
        if name in KNOWN_CODES or name in _MEANT:
            return f"Write {_MEANT.get(name, name)}."
    if value == "None":
        return "Write en for English."
    near = get_close_matches(given, [*_MEANT, *sorted(KNOWN_CODES)], n=1, cutoff=0.6)
    return f"Did you mean {_MEANT.get(near[0], near[0])}?" if near else "Write en for English."
