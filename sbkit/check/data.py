"""Transcripts of a planned run, and findings about utterances.

Whether CTC can align every transcript: a frame for each label, one more between two equal ones.

The loss gives no weight to an utterance that has none, so training alone would not show it.

Whether tokenizer, heads and transcripts agree on what a label is.

Whether masks of a pretrained encoder fit: what is shorter than one has none.

What the report of the data says of rows left out and shared, of letters, and of silence.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from sbkit.audio.io import FULL_SCALE
from sbkit.base.messages import listed, plural
from sbkit.base.units import samples_to_seconds
from sbkit.check.dry_run import dry_run
from sbkit.check.finding import SHOWN, Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.data.report import measure_data
from sbkit.data.sampler import fastest_percent
from sbkit.data.shard import read_clips
from sbkit.data.splits import TextLabels, Transcripts, read_transcripts, sample_counts, spread_rows
from sbkit.models.asr import head_size
from sbkit.models.encoder import measure_subsampling
from sbkit.models.parts import TransformerPart, WaveformPart, token_embedding
from sbkit.models.pretrained.parts import PretrainedEncoder
from sbkit.text.normalization import languages_with

TRAIN = "train"

Rows = npt.NDArray[np.int64]


def transcripts_of(planned: PlannedRun) -> dict[str, Transcripts]:
    """Return the transcripts of all splits, read once.

    Raises:
        MissingPartError: labels are not made of text: a check of transcripts does not apply.
    """
    labels = planned.prepare_labels()
    if not isinstance(labels, TextLabels):
        raise MissingPartError("transcripts")
    return {
        name: read_transcripts(each, labels)
        for name, each in planned.prepare_splits().named().items()
    }


def about(
    planned: PlannedRun, check: str, key: str, found: Mapping[str, Rows], **words: Any
) -> Iterator[Finding]:
    """Make a finding of rows of splits, if there are any; `declared` says what each must do."""
    splits, counts, ids = planned.prepare_splits().named(), [], []
    for name, rows in found.items():
        if len(rows):
            counts.append(f"{len(rows):,} of {len(splits[name]):,} in {name}")
            ids += splits[name].select(rows)["id"][:]
    if ids:
        verb = "does" if len(ids) == 1 else "do"
        effect = f"{listed(counts)} {verb} not: {listed(ids, max_names=SHOWN)}"
        yield planned.finding(check, key, effect=effect, ids=tuple(ids), **words)


MANY = 0.05  # of all utterances; with more, training is not started


def check_alignment(planned: PlannedRun) -> Iterator[Finding]:
    """Find the utterances with fewer frames than labels."""
    transcripts = transcripts_of(planned)
    if dry_run(planned).broken:
        return  # there may be no frames to count
    subsampling = measure_subsampling(planned.build_hparams())
    fastest = fastest_percent(planned.knobs.get("speeds") or [1.0])
    lacking = {
        name: each.too_short(subsampling, fastest if name == TRAIN else 100)
        for name, each in transcripts.items()
    }
    many = sum(map(len, lacking.values())) > MANY * sum(len(t.labels) for t in transcripts.values())
    only_fast = not any(len(each.too_short(subsampling)) for each in transcripts.values())
    milliseconds = 1000 * samples_to_seconds(subsampling.stride, planned.knobs["sample_rate"])
    yield from about(
        planned,
        "alignment",
        "speeds" if only_fast else "data_folder",
        lacking,
        declared=f"every utterance must have a frame of {milliseconds:g} ms for each label, for "
        "CTC to align it",
        fix="Lower the fastest of `speeds`."
        if only_fast
        else "See whether each transcript belongs to its clip; where most do, pass "
        "--token_type=bpe, whose tokens are longer than characters, or let the encoder keep more "
        "frames. They are left out of training, and count as errors elsewhere.",
        stops=many,
    )


LABELS_CHECK = "labels"
RARE = 0.02  # share of a split's transcripts with foreign characters, as healthy corpora have them


def check_labels(planned: PlannedRun) -> Iterator[Finding]:
    """Compare the sizes, and the labels of every transcript."""
    for check in (_check_sizes, _check_transcripts):
        with suppress(MissingPartError):
            yield from check(planned)


def _check_sizes(planned: PlannedRun) -> Iterator[Finding]:
    sizes = dict(_sizes(planned))
    whose, wanted = next(iter(sizes.items()), ("", 0))
    for name, size in sizes.items():
        if size != wanted:
            yield planned.finding(
                LABELS_CHECK,
                name,
                declared=f"`{name}` must have as many outputs or rows as {whose} has tokens "
                f"({wanted})",
                effect=f"has {size}",
                fix="Write `!ref <tokenizer.vocab_size>` for its size.",
            )


def _sizes(planned: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield all that has one row or output per token; the others must agree with the first."""
    hparams = planned.build_hparams()
    vocab_size = getattr(hparams.get("tokenizer"), "vocab_size", None)
    if isinstance(vocab_size, int):
        yield "the tokenizer", vocab_size
    for name in planned.load_recipe().task.heads:
        head = hparams.get(name)
        if isinstance(head, nn.Module):
            yield name, head_size(head)
    for part in (TransformerPart, WaveformPart):
        embedding = token_embedding(hparams.get(part.NAME))
        if embedding is not None:
            yield part.NAME, embedding.num_embeddings


