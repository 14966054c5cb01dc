"""What the run folder holds already, and whether what is trained can be resumed and exported.

The folder is only read. A model can be exported when each of its parts is plain data.
"""

from collections.abc import Iterator

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding, words_of
from sbkit.check.planned_run import PlannedRun
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_described
from sbkit.checkpoint.run_config import CHECKPOINTS, RESOLVED
from sbkit.checkpoint.weights import check_weights
from sbkit.config.document import read_document
from sbkit.config.hparams import save_resolved
from sbkit.export.export import plain_parts
from sbkit.logs.handlers import quiet
from sbkit.tasks.task import load_task

INITIAL = "initial weights"


def check_run_folder(planned: PlannedRun) -> tuple[Finding, ...]:
    """Refuse, as training does, a run folder that belongs to another run than this one."""
    folder = planned.run_folder / CHECKPOINTS
    if folder.is_dir():
        with quiet():  # training logs which ones are damaged
            newest = next(iter(Checkpointer(folder).find_whole(1)), None)
        if newest is not None:
            planned.prepare_labels()  # writes the file that is compared, too
            planned.make_run_config().check_continues(planned.run_folder)
            check_weights(planned.build_hparams()["checkpointer"], newest)
    return ()


def check_initial_weights(planned: PlannedRun) -> tuple[Finding, ...]:
    """Refuse, as training does, `pretrained` and `init_from` without the weights of the model.

    The lines about what would be loaded are kept for the end of `sbkit check`.
    """
    if newest_described(planned.run_folder / CHECKPOINTS) is None:
        planned.results[INITIAL] = planned.load_initial_weights()
    return ()


def check_export(planned: PlannedRun) -> Iterator[Finding]:
    """Note what `sbkit export` would refuse: parts that are no plain data."""
    file, task = planned.folder / RESOLVED, planned.load_recipe().task
    save_resolved(file, planned.yaml_file, planned.overrides)
    try:
        load_task(task.name, user_modules=frozenset([task.name.rpartition(".")[0]]))
        plain_parts(read_document(file).root, planned.build_hparams(), task)
    except SbkitError as error:
        key = next((key for key in planned.document.root if f"`{key}`" in str(error)), "model")
        yield planned.finding("export", key, **words_of(str(error)), stops=False)
