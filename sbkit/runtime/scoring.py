"""Run the model of a bundle on data sets, to score it and to fit its decoder.

rows -> batches of whole clips -> results, or log-probabilities of a sample
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, starmap
from typing import Any

import datasets

from sbkit.audio.random_draws import seeded_draws
from sbkit.audio.segments import max_unsegmented_samples
from sbkit.base.errors import ConfigError
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.task import ClipBatch
from sbkit.data.shard import Row
from sbkit.data.splits import read_column, sample_counts
from sbkit.decoding.fit import ValidationUtterance, order_of, sample_utterances
from sbkit.decoding.pool import RecognizedClip
from sbkit.decoding.word_times import BEAM, GREEDY
from sbkit.distributed.ranks import world_size
from sbkit.evaluate.wer import FigureDict
from sbkit.lm.language_models import describe_seen
from sbkit.logs.progress import ping, progress_bar
from sbkit.runtime.model_thread import model_errors
from sbkit.runtime.score_report import ScoredSet
from sbkit.runtime.score_sets import BATCH_SECONDS, read_whole_clips
from sbkit.runtime.torch_model import TorchBundle
from sbkit.text.normalizers import named_normalizer

# The most audio of a validation set: it has enough tokens if each frame of 40 ms has one.
MAX_FITTED_SECONDS = 2400.0


class BundleScorer:
    """Scores a bundle on one test set after the other.

    Args:
        normalizer: the name of a normalizer of texts, for a second comparison.
        times: whether words are timed, for the reports.
        batch_seconds: of padded audio.
        rewrite: normalizes the texts and references of a model with another text table.

    >>> scorer = BundleScorer(load_bundle("my-model"))  # doctest: +SKIP
    >>> scored = scorer.score("test", run.prepare_splits().test["test"])  # doctest: +SKIP
    >>> total_errors(scored.results).wer  # doctest: +SKIP
    0.242
    """

    def __init__(
        self,
        bundle: TorchBundle,
        *,
        normalizer: str | None = None,
        times: bool = True,
        batch_seconds: float = BATCH_SECONDS,
        rewrite: Callable[[str], str] | None = None,
    ) -> None:
        task = bundle.task
        self._bundle = bundle
        self._times = times
        self._rewrite = rewrite
        self._batch_seconds = batch_seconds
        self._result = partial(task.result, config=bundle.config)
        if normalizer is not None:
            if task.predicts != "text":
                raise ConfigError("`normalizer` is for models that write texts, unlike this one.")
            self._result = partial(self._result, normalizer=named_normalizer(normalizer))

    def score(
        self,
        name: str,
        rows: datasets.Dataset,
        *,
        as_tested: Callable[[Sequence[Row]], Sequence[Row]] | None = None,
        max_batches: int | None = None,
    ) -> ScoredSet:
        """Score a test set on all ranks, the shortest clips first, until a ping asks to stop.

        rows: of a prepared split.
        as_tested: the function of `Splits`, for a test set of a run.
        max_batches: for each rank, to debug; None for all batches.
        """
        rank_results: dict[int, Any] = {}  # by row
        rate, seconds = self._bundle.config.sample_rate, self._batch_seconds
        batches = read_whole_clips(rows, rate, batch_seconds=seconds)
        total = float(sample_counts(rows).sum())
        with progress_bar(f"scoring {name}", total) as advance:
            for batch in islice(batches, max_batches):
                batch_rows: Sequence[Row] = [*batch.values()]
                ids = [row["id"] for row in batch_rows]
                if ping("test", ids):
                    break
                with model_errors(", ".join(ids[:3])), seeded_draws(ids):
                    batch_rows = as_tested(batch_rows) if as_tested else batch_rows
                    if rewrite := self._rewrite:
                        batch_rows = [{**row, "text": rewrite(row["text"])} for row in batch_rows]
                    pairs = zip(self._predict(batch_rows), batch_rows, strict=True)
                    rank_results |= zip(batch, starmap(self._result, pairs), strict=True)
                advance(world_size() * sum(row["samples"] for row in batch_rows))
        return ScoredSet.gather(name, rows, rank_results)

    def _predict(self, rows: Sequence[Row]) -> Sequence[Any]:
        bundle = self._bundle
        clips = [row["audio"] for row in rows]
        if bundle.task.predicts == "text":
            recognized = bundle.recognize(clips, times=self._times, with_greedy=True)
            if self._rewrite is None:
                return recognized
            return [_rewrite_clip(clip, self._rewrite) for clip in recognized]
        return bundle.task.predict(bundle, ClipBatch(clips=clips, rows=rows))


def _rewrite_clip(clip: RecognizedClip, rewrite: Callable[[str], str]) -> RecognizedClip:
    greedy = None if clip.greedy is None else _rewrite_clip(clip.greedy, rewrite)
    return RecognizedClip(rewrite(clip.text), greedy=greedy)


def decoding_facts(bundle: TorchBundle, scored: ScoredSet) -> FigureDict:
    """Return the decoder, its hotwords, and how many of the texts its language models have seen."""
    facts = decoder_facts(bundle)
    if bundle.decoder is not None:
        texts = read_column(scored.rows, "text")
        seen = bundle.decoder.language_models.count_seen(texts, bundle.config.text_table)
        facts |= {**seen, "notes": [*map(describe_seen, seen.values())]}
    return facts


def decoder_facts(bundle: TorchBundle) -> FigureDict:
    """Return the decoder of a recognizer and its hotwords, as plain data."""
    if not bundle.task.decodes_frames:
        return {}
    if bundle.decoder is None:
        return {"decoder": GREEDY}
    description: FigureDict = {"decoder": BEAM}
    if bundle.decoder.phrases:
        description["hotwords"] = bundle.decoder.phrases
        description["refused_hotwords"] = bundle.refused_hotwords
    return description


def provenance_of(bundle: TorchBundle) -> FigureDict:
    """Return the hashes of a bundle, and the settings of the chosen decoder."""
    settings = None if bundle.decoder is None else bundle.decoder.plain()
    return {**bundle.digests, "decoder": settings}


def sample_validation(
    bundle: TorchBundle,
    sets: Mapping[str, datasets.Dataset],
    *,
    with_attention: bool,
    batch_seconds: float = BATCH_SECONDS,
) -> list[ValidationUtterance]:
    """Return this rank's share of a sample of the validation sets, with log-probabilities.

    At most MAX_FITTED_SECONDS of each set are encoded. Long recordings are left out, because a
    decoder is fitted to utterances.

    with_attention: whether the attention decoder rescores, and so needs the encoder's states.
    """
    rate = bundle.config.sample_rate
    longest = max_unsegmented_samples(batch_seconds, rate)
    title, total = "encoding the validation sets", sum(map(len, sets.values()))
    with progress_bar(title, total) as advance:

        def encode() -> Iterator[ValidationUtterance]:
            for rows in sets.values():
                ids = rows["id"][:]
                samples = sample_counts(rows)
                order = [row for row in range(len(rows)) if samples[row] <= longest]
                order.sort(key=lambda row: order_of(ids[row]))
                fits = samples[order].cumsum() <= seconds_to_samples(MAX_FITTED_SECONDS, rate)
                selected = rows.select(sorted(order[: max(1, fits.sum())]))
                for batch in read_whole_clips(selected, rate, batch_seconds=batch_seconds):
                    clips = [*batch.values()]
                    advance(world_size() * len(clips))
                    if ping("encoding", [clip["id"] for clip in clips]):
                        return
                    encoded_clips = bundle.encode([clip["audio"] for clip in clips])
                    for clip, encoded in zip(clips, encoded_clips, strict=True):
                        # Copied, because a view would keep the outputs of the whole batch.
                        encoded = replace(encoded, states=encoded.states.clone())
                        yield ValidationUtterance(
                            encoded.log_probs.copy(),
                            clip["text"],
                            bundle.attention_scorer(encoded) if with_attention else None,
                            clip["id"],
                        )

        return sample_utterances(encode(), bundle.tokenizer.silent_ids)
