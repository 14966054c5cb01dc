"""What the data of a run is: hours, speakers, lengths, characters, what is left out or shared.

splits -> facts, plain data -> ``data_report.json`` and ``data_report.html`` beside it

The audio of chosen rows of a prepared split as MP3, which every browser plays, for pages.

One second of telephone prompts at 16 kHz is 3.7 kB by libsndfile's MP3 at the compression below and
5.6 kB at its usual one; Opus is as small and takes five times as long to encode.
"""

import base64
import io
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import soundfile

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.units import samples_to_seconds
from sbkit.data.manifest import Excluded
from sbkit.data.shard import AUDIO, read_clips
from sbkit.data.splits import (
    Splits,
    count_characters,
    read_texts,
    sample_counts,
    spread_rows,
    take_columns,
)
from sbkit.logs.curves import render_page
from sbkit.text.normalization import NORMALIZER_VERSION, normalize, separates_words

SHARED = ("id", "text", "speaker")  # what a test set must not have in common with train
EXAMPLES = 5  # of what is left out, for each reason
EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 60, 120)  # seconds, of the histogram
CHARACTERS = 200  # the most frequent ones
MAX_TRANSCRIPTS = 10  # shown as they are written and as they are learned
MAX_HEARD = 200  # clips of a split, evenly spread over it, whose level is measured
CLIPPED = 1 - 1 / FULL_SCALE  # of full scale
SILENCE = 1e-10  # power, -100 dBFS
NAME = "data_report"
ANY = "und"  # whose table keeps every letter
LONGEST_PLAYED = 20  # seconds of an example


def measure_data(
    splits: Splits, *, sample_rate: int, language: object, corpus: object = None
) -> dict[str, Any]:
    """Measure all splits, without reading audio.

    Returns plain data: ``corpus``, its name and licence; for each split utterances, hours,
    speakers, a histogram of seconds, counts of characters and of letters that the text table
    replaced; what is left out, by reason with examples; and for each pair of splits how many
    values they share.
    """
    named = splits.named()
    by_words = separates_words(str(language))  # of several languages or none, too
    return {
        "corpus": corpus,
        "language": language,
        "normalizer": NORMALIZER_VERSION,
        "sample_rate": sample_rate,
        "splits": {name: _measure(split, sample_rate, by_words) for name, split in named.items()},
        "speakers": _count_speakers(named.values()),
        "left_out": list(_left_out([*splits.excluded, *splits.out_of_range])),
        "shared": list(_shared(named)),
    }


def _measure(split: datasets.Dataset, sample_rate: int, by_words: bool) -> dict[str, Any]:
    samples = sample_counts(split)
    counts = count_characters(read_texts(split))
    written = _count_letters(split)
    shown = split.select(spread_rows(len(split), MAX_TRANSCRIPTS))
    return {
        "utterances": len(split),
        "hours": samples_to_seconds(int(samples.sum()), sample_rate) / 3600,
        "speakers": _count_speakers([split]),
        "words": _words(split) if by_words else None,
        "seconds": _lengths(samples / sample_rate),
        "characters_per_second": counts.total() * sample_rate / max(int(samples.sum()), 1),
        "transcripts": take_columns(shown, "id", "sentence", "text").to_pylist(),
        "characters": dict(counts.most_common(CHARACTERS)),
        "different_characters": len(counts),
        "letters": sum(written.values()),
        "replaced": {
            letter: count
            for letter, count in written.most_common()
            if letter not in counts and not counts.keys() >= {*normalize(letter, ANY)}
        },
    }


def _count_letters(split: datasets.Dataset) -> Counter[str]:
    """Count the letters of the transcripts as they are written."""
    parts = read_texts(split, "sentence") if "sentence" in split.column_names else []
    composed = ([unicodedata.normalize("NFC", text) for text in texts] for texts in parts)
    counts = count_characters(composed)
    return Counter({char: count for char, count in counts.items() if char.isalpha()})


def _levels(split: datasets.Dataset) -> dict[str, Any]:
    """Measure the level (dBFS) of some clips, how many are clipped, and their files' rates."""
    rows, levels, clipped = spread_rows(len(split), MAX_HEARD), [], 0
    for samples in read_clips(split, rows):
        clip = np.append(samples, 0) / FULL_SCALE
        levels.append(10 * np.log10(max(np.square(clip).mean(), SILENCE)))
        clipped += bool(np.abs(clip).max() >= CLIPPED)
    places = split.select(rows)[AUDIO]
    rates = {soundfile.info(place["file"]).samplerate for place in places if not place["size"]}
    dbfs = np.quantile(levels, (0.05, 0.5, 0.95)).tolist() if levels else []
    return {"heard": len(rows), "dBFS": dbfs, "clipped": clipped, "source_rates": sorted(rates)}


def _lengths(seconds: npt.NDArray[np.float64]) -> dict[str, Any]:
    if not len(seconds):
        return {"histogram": []}
    edges = [*EDGES, float("inf")]
    counts, _ = np.histogram(seconds, edges)
    filled = range(*np.flatnonzero(counts)[[0, -1]] + (0, 1))  # no empty bars at either end
    shortest, middle, high, longest = np.quantile(seconds, (0, 0.5, 0.95, 1)).tolist()
    return {
        "shortest": shortest,
        "mean": float(seconds.mean()),
        "median": middle,
        "95 %": high,
        "longest": longest,
        "histogram": [{"from": EDGES[bin], "utterances": int(counts[bin])} for bin in filled],
    }


