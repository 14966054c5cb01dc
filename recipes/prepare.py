"""From the knobs to prepared splits, for every recipe: corpus -> manifests -> datasets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from datasets import concatenate_datasets

from recipes.corpora import corpus_of
from sbkit.base.errors import SbkitError
from sbkit.data.duration_limits import within_limits
from sbkit.data.manifest import Manifest
from sbkit.data.prepare import PreparedSplit, prepare_split
from sbkit.data.splits import Excluded, Splits
from sbkit.data.store import default_cache
from sbkit.text.normalize import normalize

Knobs = Mapping[str, Any]
Prepare = Callable[[str, bool], PreparedSplit]  # a split by its name; whether it trains


def prepare_transcripts(knobs: Knobs) -> Splits:
    """Prepare audio and normalized transcripts; training does without empty ones."""

    def prepare(name: str, trains: bool) -> PreparedSplit:
        manifest = corpus_of(knobs).read(knobs, name)
        return prepare_split(
            manifest,
            split=name,
            normalize=partial(normalize, language=knobs["language"]),
            sample_rate=knobs["sample_rate"],
            cache_folder=default_cache(),
            keep_empty=not trains,
        )

    return _assemble(knobs, prepare)


def prepare_audio(knobs: Knobs) -> Splits:
    """Prepare audio with all columns of the manifest, and their transcripts as they are written.

    ``languages`` are read one after the other, each with its own name in the column `language`.
    """

    def prepare(name: str, trains: bool) -> PreparedSplit:
        manifests = list(_manifests(knobs, name))
        return prepare_split(
            Manifest(
                tuple(clip for each in manifests for clip in each.clips),
                tuple(row for each in manifests for row in each.bad_rows),
            ),
            split=name,
            normalize=str,
            sample_rate=knobs["sample_rate"],
            cache_folder=default_cache(),
            keep_empty=True,
        )

    return _assemble(knobs, prepare)


def _manifests(knobs: Knobs, name: str) -> Iterator[Manifest]:
    """Read a split in every declared language; ids carry the language, which else may be equal."""
    for language in knobs.get("languages") or ():
        manifest = corpus_of(knobs).read({**knobs, "language": language}, name)
        clips = [
            replace(
                clip, id=f"{language}-{clip.id}", columns={**clip.columns, "language": language}
            )
            for clip in manifest.clips
        ]
        yield replace(manifest, clips=tuple(clips))
    if not knobs.get("languages"):
        yield corpus_of(knobs).read(knobs, name)


def _assemble(knobs: Knobs, prepare: Prepare) -> Splits:
    """Prepare every split of the corpus, and keep train within its limits."""
    first = {"language": (knobs.get("languages") or [None])[0]} if "languages" in knobs else {}
    names = corpus_of(knobs).splits({**knobs, **first})
    prepared = {
        role: {name: prepare(name, role == "train") for name in names[role]} for role in names
    }
    every = [each for role in prepared.values() for each in role.values()]
    train = concatenate_datasets([each.dataset for each in prepared["train"].values()])
    if not len(train):
        raise SbkitError(
            f"The training set ({', '.join(names['train'])}) must hold utterances, but all of its "
            f"{sum(len(each.excluded) for each in every)} rows are left out: "
            f"{_reasons(every)}. Correct the data."
        )
    train, out_of_range = within_limits(
        train,
        min_seconds=knobs["min_seconds"],
        max_seconds=knobs["max_seconds"],
        sample_rate=knobs["sample_rate"],
    )
    return Splits(
        train,
        {name: each.dataset for name, each in prepared["valid"].items()},
        {name: each.dataset for name, each in prepared["test"].items()},
        excluded=[item for each in every for item in each.excluded],
        out_of_range=out_of_range,
        fingerprints={
            name: each.fingerprint for role in prepared.values() for name, each in role.items()
        },
    )


def _reasons(prepared: list[PreparedSplit]) -> str:
    excluded: list[Excluded] = [item for each in prepared for item in each.excluded]
    return ", ".join(sorted({item.reason for item in excluded})) or "there are none"
