"""Training: a recipe's steps, the Brain, one exact step, and what stops and resumes a run.

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.train.brain import Brain as Brain
    from sbkit.train.recipe import Recipe as Recipe
    from sbkit.train.run import Run as Run
    from sbkit.train.schedule import NewBob as NewBob
    from sbkit.train.schedule import TriStage as TriStage
    from sbkit.train.schedule import WarmupCosine as WarmupCosine

__getattr__, __dir__ = lazy_names(
    "sbkit.train",
    Brain="brain",
    NewBob="schedule",
    Recipe="recipe",
    Run="run",
    TriStage="schedule",
    WarmupCosine="schedule",
)
