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
_SHORT_CODES = {
    long: short for short, *longs in map(str.split, _CODES.split(",")) for long in longs
}
TWO_LETTER_CODES = frozenset(_SHORT_CODES.values())

# A language, then a script, a region and variants: de, sv-SE, zh-Hant-TW, rm-sursilv.
_TAG = re.compile(
    r"[a-z]{2,3}([-_][a-z]{4})?([-_]([a-z]{2}|\d{3}))?([-_][a-z0-9]{5,8})*",
    re.IGNORECASE,
)


def check_language(value: object) -> str:
    """Check a language tag, an ISO 639 code with or without a region, and return it.

    Raises ConfigError unless a code of two letters is listed above, and a code of three letters has
    no shorter form there. The other 7,800 codes of three letters (ISO 639-3) are not looked up.
    """
    if value is False:
        raise ConfigError(
            "`language` must be a tag such as de or sv-SE, but is false: YAML reads an unquoted no "
            'as false. For Norwegian write language: "no", or nb-NO or nn-NO.'
        )
    code = primary(str(value))
    if not _TAG.fullmatch(str(value)) or (len(code) == 2 and code not in TWO_LETTER_CODES):
        raise ConfigError(
            "`language` must be the tag of a known language, such as de, sv-SE or zh-CN, but is "
            f"{value!r}. Write its ISO 639 code."
        )
    if code in _SHORT_CODES:
        tag = _SHORT_CODES[code] + str(value)[len(code) :]
        raise ConfigError(
            f"`language` must be the shortest code of a language, but is {value!r}. Write {tag}."
        )
    return str(value)


def language_tags(value: object) -> tuple[str, ...]:
    """Check the value of the key ``language``, a tag or a list, and return its tags."""
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise ConfigError("`language` must name a language, such as en, but is an empty list.")
    return tuple(dict.fromkeys(map(check_language, values)))


def spoken_language(value: object) -> str:
    """Return the tag of the key ``language``, or "" for several languages."""
    tags = language_tags(value)
    return tags[0] if len(tags) == 1 else ""


def primary(tag: str) -> str:
    """Return the language of a tag, without its region: ``sv`` for ``sv-SE``."""
    return re.split("[-_]", tag.strip())[0].lower()
