"""Decoding in a run: greedily while it trains; for a test, by its search, which is fitted first.

log-probabilities of the validation sets -> weights of the search, confidences of words
log-probabilities of a test set          -> texts, words with times and confidences -> errors

Legend: B utterances, U frames of 40 ms, D model width, V vocabulary.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.machine import usable_cores
from sbkit.base.units import samples_to_seconds
from sbkit.data.batch import TextBatch
from sbkit.data.splits import sample_counts
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.confidence import CONFIDENCE_FILE, GREEDY, WordAligner
from sbkit.decoding.ctc_decoder import (
    CtcDecoder,
    DecoderInput,
    DecoderPool,
    Recognized,
)
from sbkit.decoding.decoder import DECODER_FILE, BeamDecoder
from sbkit.decoding.greedy import merge_repeats
from sbkit.decoding.tune import (
    POINTS,
    TuningUtterance,
    fit_confidences,
    fit_weights,
    limit_tokens,
    tokens_to_try,
    used_weights,
)
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.wer import Scored, Scores
from sbkit.models.asr import AsrModel
from sbkit.text.normalize import separates_words
from sbkit.train.evaluation import start_validation

SECONDS_PER_TOKEN = 3e-3  # for all weights that are tried, on a core (November 2026)
TOKENS_PER_FRAME = 3  # that are likely, in the default validation set
ORDERS = ("word_lm_order", "token_lm_order")  # of the search's language models


class RunDecoding:
    """Decode the batches of a run's evaluations, and count the errors.

    hparams: of the run; model: for a search that uses the attention decoder.

    Attributes:
        search: None where the YAML has no `decoder`, so that tests are decoded greedily.
        kind: the name of the decoder of tests.
        by_words: false for a language that writes no spaces between words.
        notes: sentences for the report, on how the search was fitted.

    Raises SbkitError where the YAML declares a search that cannot run.
    """

    def __init__(self, hparams: Any, model: AsrModel) -> None:
        self._hparams, self._model = hparams, model
        self._quiet = bool(getattr(hparams, "noprogressbar", False))
        self.search = _declared_search(hparams)
        self.kind = GREEDY if self.search is None else self.search.kind
        self.by_words = separates_words(getattr(hparams, "language", "und"))
        self.notes: list[str] = []
        self._pools: dict[str, DecoderPool] = {}  # by the name of the decoder

    def fit(self, brain: Any) -> None:
        """Fit the search and the confidences to the validation sets, never to a test set.

        Both are written into the run folder.
        """
        most = tokens_to_try(brain._training_metrics.audio_seconds)
        utterances = limit_tokens(self.encode_validation(brain), most)
        sets = {name: len(loader.dataset) for name, loader in valid_sets(brain).items()}
        ping = partial(brain.watchdog.ping, "tuning", brain.optimizer_step)
        if self.search is not None:
            self.search = self._choose_weights(self.search, utterances, sets, ping)
        ping = partial(brain.watchdog.ping, "confidence", brain.optimizer_step)
        aligners = self._fit_confidences(utterances, list(sets), ping)
        share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._pools = {
            name: DecoderPool(
                CtcDecoder.of(None if name == GREEDY else self.search, aligner), processes=share
            )
            for name, aligner in aligners.items()
        }

    def seconds_to_fit(self, brain: Any, test_share: float) -> float:
        """Estimate how long `fit` takes, and the search of the test sets, beside the model.

        test_share: how much the test sets hold of what the validation sets do.
        """
        if self.search is None or brain.loaders is None:
            return 0.0
        valid, epochs = brain.loaders.splits.valid.values(), brain.hparams.epoch_counter
        seconds_so_far = brain._training_metrics.audio_seconds  # of audio
        trained_seconds = seconds_so_far / max(epochs.current, 1) * epochs.limit
        samples = sum(int(sample_counts(each).sum()) for each in valid)
        tokens = TOKENS_PER_FRAME * samples / self._model.samples_per_frame
        fitted = min(tokens, tokens_to_try(trained_seconds))
        once = fitted + test_share * tokens / usable_cores()
        tried = fitted if self.search.needs_tuning else 0.0
        # The beam of a test is twice as wide.
        return SECONDS_PER_TOKEN * (tried + 2 * once / POINTS)

    @torch.no_grad()
    def encode_validation(self, brain: Any) -> Iterator[TuningUtterance]:
        """Compute the log-probabilities of this rank's share of the validation sets."""
        start_validation(brain)
        brain.modules.eval()
        for loader in valid_sets(brain).values():
            for batch in brain.pinging(loader, "decoding"):
                yield from self._encode(brain, batch)

    def _encode(self, brain: Any, batch: Any) -> list[TuningUtterance]:
        placed = brain.placed(batch)
        with brain.evaluation_ctx:
            predictions = brain.compute_forward(placed, Stage.VALID)
        log_probs = predictions.log_probs.float().cpu().numpy()
        frames = predictions.frame_lengths
        attention = self._attention(predictions.states, frames)
        seconds = batch.audio_lengths / self._hparams.sample_rate
        columns = (batch.ids, batch.texts, log_probs, frames.tolist(), attention, seconds.tolist())
        return [
            # A view would keep the whole batch.
            TuningUtterance(row[:count].copy(), text, decoder, name, length)
            for name, text, row, count, decoder, length in zip(*columns, strict=True)
        ]

    def _choose_weights(
        self,
        search: BeamDecoder,
        utterances: Sequence[TuningUtterance],
        sets: Mapping[str, int],
        ping: Any,
    ) -> BeamDecoder:
        """Return the search with the weights that its YAML declares, or the best it can find.

        ``sets``: the validation sets, and how many utterances each has.
        """
        chosen: dict[str, Any] = {}
        if search.needs_tuning and any(used_weights(search)):
            search, tuned = fit_weights(
                search,
                utterances,
                sets=list(sets),
                total=sum(sets.values()),
                by_words=self.by_words,
                add=_add,
                ping=ping,
                quiet=self._quiet,
            )
            self.notes = [tuned.kept] if tuned.kept else []
            chosen = {"chosen_on": [] if tuned.kept else list(sets), **tuned.plain()}
        self._write(DECODER_FILE, search.plain() | chosen)
        return search

    def _fit_confidences(
        self, utterances: Sequence[TuningUtterance], sets: Sequence[str], ping: Any
    ) -> dict[str, WordAligner]:
        """Return the word aligner of each decoder, with its confidences."""
        hparams, search = self._hparams, self.search
        aligner = WordAligner(
            tokenizer=hparams.tokenizer,
            samples_per_frame=self._model.samples_per_frame,
            sample_rate=hparams.sample_rate,
            lm=None if search is None else search.language_models.words,
        )
        fitted = fit_confidences(
            aligner, search, utterances, sets=sets, ping=ping, quiet=self._quiet
        )
        self._write(CONFIDENCE_FILE, {name: fit.plain() for name, fit in fitted.items()})
        return {name: replace(aligner, confidence=fit.confidence) for name, fit in fitted.items()}

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if rank() == 0:
            file = Path(self._hparams.output_folder) / name
            write_text_atomically(file, to_json(record, indent=1) + "\n")

    # -- a batch ------------------------------------------------------------------------------

    def score_greedily(self, batch: TextBatch, log_probs: Tensor, frames: Tensor) -> list[Scored]:
        """Decode every utterance greedily, and count its errors: (B, U, V), (B,)."""
        tokenizer = self._hparams.tokenizer
        best = log_probs.argmax(-1).cpu().numpy()  # one transfer from the device for all: (B, U)
        found = [
            merge_repeats(row[:count], tokenizer.vocabulary.blank)
            for row, count in zip(best, frames.tolist(), strict=True)
        ]
        return self._count([Recognized(tokenizer.decode(each)) for each in found], batch)

    def score(
        self, batch: TextBatch, log_probs: Tensor, frames: Tensor, states: Tensor
    ) -> list[Scored]:
        """Decode every utterance greedily and by the search, with the times of its words.

        (B, U, V), (B,), and for the attention decoder the encoder states (B, U, D).
        """
        rows, samples = log_probs.float().cpu().numpy(), batch.audio_lengths.tolist()
        parts = zip(rows, frames.tolist(), samples, self._attention(states, frames), strict=True)
        clips = [
            DecoderInput(log_probs=row[:count], samples=length, attention=attention)
            for row, count, length, attention in parts
        ]
        scored = {
            name: self._count(pool.decode(clips, times=True), batch)
            for name, pool in self._pools.items()
        }
        if self.search is None:
            return scored[GREEDY]
        pairs = zip(scored[self.kind], scored[GREEDY], strict=True)
        return [replace(each, greedy=other) for each, other in pairs]

    def _attention(self, states: Tensor, frames: Tensor) -> Sequence[AttentionDecoder | None]:
        """Return the attention decoder of each utterance, None where the search uses none."""
        if self.search is None or self.search.attention is None:
            return [None] * len(frames)
        model, pairs = self._model, zip(states, frames.tolist(), strict=True)
        # Copies: a view would keep the states of the whole batch as long as one utterance.
        scores = (partial(model.score_tokens, row[:count].clone()) for row, count in pairs)
        return [AttentionDecoder(log_probs=each, eos=model.vocabulary.eos) for each in scores]

    def _count(self, found: Sequence[Recognized], batch: TextBatch) -> list[Scored]:
        """Count the errors of every utterance in its decoded text."""
        rate, samples = self._hparams.sample_rate, batch.audio_lengths.tolist()
        rows = zip(batch.ids, batch.texts, found, batch.speakers, samples, strict=True)
        return [
            Scored(
                name,
                text,
                each.text,
                speaker=speaker,
                seconds=samples_to_seconds(count, rate),
                words=each.words,
                by_words=self.by_words,
            )
            for name, text, each, speaker, count in rows
        ]


