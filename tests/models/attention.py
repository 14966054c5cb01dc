"""What torch's kernel for packed utterances computes; the kernel itself needs a GPU."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_to_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_query: int,
    max_key: int,
) -> Tensor:
    """Attend within each utterance: 3 x (N, H, D/H), offsets (B + 1,) -> (N, H, D/H)."""
    assert query_offsets is key_offsets and query_offsets.dtype == torch.int32
    sizes = query_offsets.diff()
    assert max_query == max_key == sizes.max() and len(query) == query_offsets[-1]
    assert query.dtype == key.dtype == value.dtype
    utterances = zip(*(heads.split(sizes.tolist()) for heads in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(*(heads.transpose(0, 1) for heads in utterance))
        for utterance in utterances
    ]
    return torch.cat([heads.transpose(0, 1) for heads in attended])
