"""Training: the setup of a run, the Brain, one exact step, and what stops and resumes a run.

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.train.brain import Brain as Brain
    from sbkit.train.recipe import Recipe as Recipe
    from sbkit.train.schedule import WarmupCosine as WarmupCosine
    from sbkit.train.setup import RunSetup as RunSetup

__getattr__, __dir__ = lazy_names(
    "sbkit.train",
    Brain="brain",
    Recipe="recipe",
    RunSetup="setup",
    WarmupCosine="schedule",
)
