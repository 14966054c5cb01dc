"""Read YAML files, override, resolve and check their values, and build their objects."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.config.document import read_document as read_document
    from sbkit.config.hparams import Knobs as Knobs
    from sbkit.config.hparams import load_hparams as load_hparams
    from sbkit.config.hparams import read_knobs as read_knobs
    from sbkit.config.overrides import parse_overrides as parse_overrides

__getattr__, __dir__ = lazy_names(
    "sbkit.config",
    Knobs="hparams",
    load_hparams="hparams",
    parse_overrides="overrides",
    read_document="document",
    read_knobs="hparams",
)
