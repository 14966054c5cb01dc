"""The bundles that commands open: a bundle itself, or that of a run."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run; a missing one is taken for a bundle."""
    return (folder / "hyperparams.yaml").is_file()


def open_bundle(folder: Path, user_modules: frozenset[str]) -> AbstractContextManager[Path]:
    """Return a context that yields the folder of a bundle; a run folder is exported first."""
    if not is_run(folder):
        return nullcontext(folder)  # without importing torch, which runs of ONNX do not need
    from sbkit.export.export import exported_bundle

    return exported_bundle(folder, user_modules)
