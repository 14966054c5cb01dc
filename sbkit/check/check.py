"""Run every check over one run, and gather their findings.

    checks of values -> the run, prepared -> a Brain of its own, and small steps -> all other checks

If something of the run cannot be made, the other checks are left out: they would report its
consequences.
"""

import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TypeVar

from speechbrain.utils.distributed import MainProcessContext
from torch import nn

from sbkit.base.errors import ConfigError, DataError, SbkitError
from sbkit.base.libraries import place_of
from sbkit.base.messages import nearest, plural
from sbkit.base.threads_and_memory import return_freed_memory
from sbkit.check import cost, data, dry_run, exported, parameters, settings
from sbkit.check.checked_run import (
    CPU_OPTIONS,
    CheckedRun,
    Cost,
    Finding,
    count_steps,
    has_device,
    last_epoch_of,
    planned_by,
)
from sbkit.checkpoint.rng import preserve_rng
from sbkit.config.hparams import OUTPUT_FOLDER, MissingSettingError, RunSpec
from sbkit.distributed.device import ON_CPU
from sbkit.distributed.ranks import as_single_process, rank
from sbkit.logs.handlers import quiet
from sbkit.logs.progress import progress_bar, reporting
from sbkit.train.ownership import helper_digests, reachable
from sbkit.train.recipe import Recipe
from sbkit.train.schedule import highest_factor
from sbkit.train.setup import (
    RunData,
    build_run,
    choose_placement,
    make_brain,
    prepare_data,
    write_label_files,
)

logger = logging.getLogger(__name__)

Findings = Iterable[Finding] | None  # None: the check only raises
Check = Callable[[CheckedRun], Findings]
Checked = TypeVar("Checked", RunSpec, CheckedRun)

# Nothing is built for these checks.
CHECKS_OF_VALUES = (settings.check_ranges, settings.check_placement, settings.check_needs)
FIRST_CHECKS: tuple[Check, ...] = (
    *(settings.check_formats, settings.check_batches),
    *(parameters.check_ownership, parameters.check_helpers, parameters.check_optimizers),
    *(data.check_labels, data.check_masks, data.check_positions),
    *(dry_run.check_shapes, dry_run.check_state, dry_run.check_steps, dry_run.check_padding),
)
LAST_CHECKS: tuple[Check, ...] = (
    *(data.check_data, data.check_channels, data.check_silence),
    *(dry_run.check_unused, settings.check_unread),
    *(settings.check_freezing, settings.check_schedule),
    *(settings.check_run_folder, settings.check_initial_weights, exported.check_export),
    *(cost.check_recordings, cost.check_cost),  # the last one: it trains the Brain
)
CHECKS_OF_STEPS: frozenset[Check] = frozenset(  # for a model that small steps can train
    {
        *(parameters.check_optimizers, dry_run.check_steps, dry_run.check_padding),
        *(dry_run.check_unused, cost.check_cost, exported.check_export),
    }
)

CONSEQUENCES = {"shapes", "causes"}  # left out where another error has their place


