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

from sbkit.nn.features import Fbank
from sbkit.nn.transformer import refuse_to_decode
from sbkit.tensors.lengths import length_mask, to_absolute, to_relative
from sbkit.values.errors import SbkitError
from sbkit.values.labels import LabelSpace

Encoded = tuple[Tensor | None, Tensor, Tensor | None]  # middle, states, decoded


@dataclass(frozen=True)
class States:
    """What training sees of an utterance.

    middle (B, U, D) of half of the encoder, if asked for; states (B, U, D) of all of it;
    frames (B,); logits (B, L + 1, V) of the decoder, if there were tokens.
    """

    middle: Tensor | None
    states: Tensor
    frames: Tensor
    logits: Tensor | None


class Graph:
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
        labels: LabelSpace,
    ) -> None:
        parts = {"CNN": CNN, "Transformer": Transformer, "ctc_lin": ctc_lin, "seq_lin": seq_lin}
        learned = nn.ParameterList(compute_features.parameters())
        refuse_strays(model, {**parts, "compute_features": learned})
        labels.check_head(name="ctc_lin", outputs=head_size(ctc_lin))
        labels.check_head(name="seq_lin", outputs=head_size(seq_lin))
        for part in Transformer.modules():
            if isinstance(part, nn.Embedding):
                labels.check_embedding(name="Transformer", rows=part.num_embeddings)
        self.model = model
        self.labels = labels
        self.ctc_lin = ctc_lin
        self.seq_lin = seq_lin
        self._features = compute_features
        self._front_end = front_end(CNN)
        self._transformer = transformer(Transformer, labels.blank)

    def features(self, audio: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features in float32, zero past each length: (B, S), (B,) -> (B, T, M), (B,)."""
        return run_features(self._features, audio, samples)

    def encode(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Subsample and encode: (B, T, M), (B,) -> (B, U, D), (B,)."""
        x, frames = self._front_end(features, frames)
        return self._transformer.encode(x, frames), frames

    def run(
        self, features: Tensor, frames: Tensor, *, tokens: Tensor | None, twice: bool
    ) -> "States":
        """Encode for training, ``twice`` for the middle too, and decode (B, L) tokens if any."""
        x, frames = self._front_end(features, frames)
        if tokens is not None:
            tokens = nn.functional.pad(tokens, (1, 0), value=self.labels.bos)  # (B, L + 1)
        middle, states, decoded = self._transformer.run(x, frames, tokens, twice)
        logits = None if decoded is None else self.seq_lin(decoded)
        return States(middle, states, frames, logits)

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


def refuse_strays(model: nn.ModuleList, parts: dict[str, nn.Module]) -> None:
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


def _refuse_twice(*_: Any) -> NoReturn:
    raise SbkitError(
        "`inter_ctc_weight` must be 0.0 for a Transformer without `encode_twice`, such as "
        "SpeechBrain's, but is more. Set it to 0.0, or take sbkit.nn.transformer.Transformer."
    )


def _takes_lengths(method: Any) -> bool:
    return callable(method) and "lengths" in inspect.signature(method).parameters


class _Ours:
    def __init__(self, part: Any) -> None:
        self.encode = part.encode
        self._twice = getattr(part, "encode_twice", _refuse_twice)
        self._decode = part.decode

    def run(self, x: Tensor, frames: Tensor, tokens: Tensor | None, twice: bool) -> Encoded:
        middle, states = self._twice(x, frames) if twice else (None, self.encode(x, frames))
        return middle, states, None if tokens is None else self._decode(tokens, states, frames)


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

    def run(self, x: Tensor, frames: Tensor, tokens: Tensor | None, twice: bool) -> Encoded:
        if twice:
            _refuse_twice()
        if tokens is None:
            return None, self.encode(x, frames), None
        if not hasattr(self._part, "decoder"):
            refuse_to_decode()
        states, decoded = self._part(x, tokens, _fractions(frames, x), self._padding)
        return None, states, decoded


def _fractions(frames: Tensor, x: Tensor) -> Tensor:
    """Give SpeechBrain's lengths, on the device as it wants them."""
    return to_relative(frames, x.shape[1]).to(x.device, non_blocking=True)
