"""The declared language, held against the column ``locale`` of a manifest."""

from collections import Counter

from sbkit.base.errors import SbkitError
from sbkit.data.clips import Clips
from sbkit.data.manifest import Manifest
from sbkit.text.languages import primary


def check_locale(manifest: Manifest, language: str) -> str | None:
    """Return a note if some rows have another locale than the language; null if none has.

    Rows without a locale say nothing, and a region makes no difference.

    Raises:
        SbkitError: more than half of the rows that have a locale have another one.
    """
    locales = _count_locales(Clips.of(manifest.clips))
    del locales[""]
    others = Counter(
        {locale: n for locale, n in locales.items() if primary(locale) != primary(language)}
    )
    if not others:
        return None
    most, count = others.most_common(1)[0]
    total, other = locales.total(), others.total()
    if 2 * other > total:
        raise SbkitError(
            f"`language` must be the language of the manifest, but is {language} where {count} of "
            f"{total} rows have the locale {most}. Pass --language={most}."
        )
    rows = "1 row has" if other == 1 else f"{other} rows have"
    return f"{rows} another locale than {language} (of {total}; most often {most})"


def _count_locales(clips: Clips) -> Counter[str]:
    if "locale" not in clips.columns.column_names:
        return Counter()
    counts = Counter[str]()
    for entry in clips.columns["locale"].value_counts().to_pylist():
        counts[(entry["values"] or "").strip()] += entry["counts"]
    return counts
