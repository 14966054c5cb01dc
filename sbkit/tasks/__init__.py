"""Tasks: what a model predicts, how predictions are scored, and which commands run bundles."""

from sbkit.tasks.task import Command as Command
from sbkit.tasks.task import Exportable as Exportable
from sbkit.tasks.task import Graph as Graph
from sbkit.tasks.task import LabelFile as LabelFile
from sbkit.tasks.task import Scorer as Scorer
from sbkit.tasks.task import Task as Task
