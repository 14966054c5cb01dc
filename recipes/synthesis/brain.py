"""Train a synthesizer: the alignment of text and sound, what sound is made of, and the vocoder.

All learn in one step. The aligner knows the sound; on its best path the others learn durations,
pitch, energy and features, and the vocoder learns of the clips' own features.

Legend: B utterances, S samples, L symbols, U frames, F features.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad

from recipes.synthesis.data import SpokenBatch
from recipes.synthesis.statistics import DRAWN, Shown, SpokenUtterance, describe, measure, report
from sbkit.audio.draws import draw_uniform
from sbkit.audio.io import FULL_SCALE, to_int16
from sbkit.audio.lengths import length_mask
from sbkit.base.files import write_text_atomically
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.metric import Metrics
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import mel_distance, spectral_distance
from sbkit.models.symbol_alignment import (
    expand,
    find_misaligned,
    forward_sum,
    frame_index,
    mean_by_symbol,
)
from sbkit.models.synthesis import SynthesisModel
from sbkit.tasks.synthesis import SYNTHESIS
from sbkit.text.symbols import PAUSE_SYMBOLS
from sbkit.train.brain import Brain

logger = logging.getLogger(__name__)

PARTS = (
    *("compute_features", "aligner", "text_encoder", "adaptor", "mel_decoder"),
    *("vocoder_encoder", "vocoder_decoder"),
)
EDGE = 1  # frames at each end of a piece for the vocoder, in which windows are missing


@dataclass(frozen=True)
class Aligned:
    """Which symbol each frame is of.

    scores (B, U, L): the aligner's; durations (B, L); index (B, U); wrong (B,): true where the text
    cannot be what is said.
    """

    scores: Tensor
    durations: Tensor
    index: Tensor
    wrong: Tensor


@dataclass(frozen=True)
class Synthesized:
    """What became of a batch: normalized features (B, U, F), and what they should be, in `mask`.

    log_durations (B, L); found, variances (B, L, 2): pitch and energy; piece, decoded (B, S'): a
    piece of each clip and what the vocoder made of it, piece_lengths (B,), distance (B,): between
    the log-mel features of both; sound (n, S): of the first of a test, else of none.
    """

    aligned: Aligned
    features: Tensor
    expected: Tensor
    mask: Tensor
    frames: Tensor
    log_durations: Tensor
    found: Tensor
    variances: Tensor
    symbol_mask: Tensor
    piece: Tensor
    decoded: Tensor
    piece_lengths: Tensor
    distance: Tensor
    sound: Tensor


class SynthesisBrain(Brain):
    """Train by all losses at once, on every clip whose text is what is said."""

    metrics: ClassVar[Metrics] = SYNTHESIS.metrics

    def __init__(self, **options: Any) -> None:
        """Accept SpeechBrain's options."""
        super().__init__(**options)
        parts: dict[str, Any] = {name: getattr(self.hparams, name) for name in PARTS}
        self.model = SynthesisModel(model=self.modules["model"], **parts)
        names = self.hparams.labels.names
        self._is_pause = torch.tensor([name in PAUSE_SYMBOLS for name in names], device=self.device)
        self._wrong: dict[str, bool] = {}  # of the training clips of this epoch

    def on_fit_start(self) -> None:
        """Find the last checkpoint; without one, measure the features first."""
        super().on_fit_start()
        features = self.model.features
        self.measure_features(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: SpokenBatch, stage: Stage) -> Synthesized:
        """Align, and synthesize with the durations that are found, in training the pitch, too."""
        audio, model = batch.audio.float() / FULL_SCALE, self.model
        with torch.autocast(audio.device.type, enabled=False):
            raw, frames = model.features(audio, batch.audio_lengths)
            mask = length_mask(frames, raw.shape[1], raw.device).unsqueeze(2).float()
            expected = model.mel_decoder.normalize(raw) * mask
        symbol_mask = length_mask(batch.symbol_lengths, batch.symbols.shape[1], raw.device)
        symbols = symbol_mask.unsqueeze(2).float()
        aligned = self._align(batch, expected, frames)
        octaves = pad(batch.octaves, (0, raw.shape[1] - batch.octaves.shape[1]))
        each = (octaves * mask[:, :, 0], expected.mean(2))
        variances = torch.stack(
            [mean_by_symbol(value, aligned.index, aligned.durations) for value in each], 2
        )
        states = model.text_encoder(batch.symbols, symbols)
        log_durations, found = model.adaptor.predict(states, symbols)
        given = variances if stage is Stage.TRAIN else found
        of_frames = expand(model.adaptor(states, given, symbols), aligned.index)
        piece, decoded, lengths = self._vocode(audio, raw, frames, stage)
        distance = mel_distance(model.features, decoded, piece, lengths)
        features = model.mel_decoder(of_frames, mask) * mask
        if stage is Stage.TEST:
            restored = model.mel_decoder.restore(features[:DRAWN])
            heard = model.vocode(restored, mask[:DRAWN])
        else:
            heard = audio[:0]
        return Synthesized(
            aligned=aligned,
            features=features,
            expected=expected,
            mask=mask[:, :, 0],
            frames=frames,
            log_durations=log_durations,
            found=found,
            variances=variances,
            symbol_mask=symbol_mask,
            piece=piece,
            decoded=decoded,
            piece_lengths=lengths,
            distance=distance * model.features.frame / lengths.to(distance.device),
            sound=heard,
        )

    def _align(self, batch: SpokenBatch, expected: Tensor, frames: Tensor) -> Aligned:
        scores, durations = self.model.align(batch.symbols, batch.symbol_lengths, expected, frames)
        limit = self.hparams.longest_symbol * self.hparams.sample_rate / self.model.features.frame
        is_pause = self._is_pause[batch.symbols]
        wrong = find_misaligned(durations, batch.symbol_lengths, is_pause, limit)
        return Aligned(scores, durations, frame_index(durations, scores.shape[1]), wrong)

    def _vocode(
        self, audio: Tensor, features: Tensor, frames: Tensor, stage: Stage
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vocode a piece of each clip: drawn in training, from its middle otherwise."""
        size, frame = self.hparams.piece_frames + 2 * EDGE, self.model.features.frame
        room = (frames - size).clamp(min=0)
        shares = torch.full((len(frames),), 0.5)
        if stage is Stage.TRAIN:
            shares = draw_uniform(len(frames))
        starts = (shares * (room + 1)).long().to(audio.device)
        at = starts.unsqueeze(1) + torch.arange(size, device=audio.device)  # (B, P)
        mask = (at < frames.to(audio.device).unsqueeze(1)).unsqueeze(2).float()
        at = at.clamp(max=features.shape[1] - 1)
        picked = features.gather(1, at.unsqueeze(2).expand(-1, -1, features.shape[2]))
        decoded = self.model.vocode(picked, mask)[:, EDGE * frame : -EDGE * frame]
        samples = starts.unsqueeze(1) * frame + torch.arange(decoded.shape[1]).to(at) + EDGE * frame
        lengths = (frames - starts.cpu() - EDGE).clamp(1, self.hparams.piece_frames) * frame
        within = length_mask(lengths, decoded.shape[1], audio.device)
        padded = pad(audio, (0, size * frame))
        return padded.gather(1, samples) * within, decoded * within, lengths

    def compute_objectives(self, outputs: Synthesized, batch: SpokenBatch, stage: Stage) -> Loss:
        """Sum the losses over the frames of each utterance, the mean of which is a frame's."""
        knobs, aligned = self.hparams, outputs.aligned
        frames = outputs.frames.to(outputs.mask.device)
        sound = ((outputs.features - outputs.expected).abs().mean(2) * outputs.mask).sum(1)
        mask, durations = outputs.symbol_mask, aligned.durations
        timing = (outputs.log_durations.exp() - durations * outputs.log_durations) * mask
        square = (outputs.found - outputs.variances).square().sum(2) * durations
        spoken = (
            sound + knobs.duration_weight * timing.sum(1) + knobs.variance_weight * square.sum(1)
        )
        alignment = forward_sum(aligned.scores, outputs.frames, batch.symbol_lengths)
        lengths = outputs.piece_lengths.to(frames.device)
        spectral = spectral_distance(outputs.decoded, outputs.piece, lengths)
        vocoder = frames * (outputs.distance + spectral / lengths)
        sums = spoken * ~aligned.wrong + knobs.align_weight * alignment + vocoder
        if stage is Stage.TRAIN:
            self._wrong.update(zip(batch.ids, aligned.wrong.tolist(), strict=True))
        return Loss(sums * batch.weights, frames * batch.weights)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """After training, list the clips whose text is not what is said."""
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is not Stage.TRAIN:
            return
        wrong = {
            name: is_wrong
            for each in gather_over_ranks(self._wrong)
            for name, is_wrong in each.items()
        }
        self._wrong = {}
        listed = sorted(name for name, is_wrong in wrong.items() if is_wrong)
        if rank() == 0 and self.run_folder is not None and wrong:
            file = self.run_folder / "misaligned.tsv"
            write_text_atomically(file, "".join(f"{name}\n" for name in ["id", *listed]))
            if epoch == self.hparams.epoch_counter.limit:
                logger.info(
                    f"{len(listed)} of {len(wrong)} clips of train are misaligned, and not learned "
                    f"from (listed in {file})"
                )

    def score(self, outputs: Synthesized, batch: SpokenBatch) -> list[SpokenUtterance]:
        """Keep how far the features, the pitch and the length of each utterance are off."""
        std = self.model.mel_decoder.normalize.std
        distance = ((outputs.features - outputs.expected).abs() * std).mean(2) * outputs.mask
        octaves = expand(outputs.found[:, :, :1], outputs.aligned.index)[:, :, 0] - batch.octaves
        voiced = batch.voiced & outputs.mask.bool()
        durations = outputs.log_durations.exp() * outputs.symbol_mask
        return [
            SpokenUtterance(*each)
            for each in zip(
                outputs.frames.tolist(),
                distance.sum(1).tolist(),
                voiced.sum(1).tolist(),
                (octaves.square() * voiced).sum(1).tolist(),
                durations.sum(1).tolist(),
                outputs.distance.tolist(),
                outputs.aligned.wrong.tolist(),
                self._shown(outputs, batch),
                strict=True,
            )
        ]

    def _shown(self, outputs: Synthesized, batch: SpokenBatch) -> list[Shown | None]:
        """Keep what is drawn and heard of the first utterances of a test's batch."""
        names, shown = self.hparams.labels.names, list[Shown | None]()
        octaves = expand(outputs.found[:, :, :1], outputs.aligned.index)[:, :, 0]
        for row, sound in enumerate(outputs.sound):
            count, length = int(outputs.frames[row]), int(batch.symbol_lengths[row])
            samples = int(batch.audio_lengths[row])
            each = (outputs.expected, outputs.features, batch.voiced, batch.octaves, octaves)
            shown.append(
                Shown(
                    batch.ids[row],
                    [names[id] for id in batch.symbols[row, :length].tolist()],
                    outputs.aligned.durations[row, :length].cumsum(0).tolist(),
                    batch.audio[row, :samples].cpu().numpy(),
                    to_int16(sound[:samples].float().cpu().numpy()),
                    *(values[row, :count].cpu().numpy() for values in each),
                )
            )
        return shown + [None] * (len(batch) - len(shown))

    def measure(self, results: Sequence[SpokenUtterance]) -> Mapping[str, float]:
        """Return the mel distance and what else is off."""
        return measure(results)

    def describe(self, results: Sequence[SpokenUtterance]) -> str:
        """Write the figures for the screen."""
        return describe(results)

    def report(
        self, split: str, results: Sequence[SpokenUtterance], folder: Path
    ) -> Mapping[str, Any]:
        """Draw a few utterances, and write them to be heard; return the figures."""
        return report(folder, split, results, self.hparams.sample_rate)
