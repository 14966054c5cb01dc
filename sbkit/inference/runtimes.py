"""The runtimes of a bundle: what makes its model, in a thread of its own."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import SbkitError
from sbkit.inference.bundle import WEIGHTS, Bundle, load_torch, read_bundle
from sbkit.inference.model_thread import ModelThread

if TYPE_CHECKING:
    from sbkit.inference.torch_model import TorchModel

RUNTIMES = ("torch", "onnx")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a model is asked to run on: device cpu, cuda, cuda:N or auto; compile: a mode."""

    device: str = AUTO
    runtime: str = "torch"
    precision: str = "fp32"
    compile: str | None = None


def open_model(folder: Path, wanted: Wanted, *, own: frozenset[str] = frozenset()) -> Bundle:
    """Read a bundle and make its model in a new thread, which is then its ``model``.

    Raises:
        SbkitError: the bundle is damaged, or what is wanted is not there.
    """
    if wanted.runtime not in RUNTIMES:
        raise SbkitError(
            f"`runtime` must be one of {', '.join(RUNTIMES)}, but is {wanted.runtime!r}. Choose "
            "one of them."
        )
    read = read_bundle(folder, WEIGHTS)

    def make() -> "TorchModel":
        from sbkit.distributed.device import resolve

        device = None if wanted.device == AUTO else wanted.device
        return load_torch(read, folder, own=own, placement=resolve(device, wanted.precision))

    return replace(read.bundle, model=ModelThread(make))
