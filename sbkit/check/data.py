"""Checks of the data: sizes of labels, masks, splits, letters and silence."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
from torch import nn

from sbkit.audio.channels import CANCEL
from sbkit.audio.io import FULL_SCALE
from sbkit.audio.segments import max_unsegmented_samples
from sbkit.base.messages import listed, plural
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.check.checked_run import (
    MAX_LISTED_IDS,
    CheckedRun,
    Finding,
    finding_of_ids,
    finding_of_rows,
)
from sbkit.data.columns import CUT_SHORT, find_split_column, role_of
from sbkit.data.data_report import Facts, measure_data
from sbkit.data.manifest import CHANNEL_FAULT
from sbkit.data.normalization_report import FIXES, MISREAD, REPLACED_KIND
from sbkit.data.sampler import MAX_JOINED_SECONDS, to_percents
from sbkit.data.shard import MAX_DURATION_ERROR, read_samples
from sbkit.data.splits import (
    read_column,
    sample_counts,
    spread_rows,
)
from sbkit.models.encoder import head_size, make_encoder
from sbkit.models.encoder_parts import label_embedding, label_heads
from sbkit.models.pretrained.encoder import PretrainedEncoder
from sbkit.text.languages import languages_of, script_of
from sbkit.text.normalization import language_table, languages_with

TRAIN = "train"
MAX_SHOWN_TEXT = 60  # characters of a text in a finding
MAX_RARE_SHARE = 0.02  # texts with foreign characters; healthy corpora have some
COLUMN_NOUNS = {"audio": "clip", "text": "sentence", "speaker": "speaker"}  # not to be shared
MAX_SHARED_SHARE = 0.5  # clips of a set that were trained on; with more, its score is worthless
MAX_NARROW_SHARE = 0.05  # clips of a set from files of a lower rate than `sample_rate`
MIN_RATE_SHARE = 0.9  # of `sample_rate`: 22.05 and 44.1 kHz are enough for 24 and 48
MAX_OUTSIDE_SHARE = 0.01  # rows of train that `min_seconds` and `max_seconds` usually leave out
MAX_SAMPLED_CLIPS = 100  # evenly spread over a split; the fault is a folder of silent clips
# The English table replaces 0.24 % of the letters of the default corpus in Spanish (whose prompts
# have few accents), 0.54 % in Italian, 3.55 % in French, and none in English.
MAX_REPLACED_SHARE = 0.001
MIN_REPLACED_LETTERS = 20  # fewer are loan words of a small corpus
MAX_LISTED_CHARACTERS = 10
MAX_LISTED_LANGUAGES = 5
MAX_CHANNEL_FAULT_SHARE = 0.02  # clips of a set whose channels should not be downmixed
SILENT_PEAK = FULL_SCALE * 10 ** (-50 / 20)  # loudest sample, 50 dB below full scale


def check_labels(run: CheckedRun) -> Iterator[Finding]:
    """Compare the rows or outputs of every part that has one per label."""
    hparams, task, labels = run.copy.hparams, run.data.recipe.task, run.data.labels
    has_heads = labels is not None and bool(task.heads)
    sizes = {f"the {task.label_key}": len(task.label_names(labels))} if has_heads else {}
    heads = label_heads(hparams, task.heads)
    sizes |= {name: head_size(head) for name, head in heads.items() if isinstance(head, nn.Module)}
    for name in ("Transformer", "encoder"):
        embedding = label_embedding(hparams.get(name))
        if embedding is not None:
            sizes[name] = embedding.num_embeddings
    reference, expected = next(iter(sizes.items()), ("", 0))
    for name, size in sizes.items():
        if size != expected:
            yield run.finding(
                name,
                problem=f"`{name}` has {size} outputs or rows, but {reference} has {expected} "
                "labels",
                fix=f"Write `!ref <{task.label_key}.{task.label_count}>` for its size.",
            )


def check_masks(run: CheckedRun) -> Iterator[Finding]:
    """Find masks that do not fit: longer than an utterance, or wider than the encoder."""
    encoder = run.copy.hparams.get("Transformer")
    if not isinstance(encoder, PretrainedEncoder):
        return
    (frame_share, length), (channel_share, width) = encoder.frame_masks, encoder.channel_masks
    if frame_share > 0:
        subsampling = make_encoder(run.copy.hparams).subsampling
        frames = subsampling.count(sample_counts(run.data.splits.train))
        yield from finding_of_rows(
            run,
            {TRAIN: np.flatnonzero(frames < length)},
            key="mask_time_length",
            problem=f"Utterances are shorter than the {length} frames of a mask, so never masked",
            fix="Lower `mask_time_length`, or leave it.",
        )
    hidden = run.spec.settings["encoder_config"]["hidden_size"]
    if channel_share > 0 and width > hidden:
        yield run.note(
            "mask_channel_length",
            problem=f"A mask of {width} channels is wider than the encoder ({hidden})",
            fix="Lower `mask_channel_length`, or set `mask_channel_prob: 0`.",
        )


def check_positions(run: CheckedRun) -> Iterator[Finding]:
    """Find utterances that are longer than the encoder has positions for.

    Utterances of train count at the slowest speed, and with what `concat_prob` may join to them.
    """
    settings = run.spec.settings
    config = settings.get("encoder_config") or {}
    if config.get("model_type") != "whisper":
        return
    positions = config["max_source_positions"]
    subsampling = make_encoder(run.copy.hparams).subsampling
    rate = settings["sample_rate"]
    slowest = min(100, *to_percents(settings["speeds"])) / 100
    joined_seconds = MAX_JOINED_SECONDS if settings["concat_prob"] > 0 else 0.0
    splits = run.data.splits
    longest = max_unsegmented_samples(settings["eval_batch_seconds"], rate)  # others are segmented
    too_long = {}
    for name, split in splits.named().items():
        samples = sample_counts(split)
        frames = subsampling.count(samples)
        if name == TRAIN:
            slowed = (samples + seconds_to_samples(joined_seconds, rate)) / slowest
            frames = subsampling.count(slowed.astype(np.int64))
        is_cut = (samples > longest) & (name != TRAIN)
        too_long[name] = np.flatnonzero((frames > positions) & ~is_cut)
    seconds = samples_to_seconds(positions * subsampling.stride, rate)
    yield from finding_of_rows(
        run,
        too_long,
        key="max_seconds",
        problem=f"Utterances are longer than the {seconds:g} s that the encoder has positions for",
        fix=f"Train without them (`max_seconds: {seconds * slowest - joined_seconds:g}`), and "
        f"evaluate longer recordings in segments (`eval_batch_seconds: {seconds:g}`).",
        stops=True,
    )


def check_data(run: CheckedRun) -> Iterator[Finding]:
    """Find rows left out, and clips, sentences and speakers that two splits share."""
    splits = run.data.splits
    rate = run.spec.settings["sample_rate"]
    facts = measure_data(splits, sample_rate=rate, language=run.spec.settings["language"])
    yield from _check_changes(run, [*facts["splits"].values()])
    yield from _check_file_rates(run, facts["splits"])
    max_usual = MAX_OUTSIDE_SHARE * (len(splits.out_of_range) + len(splits.train))
    is_unusual = len(splits.out_of_range) > max_usual
    outside = {row.reason for row in splits.out_of_range if is_unusual}
    unusable = {row.reason for row in splits.excluded}
    for group in facts["left_out"]:
        if group["reason"] in outside | unusable:
            examples = (f"{row['id']} ({row['detail']})" for row in group["examples"])
            count = group["utterances"]
            problem = f"{group['split']} is without {plural(count, 'row')} ({group['reason']})"
            fix = "Repair these rows or clips, or widen `min_seconds` and `max_seconds`."
            if group["reason"] == CUT_SHORT:
                problem = f"The table cuts {plural(count, 'clip')} of {group['split']} short"
                fix = "Remove this column if the texts are those of whole files."
            yield run.note(
                "max_seconds" if group["reason"] in outside else "data_folder",
                problem=f"{problem}: {listed(examples)}",
                fix=fix,
            )

    def ids_of(fact: str) -> dict[str, list[str]]:
        return {name: [clip["id"] for clip in s[fact]] for name, s in facts["splits"].items()}

    yield from finding_of_ids(
        run,
        ids_of("implausible"),
        problem="Texts can hardly belong to their clips, by their lengths",
        fix="Listen to these clips, and correct or remove them.",
    )
    yield from finding_of_ids(
        run,
        ids_of("other_durations"),
        problem=f"Clips are over {1000 * MAX_DURATION_ERROR:g} ms longer or shorter than their "
        "corpus states",
        fix="Download these clips again; they are used as they are.",
    )
    yield from _check_split_column(run)
    # A synthesizer has the voice of its speaker.
    is_voice = run.data.recipe.task.predicts == "audio"
    if is_voice and (facts["splits"][TRAIN]["speakers"] or 0) > 1:
        named = Counter(filter(None, read_column(splits.train, "speaker"))).most_common()
        yield run.note(
            "where",
            problem=f"One voice is trained on {plural(len(named), 'speaker')}: "
            f"{listed((name for name, _ in named), max_names=MAX_LISTED_IDS)}",
            fix=f"Keep one of them: `where: {{speaker: {named[0][0]}}}`.",
        )
    for shared in facts["shared"]:
        noun = COLUMN_NOUNS.get(shared["column"])
        first, second = shared["splits"]
        count = shared["values"]
        is_only_speaker = noun == "speaker" and facts["speakers"] == 1  # who must be in all splits
        if first == second:
            yield run.note(
                "data_folder",
                problem=f"{count:,} of {plural(shared['of'], 'clip')} in {first} "
                f"{'is a copy' if count == 1 else 'are copies'} of another one there: "
                f"{listed(shared['examples'], max_names=MAX_LISTED_IDS)}",
                fix="Keep each clip once, with the text that is right.",
            )
        elif noun and count and not is_only_speaker and not (is_voice and noun == "speaker"):
            yield run.finding(
                "data_folder",
                problem=f"{count:,} of {plural(shared['of'], noun)} in {second} "
                f"{'is' if count == 1 else 'are'} in {first} too, so its score measures memory: "
                f"{listed(shared['examples'], max_names=MAX_LISTED_IDS)}",
                fix=f"Keep each {noun} in one split.",
                stops=(noun, first) == ("clip", TRAIN) and count > MAX_SHARED_SHARE * shared["of"],
            )


def _check_file_rates(run: CheckedRun, splits: Mapping[str, Facts]) -> Iterator[Finding]:
    """Find splits with files whose rate is below `sample_rate`, so that they lack its high band."""
    rate = run.spec.settings["sample_rate"]
    narrow = []
    for name, facts in splits.items():
        rates = {
            int(r): n for r, n in facts["file_rates"].items() if int(r) < MIN_RATE_SHARE * rate
        }
        if sum(rates.values()) > MAX_NARROW_SHARE * facts["utterances"]:
            counts = listed(f"{n:,} of {facts['utterances']:,}: {r:,} Hz" for r, n in rates.items())
            narrow.append(f"{name} ({counts})")
    if narrow:
        yield run.note(
            "sample_rate",
            problem=f"Files have a lower rate than `sample_rate: {rate}`, so they lack the sounds "
            f"above half of their rate: {listed(narrow)}",
            fix="Set `sample_rate` to their rate, if the model shall be used on such files; "
            "otherwise use files of a higher rate.",
        )


def _check_split_column(run: CheckedRun) -> Iterator[Finding]:
    """Find rows whose column of splits names a different split."""
    splits = run.data.splits
    roles = {"train": {TRAIN}, "valid": {*splits.valid}, "test": {*splits.test}}
    for name, split in splits.named().items():
        column = find_split_column(split.column_names, partial(read_column, split))
        if column is not None:
            values = Counter(filter(None, read_column(split, column)))
            misplaced = [
                f"{count:,} {value}"
                for value, count in values.items()
                if name not in roles.get(role_of(value) or "", {name})
            ]
            if misplaced:
                yield run.note(
                    "data_folder",
                    problem=f"{name} has rows whose column `{column}` names another split: "
                    f"{listed(misplaced)}",
                    fix="Name the table as `manifest: {all: FILE}`, which follows the column.",
                )


def _check_changes(run: CheckedRun, splits: Sequence[Facts]) -> Iterator[Finding]:
    """Find dropped, replaced and unusual characters of texts, each kind once."""
    by_kind = defaultdict[str, list[Facts]](list)
    for change in chain.from_iterable(split["changes"] for split in splits):
        by_kind[change["kind"]].append(change)
    language = str(run.spec.settings["language"])
    counts = sum((Counter(split["characters"]) for split in splits), Counter[str]())
    letters = Counter({char: count for char, count in counts.items() if char.isalpha()})
    scripts = {*map(script_of, language_table(language).letters)}  # none for most languages
    foreign = Counter({char: n for char, n in letters.items() if script_of(char) not in scripts})
    num_texts = sum(split["utterances"] for split in splits)
    num_misread = sum(change["total"] for change in by_kind[MISREAD])
    is_foreign = scripts and 2 * foreign.total() > letters.total()
    if is_foreign and 2 * num_misread < num_texts:
        examples = (f"{count:,} {letter}" for letter, count in foreign.most_common())
        spoken = listed(languages_of(foreign), max_names=MAX_LISTED_LANGUAGES)
        yield run.finding(
            "language",
            problem="Most letters of the texts are of another script than those of "
            f"`language: {language}`: {listed(examples, max_names=MAX_LISTED_CHARACTERS)}",
            fix=f"Set `language` to that of the texts{spoken and f', such as {spoken}'}.",
        )
    if replacements := by_kind.get(REPLACED_KIND):  # of letters, by the text table of the language
        replaced = sum((Counter(change["counts"]) for change in replacements), Counter[str]())
        count = replaced.total()
        share = count / letters.total()
        languages = languages_with(replaced)
        if not languages and share > 10 * MAX_REPLACED_SHARE:  # no names such as Māori
            languages = languages_of(replaced)
        stops = share > MAX_REPLACED_SHARE and count >= MIN_REPLACED_LETTERS and len(languages) > 0
        yield run.finding(
            "language",
            problem=f"The text table of `language` replaces {plural(count, 'letter')} of the "
            f"texts ({share:.2%}): {_describe_changes(replacements)}",
            fix=f"Languages whose tables have these letters: "
            f"{listed(languages, max_names=MAX_LISTED_LANGUAGES)}. Set "
            f"`language: {languages[0]}`, or write the texts in the letters to train on."
            if stops
            else "Nothing needs to be done about loan words, and spellings that the table unifies.",
            stops=stops,
        )
    for kind, (key, fix) in FIXES.items():
        if changes := by_kind.get(kind):
            problem = f"Texts have {kind}: {_describe_changes(changes)}"
            is_widespread = num_misread > MAX_RARE_SHARE * num_texts
            stops = kind == MISREAD and is_widespread and num_misread >= MIN_REPLACED_LETTERS
            yield run.finding(key, problem=problem, fix=fix, stops=stops)


def _describe_changes(changes: Sequence[Facts]) -> str:
    """List characters, the most frequent first, with an example."""
    counts = sum((Counter(change["counts"]) for change in changes), Counter[str]())
    items = (f"{count:,} {item}" for item, count in counts.most_common())
    written, trained = (changes[0][side][:MAX_SHOWN_TEXT] for side in ("written", "trained"))
    example = f"{written!r} is trained as {trained!r}"
    return f"{listed(items, max_names=MAX_LISTED_CHARACTERS)} ({example})"


def check_channels(run: CheckedRun) -> Iterator[Finding]:
    """Find sets in which the downmix of two channels often loses speech."""
    rows_by_split = {}
    for name, split in run.data.splits.named().items():
        if CHANNEL_FAULT in split.column_names:
            rows = np.flatnonzero(np.array(read_column(split, CHANNEL_FAULT)) == CANCEL)
            if len(rows) > MAX_CHANNEL_FAULT_SHARE * len(split):
                rows_by_split[name] = rows
    yield from finding_of_rows(
        run,
        rows_by_split,
        problem=f"The two channels of clips {CANCEL}, but are downmixed",
        fix="Add a column `channel` to the tables: that of the speaker, counted from 0.",
    )


def check_silence(run: CheckedRun) -> Iterator[Finding]:
    """Find silent clips in a sample of each split."""
    silent = {}
    for name, split in run.data.splits.named().items():
        rows = spread_rows(len(split), MAX_SAMPLED_CLIPS)
        peaks = [np.abs(c.astype(np.int32)).max(initial=0) for c in read_samples(split, rows)]
        silent[name] = np.array(rows, np.int64)[np.array(peaks) < SILENT_PEAK]
    yield from finding_of_rows(
        run,
        silent,
        problem=f"Clips are silent (up to {MAX_SAMPLED_CLIPS} of each split were read)",
        fix="Record them again, or remove them.",
        stops=len(silent[TRAIN]) == min(len(run.data.splits.train), MAX_SAMPLED_CLIPS),
    )