def _check_transcripts(planned: PlannedRun) -> Iterator[Finding]:
    """Find labels that no loss may see, characters that the tokenizer lacks, and no text."""
    transcripts, vocabulary = transcripts_of(planned), planned.prepare_labels().vocabulary
    yield from about(
        planned,
        LABELS_CHECK,
        "tokenizer",
        {name: np.flatnonzero(each.refused) for name, each in transcripts.items()},
        declared=f"every transcript must have labels from 0 to {vocabulary.size - 1} without the "
        f"blank ({vocabulary.blank})",
        fix="Use the tokenizer that was trained on this text.",
    )
    unknown = {name: np.flatnonzero(each.unknown) for name, each in transcripts.items()}
    is_rare = all(
        len(rows) <= RARE * len(transcripts[name].unknown) for name, rows in unknown.items()
    )
    yield from about(
        planned,
        LABELS_CHECK,
        "data_folder",
        unknown,
        declared="every transcript must consist of characters that the tokenizer knows",
        fix="So few foreign characters count as errors, and need nothing done."
        if is_rare
        else "Correct these transcripts. Where they are many and of train, choose another "
        "--output_folder, for which a tokenizer is trained anew.",
        stops=False,
    )
    yield from about(
        planned,
        LABELS_CHECK,
        "data_folder",
        {name: np.flatnonzero(each.characters == 0) for name, each in transcripts.items()},
        declared="every utterance must have a transcript",
        fix="Write down what was said, or take the rows out.",
        stops=False,
    )


MASKS_CHECK = "masks"


def check_masks(planned: PlannedRun) -> Iterator[Finding]:
    """Find what is shorter than a mask: utterances, or all channels of the encoder."""
    encoder = planned.build_hparams().get("Transformer")
    if not isinstance(encoder, PretrainedEncoder):
        return
    (share, length), (channels, width) = encoder.frame_masks, encoder.channel_masks
    if share > 0:
        frames = measure_subsampling(planned.build_hparams()).count(
            sample_counts(planned.prepare_splits().train)
        )
        yield from about(
            planned,
            MASKS_CHECK,
            "mask_time_length",
            {TRAIN: np.flatnonzero(frames < length)},
            declared=f"every utterance must have the {length} frames of a mask to be masked",
            fix="Lower --mask_time_length, or leave it: they are trained on as they are.",
            stops=False,
        )
    hidden = planned.knobs["encoder_config"]["hidden_size"]
    if channels > 0 and width > hidden:
        yield planned.finding(
            MASKS_CHECK,
            "mask_channel_length",
            declared=f"a mask must be at most as wide as the encoder ({hidden} channels)",
            effect=f"is {width} wide, so that no channel is masked",
            fix="Lower --mask_channel_length, or pass --mask_channel_prob=0.",
            stops=False,
        )


