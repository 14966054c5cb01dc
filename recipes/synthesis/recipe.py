"""Text to speech in the voice of a corpus: an aligner, an acoustic model and a vocoder.

All are trained in one step. The aligner sees the audio. Along its best path the acoustic model
learns durations, pitch, energy and features; the vocoder learns from the clips' own features.

Legend: B utterances, S samples, L symbols, U frames, F features.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad

from recipes.prepare import COMMON_RANGES, CorpusRecipe
from recipes.synthesis.data import SpokenBatch, SpokenCollate, prepare_spoken, prepare_symbols
from sbkit.audio.io import FULL_SCALE, to_int16
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import draw_uniform
from sbkit.base.files import write_text_atomically
from sbkit.base.ranges import NON_NEGATIVE, Kind, Range
from sbkit.config.hparams import Settings
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import mel_distance, spectral_distance
from sbkit.models.vocoder import FRAME_HOPS
from sbkit.tasks.synthesis.model import (
    SynthesisModel,
    expand,
    find_misaligned,
    forward_sum_loss,
    frame_index,
    mean_by_symbol,
)
from sbkit.tasks.synthesis.symbols import PAUSE_SYMBOLS, SYMBOL_TYPES
from sbkit.tasks.synthesis.task import NUM_EXAMPLES, SpeechExample, SpokenUtterance, Synthesis
from sbkit.text.vocabulary import ClassLabels
from sbkit.train.brain import Brain

logger = logging.getLogger(__name__)

EDGE_FRAMES = 1  # at each end of a vocoder segment, where windows are missing


@dataclass(frozen=True)
class Aligned:
    """The alignment of a batch."""

    scores: Tensor  # (B, U, L) of the aligner
    durations: Tensor  # (B, L) frames of each symbol
    index: Tensor  # (B, U) the symbol of each frame
    is_misaligned: Tensor  # (B,) the text cannot match the audio


@dataclass(frozen=True)
class Synthesized:
    """The outputs for a batch."""

    aligned: Aligned
    features: Tensor  # (B, U, F) predicted and normalized
    target: Tensor  # (B, U, F) of the recording
    mask: Tensor  # (B, U) true within an utterance
    frames: Tensor  # (B,)
    log_durations: Tensor  # (B, L) predicted
    predicted_variances: Tensor  # (B, L, 2) pitch and energy
    variances: Tensor  # (B, L, 2) of the recording
    symbol_mask: Tensor  # (B, L) true within a text
    segment: Tensor  # (B, S') a part of each recording
    decoded: Tensor  # (B, S') the same part, vocoded
    segment_lengths: Tensor  # (B,) samples
    distance: Tensor  # (B,) between the log-mel features of segment and decoded
    examples: Tensor  # (n, S) the first utterances of a test batch; n is 0 in other stages


class SynthesisBrain(Brain):
    """Train by all losses at once, on every clip whose text matches its audio."""

    network: SynthesisModel
    parts = (
        *("compute_features", "aligner", "text_encoder", "adaptor", "mel_decoder"),
        *("vocoder_encoder", "vocoder_decoder"),
    )
    metrics = Synthesis.metrics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names = self.hparams.labels.names
        self._is_pause = torch.tensor([name in PAUSE_SYMBOLS for name in names], device=self.device)
        self._is_misaligned: dict[str, bool] = {}  # by the id of this epoch's training clips

    def on_fit_start(self) -> None:
        super().on_fit_start()
        features = self.network.compute_features
        self.measure_normalization(lambda audio, lengths: features(audio / FULL_SCALE, lengths))

    def compute_forward(self, batch: SpokenBatch, stage: Stage) -> Synthesized:
        """Align, and synthesize with the recorded durations; in training also with its pitch."""
        audio = batch.audio.float() / FULL_SCALE
        model = self.network
        with torch.autocast(audio.device.type, enabled=False):
            raw, frames = model.compute_features(audio, batch.audio_lengths)
            mask = length_mask(frames, raw.shape[1], raw.device).unsqueeze(2).float()
            target = model.mel_decoder.normalize(raw) * mask
        symbol_mask = length_mask(batch.symbol_lengths, batch.symbols.shape[1], raw.device)
        text_mask = symbol_mask.unsqueeze(2).float()
        scores, durations = model.align(batch.symbols, batch.symbol_lengths, target, frames)
        limit = self.hparams.longest_symbol * self.hparams.sample_rate
        is_pause = self._is_pause[batch.symbols]
        is_misaligned = find_misaligned(
            durations, batch.symbol_lengths, is_pause, limit / model.compute_features.frame_samples
        )
        index = frame_index(durations, scores.shape[1])
        aligned = Aligned(scores, durations, index, is_misaligned)
        octaves = pad(batch.octaves, (0, raw.shape[1] - batch.octaves.shape[1]))
        pitch_and_energy = (octaves * mask[:, :, 0], target.mean(2))
        variances = torch.stack([mean_by_symbol(x, index, durations) for x in pitch_and_energy], 2)
        states = model.text_encoder(batch.symbols, text_mask)
        log_durations, predicted = model.adaptor.predict(states, text_mask)
        used = variances if stage is Stage.TRAIN else predicted
        frame_states = expand(model.adaptor(states, used, text_mask), index)
        segment, decoded, lengths = self._vocode(audio, raw, frames, stage)
        distance = mel_distance(model.compute_features, decoded, segment, lengths)
        features = model.mel_decoder(frame_states, mask) * mask
        examples = audio[:0]
        if stage is Stage.TEST:
            restored = model.mel_decoder.denormalize(features[:NUM_EXAMPLES])
            examples = model.vocode(restored, mask[:NUM_EXAMPLES])
        return Synthesized(
            aligned=aligned,
            features=features,
            target=target,
            mask=mask[:, :, 0],
            frames=frames,
            log_durations=log_durations,
            predicted_variances=predicted,
            variances=variances,
            symbol_mask=symbol_mask,
            segment=segment,
            decoded=decoded,
            segment_lengths=lengths,
            distance=distance * model.compute_features.frame_samples / lengths.to(distance.device),
            examples=examples,
        )

    def _vocode(
        self, audio: Tensor, features: Tensor, frames: Tensor, stage: Stage
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vocode a segment of each clip: a random one in training, else its middle."""
        size = self.hparams.segment_frames + 2 * EDGE_FRAMES
        frame = self.network.compute_features.frame_samples
        room = (frames - size).clamp(min=0)
        shares = torch.full((len(frames),), 0.5)
        if stage is Stage.TRAIN:
            shares = draw_uniform(len(frames))
        starts = (shares * (room + 1)).long().to(audio.device)
        index = starts.unsqueeze(1) + torch.arange(size, device=audio.device)  # (B, P)
        mask = (index < frames.to(audio.device).unsqueeze(1)).unsqueeze(2).float()
        index = index.clamp(max=features.shape[1] - 1)
        selected = features.gather(1, index.unsqueeze(2).expand(-1, -1, features.shape[2]))
        decoded = self.network.vocode(selected, mask)[:, EDGE_FRAMES * frame : -EDGE_FRAMES * frame]
        first = (starts.unsqueeze(1) + EDGE_FRAMES) * frame
        samples = first + torch.arange(decoded.shape[1]).to(index)
        lengths = (frames - starts.cpu() - EDGE_FRAMES).clamp(1, self.hparams.segment_frames)
        lengths = lengths * frame
        within = length_mask(lengths, decoded.shape[1], audio.device)
        padded = pad(audio, (0, size * frame))
        return padded.gather(1, samples) * within, decoded * within, lengths

    def compute_objectives(self, outputs: Synthesized, batch: SpokenBatch, stage: Stage) -> Loss:
        """Sum the losses over the frames of each utterance, for the mean per frame."""
        settings = self.hparams
        aligned = outputs.aligned
        frames = outputs.frames.to(outputs.mask.device)
        acoustic = ((outputs.features - outputs.target).abs().mean(2) * outputs.mask).sum(1)
        mask = outputs.symbol_mask
        durations = aligned.durations
        timing = (outputs.log_durations.exp() - durations * outputs.log_durations) * mask
        square = (outputs.predicted_variances - outputs.variances).square().sum(2) * durations
        acoustic = acoustic + settings.duration_weight * timing.sum(1)
        acoustic = acoustic + settings.variance_weight * square.sum(1)
        alignment = forward_sum_loss(aligned.scores, outputs.frames, batch.symbol_lengths)
        lengths = outputs.segment_lengths.to(frames.device)
        spectral = spectral_distance(outputs.decoded, outputs.segment, lengths)
        vocoder = frames * (outputs.distance + spectral / lengths)
        sums = acoustic * ~aligned.is_misaligned + settings.align_weight * alignment + vocoder
        if stage is Stage.TRAIN:
            is_misaligned = zip(batch.ids, aligned.is_misaligned.tolist(), strict=True)
            self._is_misaligned.update(is_misaligned)
        return Loss(sums * batch.weights, frames * batch.weights)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """After a training epoch, list the clips whose text does not match their audio."""
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is not Stage.TRAIN:
            return
        clips = {
            id: is_misaligned
            for share in gather_over_ranks(self._is_misaligned)
            for id, is_misaligned in share.items()
        }
        self._is_misaligned = {}
        misaligned = sorted(id for id, is_misaligned in clips.items() if is_misaligned)
        if rank() == 0 and self.run_folder is not None and clips:
            file = self.run_folder / "misaligned.tsv"
            write_text_atomically(file, "".join(f"{id}\n" for id in ["id", *misaligned]))
            if epoch == self.hparams.epoch_counter.limit:
                logger.info(
                    f"{len(misaligned)} of {len(clips)} training clips are misaligned, and were "
                    f"not used for training (see {file})"
                )

    def score(self, outputs: Synthesized, batch: SpokenBatch) -> list[SpokenUtterance]:
        std = self.network.mel_decoder.normalize.std
        distance = ((outputs.features - outputs.target).abs() * std).mean(2) * outputs.mask
        octaves = self._predicted_octaves(outputs) - batch.octaves
        voiced = batch.voiced & outputs.mask.bool()
        durations = outputs.log_durations.exp() * outputs.symbol_mask
        return [
            SpokenUtterance(*values)
            for values in zip(
                outputs.frames.tolist(),
                distance.sum(1).tolist(),
                voiced.sum(1).tolist(),
                (octaves.square() * voiced).sum(1).tolist(),
                durations.sum(1).tolist(),
                outputs.distance.tolist(),
                outputs.aligned.is_misaligned.tolist(),
                self._examples(outputs, batch),
                strict=True,
            )
        ]

    def _predicted_octaves(self, outputs: Synthesized) -> Tensor:
        return expand(outputs.predicted_variances[:, :, :1], outputs.aligned.index)[:, :, 0]

    def _examples(self, outputs: Synthesized, batch: SpokenBatch) -> list[SpeechExample | None]:
        """Return the first utterances of a test batch as examples, None for the others."""
        names = self.hparams.labels.names
        octaves = self._predicted_octaves(outputs)
        by_frame = (outputs.target, outputs.features, batch.voiced, batch.octaves, octaves)
        examples: list[SpeechExample | None] = []
        for row, audio in enumerate(outputs.examples):
            frames, symbols = int(outputs.frames[row]), int(batch.symbol_lengths[row])
            samples = int(batch.audio_lengths[row])
            examples.append(
                SpeechExample(
                    batch.ids[row],
                    self.hparams.sample_rate,
                    [names[id] for id in batch.symbols[row, :symbols].tolist()],
                    outputs.aligned.durations[row, :symbols].cumsum(0).tolist(),
                    batch.audio[row, :samples].cpu().numpy(),
                    to_int16(audio[:samples].float().cpu().numpy()),
                    *(values[row, :frames].cpu().numpy() for values in by_frame),
                )
            )
        return examples + [None] * (len(batch) - len(examples))


class Tts(CorpusRecipe, Synthesis):
    """Train a voice on transcripts."""

    brain = SynthesisBrain
    ranges: ClassVar[Mapping[str, Range]] = {
        **COMMON_RANGES,
        **dict.fromkeys(("align_weight", "duration_weight", "variance_weight"), NON_NEGATIVE),
        "segment_frames": Range(low=4, integer=True, advice="32 frames are 0.8 s."),
        "symbols": Kind(SYMBOL_TYPES, advice="phonemes need espeak-ng."),
        "language": Kind(("one language tag",), advice="Train a voice for each language."),
        "longest_symbol": Range(low=0.1, advice="0.6 s is usual."),
    }
    prepare_splits = staticmethod(prepare_spoken)
    prepare_labels = staticmethod(prepare_symbols)

    def make_collate(self, hparams: Settings, labels: ClassLabels) -> SpokenCollate:
        return SpokenCollate(labels, hparams["sample_rate"], FRAME_HOPS * hparams["hop"])
