"""Export runs as bundles and other formats, each compared with the trained model."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.export.export import export_run as export_run
    from sbkit.export.export import exported_bundle as exported_bundle
    from sbkit.export.parity import Candidate as Candidate
    from sbkit.export.parity import Grid as Grid

__getattr__, __dir__ = lazy_names(
    "sbkit.export",
    Candidate="parity",
    Grid="parity",
    exported_bundle="export",
    export_run="export",
)
