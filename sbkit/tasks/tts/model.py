"""The parts of a TTS model, from text to audio, and the alignment of text and audio.

Legend: B utterances, L symbols, U frames of 25 ms, M mel bins, D model width, S samples. A frame
consists of two hops, so that its features have 2 M values.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, pad

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import draw_uniform
from sbkit.base.errors import ConfigError
from sbkit.base.ranges import Count, Dropout, PositiveCount
from sbkit.models.layers import FrameConv, GlobalNorm
from sbkit.models.spectral_losses import mel_distance
from sbkit.models.vocoder import FRAME_HOPS, ConvNeXt, LogMel, VocoderDecoder, VocoderEncoder
from sbkit.tasks.tts.recordings import SpokenBatch
from sbkit.tasks.tts.symbols import PADDING

BLANK_LOG_PROB = -1.0  # before normalization, as in Badlani et al.
IMPOSSIBLE_LOG_PROB = -1e4
MAX_SPELLED_SYMBOLS = 4  # in a text that may be an abbreviation
MAX_SHORT_SHARE = 0.6  # of symbols with at most one frame
MAX_SYMBOL_FRAMES = 80.0  # the longest predicted duration: two seconds
NUM_VARIANCES = 2  # pitch and energy
EVALUATED_FRAMES = 40  # of each recording, vocoded
EDGE_FRAMES = 1  # at each end of a vocoded segment, where windows are missing


def forward_sum_loss(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Return the negative log-probability of all monotonic alignments together.

    (B, U, L) unnormalized log-probabilities of the symbols in each frame, (B,), (B,) -> (B,).
    Source: Badlani et al. 2021, One TTS Alignment To Rule Them All (arXiv 2108.10447).
    """
    with_blank = pad(log_probs.float(), (1, 0), value=BLANK_LOG_PROB).log_softmax(2)
    classes = torch.arange(1, log_probs.shape[2] + 1).expand(len(log_probs), -1)
    return ctc_loss(
        with_blank.transpose(0, 1),
        classes.to(log_probs.device),
        frame_lengths,
        symbol_lengths,
        reduction="none",
        zero_infinity=True,
    )


def diagonal_prior(num_frames: int, num_symbols: int) -> Tensor:
    """Return log-probabilities that prefer the diagonal: (U, L), each row a beta-binomial."""
    log_gamma = torch.arange(num_frames + num_symbols + 1).double().lgamma()

    def log_beta(x: Tensor, y: Tensor) -> Tensor:
        return log_gamma[x] + log_gamma[y] - log_gamma[x + y]

    a = torch.arange(1, num_frames + 1).unsqueeze(1)  # (U, 1)
    b = num_frames + 1 - a
    symbol = torch.arange(num_symbols)
    num_trials = num_symbols - 1
    log_binomial = -log_beta(num_trials - symbol + 1, symbol + 1) - float(np.log(num_symbols))
    return (log_binomial + log_beta(symbol + a, num_trials - symbol + b) - log_beta(a, b)).float()


