"""Report the data of a run: hours, speakers, lengths, characters, excluded and shared utterances.

splits -> facts, plain data -> ``data_report.json``, and a page of `sbkit prepare --report`

Pages have clips as MP3, which every browser plays: 3.7 kB for a second at 16 kHz. Opus is as small
but takes five times as long to encode.
"""

import base64
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.audio.io import MP3_RATES, encode_mp3
from sbkit.base.arrays import Counts
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_lines_atomically, write_text_atomically
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.facts import fingerprint_of, measure_once
from sbkit.data.manifest import DURATION_COLUMN, Excluded, hash_texts, parse_durations
from sbkit.data.mix import sources_of
from sbkit.data.normalization_report import find_changes
from sbkit.data.shard import AUDIO, MAX_DURATION_ERROR, read_samples
from sbkit.data.splits import (
    Splits,
    batch_columns,
    count_characters,
    read_texts,
    sample_counts,
    spread_rows,
    take_columns,
)
from sbkit.evaluate.run_results import DATA_REPORT
from sbkit.logs.html_page import render_page
from sbkit.text.normalization import TEXT_VERSION, separates_words

logger = logging.getLogger(__name__)

REPORT_VERSION = 4  # raised with each change of measured facts
SHARED_COLUMNS = ("id", "text", "speaker")  # values that a test set should not share with train
MAX_EXAMPLES = 5  # of excluded utterances, for each reason
MAX_TRANSCRIPTS = 10  # shown before and after normalization, with their sound
MAX_EXAMPLE_SECONDS = 15.0
# A clip is implausible if it is this many times slower or faster than the median of its split. In
# the splits of five default corpora, clips have 0.42 to 2.45 times the median (see
# `implausible_rows`).
IMPLAUSIBLE_FACTOR = 4.0
IMPLAUSIBLE_DEVIATIONS = 5.0  # median absolute deviations, in units of a normal deviation
MIN_COMPARED_CLIPS = 20

Facts = dict[str, Any]  # plain data


def log_data(splits: Splits, folder: Path, sample_rate: int) -> None:
    """Log the size of every split, and write the list of left-out utterances into the folder."""
    for name, split in splits.named().items():
        minutes = samples_to_seconds(int(sample_counts(split).sum()), sample_rate) / 60
        logger.info(f"{name}: {plural(len(split), 'utterance')}, {minutes:.1f} min")
    for source in sources_of(splits):
        minutes = samples_to_seconds(source.samples, sample_rate) / 60
        epoch_minutes = samples_to_seconds(source.epoch_samples, sample_rate) / 60
        logger.info(
            f"source {source.name}: {plural(len(source.rows), 'utterance')}, {minutes:.1f} min; "
            f"{epoch_minutes:.1f} min in an epoch"
        )
    listing = folder / "left_out.tsv"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [("split", "id", "reason", "detail")]
    for row in (*splits.excluded, *splits.out_of_range):
        rows.append((row.split, row.id, row.reason, row.detail))
    cells = ([" ".join(value.split()) for value in row] for row in rows)
    write_lines_atomically(listing, map("\t".join, cells))
    for group in _group_left_out(splits):
        listed_in = f" (listed in {listing})" if group["examples"] else ""
        count, reason = group["utterances"], group["reason"]
        logger.info(f"{group['split']}: {count} left out, {reason}{listed_in}")


def write_data_report(
    splits: Splits, folder: Path, *, sample_rate: int, language: object, corpus: object = None
) -> Facts:
    """Measure all splits; write ``data_report.json`` and return its facts."""
    facts = measure_data(splits, sample_rate=sample_rate, language=language, corpus=corpus)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / DATA_REPORT, to_json(facts, indent=2) + "\n")
    return facts


def write_data_page(splits: Splits, facts: Facts, page: Path) -> None:
    """Write the facts of a report as a page, with the sound of some clips."""
    title = f"Data of this run: {', '.join(facts['splits'])}"
    ids = [example["id"] for example in facts["splits"]["train"]["transcripts"]]
    clips = encode_clips(
        splits.train, ids, sample_rate=facts["sample_rate"], max_seconds=MAX_EXAMPLE_SECONDS
    )
    write_text_atomically(page, render_page(title=title, facts=facts, clips=clips))


