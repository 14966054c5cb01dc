"""Run the model of a bundle on data sets, to score it and to fit its decoder.

rows -> batches of whole clips -> results, or log-probabilities of a sample
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, starmap
from typing import Any

import datasets

from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import ConfigError
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.task import ClipBatch
from sbkit.data.shard import Row
from sbkit.data.splits import sample_counts
from sbkit.decoding.pool import RecognizedClip
from sbkit.distributed.ranks import world_size
from sbkit.logs.progress import ping, progress_bar
from sbkit.runtime.model_thread import model_errors
from sbkit.runtime.score_report import ScoredSet
from sbkit.runtime.score_sets import BATCH_SECONDS, read_whole_clips
from sbkit.runtime.torch_model import TorchModel
from sbkit.text.normalizers import named_normalizer


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
        bundle: Bundle[TorchModel],
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
        clips = [row["audio"] for row in rows]
        batch = ClipBatch(clips=clips, rows=rows, times=self._times, with_greedy=True)
        predictions = self._bundle.predict_batch(batch)
        if self._rewrite is None:
            return predictions
        return [_rewrite_clip(clip, self._rewrite) for clip in predictions]


def _rewrite_clip(clip: RecognizedClip, rewrite: Callable[[str], str]) -> RecognizedClip:
    greedy = None if clip.greedy is None else _rewrite_clip(clip.greedy, rewrite)
    return RecognizedClip(rewrite(clip.text), greedy=greedy)
