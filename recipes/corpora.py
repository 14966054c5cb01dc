"""Choose the corpus of a run: by its name, by manifests, by its folder, or the default one."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from recipes.AsteriskPrompts import corpus as asterisk_prompts
from recipes.CommonVoice import corpus as common_voice
from recipes.LibriSpeech import corpus as librispeech
from recipes.OwnData import corpus as own_data
from sbkit.base.errors import SbkitError
from sbkit.data.corpora.corpus import Corpus, StreamedSplit
from sbkit.data.storage import sharded_corpus
from sbkit.data.storage.audio_cache import is_archive, unpacked
from sbkit.data.storage.manifest import Manifest
from sbkit.data.storage.splits import resolve_splits

KNOWN = (librispeech, common_voice)  # the narrower layout first


def corpus_of(knobs: Mapping[str, Any]) -> Corpus:
    """Return the corpus that the knobs ``corpus``, ``manifest`` and ``data_folder`` lead to.

    Raises:
        SbkitError: two of them are set that exclude each other, or no corpus knows the folder.
    """
    if knobs.get("corpus"):
        return _import_corpus(str(knobs["corpus"]))
    if knobs.get("manifest"):
        if knobs.get("data_folder"):
            raise SbkitError(
                "The data must come from `manifest` or from `data_folder`, but both are set. Take "
                "one of them out."
            )
        return own_data
    if not knobs.get("data_folder"):
        return asterisk_prompts
    named = Path(knobs["data_folder"]).expanduser().absolute()
    if not is_archive(named) and sharded_corpus.recognizes(str(knobs["data_folder"])):
        return sharded_corpus
    folder = unpacked(named)
    for corpus in KNOWN:
        if corpus.recognizes(folder):
            return corpus
    state = "has none of these layouts" if folder.is_dir() else "is not a folder"
    raise SbkitError(
        "data_folder must be a release of Common Voice (train.tsv, dev.tsv, test.tsv and clips/) "
        "or LibriSpeech (train-clean-100/SPEAKER/CHAPTER/*.trans.txt), or a .tar.gz of one, or a "
        f"folder or URL of shards (sbkit-shards.json), but {knobs['data_folder']} {state}. Pass "
        "--data_folder=FOLDER of one, or --manifest train=FILE --manifest dev=FILE."
    )


def _import_corpus(name: str) -> Corpus:
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        raise SbkitError(
            f"`corpus` must name a module, as recipes.LibriSpeech.corpus, but {name!r} cannot be "
            f"imported ({error}). Correct the name, put its file beside the YAML, or on PYTHONPATH."
        ) from error
    missing = [each for each in ("splits", "read") if not callable(getattr(module, each, None))]
    if missing:
        raise SbkitError(
            f"`corpus` must name a module with the functions splits and read, but {name} has no "
            f"{' and no '.join(missing)}. Write it, as in recipes/LibriSpeech/corpus.py."
        )
    return OwnCorpus(module)


@dataclass(frozen=True)
class OwnCorpus:
    """A corpus of the user's own, which the knob ``splits`` applies to as well."""

    module: Corpus

    def splits(self, knobs: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the splits of each role: those of the knob ``splits``, else the module's."""
        roles = self.module.splits(knobs)
        return resolve_splits(knobs.get("splits"), roles, [*chain.from_iterable(roles.values())])

    def read(self, knobs: Mapping[str, Any], split: str) -> Manifest | StreamedSplit:
        """Return the rows of one split."""
        return self.module.read(knobs, split)
