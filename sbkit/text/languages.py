"""Language tags: which ones there are, and what is said of one that there is not."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from sbkit.base.errors import SbkitError

# ISO 639-1, then the languages of Common Voice that have only a code of three letters.
_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de
dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id
ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu
lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu
rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr
ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
abq ace ady aeb ajp apc ary arz ast awa ban bas bax bbl bew bho blo bsh btm brx bum bxr byv cdo ckb
cnh cpx crh cut dag dar dav dru dsb dyu eko ewo fan fil fmp fon fuf gaa gag gom guc gsw hac haw hch
hil hsb ibb ikt inh jbo jiv kaa kab kbd kdh keu kmr koi kpv kru ksf lez lij lld lmo ltg luo lus lzz
mai mau mbf mdf mhr mmc mni mos mrj msi mvy myv nan nap ncj ncx nhe nhi nia nmz nqo nso nyn oto pap
pcd pcm pez pms prs qus quy qvi quc quz sah sat scn sco sdh seh sei shi shn skr smj snv syr szl tar
tig tli tob tok top trv trw tsz tui tvu tyv tzm udm umb ush uzs vec vmw vot vro xkl xmf yav yrk
yue yua zam zgh zoc zza
"""
KNOWN_CODES = frozenset(_CODES.split())

# What else people write: names in English and in the language itself, and codes of three letters.
_OTHER_NAMES: Mapping[str, str] = {
    "ar": "arabic ara",
    "ca": "catalan català cat",
    "cs": "czech čeština cze ces",
    "da": "danish dansk dan",
    "de": "german deutsch deu ger",
    "el": "greek ell gre",
    "en": "english eng",
    "es": "spanish español espanol spa castellano",
    "fa": "persian farsi fas per",
    "fi": "finnish suomi fin",
    "fr": "french français francais fra fre",
    "hi": "hindi hin",
    "hu": "hungarian magyar hun",
    "it": "italian italiano ita",
    "ja": "japanese jpn jp",
    "ko": "korean kor kr",
    "nb": "bokmål bokmal nob",
    "nl": "dutch nederlands nld dut",
    "nn": "nynorsk nno",
    "no": "norwegian norsk nor",
    "pl": "polish polski pol",
    "pt": "portuguese português portugues por",
    "ro": "romanian română ron rum",
    "ru": "russian русский rus",
    "sv": "swedish svenska swe",
    "tr": "turkish türkçe turkce tur",
    "uk": "ukrainian українська ukr ua",
    "vi": "vietnamese vie",
    "zh": "chinese mandarin zho chi cn 中文",
}
_MEANT = {name: tag for tag, names in _OTHER_NAMES.items() for name in names.split()}
# A language, then a script, a region and variants: de, sv-SE, zh-Hant-TW, rm-sursilv.
_TAG = re.compile(
    r"[a-z]{2,3}([-_][a-z]{4})?([-_]([a-z]{2}|\d{3}))?([-_][a-z0-9]{5,8})*",
    re.IGNORECASE,
)


def check_language(value: object) -> str:
    """Return a language tag: a code of ISO 639, alone or with a region, as Common Voice writes it.

    Raises:
        SbkitError: it is no tag, or one of no known language.
    """
    if value is False:
        raise SbkitError(
            "`language` must be a tag as de or sv-SE, but is false: YAML reads no without quotes "
            'as false. For Norwegian write language: "no", or nb-NO or nn-NO.'
        )
    if isinstance(value, str) and _TAG.fullmatch(value) and primary(value) in KNOWN_CODES:
        return value
    raise SbkitError(
        "`language` must be the tag of a known language, as de, sv-SE or zh-CN, but is "
        f"{value!r}. {_advice(str(value))}"
    )


def language_tags(value: object) -> tuple[str, ...]:
    """Return the tags of the knob ``language``: of one language or of a list of languages.

    Raises:
        SbkitError: the list is empty, or one of them is no known tag.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise SbkitError("`language` must name a language, but is an empty list. Write en.")
    return tuple(dict.fromkeys(map(check_language, values)))


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
