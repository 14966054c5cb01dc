"""Turn a Common Voice release folder, or any folder of the same form, into Arrow stores.

release folder: <split>.tsv + clips/ -> normalized text, 16 kHz audio -> one store per split
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track

from sbkit.audio.io import Samples, read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.files import building
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.manifest import Clip, Manifest
from sbkit.data.release import find_release, read_release
from sbkit.data.splits import SPLITS, Excluded, read_left_out, write_left_out
from sbkit.data.store import Utterance, sample_counts, write_store
from sbkit.text.normalize import normalize

PREPARE_VERSION = 1  # raise it when the same release would give another store
MAX_LOST = 0.05  # share of a split's rows that may be unusable before the run is refused
CLIPS_AHEAD = 512  # clips decoded before they are written; about 80 MB of audio


@dataclass(frozen=True)
class Prepared:
    """Where the store of each split lies, and what is in none of them."""

    stores: Mapping[str, Path]
    left_out: list[Excluded]


def prepare(
    *,
    data_folder: str | Path | None,
    language: str,
    cache_folder: str | Path,
    splits: Sequence[str] = SPLITS,
) -> Prepared:
    """Decode and normalize the splits that are not in the cache yet.

    Raises:
        SbkitError: the folder is no release, or more than ``MAX_LOST`` of a split is unusable.
    """
    release = find_release(data_folder, language, splits)
    stores: dict[str, Path] = {}
    left_out: list[Excluded] = []
    for split in splits:
        manifest = read_release(release / f"{split}.tsv", language)
        key = _fingerprint(release, split, language, manifest)
        folder = Path(cache_folder).expanduser() / "stores" / f"{language}-{split}-{key}"
        if not folder.is_dir():
            _prepare_split(folder, split, language, manifest)
        stores[split] = folder / "store"
        left_out += read_left_out(folder / "left_out.tsv")
    return Prepared(stores, left_out)


def _fingerprint(release: Path, split: str, language: str, manifest: Manifest) -> str:
    """Hash all that the store depends on, the clips by their size and time of change."""
    digest = hashlib.sha256(f"{PREPARE_VERSION}\n{release}\n{language}\n".encode())
    digest.update((release / f"{split}.tsv").read_bytes())
    named = {str(clip.path) for clip in manifest.clips}
    for folder in sorted({clip.path.parent for clip in manifest.clips}):
        for line in _list_clips(folder, named):
            digest.update(line.encode())
    return digest.hexdigest()[:16]


def _list_clips(folder: Path, named: Set[str]) -> list[str]:
    """Give a line per clip that is there, with one look at the folder; a dead link is not there."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [(entry.path, entry.stat()) for entry in entries if _is_clip(entry, named)]
    return sorted(f"\n{path}\t{status.st_size}\t{status.st_mtime_ns}" for path, status in found)


def _is_clip(entry: os.DirEntry[str], named: Set[str]) -> bool:
    return entry.path in named and entry.is_file()


def _prepare_split(folder: Path, split: str, language: str, manifest: Manifest) -> None:
    """Write one split's store, and beside it what is left out."""
    lost = [Excluded(split, row.id, row.reason, row.detail) for row in manifest.bad_rows]
    silent: list[Excluded] = []
    with building(folder) as beside:
        utterances = _utterances(manifest.clips, split, language, lost=lost, silent=silent)
        write_store(beside / "store", utterances)
        _refuse_heavy_loss(split, lost, total=len(manifest.clips) + len(manifest.bad_rows))
        write_left_out(beside / "left_out.tsv", lost + silent)


def _utterances(
    clips: Sequence[Clip],
    split: str,
    language: str,
    *,
    lost: list[Excluded],
    silent: list[Excluded],
) -> Iterator[Utterance]:
    """Give the utterances in order, and note the clips that cannot be read and those without text.

    Only training can do without an empty transcript: in dev and test, words heard where there are
    none are errors to be counted.
    """
    for clip, samples in _decode(clips, title=f"Decoding {split}"):
        text = normalize(clip.sentence, language)
        if isinstance(samples, SbkitError):
            lost.append(Excluded(split, clip.id, "unreadable audio", str(samples)))
        elif not text and split == "train":
            silent.append(Excluded(split, clip.id, "empty transcript", clip.sentence))
        else:
            audio = samples.astype("<i2").tobytes()
            yield Utterance(
                clip.id, text, clip.sentence, clip.columns.get("speaker", ""), len(samples), audio
            )


def _decode(clips: Sequence[Clip], *, title: str) -> Iterator[tuple[Clip, Samples | SbkitError]]:
    """Decode on all cores, in order.

    Threads, since libsndfile and torch release the interpreter: 200 clips of 48 kHz mp3 took 0.91 s
    on one, 0.50 s on two threads, and 2.7 s in two processes that were already running.
    """
    console = Console(stderr=True)
    starts = track(
        range(0, len(clips), CLIPS_AHEAD),
        description=title,
        console=console,
        disable=not console.is_terminal or len(clips) <= CLIPS_AHEAD,
    )
    with _one_torch_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in starts:
            ahead = clips[start : start + CLIPS_AHEAD]
            yield from zip(ahead, pool.map(_read_clip, ahead), strict=True)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep each decoding thread from starting threads of torch's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_clip(clip: Clip) -> Samples | SbkitError:
    try:
        return read_audio(clip.path)
    except SbkitError as error:
        return error


def _refuse_heavy_loss(split: str, lost: Sequence[Excluded], *, total: int) -> None:
    if len(lost) <= MAX_LOST * total:
        return
    reasons = Counter(item.reason for item in lost)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    first = "; ".join(f"{item.id}: {item.detail}" for item in lost[:3])
    raise SbkitError(
        f"At most {MAX_LOST:.0%} of {split} in `data_folder` may be unusable, but {len(lost)} of "
        f"{total} rows are ({counts}). Repair the release; the first ones: {first}"
    )


def select_train(
    dataset: Dataset, *, min_seconds: float, max_seconds: float
) -> tuple[Dataset, list[Excluded]]:
    """Keep the utterances of a length to train on; looks at no audio."""
    samples = sample_counts(dataset)
    too_short = samples < seconds_to_samples(min_seconds)
    too_long = samples > seconds_to_samples(max_seconds)
    ids = dataset["id"][:]
    left_out = [
        Excluded("train", ids[row], reason, f"{samples_to_seconds(int(samples[row])):.2f} s")
        for rows, reason in (
            (too_short, f"shorter than {min_seconds:g} s"),
            (too_long, f"longer than {max_seconds:g} s"),
        )
        for row in np.flatnonzero(rows)
    ]
    return dataset.select(np.flatnonzero(~(too_short | too_long))), left_out
