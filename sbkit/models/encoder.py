"""The encoder of a recognizer or the like: (audio, audio_lengths) -> (states, frame_lengths).

Legend: B utterances, S samples, T features, U frames of the encoder, M values of a
feature, D model width, V vocabulary, L tokens.

A YAML declares it as one part, `encoder`, which takes audio, or as three: `compute_features`, `CNN`
and `Transformer`. These classes own no parameters: the one ModuleList of the YAML owns them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sbkit.audio.augment import AugmentFeatures
from sbkit.audio.lengths import Subsampling, append_silence, pad_to_bucket
from sbkit.base.errors import ConfigError
from sbkit.models.encoder_parts import Backbone, EncoderPart, FeatureExtractor

ENCODER, COMPOSED = "encoder", ("compute_features", "CNN", "Transformer")  # keys of the YAML
AUDIO_PART_KEYS = ("compute_features", ENCODER, "wave_augment")  # keys of parts that take audio


class Encoder:
    """An encoder of audio, in one part: (B, S) in the scale of int16, (B,) -> (B, U, D), (B,).

    modules: the modules of the YAML by their keys.
    """

    features: FeatureExtractor | None = None

    def __init__(self, backbone: Backbone, modules: Mapping[str, nn.Module]) -> None:
        self.backbone = backbone
        self.modules = modules

    def inputs(
        self, audio: Tensor, lengths: Tensor, spec_augment: AugmentFeatures | None, tail: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compute the input of the backbone, here audio and ``tail`` zeros: -> (B, S), (B,)."""
        return append_silence(audio.float(), lengths, tail)

    def __call__(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.backbone(*self.inputs(audio, audio_lengths, None, 0))

    @property
    def subsampling(self) -> Subsampling:
        """How the parts subsample audio, as they declare."""
        return self.backbone.subsampling


class FeatureEncoder(Encoder):
    """An encoder in three parts: features, front-end and Transformer."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(Backbone("Transformer", modules["Transformer"]), modules)
        self.features: FeatureExtractor = FeatureExtractor(modules["compute_features"])
        self.front_end = EncoderPart("CNN", modules["CNN"])

    def inputs(
        self, audio: Tensor, lengths: Tensor, spec_augment: AugmentFeatures | None, tail: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compute features, mask some of them, and subsample: -> (B, U, D), (B,)."""
        features, frame_lengths = self.features(audio, lengths, tail=tail)
        if spec_augment is not None:
            features = spec_augment(features, frame_lengths)
        return self.subsample(features, frame_lengths)

    def subsample(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Call the front-end: (B, T, M), (B,) -> (B, U, D), (B,).

        On an accelerator, T is padded to one of a few lengths, unless a part sees the padding.
        """
        parts = (self.front_end.module, self.backbone.module)
        if not any(getattr(part, "sees_padding", False) for part in parts):
            features = pad_to_bucket(features)
        return self.front_end(features, frame_lengths)

    def encode_features(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.backbone(*self.subsample(features, frame_lengths))

    @property
    def subsampling(self) -> Subsampling:
        subsampling = self.features.subsampling.then(self.front_end.subsampling)
        return subsampling.then(self.backbone.subsampling)


def find_subsampling(parts: Mapping[str, nn.Module | None]) -> Subsampling | None:
    """Return the subsampling of the declared encoder; None if no part has one of sbkit's keys."""
    is_declared = any(parts.get(name) is not None for name in (ENCODER, *COMPOSED))
    return make_encoder(parts).subsampling if is_declared else None


def make_encoder(parts: Mapping[str, nn.Module | None]) -> Encoder:
    """Assemble an encoder from its parts."""
    declared = {k: part for k in (ENCODER, *COMPOSED) if (part := parts.get(k)) is not None}
    if {*declared} == {ENCODER}:
        return Encoder(Backbone(ENCODER, declared[ENCODER]), declared)
    if {*declared} != {*COMPOSED}:
        raise ConfigError(
            f"A model needs either `{ENCODER}`, or `compute_features`, `CNN` and `Transformer`, "
            f"but the YAML declares {' and '.join(f'`{key}`' for key in declared) or 'neither'}.",
            keys=(next(iter(declared), "model"),),
        )
    return FeatureEncoder(declared)


class AcousticModel:
    """An encoder and its heads, all owned by the one ModuleList: the base of a recognizer."""

    def __init__(
        self, *, model: nn.ModuleList, encoder: Encoder, heads: Mapping[str, nn.Module | None]
    ) -> None:
        declared = {**encoder.modules, **heads}
        parts = {name: part for name, part in declared.items() if part is not None}
        if encoder.features is not None:  # only its parameters: constants may stay outside
            name = encoder.features.name
            parts[name] = nn.ParameterList(parts.pop(name).parameters())
        require_registered(model, parts)
        self.model = model
        self.encoder = encoder

    def encode(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(audio, audio_lengths)


def require_registered(model: nn.ModuleList, parts: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for a part with tensors that the one ModuleList does not own.

    Such tensors would stay on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804).
    """
    owned = {*map(id, model.parameters()), *map(id, model.buffers())}
    for name, part in parts.items():
        tensors = [*part.named_parameters(), *part.named_buffers()]
        strays = [key for key, tensor in tensors if id(tensor) not in owned]
        if strays:
            raise ConfigError(
                f"`model` must own every part, but {name}.{strays[0]} is not in it. "
                f"Add `!ref <{name}>` to the torch.nn.ModuleList.",
                keys=("model",),
            )


def require_rate(parts: Mapping[str, object], sample_rate: int) -> None:
    """Raise ConfigError if a module of a part that takes audio has another `sample_rate`, in Hz."""
    for name in AUDIO_PART_KEYS:
        part = parts.get(name)
        for module in part.modules() if isinstance(part, nn.Module) else ():
            module_rate = getattr(module, "sample_rate", sample_rate)
            if isinstance(module_rate, int | float) and module_rate != sample_rate:
                raise ConfigError(
                    f"The audio has {sample_rate} Hz, but {type(module).__name__} in `{name}` is "
                    f"made for {module_rate} Hz. Add `sample_rate: !ref <sample_rate>` to it.",
                    keys=(name,),
                )


@dataclass(frozen=True)
class Predictions:
    """The predictions of a recognizer for a batch."""

    states: Tensor  # of the encoder: (B, U, D)
    log_probs: Tensor  # of CTC: (B, U, V)
    intermediate: Tensor | None  # CTC's from the middle of the encoder, if requested
    frame_lengths: Tensor  # (B,)
    logits: Tensor | None  # of the decoder, if there are tokens: (B, L + 1, V)


def head_size(head: nn.Module) -> int:
    """Count the outputs of a head: the rows of its last matrix."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim > 1]
    return matrices[-1].shape[0] if matrices else 0
