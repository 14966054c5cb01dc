"""What a corpus can do: name its splits, and list the rows of one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sbkit.base.errors import SbkitError
from sbkit.data.corpora.manifest import Manifest
from sbkit.data.corpora.streamed_split import StreamedSplit


class Corpus(Protocol):
    """What a corpus can do; a module with these two functions is one."""

    def splits(self, knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the splits for ``train``, ``valid`` and ``test``."""
        ...

    def read(self, knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
        """Return the rows of one split, or what streams them."""
        ...


def describe_corpus(corpus: Corpus | None, knobs: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the name and the licence of a corpus: what its function `about` says, if it has one.

    The name is else that of the module or folder, and the licence None, for unknown.
    """
    about = getattr(getattr(corpus, "module", corpus), "about", None)
    if about is not None:
        return {**about(knobs)}
    named = knobs.get("corpus") or knobs.get("data_folder")
    return {"name": named and Path(str(named)).name, "licence": None}


def read_listed(corpus: Corpus, knobs: Mapping[str, Any], split: str) -> Manifest:
    """Return the rows of one split; raises SbkitError where they are only streamed."""
    source = corpus.read(knobs, split)
    if isinstance(source, StreamedSplit):
        raise SbkitError(
            f"The data of {split} must be listed or in shards, but {source.files[0]} is streamed. "
            "Make shards of it first, sbkit prepare YAML --shards FOLDER, and pass "
            "--data_folder=FOLDER then."
        )
    return source