DATA_CHECK, KEY = "data", "data_folder"
# What splits may not share, by its column.
NAMES = {"audio": "clip", "text": "sentence", "speaker": "speaker"}
MANY_SHARED = 0.5  # of a set's clips that were trained on, with which its score means nothing
MANY_OUTSIDE = 0.01  # of train; the limits are declared, and fewer are what they are there for
SAMPLED = 500  # utterances of a split, evenly spread over it, whose audio is looked at
# Of the letters of the default corpus, the English table replaces 0.24 % in Spanish (whose prompts
# have few accents), 0.54 % in Italian, 3.55 % in French, and none in English.
MAX_REPLACED = 0.001
MIN_REPLACED = 20  # letters; fewer are loan words of a small corpus
SILENT = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale


def check_report(planned: PlannedRun) -> Iterator[Finding]:
    """Find rows that are left out, and clips, sentences and speakers in two splits."""
    splits, language = planned.prepare_splits(), planned.knobs.get("language")
    facts = measure_data(splits, sample_rate=planned.knobs["sample_rate"], language=language)
    yield from _check_letters(planned, facts["splits"].values())
    few = MANY_OUTSIDE * (len(splits.out_of_range) + len(splits.train))
    outside = {each.reason for each in splits.out_of_range if len(splits.out_of_range) > few}
    unusable = {each.reason for each in splits.excluded}
    for each in facts["left_out"]:
        if each["reason"] in outside | unusable:
            shown = (f"{item['id']} ({item['detail']})" for item in each["examples"])
            count = each["utterances"]
            yield planned.finding(
                DATA_CHECK,
                "max_seconds" if each["reason"] in outside else KEY,
                declared=f"every row of {each['split']} must be usable",
                effect=f"{plural(count, 'row')} {'is' if count == 1 else 'are'} left out "
                f"({each['reason']}): {listed(shown)}",
                fix="Repair these rows or clips, or widen `min_seconds` and `max_seconds`.",
                stops=False,
            )
    for each in facts["shared"]:
        what, (one, other) = NAMES.get(each["column"]), each["splits"]
        only_one = what == "speaker" and facts["speakers"] == 1  # whom no split can part
        if what and each["values"] and not only_one:
            is_trained = what == "clip" and one == "train"
            yield planned.finding(
                DATA_CHECK,
                KEY,
                declared=f"a {what} must be in one split only: a score on what was trained on "
                "measures memory",
                effect=f"{each['values']:,} of {plural(each['of'], what)} in {other} "
                f"{'is' if each['values'] == 1 else 'are'} in {one}, too: "
                f"{listed(each['examples'], max_names=SHOWN)}",
                fix=f"Keep each {what} in one split.",
                stops=is_trained and each["values"] > MANY_SHARED * each["of"],
            )


def _check_letters(planned: PlannedRun, splits: Collection[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find letters that the text table of the language replaced by others."""
    replaced = sum((Counter(split["replaced"]) for split in splits), Counter[str]())
    if not replaced:
        return
    count, share = replaced.total(), replaced.total() / sum(split["letters"] for split in splits)
    fitting = languages_with(replaced)
    stops = share > MAX_REPLACED and count >= MIN_REPLACED and bool(fitting)
    letters = (f"{number} {letter}" for letter, number in replaced.most_common())
    yield planned.finding(
        DATA_CHECK,
        "language",
        declared="the text table of `language` must have the letters of the transcripts",
        effect=f"it replaces {plural(count, 'letter')} of them ({share:.2%}): "
        f"{listed(letters, max_names=2 * SHOWN)}",
        fix=f"Languages whose tables have these letters: {listed(fitting)}. Pass "
        f"--language={fitting[0]}, or write the transcripts in the letters to train on."
        if stops
        else "Loan words, and spellings that the table unifies, need nothing done.",
        stops=stops,
    )


def check_silence(planned: PlannedRun) -> Iterator[Finding]:
    """Find silent clips among some of each split."""
    silent = {}
    for name, split in planned.prepare_splits().named().items():
        rows = spread_rows(len(split), SAMPLED)
        peaks = [np.abs(c.astype(np.int32)).max(initial=0) for c in read_clips(split, rows)]
        silent[name] = np.array(rows, np.int64)[np.array(peaks) < SILENT]
    yield from about(
        planned,
        DATA_CHECK,
        KEY,
        silent,
        declared=f"every clip must hold sound (up to {SAMPLED} of each split were looked at)",
        fix="Record them again, or take them out.",
        stops=False,
    )