def measure_data(
    splits: Splits, *, sample_rate: int, language: object, corpus: object = None
) -> Facts:
    """Measure all splits, without reading audio."""
    by_name = splits.named()
    version = {"version": REPORT_VERSION}
    # Data of several languages, or of an unknown one, is taken to have words.
    has_words = splits.table.spaces if splits.table else separates_words(str(language))
    return {
        "corpus": corpus,
        "language": language,
        "normalizer": TEXT_VERSION,
        "sample_rate": sample_rate,
        "splits": {
            name: measure_once(
                split,
                "data_report",
                {**version, "rate": sample_rate, "language": str(language), "words": has_words},
                partial(_measure, split, sample_rate, str(language), has_words),
            )
            for name, split in by_name.items()
        },
        "left_out": _group_left_out(splits),
        **measure_once(
            splits.train,
            "data_report",
            {**version, "shared": {name: fingerprint_of(split) for name, split in by_name.items()}},
            lambda: {
                "speakers": _count_speakers(by_name.values()),
                "shared": [*_compare_splits(by_name)],
            },
        ),
    }


def _measure(split: datasets.Dataset, sample_rate: int, language: str, has_words: bool) -> Facts:
    samples = sample_counts(split)
    quantiles = np.quantile(samples / sample_rate, (0, 0.5, 1)).tolist() if len(split) else []
    counts, num_words = Counter[str](), 0
    lengths = [np.empty(0, np.int32)]
    for texts in read_texts(split):
        counts.update(count_characters(texts))
        num_words += sum(len(text.split()) for text in texts)
        lengths.append(np.fromiter(map(len, texts), np.int32, len(texts)))
    examples = split.select(spread_rows(len(split), MAX_TRANSCRIPTS))
    rows = implausible_rows(np.concatenate(lengths), samples, sample_rate)
    implausible = split.select(rows)
    return {
        "utterances": len(split),
        "hours": samples_to_seconds(int(samples.sum()), sample_rate) / 3600,
        "speakers": _count_speakers([split]),
        "words": num_words if has_words else None,
        "file_rates": _count_file_rates(split),
        "seconds": dict(zip(("shortest", "median", "longest"), quantiles, strict=False)),
        "characters_per_second": counts.total() * sample_rate / max(int(samples.sum()), 1),
        "implausible": take_columns(implausible, "id", "text", "samples").to_pylist(),
        "other_durations": _list_wrong_durations(split, sample_rate),
        "transcripts": take_columns(examples, "id", "sentence", "text").to_pylist(),
        "characters": dict(counts.most_common()),
        "changes": find_changes(split, language),
    }


def implausible_rows(characters: Counts, samples: Counts, sample_rate: int) -> list[int]:
    """Return the rows whose transcripts are far too long or too short for the clip, worst first.

    A second of audio at the median rate is added to every clip, because a single word with silence
    around it may take several times as long as the same letters in a sentence.
    """
    rows = np.flatnonzero((characters > 0) & (samples > 0))
    if len(rows) < MIN_COMPARED_CLIPS:
        return []
    median_rate = np.median(characters[rows] / samples[rows])
    ratios = np.log((characters[rows] / median_rate + sample_rate) / (samples[rows] + sample_rate))
    distances = np.abs(ratios - np.median(ratios))
    deviation = 1.4826 * np.median(distances)  # the standard deviation, if normally distributed
    limit = max(np.log(IMPLAUSIBLE_FACTOR), IMPLAUSIBLE_DEVIATIONS * deviation)
    worst_first = np.argsort(-distances)
    return [int(rows[index]) for index in worst_first if distances[index] > limit]


def _list_wrong_durations(split: datasets.Dataset, sample_rate: int) -> list[Facts]:
    """List the clips whose decoded length differs from the duration that their corpus states."""
    if DURATION_COLUMN not in split.column_names:
        return []
    stated = parse_durations(take_columns(split, DURATION_COLUMN)[DURATION_COLUMN])
    differences = np.abs(stated - sample_counts(split) / sample_rate)  # NaN if none is stated
    rows = np.flatnonzero(differences > MAX_DURATION_ERROR)
    clips: list[Facts] = take_columns(
        split.select(rows), "id", DURATION_COLUMN, "samples"
    ).to_pylist()
    return clips


def _count_file_rates(split: datasets.Dataset) -> dict[str, int]:
    """Count the clips by the rate of their files in Hz, the most frequent first; {} if unknown."""
    rates = Counter[int]()
    for columns in batch_columns(split, AUDIO):
        for entry in pc.struct_field(columns[AUDIO], "file_rate").value_counts().to_pylist():
            rates[entry["values"]] += entry["counts"]
    return {str(rate): count for rate, count in rates.most_common() if rate}


def _count_speakers(splits: Iterable[datasets.Dataset]) -> int | None:
    """Count the distinct speakers; None if the data does not name them."""
    speakers: set[str] = set()
    for split in splits:
        if "speaker" in split.column_names:
            speakers.update(_distinct_values(split, "speaker").to_pylist())
    return len(speakers) or None