def _declared_search(hparams: Any) -> BeamDecoder | None:
    """Return the declared search, without the attention decoder where that is not trained."""
    search: BeamDecoder | None = getattr(hparams, "decoder", None)
    if search is None:
        if any(getattr(hparams, name, 0) for name in ORDERS):
            raise SbkitError(
                f"`{ORDERS[0]}` and `{ORDERS[1]}` must be those of a `decoder`, but the YAML has "
                "none, so that greedy decoding uses no language model. Set both to 0, or add the "
                "decoder."
            )
        return None
    if type(search) is not BeamDecoder:
        raise SbkitError(
            "`decoder` must be a sbkit.decoding.decoder.BeamDecoder, which a bundle can hold, but "
            f"is a {type(search).__name__}. Take that, or leave `decoder` out and decode in "
            "`score` of a Brain of your own."
        )
    if hparams.ctc_weight == 1:  # the attention decoder is not trained
        if search.attention == "joint":
            raise SbkitError(
                "`attention_decoding: joint` must have an attention decoder that is trained, "
                "but `ctc_weight` is 1.0. Lower that, or take rescore, which then does nothing."
            )
        search = search.with_attention(None)
    search.check_graph()
    return search


def valid_sets(brain: Any) -> dict[str, Any]:
    """Return the loaders of a run's validation sets by name."""
    return {} if brain.loaders is None else dict(brain.loaders.valid)


def _add(scores: Sequence[Scores]) -> list[Scores]:
    """Add the scores of all ranks."""
    everyone = gather_over_ranks(list(scores))
    return [sum(each, Scores()) for each in zip(*everyone, strict=True)]