def diagonal_priors(shape: torch.Size, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Return the prior of each utterance, IMPOSSIBLE_LOG_PROB past its lengths: -> (B, U, L)."""
    priors = torch.full(shape, IMPOSSIBLE_LOG_PROB)
    lengths = zip(frame_lengths.tolist(), symbol_lengths.tolist(), strict=True)
    for prior, (num_frames, num_symbols) in zip(priors, lengths, strict=True):
        prior[:num_frames, :num_symbols] = diagonal_prior(num_frames, num_symbols)
    return priors


def find_durations(log_probs: Tensor, frame_lengths: Tensor, symbol_lengths: Tensor) -> Tensor:
    """Count the frames of each symbol on the best monotonic path: (B, U, L), (B,), (B,) -> (B, L).

    Each symbol has at least one frame; with more symbols than frames, the last symbols have none.
    """
    by_frame = log_probs.detach().float().cpu().numpy().transpose(1, 0, 2)  # (U, B, L)
    num_frames, num_utterances, num_symbols = by_frame.shape
    advances = np.zeros(by_frame.shape, bool)  # whether the path comes from the symbol before
    best = np.full((num_utterances, num_symbols), 2 * IMPOSSIBLE_LOG_PROB * num_frames)
    best[:, 0] = by_frame[0, :, 0]
    for frame in range(1, num_frames):
        previous = np.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=-np.inf)
        advances[frame] = previous > best
        best = np.maximum(previous, best) + by_frame[frame]
    # Follow each path back from its last symbol.
    durations = np.zeros((num_utterances, num_symbols), np.int64)
    lengths = frame_lengths.numpy()
    utterance = np.arange(num_utterances)
    symbol = np.minimum(symbol_lengths.numpy(), lengths) - 1
    for frame in range(num_frames - 1, -1, -1):
        within = frame < lengths
        durations[utterance[within], symbol[within]] += 1
        symbol = symbol - (within & advances[frame, utterance, symbol])
    return torch.from_numpy(durations)


def find_misaligned(
    durations: Tensor, symbol_lengths: Tensor, is_pause: Tensor, max_frames: float
) -> Tensor:
    """Check each utterance for durations that no speech has: (B, L), (B,), (B, L) -> (B,).

    If the text does not match the audio, the best path gives a symbol more than ``max_frames``
    frames, or gives most symbols at most one. Pauses may be long. In a text of few letters, a
    letter may also be long: it may be spoken as a word, as in "DVD".
    """
    counts = symbol_lengths.to(durations.device)
    is_long = durations.masked_fill(is_pause, 0).amax(1) > max_frames
    num_short = counts - (durations > 1).sum(1)
    is_short = num_short > MAX_SHORT_SHARE * counts
    return (is_long & (counts > MAX_SPELLED_SYMBOLS)) | is_short


def expand(states: Tensor, index: Tensor) -> Tensor:
    """Return the state of each frame's symbol: (B, L, D), (B, U) -> (B, U, D).

    The index of padding is `PADDING`; it gets the states of the first symbol.
    """
    return states.gather(1, index.clamp(min=0).unsqueeze(2).expand(-1, -1, states.shape[2]))


def frame_index(durations: Tensor, num_frames: int) -> Tensor:
    """Return the symbol index of each frame: (B, L) -> (B, U); past the end, the last index."""
    ends = durations.cumsum(1)
    frame = torch.arange(num_frames, device=durations.device)
    frame = frame.expand(len(durations), -1).contiguous()
    return torch.searchsorted(ends, frame, right=True).clamp(max=durations.shape[1] - 1)


def mean_by_symbol(values: Tensor, index: Tensor, durations: Tensor) -> Tensor:
    """Return the mean over each symbol's frames: (B, U), (B, U), (B, L) -> (B, L).

    Frames past the end must be 0. A symbol without frames has 0.
    """
    sums = torch.zeros_like(durations, dtype=values.dtype).scatter_add(1, index, values)
    return sums / durations.clamp(min=1)


class TextEncoder(nn.Module):
    """Encode symbols: (B, L), (B, L, 1) -> (B, L, D).

    symbol_type: one of `sbkit.tasks.tts.symbols.SYMBOL_TYPES`.
    """

    def __init__(
        self,
        *,
        num_symbols: PositiveCount,
        symbol_type: str,
        d_model: PositiveCount,
        d_ffn: PositiveCount,
        num_layers: Count,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        self.symbol_type = symbol_type
        self.embedding = nn.Embedding(num_symbols, d_model)
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn, dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, symbols: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(symbols), mask))


class DurationAligner(nn.Module):
    """Score which symbol each frame belongs to, by the distance between learned embeddings.

    (B, L), (B, L, 1), (B, U, 2 M) -> (B, U, L), unnormalized. Source: arXiv 2108.10447.

    longest_symbol: seconds; if a letter takes more, the text does not match the audio.
    """

    def __init__(
        self,
        *,
        num_symbols: PositiveCount,
        n_mels: PositiveCount,
        d_align: PositiveCount,
        longest_symbol: float,
    ) -> None:
        super().__init__()
        self.longest_symbol = longest_symbol
        self.embedding = nn.Embedding(num_symbols, d_align)
        self.text_conv = FrameConv(d_align, 2 * d_align, 3, padding=1)
        self.text_proj = nn.Linear(2 * d_align, d_align)
        self.frame_conv = FrameConv(FRAME_HOPS * n_mels, 2 * d_align, 3, padding=1)
        self.frame_proj = nn.Linear(2 * d_align, d_align)
        self.log_scale = nn.Parameter(-torch.tensor(float(d_align)).log())

    def forward(self, symbols: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        keys = self.text_proj(self.text_conv(self.embedding(symbols) * mask).relu())
        queries = self.frame_proj(self.frame_conv(features).relu())
        squares = queries.square().sum(2, keepdim=True) + keys.square().sum(2).unsqueeze(1)
        distances: Tensor = squares - 2 * queries @ keys.transpose(1, 2)
        return -self.log_scale.exp() * distances


class VarianceAdaptor(nn.Module):
    """Predict duration, pitch and energy of each symbol, and add pitch and energy to its state.

    Durations are predicted as logarithms of frames, pitch in octaves, energy in nats.
    """

    def __init__(self, *, d_model: PositiveCount, num_layers: Count, dropout: Dropout) -> None:
        super().__init__()
        self.blocks = ConvNeXt(num_layers, d_model, d_model, dropout)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, 1 + NUM_VARIANCES)
        self.embed = FrameConv(NUM_VARIANCES, d_model, 3, padding=1)

    def predict(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Predict log-durations (B, L), and pitch and energy: (B, L, D), (B, L, 1) -> (B, L, 2)."""
        predicted = self.head(self.norm(self.blocks(states, mask)))
        return predicted[:, :, 0], predicted[:, :, 1:]

    def forward(self, states: Tensor, variances: Tensor, mask: Tensor) -> Tensor:
        """Add pitch and energy to states: (B, L, D), (B, L, 2), (B, L, 1) -> (B, L, D)."""
        return states + self.embed(variances * mask)


class MelDecoder(nn.Module):
    """Predict normalized log-mel features: (B, U, D), (B, U, 1) -> (B, U, 2 M)."""

    def __init__(
        self,
        *,
        n_mels: PositiveCount,
        d_model: PositiveCount,
        d_ffn: PositiveCount,
        num_layers: Count,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        self.normalize = GlobalNorm(n_mels=FRAME_HOPS * n_mels)
        self.blocks = ConvNeXt(num_layers, d_model, d_ffn, dropout)
        self.norm = nn.LayerNorm(d_model)
        self.proj = nn.Linear(d_model, FRAME_HOPS * n_mels)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return self.proj(self.norm(self.blocks(states, mask)))

    def denormalize(self, features: Tensor) -> Tensor:
        return features * self.normalize.std + self.normalize.mean


@dataclass(frozen=True)
class Synthesized:
    """The outputs for a batch."""

    batch: SpokenBatch
    sample_rate: int  # Hz
    alignment: Tensor  # (B, U, L) ln p of each symbol at each frame, by the aligner
    durations: Tensor  # (B, L) frames of each symbol
    index: Tensor  # (B, U) the symbol of each frame
    is_misaligned: Tensor  # (B,) the text cannot match the audio
    features: Tensor  # (B, U, F) predicted and normalized
    target: Tensor  # (B, U, F) of the recording
    target_std: Tensor  # (F,) before normalization
    mask: Tensor  # (B, U) 1 within an utterance
    frames: Tensor  # (B,)
    log_durations: Tensor  # (B, L) predicted
    predicted_variances: Tensor  # (B, L, 2) pitch and energy
    variances: Tensor  # (B, L, 2) of the recording
    predicted_octaves: Tensor  # (B, U) the pitch of each frame
    symbol_mask: Tensor  # (B, L) true within a text
    segment: Tensor  # (B, S') a part of each recording
    decoded: Tensor  # (B, S') the same part, vocoded
    segment_lengths: Tensor  # (B,) samples
    distance: Tensor  # (B,) between the log-mel features of segment and decoded
    examples: Tensor  # (n, S) the first utterances of a test batch; n is 0 elsewhere


@dataclass(eq=False, kw_only=True)
class TtsModel:
    """A TTS model as one: aligner, text encoder, adaptor, mel decoder and vocoder.

    `encode` and `decode` are exported as graphs of these names, and a graph returns a tuple, even
    of a single tensor.
    """

    model: nn.ModuleList
    compute_features: LogMel
    aligner: DurationAligner
    text_encoder: TextEncoder
    adaptor: VarianceAdaptor
    mel_decoder: MelDecoder
    vocoder_encoder: VocoderEncoder
    vocoder_decoder: VocoderDecoder

    def __post_init__(self) -> None:
        hop, decoder_hop = self.compute_features.hop_samples, self.vocoder_decoder.hop_samples
        if hop != decoder_hop:
            raise ConfigError(
                f"`vocoder_decoder` has a hop of {decoder_hop}, `compute_features` of {hop}.",
                keys=("vocoder_decoder",),
            )

    @property
    def settings(self) -> dict[str, object]:
        frame = self.compute_features.frame_samples
        return {"symbol_type": self.text_encoder.symbol_type, "frame": frame}

    def align(
        self, symbols: Tensor, symbol_lengths: Tensor, features: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ln p of each symbol at each frame, and count frames per symbol on the best path.

        (B, L), (B,), normalized features (B, U, 2 M), (B,) -> (B, U, L), (B, L). The lengths are on
        the CPU.
        """
        mask = length_mask(symbol_lengths, symbols.shape[1], symbols.device).unsqueeze(2).float()
        is_symbol = mask.transpose(1, 2) != 0
        logits = self.aligner(symbols, mask, features).float()
        log_probs = logits.masked_fill(~is_symbol, IMPOSSIBLE_LOG_PROB).log_softmax(2)
        priors = diagonal_priors(log_probs.shape, frames, symbol_lengths)
        log_probs = log_probs + priors.to(log_probs.device)
        return log_probs, find_durations(log_probs, frames, symbol_lengths).to(log_probs.device)

    def resynthesize(
        self, batch: SpokenBatch, *, drawn_frames: int | None = None, num_examples: int = 0
    ) -> Synthesized:
        """Align recordings with their texts, and synthesize them with the recorded durations.

        drawn_frames: in training, which also uses the recorded pitch and energy, the frames of a
            drawn segment to vocode; None for those in the middle of each recording.
        num_examples: the first ones that are also vocoded whole.
        """
        training = drawn_frames is not None
        audio = batch.audio.float() / FULL_SCALE
        with torch.autocast(audio.device.type, enabled=False):
            raw, frames = self.compute_features(audio, batch.audio_lengths)
            mask = length_mask(frames, raw.shape[1], raw.device).unsqueeze(2).float()
            target = self.mel_decoder.normalize(raw) * mask
        symbol_mask = length_mask(batch.symbol_lengths, batch.symbols.shape[1], raw.device)
        text_mask = symbol_mask.unsqueeze(2).float()
        alignment, durations = self.align(batch.symbols, batch.symbol_lengths, target, frames)
        frame_samples = self.compute_features.frame_samples
        longest = self.aligner.longest_symbol * self.compute_features.sample_rate / frame_samples
        is_misaligned = find_misaligned(durations, batch.symbol_lengths, batch.is_pause, longest)
        index = frame_index(durations, alignment.shape[1])
        octaves = pad(batch.octaves, (0, raw.shape[1] - batch.octaves.shape[1]))
        pitch_and_energy = (octaves * mask[:, :, 0], target.mean(2))
        variances = torch.stack([mean_by_symbol(x, index, durations) for x in pitch_and_energy], 2)
        states = self.text_encoder(batch.symbols, text_mask)
        log_durations, predicted = self.adaptor.predict(states, text_mask)
        used = variances if training else predicted
        frame_states = expand(self.adaptor(states, used, text_mask), index)
        segment, decoded, lengths = self._vocode_segment(audio, raw, frames, drawn_frames)
        distance = mel_distance(self.compute_features, decoded, segment, lengths)
        features = self.mel_decoder(frame_states, mask) * mask
        examples = audio[:0]
        if num_examples:
            restored = self.mel_decoder.denormalize(features[:num_examples])
            examples = self.vocode(restored, mask[:num_examples])
        return Synthesized(
            batch=batch,
            sample_rate=self.compute_features.sample_rate,
            alignment=alignment,
            durations=durations,
            index=index,
            is_misaligned=is_misaligned,
            features=features,
            target=target,
            target_std=self.mel_decoder.normalize.std,
            mask=mask[:, :, 0],
            frames=frames,
            log_durations=log_durations,
            predicted_variances=predicted,
            variances=variances,
            predicted_octaves=expand(predicted[:, :, :1], index)[:, :, 0],
            symbol_mask=symbol_mask,
            segment=segment,
            decoded=decoded,
            segment_lengths=lengths,
            distance=distance * frame_samples / lengths.to(distance.device),
            examples=examples,
        )

    def _vocode_segment(
        self, audio: Tensor, features: Tensor, frames: Tensor, drawn_frames: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Vocode a segment of each recording; see `resynthesize`."""
        segment_frames = drawn_frames or EVALUATED_FRAMES
        size = segment_frames + 2 * EDGE_FRAMES
        frame = self.compute_features.frame_samples
        room = (frames - size).clamp(min=0)
        shares = torch.full((len(frames),), 0.5)
        if drawn_frames is not None:
            shares = draw_uniform(len(frames))
        starts = (shares * (room + 1)).long().to(audio.device)
        index = starts.unsqueeze(1) + torch.arange(size, device=audio.device)  # (B, P)
        mask = (index < frames.to(audio.device).unsqueeze(1)).unsqueeze(2).float()
        index = index.clamp(max=features.shape[1] - 1)
        selected = features.gather(1, index.unsqueeze(2).expand(-1, -1, features.shape[2]))
        decoded = self.vocode(selected, mask)[:, EDGE_FRAMES * frame : -EDGE_FRAMES * frame]
        first = (starts.unsqueeze(1) + EDGE_FRAMES) * frame
        samples = first + torch.arange(decoded.shape[1]).to(index)
        lengths = (frames - starts.cpu() - EDGE_FRAMES).clamp(1, segment_frames) * frame
        within = length_mask(lengths, decoded.shape[1], audio.device)
        padded = pad(audio, (0, size * frame))
        return padded.gather(1, samples) * within, decoded * within, lengths

    def encode(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        """Encode symbols: (B, L) -> states (B, L, D), durations in frames, not rounded (B, L).

        Shorter texts are padded with `PADDING`; what is returned there has no meaning.
        """
        mask = (symbols > PADDING).float().unsqueeze(2)
        states = self.text_encoder(symbols.clamp(min=0), mask)
        durations, variances = self.adaptor.predict(states, mask)
        return self.adaptor(states, variances, mask), durations.exp().clamp(max=MAX_SYMBOL_FRAMES)

    def decode(self, states: Tensor, index: Tensor) -> tuple[Tensor]:
        """Turn states into audio between -1 and 1: (B, L, D), (B, U) -> (B, S).

        index: the symbol of each frame, `PADDING` past the end of shorter speech.
        """
        mask = (index > PADDING).float().unsqueeze(2)
        features = self.mel_decoder(expand(states, index), mask)
        return (self.vocode(self.mel_decoder.denormalize(features), mask),)

    def vocode(self, features: Tensor, mask: Tensor) -> Tensor:
        """Turn log-mel features into audio: (B, U, 2 M), (B, U, 1) -> (B, S)."""
        return self.vocoder_decoder(self.vocoder_encoder(features * mask, mask), mask)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Vocode the features of audio in the scale of int16: (B, S), (B,) -> (B, S)."""
        features, frames = self.compute_features(audio / FULL_SCALE, audio_lengths)
        mask = length_mask(frames, features.shape[1], features.device).unsqueeze(2).float()
        return self.vocode(features, mask)[:, : audio.shape[1]]
