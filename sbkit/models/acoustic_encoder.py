"""What every task shares: audio -> features -> front-end -> encoder.

Legend: B utterances, S samples, T frames of features, U frames after the front-end, M features of
a frame, D model width.

It owns nothing: every parameter belongs to the one ModuleList of the YAML, and a part that does
not is refused here.
"""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from sbkit.audio.lengths import pad_to_bucket
from sbkit.base.errors import SbkitError
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.encoder_adapter import Encoder
from sbkit.models.feature_extractor import FeatureExtractor
from sbkit.models.frontend_adapter import FrontEnd
from sbkit.models.striding import Striding, measure_striding


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
        self.model = model
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


def measure_subsampling(
    compute_features: nn.Module, CNN: nn.Module, sample_rate: int = SAMPLE_RATE
) -> Striding:
    """Run silence of some twenty lengths through features and CNN, and see when a frame is added.

    The parts stay as they are. Raises SbkitError when the CNN does not take the features, or keeps
    no constant stride.
    """
    features = FeatureExtractor(deepcopy(compute_features).cpu().eval())
    front_end = FrontEnd(deepcopy(CNN).cpu().eval())
    return striding_of(features, front_end, sample_rate, torch.device("cpu"))


def striding_of(
    features: FeatureExtractor, front_end: FrontEnd, sample_rate: int, device: torch.device
) -> Striding:
    """Measure parts that lie on a device; raises SbkitError like `measure_subsampling`."""

    @torch.no_grad()
    def count(samples: int) -> int:
        silence = torch.zeros(1, samples, device=device)
        computed, lengths = features(silence, torch.tensor([samples]))
        try:
            return int(front_end(computed, lengths)[1])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SbkitError(
                f"`CNN` must take features of {computed.shape[-1]} values a frame, but fails "
                f"({type(error).__name__}: {error}). Give it and `compute_features` the same "
                "number of mel bins, or correct it."
            ) from error

    return measure_striding(count, part="CNN", unit="samples", shortest=sample_rate)


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
