"""CTC on a GPU: deterministic, and the host does not wait for it.

PyTorch's kernel adds up its gradient in no fixed order (pytorch #17798), and copies the lengths in
a way that makes the host wait, three times forward and three times back (LossCTC.cu). Here one
program walks one utterance; the sums over states that share a label are differences of a running
sum in the order of the labels, so that nothing is ever added by two at once.

Legend: B utterances, U frames, V vocabulary, L tokens, S = 2 L + 1 states (blanks between tokens).
Source: Graves et al. 2006, equations 6 to 15, in logarithms.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add(a, b, c):
    """Add three probabilities that are given by their logarithms."""
    largest = tl.maximum(a, tl.maximum(b, c))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.log(tl.exp(a - largest) + tl.exp(b - largest) + tl.exp(c - largest)) + largest


@triton.jit
def _read_states(tokens, count, blank, states: tl.constexpr):
    """Return states, their labels, and which can be entered from two before: a new token's."""
    s = tl.arange(0, states)
    is_token = (s % 2 == 1) & (s // 2 < count)
    labels = tl.load(tokens + s // 2, mask=is_token, other=blank)
    before = tl.load(tokens + s // 2 - 1, mask=is_token & (s > 1), other=blank)
    return s, labels, is_token & (s > 1) & (labels != before)


@triton.jit(do_not_specialize=["longest", "size", "width"])
def _ctc_forward(
    log_probs, tokens, frames, counts, alphas, likelihoods,
    blank, longest, size, width, states: tl.constexpr,
):  # fmt: skip
    """Compute the forward variables of one utterance, from its first frame to its last."""
    b = tl.program_id(0).to(tl.int64)
    n, count = tl.load(frames + b), tl.load(counts + b)
    s, labels, skips = _read_states(tokens + b * width, count, blank, states)
    emitted = log_probs + b * longest * size + labels
    kept = alphas + b * longest * states + s
    alpha = tl.where(s == 0, 0.0, float("-inf"))  # before the first frame
    t = 0
    while t < n:
        one = tl.where(s > 0, tl.gather(alpha, tl.maximum(s - 1, 0), 0), float("-inf"))
        two = tl.where(skips, tl.gather(alpha, tl.maximum(s - 2, 0), 0), float("-inf"))
        alpha = _add(alpha, one, two) + tl.load(emitted + t * size)
        alpha = tl.where(s <= 2 * count, alpha, float("-inf"))
        tl.store(kept + t * states, alpha)
        t += 1
    last = tl.where((s == 2 * count) | (s == 2 * count - 1), alpha, float("-inf"))
    largest = tl.max(last, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(likelihoods + b, tl.log(tl.sum(tl.exp(last - largest), 0)) + largest)


@triton.jit(do_not_specialize=["longest", "size", "width"])
def _ctc_backward(
    log_probs, tokens, frames, counts, alphas, likelihoods, scales, gradient,
    order, firsts, blank, longest, size, width, states: tl.constexpr,
):  # fmt: skip
    """Compute backward, and store for each label minus the probability of its states."""
    b = tl.program_id(0).to(tl.int64)
    n, count = tl.load(frames + b), tl.load(counts + b)
    s, labels, skips = _read_states(tokens + b * width, count, blank, states)
    leaves = tl.gather(skips.to(tl.int32), tl.minimum(s + 2, states - 1), 0) > 0
    emitted = log_probs + b * longest * size + labels
    kept = alphas + b * longest * states + s
    likelihood, scale = tl.load(likelihoods + b), tl.load(scales + b)
    is_sorted = s < count
    state = 2 * tl.load(order + b * width + s, mask=is_sorted, other=0) + 1
    first = tl.load(firsts + b * width + s, mask=is_sorted, other=0)
    label = tl.gather(labels, state.to(tl.int32), 0)
    is_new = tl.gather(first, tl.minimum(s + 1, states - 1), 0) == s + 1
    is_last = is_sorted & (is_new | (s == count - 1))
    written = gradient + b * longest * size
    beta = tl.where((s == 2 * count) | (s == 2 * count - 1), 0.0, float("-inf"))
    t = n - 1
    while t >= 0:
        gamma = tl.exp(tl.load(kept + t * states) + beta - likelihood)  # 0 past the last state
        gamma = tl.where(likelihood == float("-inf"), 0.0, gamma)
        blanks = tl.sum(tl.where(s % 2 == 0, gamma, 0.0), 0)
        tl.store(written + t * size + blank, -scale * blanks)
        running = tl.cumsum(tl.where(is_sorted, tl.gather(gamma, state.to(tl.int32), 0), 0.0), 0)
        below = tl.gather(running, tl.maximum(first - 1, 0).to(tl.int32), 0)
        total = running - tl.where(first > 0, below, 0.0)
        tl.store(written + t * size + label, -scale * total, mask=is_last)
        came = beta + tl.load(emitted + t * size)
        one = tl.gather(came, tl.minimum(s + 1, states - 1), 0)  # -inf past the last
        two = tl.where(leaves, tl.gather(came, tl.minimum(s + 2, states - 1), 0), float("-inf"))
        beta = _add(came, one, two)
        t -= 1


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, tokens: Tensor, frames: Tensor, counts: Tensor, blank: int
    ) -> Tensor:
        utterances, steps, size = log_probs.shape
        states = max(128, triton.next_power_of_2(2 * tokens.shape[1] + 1))
        alphas = log_probs.new_empty(utterances, steps, states)
        likelihoods = log_probs.new_empty(utterances)
        _ctc_forward[(utterances,)](
            log_probs, tokens, frames, counts, alphas, likelihoods,
            blank, steps, size, tokens.shape[1], states=states,
        )  # fmt: skip
        ctx.save_for_backward(log_probs, tokens, frames, counts, alphas, likelihoods)
        ctx.blank = blank
        return -likelihoods

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, tokens, frames, counts, alphas, likelihoods = ctx.saved_tensors
        utterances, steps, size = log_probs.shape
        inside = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
        ordered, order = tokens.where(inside, size).sort(stable=True)
        gradient = torch.zeros_like(log_probs)
        _ctc_backward[(utterances,)](
            log_probs, tokens, frames, counts, alphas, likelihoods, scales[0].contiguous(),
            gradient, order, torch.searchsorted(ordered, ordered),
            ctx.blank, steps, size, tokens.shape[1], states=alphas.shape[2],
        )  # fmt: skip
        return gradient, None, None, None, None


def ctc_on_gpu(
    log_probs: Tensor, tokens: Tensor, frames: Tensor, counts: Tensor, *, blank: int
) -> Tensor:
    """Return each negative log-likelihood: (B, U, V), (B, L), (B,), (B,) -> (B,), 0 if impossible.

    In float32. The lengths may lie on the host or on the device.
    """
    frames, counts = (each.to(log_probs.device, non_blocking=True) for each in (frames, counts))
    with torch.cuda.device_of(log_probs):
        nll: Tensor = _Ctc.apply(log_probs.contiguous(), tokens.contiguous(), frames, counts, blank)
    return nll.where(nll != torch.inf, 0)
