"""Whether the parts of a YAML that take audio are made for its sample rate."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from sbkit.base.errors import SbkitError

TAKE_AUDIO = ("compute_features", "encoder", "wave_augment")


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
