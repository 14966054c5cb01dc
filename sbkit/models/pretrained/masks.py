"""Hide spans of frames and of channels in training.

Legend: B utterances, U frames, D width.

Sources: wav2vec 2.0 (Baevski et al. 2020, appendix B), SpecAugment (Park et al. 2019). Spans may
overlap, so less is hidden than ``prob``: .49 of the frames with .65 and 10, .40 with .5 and 64.
They are drawn by utterance (`sbkit/audio/draws.py`), and nothing waits for the device.
"""

import torch
from torch import Tensor

from sbkit.audio.draws import draw_uniform


def draw_spans(lengths: Tensor, size: int, prob: float, width: int) -> Tensor:
    """Draw what is hidden of rows of these lengths: (B,) on the CPU -> (B, size) of bool.

    A row gets prob * length / width spans, rounded up or down at random, each at another place
    within it. A row shorter than a span gets none.
    """
    places = (lengths - width + 1).clamp(min=0)
    spans = (prob * lengths / width + draw_uniform(len(lengths))).long().minimum(places)
    at = torch.arange(size)
    order = draw_uniform(len(lengths), size).masked_fill_(at >= places.unsqueeze(1), -1.0)
    chosen = order.topk(int(spans.max())).indices  # (B, N)
    first = torch.zeros(len(lengths), size, dtype=torch.int32)
    first.scatter_(1, chosen, (at[: chosen.shape[1]] < spans.unsqueeze(1)).int())
    begun = first.cumsum(1)
    begun[:, width:] -= begun[:, :-width].clone()  # spans that have ended
    return begun > 0


def hide(
    x: Tensor,
    lengths: Tensor,
    *,
    frames: tuple[float, int],
    channels: tuple[float, int],
    vector: Tensor | None,
) -> Tensor:
    """Hide frames and channels, each by (prob, width): (B, U, D), (B,) -> (B, U, D).

    vector (D,): what stands in the place of a hidden frame; None: zeros. Channels become zero.
    """
    if frames[0] > 0:
        hidden = draw_spans(lengths, x.shape[1], *frames).to(x.device, non_blocking=True)
        instead = x.new_zeros(()) if vector is None else vector.to(x.dtype)
        x = torch.where(hidden.unsqueeze(-1), instead, x)
    if channels[0] > 0:
        widths = torch.full((x.shape[0],), x.shape[2])
        hidden = draw_spans(widths, x.shape[2], *channels).to(x.device, non_blocking=True)
        x = x.masked_fill(hidden.unsqueeze(1), 0.0)
    return x
