"""What a model runs on: read back from what was made, and compared with what was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sbkit.base.errors import SbkitError


@dataclass(frozen=True, kw_only=True)
class Effective:
    """Where and how a model runs, as it was found after creation.

    runtime: torch or onnx; device: of all weights, such as cuda:0; precision: of the matrix
    products, such as bf16, or "bf16 and fp32" where some parts, such as features, stay in fp32;
    compiled: the mode, or None; nodes: how many nodes of an ONNX graph each execution provider has.
    """

    runtime: str
    device: str
    precision: str
    compiled: str | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write it for a log."""
        words = [self.runtime, self.device, self.precision]
        words += [f"compiled ({self.compiled})"] if self.compiled else []
        words += [f"{count} nodes on {name}" for name, count in self.nodes.items()]
        return ", ".join(words)


def require_effective(found: Effective, *, device: str, precision: str) -> Effective:
    """Return what was found, where it is what was asked for.

    Raises:
        SbkitError: the model runs elsewhere, or in another precision.
    """
    fits = precision == found.precision or (
        precision != "fp32" and precision in found.precision.split(" and ")
    )
    for name, asked, came, is_met in (
        ("device", device, found.device, device == found.device),
        ("precision", precision, found.precision, fits),
    ):
        if not is_met:
            raise SbkitError(
                f"`--{name}` must be what the model runs with, but {asked} was asked for and it "
                f"runs with {came}. See what is there: sbkit doctor"
            )
    return found
