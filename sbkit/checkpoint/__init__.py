"""Checkpoints: whole or absent, resumed bit for bit, averaged, and bound to one run configuration.

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.checkpoint.checkpointer import AveragedCheckpoints as AveragedCheckpoints
    from sbkit.checkpoint.checkpointer import Checkpointer as Checkpointer
    from sbkit.checkpoint.run_config import RunConfig as RunConfig
    from sbkit.checkpoint.run_config import read_run_config as read_run_config

__getattr__, __dir__ = lazy_names(
    "sbkit.checkpoint",
    AveragedCheckpoints="checkpointer",
    Checkpointer="checkpointer",
    RunConfig="run_config",
    read_run_config="run_config",
)
