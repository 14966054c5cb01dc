"""Compare written formats with the trained model, and certify what was found: parity.json.

Legend: B utterances, S samples, U frames, V vocabulary.

Every format is compared on the grid, and where the run's test sets are there, on all of their
clips: log-probabilities, best tokens, and error rates beside those of the trained model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from sbkit.audio.io import FULL_SCALE
from sbkit.base.printable import printable
from sbkit.inference.bundle import Bundle
from sbkit.inference.formats.candidate import Candidate, Limits
from sbkit.inference.formats.grid import Grid, noise
from sbkit.inference.formats.held_out import HeldOut
from sbkit.inference.formats.source import Source, trained_log_probs
from sbkit.inference.onnx_runtime import Counts, Floats, LogProbs
from sbkit.inference.whole_clips import WholeClips
from sbkit.logs.wer_report import error_figures
from sbkit.models.decoding import greedy
from sbkit.text.wer import Scores, count_errors

SPEECH_SECONDS = 60  # of the held-out clips that the grid is cut from


@dataclass
class Agreement:
    """What a candidate and the trained model have in common, added up over batches."""

    largest_difference: float = 0.0
    where: str = ""
    utterances: int = 0
    other_tokens: int = 0
    frames: int = 0
    same_frames: int = 0

    def add(self, expected: LogProbs, found: LogProbs, *, blank: int, what: str) -> None:
        """Compare a batch; other lengths are an infinite difference."""
        self.utterances += len(expected.lengths)
        if not np.array_equal(expected.lengths, found.lengths):
            self.largest_difference, self.where = float("inf"), f"{what}: other lengths"
            self.other_tokens += len(expected.lengths)
            return
        self.other_tokens += sum(
            one != two
            for one, two in zip(tokens(expected, blank), tokens(found, blank), strict=True)
        )
        for row, length in enumerate(expected.lengths):
            one, two = expected.log_probs[row, :length], found.log_probs[row, :length]
            self.frames += int(length)
            self.same_frames += int((one.argmax(-1) == two.argmax(-1)).sum())
            difference = float(np.abs(one - two).max(initial=0))
            if not difference <= self.largest_difference:  # NaN is none, either
                self.largest_difference, self.where = difference, what

    def figures(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "largest_difference": self.largest_difference,
            "where": self.where,
            "utterances": self.utterances,
            "utterances_with_other_tokens": self.other_tokens,
            "frames": self.frames,
            "frames_with_the_same_best_token": self.same_frames,
        }


@dataclass
class Comparison:
    """A candidate beside the trained model: on the grid, and on held-out clips.

    errors, trained: by decoder; other_words: transcripts that are others; failure: what the
    candidate raised, after which it is asked no more.
    """

    candidate: Candidate
    grid: Agreement = field(default_factory=Agreement)
    clips: Agreement = field(default_factory=Agreement)
    errors: dict[str, Scores] = field(default_factory=dict)
    trained: dict[str, Scores] = field(default_factory=dict)
    other_words: int = 0
    failure: str = ""

    def run(self, audio: Floats, lengths: Counts, what: str) -> LogProbs | None:
        """Run the candidate; None where it fails, as the graph of an LSTM does at other lengths."""
        if self.failure:
            return None
        try:
            return self.candidate.log_probs(audio, lengths)
        except Exception as error:  # parts may be anybody's, and so may what a runtime raises
            reason = f"{type(error).__name__}: {printable(str(error))[:300]}"
            self.failure = f"it must run on {what}, but raised {reason}"
            return None

    def reasons(self) -> list[str]:
        """Say which limits are missed."""
        if self.failure:
            return [self.failure]
        limits, found = self.candidate.limits, []
        for agreement in (self.grid, self.clips):
            worst = agreement.largest_difference
            if limits.difference is not None and not worst <= limits.difference:
                found.append(
                    f"log-probabilities differ by {worst:.1e} where at most "
                    f"{limits.difference:.0e} is allowed ({agreement.where})"
                )
            if limits.same_tokens and agreement.other_tokens:
                found.append(
                    f"{agreement.other_tokens} of {agreement.utterances} utterances have other "
                    "tokens"
                )
        return found + (self._other_rates(limits) if self.errors else self._other_frames(limits))

    def _other_rates(self, limits: Limits) -> list[str]:
        allowed = limits.word_error_rate
        return [
            f"WER ({decoder}) is {100 * scores.wer:.2f} % where the trained model has "
            f"{100 * self.trained[decoder].wer:.2f} %, and {100 * allowed:g} points are allowed"
            for decoder, scores in self.errors.items()
            if allowed is not None and abs(scores.wer - self.trained[decoder].wer) > allowed
        ]

    def _other_frames(self, limits: Limits) -> list[str]:
        share = self.grid.same_frames / max(1, self.grid.frames)
        if limits.frames is None or share >= limits.frames:
            return []
        return [
            f"{100 * share:.1f} % of frames have the same best token where {100 * limits.frames:g} "
            "% must, as there are no held-out clips"
        ]


def compare(
    source: Source, candidates: Sequence[Candidate], grid: Grid, held_out: HeldOut | None
) -> list[Comparison]:
    """Run every candidate and the trained model on the same audio."""
    compared, bundle = [Comparison(each) for each in candidates], source.bundle
    trained = partial(trained_log_probs, source.waveform)
    blank, rate = bundle.require_asr().vocabulary.blank, bundle.config.sample_rate
    for case in grid.cases(_speech(held_out, rate), rate):
        expected = trained(case.audio, case.lengths)
        for each in compared:
            found = each.run(case.audio, case.lengths, case.what)
            if found is not None:
                each.grid.add(expected, found, blank=blank, what=case.what)
    for clips in held_out.batches() if held_out else ():
        audio, lengths = _as_batch(clips)
        expected, what = trained(audio, lengths), f"{len(audio)} held-out clips"
        hypotheses = _texts(bundle, expected)
        for each in compared:
            found = each.run(audio, lengths, what)
            if found is not None:
                each.clips.add(expected, found, blank=blank, what=what)
                _score(each, bundle, clips, hypotheses, found)
    return compared


def certificate(compared: Comparison, grid: Grid, held_out: HeldOut | str) -> dict[str, Any]:
    """Return what a comparison found as plain data; ``held_out`` may be why there is none."""
    reasons = compared.reasons()
    limits = {name: value for name, value in vars(compared.candidate.limits).items() if value}
    figures: dict[str, Any] = {
        "written": not reasons,
        "reasons": reasons,
        "limits": limits,
        "grid": {
            "batch": grid.batches,
            "seconds": grid.seconds,
            "padding": grid.paddings,
            "audio": "noise" if isinstance(held_out, str) else "held-out clips",
            **compared.grid.figures(),
        },
    }
    if isinstance(held_out, str):
        return figures | {"held_out": {"not_compared": held_out}}
    return figures | {
        "held_out": {
            "sets": {name: len(rows) for name, rows in held_out.sets.items()},
            **compared.clips.figures(),
            "transcripts_with_other_words": compared.other_words,
            "error_rates": _rates(compared.errors),
            "error_rates_of_the_trained_model": _rates(compared.trained),
        }
    }


def tokens(found: LogProbs, blank: int) -> list[list[int]]:
    """Decode greedily."""
    return greedy(torch.from_numpy(found.log_probs), torch.from_numpy(found.lengths), blank)


def _texts(bundle: Bundle, found: LogProbs) -> dict[str, list[str]]:
    """Decode greedily, and with the bundle's own decoder, given log-probabilities alone."""
    tokenizer = bundle.require_asr()
    best = {"greedy": tokens(found, tokenizer.vocabulary.blank)}
    if bundle.decoder is not None:
        kind, attends = bundle.decoder.kind, bundle.decoder.attention is not None
        name = f"{kind} of CTC alone" if attends else kind
        search, lengths = bundle.decoder.with_attention(None), found.lengths.tolist()
        rows = zip(found.log_probs, lengths, strict=True)
        best[name] = [list(search.nbest(row[:count])[0].tokens) for row, count in rows]
    return {name: [tokenizer.decode(ids) for ids in each] for name, each in best.items()}


