"""The clips that are in the page of a report, for the page of a comparison."""

import json
import re
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.regular import read_regular

LARGEST = 64 << 20  # bytes
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")


def read_clips(page: Path) -> dict[str, dict[str, str]]:
    """Return the MP3 in base64 of every clip, by test set and id; none where there is no page.

    Raises:
        SbkitError: it is no page of a report.
    """
    if not page.exists():
        return {}
    content = read_regular(page, largest=LARGEST, what="The page of a report")
    try:
        found = DATA.search(content.decode())
        sets = json.loads(found[1] if found else "")["sets"]
        clips = {
            str(name): {str(row["id"]): row["clip"] for row in rows if row["clip"] is not None}
            for name, rows in sets.items()
        }
        if not all(BASE64.fullmatch(clip) for of in clips.values() for clip in of.values()):
            raise ValueError("a clip is not in base64")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"{page} must be the page that sbkit wrote, whose clips can be heard, but is another "
            f"({error}). Remove it, or score again: sbkit score RUN DATA --out DIR."
        ) from error
    return clips
