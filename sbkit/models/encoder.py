"""The encoder of every task: (audio, audio_lengths) -> (states, frame_lengths).

Legend: B utterances, S samples, T frames of features, U frames of the encoder, M features of a
frame, D model width.

A YAML declares it as one part, `encoder`, which takes audio, or as three: `compute_features`, `CNN`
and `Transformer`. The models own nothing: every parameter belongs to the one ModuleList of the
YAML.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import pad_to_bucket
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.parts import FeatureExtractor, FrontEnd, TransformerPart, WaveformPart
from sbkit.models.subsampling import Subsampling, as_evaluated

ENCODER, COMPOSED = "encoder", ("compute_features", "CNN", "Transformer")  # keys of the YAML

TAKE_AUDIO = ("compute_features", ENCODER, "wave_augment")

SpecAugment = Callable[[Tensor, Tensor], Tensor]  # (B, T, M), (B,) -> (B, T, M)


class Encoder:
    """An encoder of audio, of one part: (B, S) in the scale of int16, (B,) -> (B, U, D), (B,).

    modules: those of the YAML by their keys; part: the last, which returns the states, and may
    decode; features: what computes features, where a part does.
    """

    features: FeatureExtractor | None = None

    def __init__(self, part: TransformerPart, modules: Mapping[str, nn.Module]) -> None:
        self.part, self.modules = part, modules

    def inputs(
        self, audio: Tensor, audio_lengths: Tensor, spec_augment: SpecAugment | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute what the last part is given, here audio in its scale: -> (B, S), (B,)."""
        return self.part.scaled(audio), audio_lengths

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode."""
        return self.part.encode(*self.inputs(audio, audio_lengths))

    @cached_property
    def subsampling(self) -> Subsampling:
        """How many frames audio has: by what the parts declare, else by running them on silence.

        Raises SbkitError where they keep no constant stride.
        """
        return self.part.subsampling(self._silence())

    def _silence(self) -> Tensor:
        tensors = (each for module in self.modules.values() for each in module.parameters())
        return torch.zeros(1, SAMPLE_RATE, device=next(tensors, torch.empty(0)).device)


class FeatureEncoder(Encoder):
    """Features, front-end and Transformer, called in their order."""

    def __init__(self, modules: Mapping[str, nn.Module], *, padding: int = 0) -> None:
        super().__init__(TransformerPart(modules["Transformer"], padding=padding), modules)
        self.features: FeatureExtractor = FeatureExtractor(modules["compute_features"])
        self.front_end = FrontEnd(modules["CNN"])

    def inputs(
        self, audio: Tensor, audio_lengths: Tensor, spec_augment: SpecAugment | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute features, hide some of them, and subsample: -> (B, U, D), (B,)."""
        features, frame_lengths = self.features(audio, audio_lengths)
        if spec_augment is not None:
            features = spec_augment(features, frame_lengths)
        return self.subsample(features, frame_lengths)

    def subsample(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Call the front-end: (B, T, M), (B,) -> (B, U, D), (B,).

        On an accelerator T becomes one of few lengths, unless what follows depends on padding.
        """
        if self.front_end.accepts_lengths and self.part.accepts_lengths:
            features = pad_to_bucket(features)
        return self.front_end(features, frame_lengths)

    def encode_features(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode features: (B, T, M), (B,) -> (B, U, D), (B,)."""
        return self.part.encode(*self.subsample(features, frame_lengths))

    @cached_property
    def subsampling(self) -> Subsampling:
        """How many frames features and front-end leave."""
        audio = self._silence()
        with as_evaluated(audio.device, *self.modules.values()):
            features, _ = self.features(audio, torch.tensor([SAMPLE_RATE]))
        return self.features.subsampling(audio).then(self.front_end.subsampling(features))


def encoder_parts(hparams: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the parts of the encoder that a YAML declares, by key."""
    return {key: hparams[key] for key in (ENCODER, *COMPOSED) if hparams.get(key) is not None}


def make_encoder(parts: Mapping[str, nn.Module | None], *, padding: int = 0) -> Encoder:
    """Put the parts of an encoder together; ``padding`` is the token that pads rows.

    Raises SbkitError where they are neither one encoder of audio nor its three parts.
    """
    given = {key: part for key, part in parts.items() if part is not None}
    if {*given} == {ENCODER}:
        return Encoder(WaveformPart(given[ENCODER]), given)
    if {*given} != {*COMPOSED}:
        raise SbkitError(
            f"A model must have `{ENCODER}`, which takes audio, or `compute_features`, `CNN` and "
            f"`Transformer`, but has {' and '.join(f'`{key}`' for key in given) or 'neither'}. "
            "Declare the one or the others."
        )
    return FeatureEncoder(given, padding=padding)


def measure_subsampling(hparams: Mapping[str, Any]) -> Subsampling:
    """Return how many frames the encoder of a YAML makes of audio, by running copies of its parts.

    Raises SbkitError where they keep no constant stride.
    """
    parts = encoder_parts(hparams)
    run = {key: part for key, part in parts.items() if key != TransformerPart.NAME}
    return make_encoder(parts | deepcopy(run)).subsampling


class AcousticModel:
    """What every task shares: an encoder, and the check that the one ModuleList owns its parts."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        encoder: Encoder,
        heads: Mapping[str, nn.Module],
    ) -> None:
        parts = {**encoder.modules, **heads}
        if encoder.features is not None:  # only what it learns: constants are no part of a model
            name = encoder.features.NAME
            parts[name] = nn.ParameterList(parts.pop(name).parameters())
        require_registered(model, parts)
        self.model, self.encoder = model, encoder

    def encode(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode: (B, S), (B,) -> (B, U, D), (B,)."""
        return self.encoder(audio, audio_lengths)

    def to(self, device: torch.device) -> None:
        """Move the model, and what computes features, to a device."""
        for part in (self.model, *self.encoder.modules.values()):
            part.to(device)


def require_registered(model: nn.ModuleList, parts: Mapping[str, nn.Module]) -> None:
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


def require_rate(parts: Mapping[str, Any], sample_rate: int) -> None:
    """Check that no module of the parts that take audio is made for another rate, in Hz.

    Raises:
        SbkitError: one says in its `sample_rate` that it is.
    """
    for name in TAKE_AUDIO:
        part = parts.get(name)
        for module in part.modules() if isinstance(part, nn.Module) else ():
            made_for = getattr(module, "sample_rate", None)
            if isinstance(made_for, int | float) and made_for != sample_rate:
                raise SbkitError(
                    f"`{name}` must be made for the audio's {sample_rate} Hz, but its "
                    f"{type(module).__name__} is made for {made_for} Hz. Write `sample_rate: !ref "
                    "<sample_rate>` in it."
                )
