"""What a recipe builds its own class on, for bundles whose task has graphs of its own."""

import argparse
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy.typing as npt

from sbkit.runtime.runtimes import open_model

OPTIONS = ("device", "runtime", "precision", "compile", "user_modules")  # of a command line


class GraphModel:
    """A bundle whose model has a thread of its own, in which `run` calls a graph.

    Attributes:
        command: that the bundle's task must have.
        bundle, sample_rate: what was exported.
        settings: the plain data that callers of the graphs need.
        effective: what the model runs on.
    """

    command: ClassVar[str]

    def __init__(self, folder: Path | str, **options: Any) -> None:
        """Open a bundle; ``options`` are those of `open_model`: device, runtime, precision, own.

        Raises SbkitError: the bundle is damaged or of another task, or the device is not there.
        """
        self.bundle = open_model(Path(folder), **options)
        self.bundle.task.require_command(self.command)
        self._model, self.sample_rate = self.bundle.model, self.bundle.config.sample_rate
        self.effective = self._model.effective
        self.settings: dict[str, Any] = self._model.call(lambda model: model.settings)

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> Self:
        """Open a bundle, as the constructor does."""
        return cls(folder, **options)

    @classmethod
    def named_by(cls, options: argparse.Namespace) -> Self:
        """Open the bundle that a command line names."""
        return cls(options.bundle, **{name: getattr(options, name) for name in OPTIONS})

    def run(self, graph: str, *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Run a graph of the task."""
        found: list[npt.NDArray[Any]] = self._model.call(lambda model: model.run(graph, *arrays))
        return found

    def close(self) -> None:
        """End the thread of the model."""
        self._model.close()

    def __enter__(self) -> Self:
        """Return the model, which a `with` statement closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread of the model."""
        self.close()