def _count_speakers(splits: Iterable[datasets.Dataset]) -> int | None:
    """Count the different speakers; None where the data does not name them."""
    found = set[str]()
    for split in splits:
        if "speaker" in split.column_names:
            found.update(distinct_values(split, "speaker").to_pylist())
    return len(found) or None


def _words(split: datasets.Dataset) -> int:
    return sum(len(text.split()) for texts in read_texts(split) for text in texts)


def _left_out(excluded: Sequence[Excluded]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Excluded]] = {}
    for each in excluded:
        groups.setdefault((each.split, each.reason), []).append(each)
    for (split, reason), items in groups.items():
        examples = [{"id": item.id, "detail": item.detail} for item in islice(items, EXAMPLES)]
        yield {"split": split, "reason": reason, "utterances": len(items), "examples": examples}


def _shared(named: Mapping[str, datasets.Dataset]) -> Iterator[dict[str, Any]]:
    """Count what two splits have in common, by column."""
    columns = [c for c in SHARED if all(c in split.column_names for split in named.values())]
    for (one, first), (other, second) in combinations(named.items(), 2):
        for column in columns:
            common = shared_values(first, second, column)
            yield {
                "splits": [one, other],
                "column": column,
                "values": len(common),
                "of": len(distinct_values(second, column)),
                "examples": common.slice(0, EXAMPLES).to_pylist(),
            }
        clips = shared_clips(first, second)
        yield {
            **{"splits": [one, other], "column": "audio", "values": len(clips), "of": len(second)},
            "examples": clips.slice(0, EXAMPLES).to_pylist(),
        }


def write_data_report(
    splits: Splits, folder: Path, *, sample_rate: int, language: object, corpus: object = None
) -> tuple[Path, Path]:
    """Write ``data_report.json`` and ``data_report.html``; return both paths.

    Examples of what is left out for its length can be played.
    """
    facts = measure_data(splits, sample_rate=sample_rate, language=language, corpus=corpus)
    for name, split in splits.named().items():
        facts["splits"][name] |= _levels(split)
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{NAME}.json", folder / f"{NAME}.html"
    write_text_atomically(data, to_json(facts, indent=2) + "\n")
    players = {} if splits.unused is None else _players(splits.unused, facts, sample_rate)
    title = f"Data of this run: {', '.join(facts['splits'])}"
    content = render_page(title=title, facts=facts, players=players)
    write_text_atomically(page, content)
    return data, page


def _players(
    unused: datasets.Dataset, facts: Mapping[str, Any], sample_rate: int
) -> dict[tuple[str, str], str]:
    """Return MP3 in base64 of the examples whose audio is there, by split and id."""
    wanted = [
        example["id"]
        for each in facts["left_out"]
        if each["split"] == "train"
        for example in each["examples"]
    ]
    clips = encode_clips(unused, wanted, sample_rate=sample_rate, longest=LONGEST_PLAYED)
    return {("train", id): clip for id, clip in clips.items()}


RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz, of MPEG
COMPRESSION = 0.9  # of libsndfile, from 0 to 1


def encode_mp3(audio: Samples, sample_rate: int) -> bytes:
    """Return audio (S,) int16 at one of `RATES` as MP3."""
    content = io.BytesIO()
    soundfile.write(content, audio, sample_rate, format="MP3", compression_level=COMPRESSION)
    return content.getvalue()


def encode_clips(
    split: datasets.Dataset,
    ids: Sequence[str],
    *,
    sample_rate: int,
    longest: float,
    budget: float = float("inf"),
) -> dict[str, str]:
    """Return MP3 in base64 by id, in the order of ``ids``, until ``budget`` characters are full.

    A clip is cut after ``longest`` seconds. Those that are not there, or whose audio cannot be read
    any more, are left out; all are where MP3 does not have the rate.
    """
    if sample_rate not in RATES:
        return {}
    row_of = {id: row for row, id in enumerate(take_columns(split, "id")["id"].to_pylist())}
    found: dict[str, str] = {}
    for id in ids:
        if id not in row_of:
            continue
        try:
            (audio,) = read_clips(split, [row_of[id]])
        except SbkitError:
            continue
        content = encode_mp3(audio[: int(longest * sample_rate)], sample_rate)
        encoded = base64.b64encode(content).decode()
        budget -= len(encoded)
        if budget < 0:
            break
        found[id] = encoded
    return found


def shared_values(one: datasets.Dataset, other: datasets.Dataset, column: str) -> pa.Array:
    """Return the values of the second split that are in the first one, too, none of them empty."""
    values = distinct_values(other, column)
    return values.filter(pc.is_in(values, value_set=distinct_values(one, column)))


def shared_clips(one: datasets.Dataset, other: datasets.Dataset) -> pa.ChunkedArray:
    """Return the ids of the second split's clips whose audio is in the first one, too."""
    is_shared = pc.is_in(_audio_keys(other), value_set=_audio_keys(one))
    return take_columns(other, "id")["id"].filter(is_shared)


def _audio_keys(split: datasets.Dataset) -> pa.ChunkedArray:
    """Return a text for the audio of every row: size and checksum, else the clip's own file."""
    place = take_columns(split, AUDIO)[AUDIO]
    size, checksum, file = (pc.struct_field(place, name) for name in ("size", "crc32", "file"))
    known = (size.cast(pa.string()), checksum.cast(pa.string()), "-")
    return pc.coalesce(pc.binary_join_element_wise(*known), file)


def distinct_values(split: datasets.Dataset, column: str) -> pa.Array:
    """Return the different values of a column, none of them empty."""
    values = pc.unique(take_columns(split, column)[column])
    return values.filter(pc.not_equal(values, ""))
