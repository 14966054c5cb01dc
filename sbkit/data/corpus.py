"""Corpora: they name their splits and read the manifest of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sbkit.data.manifest import Manifest
from sbkit.data.sources import RemoteTables

KnobValues = Mapping[str, Any]  # the plain values of a YAML


class Corpus(Protocol):
    """A corpus of speech; a module with these two functions is one."""

    def splits(self, knobs: KnobValues) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``."""
        ...

    def read(self, knobs: KnobValues, split: str) -> Manifest | RemoteTables:
        """Return the manifest of one split, or the tables that it is in."""
        ...


def describe_corpus(corpus: Corpus | None, knobs: KnobValues) -> dict[str, str | None]:
    """Return the name and the license of a corpus, from its optional function ``about(knobs)``.

    Otherwise the name is that of the module or folder, and the license is None, unknown.
    """
    about = getattr(getattr(corpus, "module", corpus), "about", None)
    if about is not None:
        return {**about(knobs)}
    name = knobs.get("corpus") or knobs.get("data_folder")
    return {"name": name and Path(str(name)).name, "license": None}
