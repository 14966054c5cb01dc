"""The encoder of a model, whoever wrote it: frames in, as many encoded frames out.

Legend: B utterances, U frames, L tokens, D model width.

An encoder is told apart by its signature (`ENCODER_SIGNATURES`). It may have two methods more:
``encode_with_intermediate(x, lengths)``, which returns the states of its middle first, for
inter-CTC, and ``decode(tokens, states, lengths)``. What only decoding needs is named by
``decoding_modules``, a tuple of the names of its children; without it, the usual names count.
"""

import inspect
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import to_relative
from sbkit.base.errors import SbkitError
from sbkit.models.signatures import (
    ENCODER_SIGNATURES,
    described,
    first_tensor,
    lengths_argument,
    refuse,
    refuse_time_first,
)
from sbkit.models.transformer import refuse_to_decode

NAME = "Transformer"
# Children that only decoding runs: sbkit's three, and SpeechBrain's embedding of tokens.
DECODING_MODULES = ("embedding", "decoder", "decoder_norm", "custom_tgt_module")
TOKEN_EMBEDDINGS = ("token_embedding", "embedding", "custom_tgt_module")
RELATIVE_POSITIONS = "RelPosMHAXL"  # SpeechBrain's attention that is given positions from outside


class Encoder:
    """Call an encoder with the lengths that it takes, and compare what it returns."""

    def __init__(self, part: Any, *, padding: int = 0) -> None:
        """Wrap the part; ``padding`` is the token that pads rows, for SpeechBrain's decoder."""
        self._part, self._padding = part, padding
        refuse_time_first(part, NAME)
        self._method = part.encode if callable(getattr(part, "encode", None)) else part
        called = self._method.forward if self._method is part else self._method
        self._takes = lengths_argument(
            called, part=NAME, signatures=ENCODER_SIGNATURES, others=("pad_idx", "pos_embs")
        )
        parameters = inspect.signature(called).parameters
        self._pads = "pad_idx" in parameters
        self._positions = (
            "pos_embs" in parameters and getattr(part, "attention_type", "") == RELATIVE_POSITIONS
        )
        if self._pads:  # its decoder gives PyTorch a mask of bool beside one of float
            warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")

    @property
    def minds_lengths(self) -> bool:
        """Return whether it takes lengths as sbkit's do, and nothing then depends on padding."""
        return self._takes.form == "absolute"

    def encode(self, x: Tensor, frame_lengths: Tensor) -> Tensor:
        """Encode: (B, U, D), (B,) -> (B, U, D).

        Raises SbkitError when the encoder returns another number of frames.
        """
        arguments: dict[str, Any] = self._takes.of(x, frame_lengths)
        if self._pads:
            arguments["pad_idx"] = self._padding
        if self._positions:
            arguments["pos_embs"] = _positions(x.shape[-1], x.device)(x)
        output = self._method(x, **arguments)
        states = first_tensor(output, part=NAME, signatures=ENCODER_SIGNATURES)
        if states.ndim != 3 or states.shape[:2] != x.shape[:2]:
            came = f"it makes {described(states)} of x of shape {tuple(x.shape)}"
            refuse(NAME, ENCODER_SIGNATURES, came)
        return states

    def encode_with_intermediate(self, x: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode, and return the states of the middle first: -> 2 x (B, U, D)."""
        if not hasattr(self._part, "encode_with_intermediate"):
            raise SbkitError(
                "`inter_ctc_weight` must be 0.0 for a Transformer without "
                "`encode_with_intermediate`, such as SpeechBrain's, but is more. Set it to 0.0, "
                "or take sbkit.models.transformer.Transformer."
            )
        intermediate, states = self._part.encode_with_intermediate(x, frame_lengths)
        return intermediate, states

    def encode_and_decode(
        self, x: Tensor, frame_lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode, and decode (B, L) tokens: -> (B, U, D), (B, L, D)."""
        if self._pads:
            if not hasattr(self._part, "decoder"):
                refuse_to_decode()
            fractions = to_relative(frame_lengths, x.shape[1]).to(x.device, non_blocking=True)
            states, decoded = self._part(x, tokens, fractions, self._padding)
            return states, decoded
        states = self.encode(x, frame_lengths)
        return states, self.decode(tokens, states, frame_lengths)

    def decode(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Decode with teacher forcing: (B, L), (B, U, D), (B,) -> (B, L, D)."""
        if not callable(getattr(self._part, "decode", None)):
            raise SbkitError(
                f"`{NAME}` must have decode(tokens, states, lengths) while ctc_weight is below "
                f"1.0, but {type(self._part).__name__} has none. Add it, or set --ctc_weight=1.0 "
                "to train CTC alone."
            )
        if self._pads:
            frame_lengths = frame_lengths.to(states.device, non_blocking=True)
        output = self._part.decode(tokens, states, frame_lengths)
        # SpeechBrain's returns its attentions, too.
        decoded: Tensor = output[0] if isinstance(output, tuple) else output
        return decoded

    def decoding_modules(self) -> tuple[nn.Module, ...]:
        """Return the children that only decoding runs."""
        names = getattr(self._part, "decoding_modules", DECODING_MODULES)
        children = (getattr(self._part, name, None) for name in names)
        return tuple(each for each in children if isinstance(each, nn.Module))


def token_embedding(part: Any) -> nn.Embedding | None:
    """Return the embedding that is given tokens, if there is one; others may be any size."""
    if not callable(getattr(part, "decode", None)):
        return None
    children = (getattr(part, name, None) for name in TOKEN_EMBEDDINGS)
    for child in children:
        for module in child.modules() if isinstance(child, nn.Module) else ():
            if isinstance(module, nn.Embedding):
                return module
    return None


@lru_cache(maxsize=8)
def _positions(d_model: int, device: torch.device) -> nn.Module:
    """Make SpeechBrain's relative positions, which learn nothing."""
    from speechbrain.nnet.attention import RelPosEncXL

    made: nn.Module = RelPosEncXL(d_model).to(device)
    return made
