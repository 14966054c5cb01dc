"""What the run folder holds already, and whether what is trained can be resumed and exported.

The folder is only read. A model can be exported when each of its parts is plain data that names
what a bundle may build.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing
from sbkit.base.text import listed
from sbkit.check.finding import Finding, words_of
from sbkit.check.model.dry_run import dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.declaration import CHECKPOINTS, RESOLVED
from sbkit.checkpoint.folder import newest_described
from sbkit.checkpoint.weights import check_weights
from sbkit.config.allowed import refusal
from sbkit.config.document import read_document
from sbkit.config.hparams import save_resolved
from sbkit.inference.bundle.export import plain_parts
from sbkit.inference.bundle.module_spec import names_of
from sbkit.logs.log import quiet
from sbkit.tasks.task import load_task
from sbkit.train.initialize import initialize_from

RUN_FOLDER, EXPORT = "run_folder", "export"  # the names of the two checks
OF_A_RUN = (RESOLVED, CHECKPOINTS, "check", "left_out.tsv", "tokenizer.model")


def check_run_folder(planned: PlannedRun) -> Iterator[Finding]:
    """Find a run folder that cannot be written to, or that holds something else than this run."""
    folder = planned.run_folder
    if folder is None:
        return
    there = nearest_existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield planned.finding(
            RUN_FOLDER,
            "output_folder",
            declared=f"output_folder: {folder}",
            effect=f"{there} is no folder to write to, so nothing could be saved",
            fix="Choose another --output_folder.",
        )
        return
    if folder.exists():
        yield from _find_foreign(planned, folder)
        if (newest := newest_checkpoint(folder)) is not None:
            _ = planned.labels  # whose file is compared, too
            planned.run.declare().check_continues(folder)
            check_weights(planned.hparams["checkpointer"], newest)


def check_initial_weights(planned: PlannedRun) -> tuple[Finding, ...]:
    """Refuse, as training does, an `init_from` that has no weights of the model."""
    source, folder = planned.knobs.get("init_from"), planned.run_folder
    if source and (folder is None or newest_described(folder / CHECKPOINTS) is None):
        initialize_from(Path(str(source)), planned.hparams, planned.recipe.task)
    return ()


def check_export(planned: PlannedRun) -> Iterator[Finding]:
    """Note what `sbkit export` would refuse: parts that are no plain data, or not allowed."""
    if not planned.has_recipe:
        return
    if dry_run(planned).broken:
        return  # what does not run cannot be exported either, and is reported
    try:
        config = _plain(planned)
    except SbkitError as error:
        key = next((key for key in planned.document.root if f"`{key}`" in str(error)), "model")
        yield planned.finding(EXPORT, key, **words_of(str(error)), stops=False)
        return
    yield from _find_not_listed(planned, config)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Find the checkpoint that a run would go on from; raises SbkitError where all are damaged."""
    if not (folder / CHECKPOINTS).is_dir():
        return None
    with quiet():  # training logs which ones are damaged
        return next(iter(Checkpointer(folder / CHECKPOINTS).find_whole(1)), None)


def _find_foreign(planned: PlannedRun, folder: Path) -> Iterator[Finding]:
    there = sorted(each.name for each in folder.iterdir())
    if there and not any((folder / name).exists() for name in OF_A_RUN):
        yield planned.finding(
            RUN_FOLDER,
            "output_folder",
            declared=f"output_folder: {folder}",
            effect=f"it is no run but holds {listed(there)}: a run would be mixed into it",
            fix="Choose another --output_folder.",
            stops=False,
        )


def _plain(planned: PlannedRun) -> dict[str, Any]:
    file = planned.run.folder / RESOLVED
    save_resolved(file, planned.yaml_file, planned.building_overrides)
    task = planned.recipe.task
    load_task(task.name, own=frozenset([task.name.rpartition(".")[0]]))
    config = plain_parts(read_document(file).root, planned.hparams, task)
    described: dict[str, Any] = json.loads(json.dumps(config))
    return described


def _find_not_listed(planned: PlannedRun, config: Mapping[str, Any]) -> Iterator[Finding]:
    for key, part in config["parts"].items():
        not_listed = [name for kind, name in names_of(part) if refusal(f"!{kind}", name)]
        if not_listed:
            yield planned.finding(
                EXPORT,
                key,
                declared=f"`{key}`, made of {', '.join(not_listed)}",
                effect="`sbkit export` builds of itself only what is on sbkit's list",
                fix="Export with --import and the name of its module.",
                stops=False,
            )