def _score(
    compared: Comparison,
    bundle: Bundle,
    clips: WholeClips,
    trained: Mapping[str, list[str]],
    found: LogProbs,
) -> None:
    """Add the errors of a batch; a format with a decoder of its own is scored by that alone."""
    transcribe = compared.candidate.transcribe
    if transcribe is None:
        texts = _texts(bundle, found)
    else:
        texts = {compared.candidate.decoder: transcribe([_scaled(each) for each in clips.audio])}
    for decoder, hypotheses in texts.items():
        for name, heard in (("errors", hypotheses), ("trained", trained[decoder])):
            scores = getattr(compared, name)
            pairs = zip(clips.rows, heard, strict=True)
            more = sum((count_errors(row["text"], text) for row, text in pairs), Scores())
            scores[decoder] = scores.get(decoder, Scores()) + more
    own = compared.candidate.decoder
    compared.other_words += sum(
        one.split() != two.split() for one, two in zip(texts[own], trained[own], strict=True)
    )


def _rates(errors: Mapping[str, Scores]) -> dict[str, Any]:
    return {decoder: error_figures(scores) for decoder, scores in errors.items()}


def _as_batch(clips: WholeClips) -> tuple[Floats, Counts]:
    lengths = np.array([len(each) for each in clips.audio], np.int64)
    audio = np.zeros((len(lengths), lengths.max()), np.float32)
    for row, each in enumerate(clips.audio):
        audio[row, : len(each)] = _scaled(each)
    return audio, lengths


def _scaled(samples: Any) -> Floats:
    scaled: Floats = samples.astype(np.float32) / np.float32(FULL_SCALE)
    return scaled


def _speech(held_out: HeldOut | None, rate: int) -> Floats:
    """Join held-out clips, a minute at most; noise where there are none."""
    found: list[Floats] = []
    for clips in held_out.batches() if held_out else ():
        found += [_scaled(each) for each in clips.audio]
        if sum(map(len, found)) > SPEECH_SECONDS * rate:
            break
    return np.concatenate(found)[: SPEECH_SECONDS * rate] if found else noise(rate)