def _group_left_out(splits: Splits) -> list[Facts]:
    """Count the left-out rows by split and reason, with examples, except of filtered rows."""
    groups = defaultdict[tuple[str, str], list[Excluded]](list)
    for row in (*splits.excluded, *splits.out_of_range):
        groups[row.split, row.reason].append(row)
    counts = [(*group, len(rows), rows[:MAX_EXAMPLES]) for group, rows in groups.items()]
    for split, reasons in splits.filtered.items():
        counts += [(split, reason, count, []) for reason, count in reasons.items()]
    return [
        {
            "split": split,
            "reason": reason,
            "utterances": count,
            "examples": [{"id": row.id, "detail": row.detail} for row in rows],
        }
        for split, reason, count, rows in counts
    ]


def _compare_splits(by_name: Mapping[str, datasets.Dataset]) -> Iterator[Facts]:
    """Count the repeated clips of each split, and the values that two splits share, by column."""
    for name, split in by_name.items():
        keys = [hash_texts(_audio_keys(columns)) for columns in batch_columns(split, AUDIO)]
        _, first_rows = np.unique(np.concatenate([np.empty(0, np.int64), *keys]), return_index=True)
        copies = np.setdiff1d(np.arange(len(split)), first_rows)
        if len(copies):
            yield {
                "splits": [name, name],
                "column": "audio",
                "values": len(copies),
                "of": len(split),
                "examples": [*split.select(copies[:MAX_EXAMPLES])["id"]],
            }
    columns = [
        c for c in SHARED_COLUMNS if all(c in split.column_names for split in by_name.values())
    ]
    for (first_name, first), (second_name, second) in combinations(by_name.items(), 2):
        shared: dict[str, tuple[pa.Array, int]] = {}  # shared values, and how many the second has
        for column in columns:
            values = _distinct_values(second, column)
            blocks = (block[column] for block in batch_columns(first, column))
            shared[column] = values.filter(_occur_in(blocks, values)), len(values)
        keys = _audio_keys(take_columns(second, AUDIO))
        is_shared = _occur_in(map(_audio_keys, batch_columns(first, AUDIO)), keys)
        shared["audio"] = take_columns(second, "id")["id"].filter(is_shared), len(second)
        for column, (values, total) in shared.items():
            yield {
                "splits": [first_name, second_name],
                "column": column,
                "values": len(values),
                "of": total,
                "examples": values.slice(0, MAX_EXAMPLES).to_pylist(),
            }


def _distinct_values(split: datasets.Dataset, column: str) -> pa.Array:
    values = pa.array([], pa.large_string())
    for columns in batch_columns(split, column):
        texts = columns[column].cast(pa.large_string())
        values = pc.unique(pa.chunked_array([values, *texts.chunks]))
    return values.filter(pc.not_equal(values, ""))


def _occur_in(blocks: Iterable[pa.ChunkedArray], values: pa.Array) -> pa.Array:
    """Return whether each value of a small split occurs in a column of a large one."""
    shared = [pc.unique(block.filter(pc.is_in(block, value_set=values))) for block in blocks]
    return pc.is_in(values, value_set=pa.concat_arrays([pa.array([], pa.string()), *shared]))


def _audio_keys(columns: pa.Table) -> pa.ChunkedArray:
    """Return the digest of each row's audio; the path of the file if the audio is lazy."""
    digest, start, file = (pc.struct_field(columns[AUDIO], n) for n in ("digest", "start", "file"))
    return pc.if_else(pc.is_valid(start), digest, file)


def encode_clips(
    split: datasets.Dataset,
    ids: Iterable[str],
    *,
    sample_rate: int,
    max_seconds: float,
    max_characters: float = float("inf"),
) -> dict[str, str]:
    """Return clips as MP3 in base64, by id and in the order of ``ids``.

    Missing and unreadable clips are skipped; if MP3 does not support the rate (Hz), all are. Clips
    are cut to ``max_seconds``, and the results have at most ``max_characters`` in all.
    """
    if sample_rate not in MP3_RATES:
        return {}
    present = take_columns(split, "id")["id"]
    encoded: dict[str, str] = {}
    for id in ids:  # one by one, because the caller shows the progress
        row = pc.index(present, id).as_py()
        if row < 0:
            continue
        try:
            (audio,) = read_samples(split, [row])
        except SbkitError:
            continue
        content = encode_mp3(audio[: seconds_to_samples(max_seconds, sample_rate)], sample_rate)
        clip = base64.b64encode(content).decode()
        max_characters -= len(clip)
        if max_characters < 0:
            break
        encoded[id] = clip
    return encoded
