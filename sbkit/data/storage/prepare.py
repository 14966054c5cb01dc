"""From the clips of a manifest to a dataset: normalized text beside audio that is decoded once.

manifest -> texts, normalized each time -> audio, from the cache or decoded into it -> Dataset
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import InMemoryTable

from sbkit.base.errors import SbkitError
from sbkit.data.storage.audio_cache import StoredAudio, prepare_audio
from sbkit.data.storage.audio_store import AUDIO
from sbkit.data.storage.clips import Clips
from sbkit.data.storage.manifest import Manifest, free_name
from sbkit.data.storage.splits import Excluded

MAX_LOST = 0.05  # share of a split's rows that may be unusable before the run is refused
UNREADABLE, EMPTY = "unreadable audio", "empty transcript"


@dataclass(frozen=True)
class PreparedSplit:
    """One split, ready to be batched.

    Attributes:
        dataset: columns id, text (normalized), sentence, samples, those of the manifest, as
            strings, and audio, the place from which `read_rows` reads it.
        excluded: what is not in it, and why.
        fingerprint: changes when the ids, texts or audio files of the dataset do.
    """

    dataset: datasets.Dataset
    excluded: list[Excluded]
    fingerprint: str


def prepare_split(
    manifest: Manifest,
    *,
    split: str,
    normalize: Callable[[str], str],
    sample_rate: int,
    cache_folder: Path,
    keep_empty: bool,
    store: str = "pcm",
) -> PreparedSplit:
    """Normalize the texts of a split, and decode the clips that are not in the cache yet.

    Only training can do without an empty transcript (``keep_empty=False``): elsewhere, words heard
    where there are none are errors to be counted.

    Raises:
        SbkitError: more than ``MAX_LOST`` of the rows is unusable, or the cache cannot be written.
    """
    clips = Clips.of(manifest.clips)
    texts = [normalize(sentence) for sentence in clips.sentences]
    spoken = np.array([row for row, text in enumerate(texts) if keep_empty or text.strip()], int)
    with_text = clips.take(spoken)
    if manifest.stored is not None:
        stored, errors = StoredAudio(manifest.stored.take(pa.array(spoken)), {})
    else:
        stored, errors = prepare_audio(
            with_text.own["path"],
            sample_rate=sample_rate,
            cache_folder=cache_folder,
            store=store,
            title=f"Decoding {split}",
        )
    lost = [Excluded(split, row.id, row.reason, row.detail) for row in manifest.bad_rows]
    lost += [
        Excluded(split, with_text[row].id, UNREADABLE, str(error)) for row, error in errors.items()
    ]
    check_loss(split, lost, len(clips) + len(manifest.bad_rows))
    empty = [
        Excluded(split, clips[row].id, EMPTY, clips[row].sentence)
        for row in np.setdiff1d(np.arange(len(clips)), spoken).tolist()
    ]
    rows = np.delete(spoken, list(errors))
    table = _join(clips.take(rows), [texts[row] for row in rows.tolist()], stored)
    fingerprint = _fingerprint(table, stored, sample_rate)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(InMemoryTable(table), fingerprint=fingerprint[:16])
    return PreparedSplit(dataset, lost + empty, fingerprint)


def check_loss(split: str, lost: Sequence[Excluded], total: int) -> None:
    """Raise SbkitError where more than ``MAX_LOST`` of a split's ``total`` rows is unusable."""
    if len(lost) <= MAX_LOST * total:
        return
    reasons = Counter(item.reason for item in lost).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    first = "; ".join(f"{item.id}: {item.detail}" for item in lost[:3])
    raise SbkitError(
        f"At most {MAX_LOST:.0%} of the rows of {split} may be unusable, but {len(lost)} of "
        f"{total} are ({counts}). Repair the corpus; the first ones: {first}"
    )


def _fingerprint(table: pa.Table, stored: pa.Table, sample_rate: int) -> str:
    """Hash what trains, and not where or when it was stored."""
    digest = hashlib.sha256(f"{sample_rate}\n".encode())
    columns = [table["id"], table["text"], stored["samples"], stored["digest"]]
    for id, text, samples, of_file in zip(*(each.to_pylist() for each in columns), strict=True):
        digest.update(f"{id}\0{text}\0{samples}\0{of_file}\n".encode())
    return digest.hexdigest()


def _join(clips: Clips, texts: Sequence[str], stored: pa.Table) -> pa.Table:
    """Return all columns of a split: those of its clips beside their texts and their audio."""
    columns = {
        "id": clips.own["id"],
        "text": pa.array(texts, pa.string()),
        "sentence": clips.own["sentence"],
        "samples": stored["samples"],
    }
    for name in clips.columns.column_names:
        columns[free_name(name)] = clips.columns[name].fill_null("")
    return pa.table({**columns, AUDIO: stored[AUDIO]})
