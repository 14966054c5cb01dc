"""What every task shares: audio -> features -> front-end -> encoder.

Legend: B utterances, S samples, T frames of features, U frames after the front-end, M features of
a frame, D model width.

It owns nothing: every parameter belongs to the one ModuleList of the YAML, and a part that does
not is refused here.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from sbkit.audio.lengths import pad_to_bucket
from sbkit.base.errors import SbkitError
from sbkit.models.encoder_adapter import Encoder
from sbkit.models.feature_extractor import FeatureExtractor
from sbkit.models.frontend_adapter import FrontEnd


class AcousticEncoder:
    """Call features, front-end and encoder in their order; who wrote them makes no difference."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: nn.Module,
        CNN: nn.Module,
        Transformer: nn.Module,
        others: Mapping[str, nn.Module],
        padding: int = 0,
    ) -> None:
        """Check that ``model`` owns the parts and the ``others`` of the task."""
        learned = nn.ParameterList(compute_features.parameters())
        parts = {"CNN": CNN, "Transformer": Transformer, **others, "compute_features": learned}
        require_registered(model, parts)
        self.features = FeatureExtractor(compute_features)
        self.front_end = FrontEnd(CNN)
        self.encoder = Encoder(Transformer, padding=padding)

    def subsample(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Call the front-end: (B, T, M), (B,) -> (B, U, D), (B,).

        On an accelerator T becomes one of few lengths, unless what follows depends on padding.
        """
        if self.front_end.minds_lengths and self.encoder.minds_lengths:
            features = pad_to_bucket(features)
        return self.front_end(features, frame_lengths)

    def encode(self, features: Tensor, frame_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Subsample and encode: (B, T, M), (B,) -> (B, U, D), (B,)."""
        x, frame_lengths = self.subsample(features, frame_lengths)
        return self.encoder.encode(x, frame_lengths), frame_lengths


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