def checks_of(recipe: Recipe) -> tuple[Check, ...]:
    """Return the checks of a recipe's runs in the order in which findings are reported."""
    return (*FIRST_CHECKS, *recipe.checks(), *LAST_CHECKS)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The findings of the checks of a run, and what else `sbkit check` prints."""

    findings: list[Finding]
    initial_weights: list[str] = field(default_factory=list)
    cost: Cost | None = None


def check_run(
    spec: RunSpec, *, data: RunData | None = None, checks: Sequence[Check] | None = None
) -> CheckResult:
    """Check a run, and return each finding once.

    data: the data and labels of the run, if they are prepared already.
    checks: by default all of them, and those of the recipe.
    """
    findings: list[Finding] = []
    for check_values in CHECKS_OF_VALUES:
        findings += _run(check_values, spec)
    if any(finding.stops and finding.check == "ranges" for finding in findings):
        return CheckResult(findings=_unique(findings))
    with ExitStack() as stack:
        stack.enter_context(preserve_rng(ON_CPU.device))
        try:
            run = stack.enter_context(open_checked_run(spec, data))
        except Exception as error:  # whatever a part or a recipe raises
            problem = _to_finding(error, spec, "run")
            if problem.where not in {finding.where for finding in findings if finding.stops}:
                findings.append(problem)
            return CheckResult(findings=_unique(findings))
        if checks is None:
            checks = checks_of(run.data.recipe)
        with progress_bar("checking the run", len(checks)) as advance:
            for check in checks:
                if run.dry_run.error is None or check not in CHECKS_OF_STEPS:
                    findings += _run(check, run)
                advance(1)
    reported = {f.where for f in findings if f.stops and f.check not in CONSEQUENCES}
    findings = [f for f in findings if f.check not in CONSEQUENCES or f.where not in reported]
    return CheckResult(
        findings=_unique(findings), initial_weights=run.initial_weights, cost=run.cost
    )


@contextmanager
def open_checked_run(spec: RunSpec, data: RunData | None = None) -> Iterator[CheckedRun]:
    """Prepare the data of a run, unless that is done, and yield it with objects for the checks.

    The objects are built in a scratch folder: one of the user's may write when it is made.
    """
    placement = choose_placement(spec) if has_device(spec) else ON_CPU
    if data is None:
        data = prepare_data(spec)
    with TemporaryDirectory(prefix="sbkit-check") as folder:
        with quiet(), reporting(show_progress=False):
            scratch_spec = spec.with_overrides(**{OUTPUT_FOLDER: folder})
            scratch_data = replace(data, spec=scratch_spec)
            write_label_files(scratch_data)
            run_copy = build_run(scratch_data, placement)
            if not isinstance(model := run_copy.hparams["model"], nn.ModuleList):
                raise ConfigError(
                    f"`model` must be a torch.nn.ModuleList, not a {type(model).__name__}.",
                    keys=("model",),
                )
            learnable = {id(p) for p in model.parameters() if p.requires_grad}
            brain = make_brain(run_copy, **CPU_OPTIONS)
            reached = [*reachable({**dict(run_copy.hparams.items()), "brain": brain})]
            helpers = helper_digests(brain)
            if (sampler := planned_by(run_copy)) is not None:
                sampler.set_epoch(last_epoch_of(run_copy))
            factor = highest_factor(brain.schedule, count_steps(run_copy), last_epoch_of(run_copy))
            small_steps = dry_run.take_small_steps(run_copy, brain, reached, factor)
        run = CheckedRun(
            data=data,
            copy=run_copy,
            brain=brain,
            reached=reached,
            highest_factor=factor,
            helpers=helpers,
            learnable=learnable,
            dry_run=small_steps,
        )
        yield run


def check_before_training(data: RunData) -> None:
    """Check a run on rank 0, unless `check` is off: log the notes, raise ConfigError for errors."""
    if rank() > 0 or not data.spec.settings["check"]:
        return
    with as_single_process(), MainProcessContext():  # SpeechBrain would wait for the other ranks
        findings = check_run(data.spec, data=data).findings
    errors = [finding for finding in findings if finding.stops]
    for finding in findings:
        if not finding.stops:
            logger.info(f"note: {finding.as_sentence()}")
    if len(errors) == 1:
        raise ConfigError(errors[0].as_sentence())
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        raise ConfigError(f"`sbkit check` found {len(errors)} errors, printed above.")
    gc.collect()
    return_freed_memory()


def summary(findings: Sequence[Finding]) -> str:
    """Write how many errors and notes there are: "2 errors and 1 note"."""
    counts = Counter(finding.severity for finding in findings)
    texts = [plural(counts[word], word) for word in ("error", "note") if counts[word]]
    return " and ".join(texts) or "Nothing found."


def _unique(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once; of equal problems at one place, an error rather than a note."""
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first = unique.setdefault((finding.where, finding.problem), finding)
        if finding.stops and not first.stops:
            unique[finding.where, finding.problem] = finding
    return list(unique.values())


def _run(check: Callable[[Checked], Findings], checked: Checked) -> Iterator[Finding]:
    """Yield the findings of a check, which draws random numbers of its own."""
    name = check.__name__.removeprefix("check_")
    spec = checked.spec if isinstance(checked, CheckedRun) else checked
    try:
        # Messages of hooks in these steps are not the run's.
        with preserve_rng(ON_CPU.device), quiet(), reporting(show_progress=False):
            findings = [*(check(checked) or ())]
        for finding in findings:
            yield replace(finding, check=name)
    except SbkitError as error:
        yield _to_finding(error, spec, name)
    except Exception as error:
        yield Finding(
            check=name,
            where=spec.place(),
            problem=f"The check `{name}` did not complete ({type(error).__name__}: {error}"
            f"{place_of(error)})",
            stops=False,
        )


def _to_finding(error: Exception, spec: RunSpec, check: str) -> Finding:
    """Turn an error into a finding at the file or the key that it concerns.

    An error of the data without file and key is at the key of the data.
    """
    if not isinstance(error, SbkitError):
        fault = f"{type(error).__name__}: {error}{place_of(error)}"
        error = ConfigError(f"The run cannot be made: {fault}.")
    keys = error.keys or (("data_folder",) if isinstance(error, DataError) else ())
    misspelled: list[str] = []
    if isinstance(error, MissingSettingError):
        unread = settings.unread_keys(spec, spec.settings.names_read)
        misspelled = [key for key in unread if nearest(key, keys)]
    place = f"{error.file}:{error.line}" if error.line else error.file
    problem = str(error).removeprefix(f"{error.file}: ").rstrip(".")
    return Finding(
        check=check,
        where=place or spec.place(*(misspelled[:1] or keys)),
        problem=problem,
        fix=f"Is `{misspelled[0]}` meant for it?" if misspelled else "",
    )
