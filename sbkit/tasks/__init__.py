"""Tasks: what a model predicts, how predictions are scored, and which commands run bundles."""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.tasks.task import Command as Command
    from sbkit.tasks.task import Exportable as Exportable
    from sbkit.tasks.task import Graph as Graph
    from sbkit.tasks.task import LabelFile as LabelFile
    from sbkit.tasks.task import Scorer as Scorer
    from sbkit.tasks.task import Task as Task

__getattr__ = lazy_names(
    "sbkit.tasks",
    Command="task",
    Exportable="task",
    Graph="task",
    LabelFile="task",
    Scorer="task",
    Task="task",
)
