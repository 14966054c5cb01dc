"""Language tags, as Common Voice writes them."""

import re

from sbkit.base.errors import ConfigError

# The codes of ISO 639-1, each followed by the three-letter codes of ISO 639-2 and of corpora.
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


def _read_codes() -> dict[str, str]:
    """Return the two-letter code of each three-letter code."""
    two_letter_of: dict[str, str] = {}
    for codes in _CODES.split(","):
        two_letter_code, *three_letter_codes = codes.split()
        two_letter_of |= dict.fromkeys(three_letter_codes, two_letter_code)
    return two_letter_of


_TWO_LETTER_OF = _read_codes()
TWO_LETTER_CODES = frozenset(_TWO_LETTER_OF.values())

# A language, then a script, a region and variants: de, sv-SE, zh-Hant-TW, rm-sursilv.
_TAG = re.compile(
    r"[a-z]{2,3}([-_][a-z]{4})?([-_]([a-z]{2}|\d{3}))?([-_][a-z0-9]{5,8})*", re.IGNORECASE
)


def check_language(value: object) -> str:
    """Check a language tag, an ISO 639 code with or without a region, and return it.

    Raises ConfigError for a two-letter code that does not exist, and for a three-letter code of a
    language that has a two-letter code. Any other three-letter code passes, because the 7,800 codes
    of ISO 639-3 are not listed here.
    """
    if value is False:
        raise ConfigError(
            "`language` must be a tag such as de or sv-SE, but is false: YAML reads an unquoted no "
            'as false. For Norwegian write language: "no", or nb-NO or nn-NO.'
        )
    code = primary_language(str(value))
    if not _TAG.fullmatch(str(value)) or (len(code) == 2 and code not in TWO_LETTER_CODES):
        raise ConfigError(
            "`language` must be the tag of a known language, such as de, sv-SE or zh-CN, but is "
            f"{value!r}. Write its ISO 639 code."
        )
    if code in _TWO_LETTER_OF:
        tag = _TWO_LETTER_OF[code] + str(value)[len(code) :]
        raise ConfigError(
            "`language` must be the two-letter code of a language that has one, but is "
            f"{value!r}. Write {tag}."
        )
    return str(value)


def language_tags(value: object) -> tuple[str, ...]:
    """Check the value of the key ``language``, a tag or a list, and return its tags."""
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise ConfigError("`language` must name a language, such as en, but is an empty list.")
    tags: dict[str, str] = {}
    for item in values:
        tag = check_language(item)
        tags.setdefault(tag.lower(), tag)
    return tuple(tags.values())


def single_language_tag(value: object) -> str:
    """Return the first tag of the key ``language``, or "" if its tags are of several languages.

    Regions do not count: de and de-AT are one language.
    """
    tags = language_tags(value)
    languages = {primary_language(tag) for tag in tags}
    return tags[0] if len(languages) == 1 else ""


def primary_language(tag: str) -> str:
    """Return the language of a tag without its script and region: ``sv`` for ``sv-SE``."""
    return re.split("[-_]", tag.strip())[0].lower()
