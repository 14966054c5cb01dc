"""How the four parts hang together: audio -> features -> CNN -> Transformer -> heads.

Legend: B utterances, S samples, T frames of 10 ms, U frames after the CNN, L tokens, M mel bins,
D model width, V vocabulary.

Training, transcription and export all walk this one graph. It owns nothing: every parameter
belongs to the one ModuleList of the YAML, and a part that does not is refused here.
"""

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sbkit.audio.fbank import Fbank
from sbkit.audio.lengths import length_mask, to_absolute, to_relative
from sbkit.base.errors import SbkitError
from sbkit.models.transformer import refuse_to_decode
from sbkit.text.vocabulary import Vocabulary

Encoded = tuple[Tensor | None, Tensor, Tensor | None]  # intermediate, states, decoded


@dataclass(frozen=True)
class EncoderOutput:
    """What training sees of an utterance.

    intermediate (B, U, D) of half of the encoder, if asked for; states (B, U, D) of all of it;
    frames (B,); logits (B, L + 1, V) of the decoder, if there were tokens.
    """

    intermediate: Tensor | None
    states: Tensor
    frames: Tensor
    logits: Tensor | None


class AsrModel:
    """Call the parts of a model in their order.

    Parts may be sbkit's, which take absolute lengths, or SpeechBrain's, which take relative ones
    or none; they are told apart by their signature, once, here.
    """

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: nn.Module,
        CNN: nn.Module,
        Transformer: nn.Module,
        ctc_lin: nn.Module,
        seq_lin: nn.Module,
        vocabulary: Vocabulary,
    ) -> None:
        parts = {"CNN": CNN, "Transformer": Transformer, "ctc_lin": ctc_lin, "seq_lin": seq_lin}
        learned = nn.ParameterList(compute_features.parameters())
        require_registered(model, {**parts, "compute_features": learned})
        vocabulary.check_head(name="ctc_lin", outputs=head_size(ctc_lin))
        vocabulary.check_head(name="seq_lin", outputs=head_size(seq_lin))
        for part in Transformer.modules():
            if isinstance(part, nn.Embedding):
                vocabulary.check_embedding(name="Transformer", rows=part.num_embeddings)
        self.model = model
        self.vocabulary = vocabulary
        self.ctc_lin = ctc_lin
        self.seq_lin = seq_lin
        self._features = compute_features
        self._front_end = front_end(CNN)
        self._transformer = transformer(Transformer, vocabulary.blank)

    def features(self, audio: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""
        return run_features(self._features, audio, samples)

    def encode(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Subsample and encode: (B, T, M), (B,) -> (B, U, D), (B,)."""
        x, frames = self._front_end(features, frames)
        return self._transformer.encode(x, frames), frames

    def run(
        self, features: Tensor, frames: Tensor, *, tokens: Tensor | None, return_intermediate: bool
    ) -> "EncoderOutput":
        """Encode for training, and decode (B, L) tokens if there are any."""
        x, frames = self._front_end(features, frames)
        if tokens is not None:
            tokens = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)  # (B, L + 1)
        intermediate, states, decoded = self._transformer.run(
            x, frames, tokens, return_intermediate
        )
        logits = None if decoded is None else self.seq_lin(decoded)
        return EncoderOutput(intermediate, states, frames, logits)

    def ctc_log_probs(self, states: Tensor) -> Tensor:
        """Score every label at every frame, in float32: (B, U, D) -> (B, U, V)."""
        scores: Tensor = self.ctc_lin(states)
        return scores.float().log_softmax(-1)


def run_features(
    compute_features: nn.Module, audio: Tensor, samples: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""
    if isinstance(compute_features, Fbank):
        computed: tuple[Tensor, Tensor] = compute_features(audio, samples)
        return computed
    with torch.autocast(audio.device.type, enabled=False):
        features = compute_features(audio.float())
    frames = to_absolute(to_relative(samples, audio.shape[1]), features.shape[1])
    inside = length_mask(frames, features.shape[1], features.device)
    return features * inside.unsqueeze(-1), frames


def require_registered(model: nn.ModuleList, parts: dict[str, nn.Module]) -> None:
    """Refuse a part with parameters or buffers that the one ModuleList does not own.

    Such a part would stay on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804).
    """
    owned = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, part in parts.items():
        strays = [
            key
            for key, tensor in [*part.named_parameters(), *part.named_buffers()]
            if id(tensor) not in owned
        ]
        if strays:
            raise SbkitError(
                f"`model` must own every part, but `{name}` is not in its list "
                f"({name}.{strays[0]} and {len(strays) - 1} more tensors are left out). "
                f"Add `!ref <{name}>` to the torch.nn.ModuleList."
            )


def head_size(head: nn.Module) -> int:
    """Count the outputs of a head: the rows of its last matrix."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim > 1]
    return matrices[-1].shape[0] if matrices else 0


def front_end(part: nn.Module) -> Any:
    """Give a CNN that takes and returns absolute lengths."""
    return part if _takes_lengths(part.forward) else _SpeechBrainFrontEnd(part)


def transformer(part: nn.Module, blank: int) -> Any:
    """Give a Transformer that takes absolute lengths; the blank pads its tokens."""
    ours = _takes_lengths(getattr(part, "encode", None))
    return _Ours(part) if ours else _SpeechBrain(part, blank)


def _refuse_intermediate(*_: Any) -> NoReturn:
    raise SbkitError(
        "`inter_ctc_weight` must be 0.0 for a Transformer without `encode_with_intermediate`, "
        "such as SpeechBrain's, but is more. Set it to 0.0, or take "
        "sbkit.models.transformer.Transformer."
    )


def _takes_lengths(method: Any) -> bool:
    return callable(method) and "lengths" in inspect.signature(method).parameters


class _Ours:
    def __init__(self, part: Any) -> None:
        self.encode = part.encode
        self._encode_with_intermediate = getattr(
            part, "encode_with_intermediate", _refuse_intermediate
        )
        self._decode = part.decode

    def run(
        self, x: Tensor, frames: Tensor, tokens: Tensor | None, return_intermediate: bool
    ) -> Encoded:
        intermediate, states = (
            self._encode_with_intermediate(x, frames)
            if return_intermediate
            else (None, self.encode(x, frames))
        )
        return (
            intermediate,
            states,
            None if tokens is None else self._decode(tokens, states, frames),
        )


class _SpeechBrainFrontEnd:
    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def __call__(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self._part(features)  # (B, U, C, F), or (B, U, D)
        stride = -(-features.shape[1] // x.shape[1])
        # "same" padding leaves ceil(T / stride) frames; a rounded fraction of U may be one off.
        return x.flatten(2), torch.div(frames + stride - 1, stride, rounding_mode="floor")


class _SpeechBrain:
    def __init__(self, part: Any, padding: int) -> None:
        self._part, self._padding = part, padding

    def encode(self, x: Tensor, frames: Tensor) -> Tensor:
        states: Tensor = self._part.encode(x, _fractions(frames, x), self._padding)
        return states

    def run(
        self, x: Tensor, frames: Tensor, tokens: Tensor | None, return_intermediate: bool
    ) -> Encoded:
        if return_intermediate:
            _refuse_intermediate()
        if tokens is None:
            return None, self.encode(x, frames), None
        if not hasattr(self._part, "decoder"):
            refuse_to_decode()
        states, decoded = self._part(x, tokens, _fractions(frames, x), self._padding)
        return None, states, decoded


def _fractions(frames: Tensor, x: Tensor) -> Tensor:
    """Give SpeechBrain's lengths, on the device as it wants them."""
    return to_relative(frames, x.shape[1]).to(x.device, non_blocking=True)
