"""Decoding in a run: greedy in validation; in a test, by the declared decoder, fitted first.

log-probabilities of the validation sets -> weights of the decoder, confidences of words
log-probabilities of a test set          -> texts, words with times and confidences -> errors

Legend: B utterances, U frames, D model width, V vocabulary.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor

from sbkit.base.errors import ConfigError
from sbkit.base.machine import usable_cores
from sbkit.data.batch import TextBatch
from sbkit.data.splits import sample_counts
from sbkit.decoding.clips import ClipDecoder, DecoderInput, DecoderPool, Recognition
from sbkit.decoding.declared import DECODERS
from sbkit.decoding.decoder import LanguageModelDecoder
from sbkit.decoding.fit import fit_decoder
from sbkit.decoding.fit_weights import NUM_TRIALS
from sbkit.decoding.greedy import merge_repeats
from sbkit.decoding.rescoring import AttentionScorer
from sbkit.decoding.sample import MAX_SAMPLE_TOKENS, ValidationUtterance, sample_utterances
from sbkit.decoding.words import GREEDY, WordAligner
from sbkit.evaluate.wer import GreedyCounts, ScoredUtterance
from sbkit.models.asr import AsrModel
from sbkit.runtime.transcriber import longest_whole
from sbkit.tasks.speech_recognition import score_texts
from sbkit.text.normalization import separates_words, text_table
from sbkit.train.brain import Brain

SECONDS_PER_TOKEN = 3e-3  # for all trials of the weights, on one core
LIKELY_TOKENS_PER_FRAME = 3  # in the default validation set
LM_ORDERS = ("word_lm_order", "token_lm_order")


class RunDecoding:
    """Decode the batches of a run's evaluations, and count the errors.

    Raises ConfigError if the YAML declares a decoder that cannot run.
    """

    def __init__(self, hparams: Any, model: AsrModel) -> None:
        self._hparams = hparams
        self._model = model
        self.decoder = _declared_decoder(hparams)  # None: tests are decoded greedily
        self.decoder_type = GREEDY if self.decoder is None else self.decoder.decoder_type
        self.language = getattr(hparams, "language", "und")
        self.by_words = separates_words(self.language)  # not by characters
        self.table = text_table(self.language, getattr(hparams, "text", None))
        self.notes: list[str] = []  # for the report: how the decoder was fitted
        self._pools: dict[str, DecoderPool] = {}  # by decoder type

    def fit(self, brain: Brain) -> None:
        """Fit decoder and confidences to the validation sets; write both into the run folder."""
        hparams = self._hparams
        silent = hparams.tokenizer.silent
        utterances = sample_utterances(self._encode_validation(brain), silent)
        aligner = WordAligner(
            tokenizer=hparams.tokenizer,
            samples_per_frame=self._model.samples_per_frame,
            sample_rate=hparams.sample_rate,
            word_lm=None if self.decoder is None else self.decoder.language_models.words,
        )
        fitted = fit_decoder(
            self.decoder,
            aligner,
            utterances,
            splits=[name for name, _ in _valid_loaders(brain)],
            by_words=self.by_words,
            ping=lambda phase: brain.watchdog.ping(phase, brain.optimizer_step),
            quiet=bool(getattr(hparams, "noprogressbar", False)),
        )
        fitted.write(Path(hparams.output_folder))
        self.decoder = fitted.decoder
        self.notes = [fitted.note] if fitted.note else []
        processes = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for name, fit in fitted.confidences.items():
            confident_aligner = replace(aligner, confidence=fit.confidence)
            decoder = ClipDecoder(None if name == GREEDY else self.decoder, confident_aligner)
            self._pools[name] = DecoderPool(decoder, processes=processes)

    def seconds_to_fit(self, brain: Brain, test_share: float) -> float:
        """Estimate how long `fit` and the decoding of the test sets take, without the model.

        test_share: the size of the test sets, divided by the size of the validation sets.
        """
        if self.decoder is None or brain.loaders is None:
            return 0.0
        longest = longest_whole(self._hparams.eval_batch_seconds, self._hparams.sample_rate)
        counts = map(sample_counts, brain.loaders.splits.valid.values())
        samples = sum(int(lengths[lengths <= longest].sum()) for lengths in counts)
        num_tokens = LIKELY_TOKENS_PER_FRAME * samples / self._model.samples_per_frame
        num_sampled = min(num_tokens, MAX_SAMPLE_TOKENS)
        num_decoded = num_sampled + test_share * num_tokens / usable_cores()
        num_tried = num_sampled if self.decoder.needs_tuning else 0.0
        # The beam of a test is twice as wide as the beam of a trial.
        return SECONDS_PER_TOKEN * (num_tried + 2 * num_decoded / NUM_TRIALS)

    @torch.no_grad()
    def _encode_validation(self, brain: Brain) -> Iterator[ValidationUtterance]:
        """Compute the log-probabilities of this rank's share of the validation sets.

        Long recordings are left out: a decoder is fitted to utterances.
        """
        brain.start_validation()
        brain.modules.eval()
        for _, loader in _valid_loaders(brain):
            for batch in brain.watched(loader, "decoding"):
                if self.is_long(batch):
                    continue
                placed_batch = brain.to_device(batch)
                with brain.evaluation_ctx:
                    predictions = brain.compute_forward(placed_batch, Stage.VALID)
                log_probs = predictions.log_probs.float().cpu().numpy()
                frames = predictions.frame_lengths
                attention = self._attention_decoders(predictions.states, frames)
                rows = zip(log_probs, frames.tolist(), strict=True)
                # Copies: a view would keep the log-probabilities of the whole batch.
                clips = [row[:count].copy() for row, count in rows]
                yield from map(ValidationUtterance, clips, batch.texts, attention, batch.ids)

    def is_long(self, batch: TextBatch) -> bool:
        """Return whether a batch is one recording that is evaluated in segments, without a loss.

        Attention and CTC over so many frames would take minutes and gigabytes.
        """
        longest = longest_whole(self._hparams.eval_batch_seconds, self._hparams.sample_rate)
        return len(batch) == 1 and int(batch.audio_lengths.max()) > longest

    # -- a batch ------------------------------------------------------------------------------

    def score_greedily(
        self, batch: TextBatch, log_probs: Tensor, frames: Tensor
    ) -> list[ScoredUtterance]:
        """Decode every utterance greedily, and count its errors: (B, U, V), (B,)."""
        tokenizer = self._hparams.tokenizer
        best = log_probs.argmax(-1).cpu().numpy()  # one transfer from the device for all: (B, U)
        blank = tokenizer.vocabulary.blank
        rows = [row[:count] for row, count in zip(best, frames.tolist(), strict=True)]
        tokens = [merge_repeats(row, blank) for row in rows]
        scored = self._score([Recognition(tokenizer.decode(ids)) for ids in tokens], batch)
        counts = [
            GreedyCounts(len(row), int((row == blank).sum()), len(ids), expected)
            for row, ids, expected in zip(rows, tokens, batch.token_lengths.tolist(), strict=True)
        ]
        pairs = zip(scored, counts, strict=True)
        return [replace(utterance, counts_of_greedy=count) for utterance, count in pairs]

    def score(
        self, batch: TextBatch, log_probs: Tensor, frames: Tensor, states: Tensor
    ) -> list[ScoredUtterance]:
        """Decode every utterance greedily and with the decoder, with the times of its words.

        (B, U, V), (B,), and for the attention decoder the encoder states (B, U, D).
        """
        rows = log_probs.float().cpu().numpy()
        samples = batch.audio_lengths.tolist()
        attention = self._attention_decoders(states, frames)
        clips = [
            DecoderInput(log_probs=row[:count], samples=length, attention=attention_decoder)
            for row, count, length, attention_decoder in zip(
                rows, frames.tolist(), samples, attention, strict=True
            )
        ]
        scored = {
            name: self._score(pool.decode(clips, with_times=True), batch)
            for name, pool in self._pools.items()
        }
        if self.decoder is None:
            return scored[GREEDY]
        pairs = zip(scored[self.decoder_type], scored[GREEDY], strict=True)
        return [replace(utterance, greedy=greedy) for utterance, greedy in pairs]

    def _attention_decoders(
        self, states: Tensor, frames: Tensor
    ) -> Sequence[AttentionScorer | None]:
        """Return the attention decoder of each utterance, None if the decoder does not rescore."""
        if self.decoder is None or not self.decoder.attention_rescoring:
            return [None] * len(frames)
        model = self._model
        pairs = zip(states, frames.tolist(), strict=True)
        # Copies: a view would keep the states of the whole batch as long as one utterance.
        scores = (partial(model.score_tokens, row[:count].clone()) for row, count in pairs)
        return [AttentionScorer(log_probs=score, eos=model.vocabulary.eos) for score in scores]

    def _score(self, recognized: Sequence[Recognition], batch: TextBatch) -> list[ScoredUtterance]:
        return score_texts(
            recognized,
            ids=batch.ids,
            texts=batch.texts,
            sentences=batch.columns.get("sentence", batch.texts),
            speakers=batch.speakers,
            samples=batch.audio_lengths.tolist(),
            sample_rate=self._hparams.sample_rate,
            by_words=self.by_words,
            language=self.language,
            table=self.table,
        )


def _declared_decoder(hparams: Any) -> LanguageModelDecoder | None:
    """Return the declared decoder, without rescoring if no attention decoder is trained."""
    decoder: LanguageModelDecoder | None = getattr(hparams, "decoder", None)
    if decoder is None:
        if any(getattr(hparams, name, 0) for name in LM_ORDERS):
            raise ConfigError(
                f"`{LM_ORDERS[0]}` and `{LM_ORDERS[1]}` belong to a `decoder`, but the YAML has "
                "none, and greedy decoding uses no language model. Set both to 0, or add the "
                "decoder."
            )
        return None
    if type(decoder) not in DECODERS.values():
        raise ConfigError(
            "`decoder` must be made by sbkit.decoding.declared.make_decoder, so that a bundle can "
            f"hold it, but is a {type(decoder).__name__}. Correct it, or leave `decoder` out and "
            "decode in `score` of your own Brain."
        )
    if hparams.ctc_weight == 1:  # the attention decoder is not trained
        decoder = decoder.copy_with(attention_rescoring=False)
    decoder.check()
    return decoder


def _valid_loaders(brain: Brain) -> Sequence[tuple[str, Any]]:
    return [] if brain.loaders is None else [*brain.loaders.valid.items()]
