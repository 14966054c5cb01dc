"""Whether the features are made for the sample rate of the audio that they are given."""

from torch import nn

from sbkit.base.errors import SbkitError


def require_rate(compute_features: nn.Module, sample_rate: int) -> None:
    """Check that no module of the feature extractor is made for another rate, in Hz.

    Raises:
        SbkitError: one says in its `sample_rate` that it is.
    """
    for module in compute_features.modules():
        made_for = getattr(module, "sample_rate", None)
        if isinstance(made_for, int | float) and made_for != sample_rate:
            raise SbkitError(
                f"`compute_features` must be made for the audio's {sample_rate} Hz, but its "
                f"{type(module).__name__} is made for {made_for} Hz. Write `sample_rate: !ref "
                "<sample_rate>` in it."
            )
