"""The default recipe on a few pages: from clips to a word error rate, in plain torch.

    python -m docs.examples.nano

It is `python train.py hparams/ctc.yaml` without augmentation, language models, and what serves a
run: checkpoints, devices, several processes, exports. With `DROPOUT = 0`, a test finds the same
losses from the same seed in `python train.py hparams/ctc.yaml --dropout=0 --concat_prob=0
--soften_prob=0 --pause_prob=0 --speeds=[1.0] --time_masks=0 --freq_masks=0`. See
docs/how-it-works/code.md for the rest.

Legend: B utterances, S samples, T features of 10 ms, U frames of 40 ms, M mel bins, D width of the
model, H heads, L tokens of a text, V tokens of the vocabulary.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, glu, pad, scaled_dot_product_attention, silu
from torch.nn.utils.rnn import pad_sequence

from recipes.AsteriskPrompts.corpus import AsteriskPrompts

# ---- what hparams/ctc.yaml declares
SEED = 3407
NUM_EPOCHS = 62
SAMPLE_RATE = 16_000
MAX_SECONDS = 32.0  # longer clips are left out of training
BATCH_SECONDS = 32.0  # of padded audio in a step
N_MELS = 80
D_MODEL = 144  # also the channels between the convolutions
D_FFN = 384
NUM_HEADS = 4
NUM_BLOCKS = 6
KERNEL_SIZE = 15  # frames of 40 ms that a block's convolution covers
DROPOUT = 0.15
INTER_CTC_WEIGHT = 0.3  # of the loss at the middle of the encoder
PEAK_RATE = 0.0025
WARMUP_FRACTION = 0.1  # of the run
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 5.0

BLANK, NUM_SPECIAL = 0, 4  # special tokens: the blank of CTC, and three for other decoders


# ---- data: clips, texts and tokens
class Clip(NamedTuple):
    """One recording and what is said in it."""

    audio: Tensor  # (S,) in the scale of int16
    text: str  # normalized


def read_clips(split: str) -> Iterator[Clip]:
    """Read one split of the default corpus: train, dev or test."""
    for row in AsteriskPrompts({"language": "en"}).clips(split):
        samples, _ = soundfile.read(row.path, dtype="int16")
        yield Clip(torch.from_numpy(samples).float(), normalize(row.sentence))


def normalize(sentence: str) -> str:
    """Keep a to z and apostrophes: "It's five P.M." becomes "it's five pm"."""
    joined = re.sub(r"\b(\w)\.(?=\w\b)", r"\1", sentence.lower())
    return " ".join(re.sub("[^a-z']", " ", joined).split())


def rank_characters(texts: Iterable[str]) -> str:
    """Return the characters of texts, frequent ones first: the tokens after the special ones."""
    counts = Counter("".join(texts))
    return "".join(sorted(counts, key=lambda character: (-counts[character], character)))


def plan_epoch(clips: Sequence[Clip], epoch: int, seed: int = SEED) -> Iterator[list[Clip]]:
    """Yield the clips of each step: similar lengths together, the steps in random order.

    It depends on the clips, the seed and the epoch only, so that each process knows all of it.
    """
    samples = np.array([len(clip.audio) for clip in clips])
    random = np.random.default_rng((seed, epoch))
    shuffled = random.permutation(len(samples))
    random.random(len(samples))  # unused: the full recipe draws here which clips are joined
    jitter = random.uniform(0.98, 1.02, len(samples))  # so that batches differ between epochs
    by_length = shuffled[np.argsort(samples[shuffled] * jitter, kind="stable")]
    steps: list[list[int]] = [[]]
    for row in by_length.tolist():
        longest = max(samples[[*steps[-1], row]])
        if steps[-1] and longest * (len(steps[-1]) + 1) > BATCH_SECONDS * SAMPLE_RATE:
            steps.append([])
        steps[-1].append(row)
    for index in random.permutation(len(steps)):
        yield [clips[row] for row in steps[index]]


# ---- features: log-mel filterbanks as Kaldi defines them, relative to the level of the utterance

WINDOW, SHIFT, FFT = 400, 160, 512  # samples: 25 ms every 10 ms, transformed as 32 ms
PREEMPHASIS = 0.97
MIN_HZ = 20.0
MIN_LEVEL = 15.5  # of the log power of a frame; clips below it, such as noise, stay quieter
RANGE = 12.5  # mel bins that are further below the level become 0
SPAN, SPAN_STEP, SPAN_HOP = 60, 5, 4  # features; half of a span must have a power that counts
MAX_TILT = 10**2.5  # of the power of a frame to that of the weaker end of its spectrum
TAIL = SAMPLE_RATE // 5  # zeros after a clip that is transcribed: CTC writes late


def compute_features(audio: Tensor, lengths: Tensor, tail: int = 0) -> tuple[Tensor, Tensor]:
    """Compute features, zero in the padding: (B, S), (B,) -> (B, T, M), (B,).

    tail: zeros that follow each clip, without a share in its level.
    """
    windows = pad(audio, (0, tail)).unfold(1, WINDOW, SHIFT)  # (B, T, WINDOW)
    windows = windows - windows.mean(-1, keepdim=True)
    previous = torch.cat([windows[..., :1], windows[..., :-1]], -1)
    povey = torch.hann_window(WINDOW, periodic=False).pow(0.85)
    spectrum = torch.fft.rfft((windows - PREEMPHASIS * previous) * povey, FFT).abs()
    log_mels = (spectrum.square() @ mel_filters()).clamp(min=torch.finfo(torch.float32).eps).log()
    num_features = count_features(lengths + tail)
    mask = length_mask(num_features, log_mels.shape[1])
    log_mels = log_mels * mask.unsqueeze(2)
    level = measure_level(log_mels, count_features(lengths))
    return (log_mels - (level - RANGE)).relu() * mask.unsqueeze(2), num_features


def measure_level(log_mels: Tensor, lengths: Tensor) -> Tensor:
    """Average the sustained power, weighted by its square: (B, T, M) -> (B, 1, 1).

    Power is sustained if half of 0.6 s have it, so a click or a beep has no share in the level.
    """
    powers, size = log_mels.exp(), N_MELS * 7 // 16
    low, high = powers[..., :size].sum(2), powers[..., -size:].sum(2)
    power = powers.sum(2).minimum(MAX_TILT * low.minimum(high)).log()  # (B, T)
    ends = torch.arange(0, power.shape[1], SPAN_HOP).clip(min=SPAN - SPAN_STEP).unsqueeze(1)
    frames = (ends - torch.arange(0, SPAN, SPAN_STEP)) % lengths[:, None, None]  # (B, T / 4, 12)
    spans = (power.double() - MIN_LEVEL).gather(1, frames.flatten(1)).reshape(frames.shape)
    sustained = spans.sort(2).values[..., -(SPAN // SPAN_STEP // 2)]  # (B, T / 4)
    weights = (2 * sustained).exp() * length_mask(lengths, power.shape[1])[:, ::SPAN_HOP]
    mean = (weights * sustained).sum(1) / weights.sum(1)
    return (MIN_LEVEL + mean.clamp(min=0)).float()[:, None, None]


def mel_filters() -> Tensor:
    """Return triangles of equal width on Kaldi's mel scale: (FFT / 2 + 1, M)."""
    lowest, highest = (1127 * math.log(1 + hz / 700) for hz in (MIN_HZ, SAMPLE_RATE / 2))
    corners = torch.linspace(lowest, highest, N_MELS + 2, dtype=torch.float64)
    hertz = torch.arange(FFT // 2 + 1).double() * (SAMPLE_RATE / FFT)
    mels = 1127 * (1 + hertz / 700).log()
    rising = (mels.unsqueeze(1) - corners[:-2]) / corners.diff()[:-1]
    falling = (corners[2:] - mels.unsqueeze(1)) / corners.diff()[1:]
    return torch.minimum(rising, falling).clamp(min=0).float()


def count_features(samples: Tensor) -> Tensor:
    """Count the whole windows in a number of samples: (B,) -> (B,)."""
    return (samples - WINDOW + SHIFT) // SHIFT


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """Return true within each length: (B,) -> (B, size)."""
    return torch.arange(size) < lengths.unsqueeze(1)


# ---- the model: CNN, Transformer, seq_lin and ctc_lin in one ModuleList
class ConvFrontEnd(nn.Module):
    """Subsample with two strided convolutions: (B, T, M), (B,) -> (B, U, D), (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.std = nn.Buffer(torch.zeros(N_MELS)), nn.Buffer(torch.ones(N_MELS))
        self.conv1 = nn.Conv1d(N_MELS, D_MODEL, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(D_MODEL, D_MODEL, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Mask the padding before each convolution, so no utterance depends on its batch."""
        x = (features - self.mean) / self.std
        x = self.conv1((x * length_mask(lengths, x.shape[1]).unsqueeze(2)).mT).mT
        lengths = (lengths + 1) // 2
        x = silu(x) * length_mask(lengths, x.shape[1]).unsqueeze(2)
        return self.norm(self.conv2(x.mT).mT), (lengths + 1) // 2

    def measure_normalization(self, clips: Sequence[Clip]) -> None:
        """Set the mean and deviation of each mel bin over the training set."""
        audio = ((clip.audio[None], lengths_of([clip.audio])) for clip in clips)
        features = torch.cat([compute_features(*clip)[0][0] for clip in audio]).double()
        self.mean.copy_(features.mean(0))
        self.std.copy_(features.std(0, correction=0))


class FeedForward(nn.Sequential):
    """Residual feed-forward with half its weight: project up, SiLU, project down."""

    def __init__(self, dropout: float) -> None:
        up, down = nn.Linear(D_MODEL, D_FFN), nn.Linear(D_FFN, D_MODEL)
        drop = nn.Dropout(dropout)
        super().__init__(nn.LayerNorm(D_MODEL), up, nn.SiLU(), drop, down, drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * super().forward(x)  # type: ignore[no-untyped-call]


class SelfAttention(nn.Module):
    """Residual attention over all frames, with rotary positions (Su et al. 2021)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.qkv_proj = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out_proj = nn.Linear(D_MODEL, D_MODEL)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv_proj(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # 3 x (B, H, U, D / H)
        mask = mask[:, None, None]  # (B, 1, 1, U)
        attended = scaled_dot_product_attention(rotate(query), rotate(key), value, mask)
        return x + self.dropout(self.out_proj(attended.transpose(1, 2).flatten(2)))


def rotate(x: Tensor) -> Tensor:
    """Rotate channels i and i + size / 2 by the angle of their frame: (B, H, U, D / H) -> same."""
    frames, size = x.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(frames).unsqueeze(1) * frequencies  # (U, D / H / 2)
    first, second = x.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Convolution(nn.Module):
    """Residual convolution over neighboring frames: gate, depthwise convolution, norm, SiLU."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.pointwise_conv1 = nn.Linear(D_MODEL, 2 * D_MODEL)
        options: Any = {"padding": KERNEL_SIZE // 2, "groups": D_MODEL}
        self.depthwise_conv = nn.Conv1d(D_MODEL, D_MODEL, KERNEL_SIZE, **options)
        self.depthwise_norm = nn.LayerNorm(D_MODEL)
        self.out_proj = nn.Linear(D_MODEL, D_MODEL)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        gated = glu(self.pointwise_conv1(self.norm(x))) * mask.unsqueeze(2)
        y = silu(self.depthwise_norm(self.depthwise_conv(gated.mT).mT))
        return x + self.dropout(self.out_proj(y))


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward (Gulati et al. 2020)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.feed_forward1 = FeedForward(dropout)
        self.attention = SelfAttention(dropout)
        self.convolution = Convolution(dropout)
        self.feed_forward2 = FeedForward(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(self.feed_forward1(x), mask)
        return self.feed_forward2(self.convolution(x, mask))


class Transformer(nn.Module):
    """Encode frames; return the states of the middle and of the end: -> 2 x (B, U, D)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(ConformerBlock(dropout) for _ in range(NUM_BLOCKS))
        self.encoder_norm = nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = length_mask(lengths, x.shape[1])
        outputs = [self.dropout(x)]
        for block in self.encoder:
            outputs.append(block(outputs[-1], mask))
        return self.encoder_norm(outputs[NUM_BLOCKS // 2]), self.encoder_norm(outputs[-1])


def make_model(vocab_size: int, dropout: float = DROPOUT, seed: int = SEED) -> nn.ModuleList:
    """Make all layers with random weights; seq_lin scores tokens in the middle of the encoder."""
    torch.manual_seed(seed)
    cnn, transformer = ConvFrontEnd(), Transformer(dropout)
    seq_lin, ctc_lin = nn.Linear(D_MODEL, vocab_size), nn.Linear(D_MODEL, vocab_size)
    return nn.ModuleList([cnn, transformer, seq_lin, ctc_lin])


def run_model(
    model: nn.ModuleList, audio: Tensor, lengths: Tensor, tail: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p of the tokens, in the middle and at the end: -> 2 x (B, U, V), (B,)."""
    cnn, transformer, seq_lin, ctc_lin = model
    frames, num_frames = cnn(*compute_features(audio, lengths, tail))
    middle, end = transformer(frames, num_frames)
    return seq_lin(middle).log_softmax(-1), ctc_lin(end).log_softmax(-1), num_frames


# ---- training: sums and counts, one division, one step
def sum_of_losses(
    model: nn.ModuleList, clips: Sequence[Clip], characters: str
) -> tuple[Tensor, int]:
    """Return the loss of a batch as a sum, and the number of its tokens, which fit their frames.

    Sums and counts add up over batches, of one process or of many; means do not.
    """
    audio = pad_sequence([clip.audio for clip in clips], batch_first=True)  # (B, S)
    middle, end, num_frames = run_model(model, audio, lengths_of([clip.audio for clip in clips]))
    tokens = [NUM_SPECIAL + characters.index(letter) for clip in clips for letter in clip.text]
    labels = torch.tensor(tokens), num_frames, lengths_of([clip.text for clip in clips])
    middle_loss, loss = (
        ctc_loss(log_probs.transpose(0, 1), *labels, blank=BLANK, reduction="sum")
        for log_probs in (middle, end)
    )
    total = INTER_CTC_WEIGHT * middle_loss + (1 - INTER_CTC_WEIGHT) * loss
    return total, len(tokens)


def lengths_of(rows: Sequence[Tensor | str]) -> Tensor:
    """Count the samples or letters of each row: -> (B,)."""
    return torch.tensor([*map(len, rows)])


def learning_rate(progress: float) -> float:
    """Rise linearly, then fall along half a cosine; ``progress`` is the share of the run."""
    if progress < WARMUP_FRACTION:
        return PEAK_RATE * progress / WARMUP_FRACTION
    fallen = (progress - WARMUP_FRACTION) / (1 - WARMUP_FRACTION)
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * fallen))


def divide_and_step(
    model: nn.ModuleList, optimizer: torch.optim.Optimizer, num_tokens: int, rate: float
) -> None:
    """Turn the gradient of a sum into that of the mean over all tokens, and take a step."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= num_tokens
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def fit(
    model: nn.ModuleList, clips: Sequence[Clip], characters: str, num_epochs: int = NUM_EPOCHS
) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    cnn: ConvFrontEnd = model[0]  # type: ignore[assignment]
    cnn.measure_normalization(clips)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    groups: Any = [{"params": vectors, "weight_decay": 0.0}, {"params": weights}]
    optimizer = torch.optim.AdamW(groups, PEAK_RATE, (0.9, 0.98), weight_decay=WEIGHT_DECAY)
    model.train()
    for epoch in range(1, num_epochs + 1):
        plan = [*plan_epoch(clips, epoch)]
        for step, batch in enumerate(plan):
            # A step in several batches would add up their gradients, sums and counts here.
            loss, num_tokens = sum_of_losses(model, batch, characters)
            loss.backward()  # type: ignore[no-untyped-call]
            progress = (epoch - 1 + step / len(plan)) / num_epochs
            divide_and_step(model, optimizer, num_tokens, learning_rate(progress))
            yield loss.item() / num_tokens


# ---- decoding and errors
@torch.no_grad()
def transcribe(model: nn.ModuleList, clip: Clip, characters: str) -> str:
    """Decode greedily: the best token of each frame, repeats merged, blanks dropped."""
    model.eval()
    _, log_probs, _ = run_model(model, clip.audio[None], lengths_of([clip.audio]), TAIL)
    best: list[int] = log_probs[0].argmax(1).tolist()
    tokens = [token for token, _ in groupby(best) if token >= NUM_SPECIAL]
    return " ".join("".join(characters[token - NUM_SPECIAL] for token in tokens).split())


def count_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Count the fewest insertions, deletions and substitutions (Levenshtein 1966)."""
    previous: list[int] = [*range(len(hypothesis) + 1)]
    for row, expected in enumerate(reference, 1):
        current = [row]
        for column, word in enumerate(hypothesis, 1):
            replaced = previous[column - 1] + (word != expected)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def main() -> None:
    """Train on the default corpus, and print the word errors of its test set."""
    clips = [c for c in read_clips("train") if len(c.audio) <= MAX_SECONDS * SAMPLE_RATE]
    characters = rank_characters(clip.text for clip in clips)
    model = make_model(NUM_SPECIAL + len(characters))
    for step, loss in enumerate(fit(model, clips, characters), 1):
        print(f"step {step}: loss {loss:.3f}")
    errors = words = 0
    for clip in read_clips("test"):
        expected, written = clip.text.split(), transcribe(model, clip, characters).split()
        errors += count_errors(expected, written)
        words += len(expected)
    print(f"WER {errors / words:.1%} ({errors} errors in {words} words)")


if __name__ == "__main__":
    main()
