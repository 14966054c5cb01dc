"""`sbkit prepare` and `sbkit cache`: prepare the corpus of a run in the cache or in a folder."""

import logging
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import ASKED_TO_STOP, PARTLY_DONE, ConfigError, StoreError
from sbkit.base.files import require_writable
from sbkit.base.messages import listed, plural
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import Share

if TYPE_CHECKING:
    from sbkit.data.prepared import Spec

# The variable with the index of a job in an array, and its value in a job outside of an array.
ARRAY_INDEX_VARIABLES = {
    **dict.fromkeys(("JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX"), ""),
    **dict.fromkeys(("PBS_ARRAY_INDEX", "PBS_ARRAYID"), ""),  # OpenPBS and Torque
    **{"SGE_TASK_ID": "undefined", "LSB_JOBINDEX": "0"},
}
# For jobs that start a command several times: the variable with the index of a process, and the one
# with their number.
PROCESS_VARIABLES = {
    **{"SLURM_PROCID": "SLURM_NTASKS", "RANK": "WORLD_SIZE"},
    **{"OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"},
    "CLOUD_RUN_TASK_INDEX": "CLOUD_RUN_TASK_COUNT",
}

logger = logging.getLogger(__name__)


def add_commands(parser: Parser) -> None:
    """Add `prepare` and `cache`."""
    help = "decode the data of a run, or write it as a corpus to be shared"
    add = parser.add_command(
        "prepare", prepare_data, help, "share", takes_overrides=True, logs_to_stdout=True
    )
    add("source", metavar="YAML", help="the YAML, as given to train.py; the corpus of --verify")
    add("--report", metavar="DIR", type=Path, help="write the data report to DIR")
    add("--again", action="store_true", help="read all audio files again")
    add("--out", metavar="DIR|URL", help="write the corpus there; data_folder reads it")
    add("--finish", action="store_true", help="write the index of --out, or list what is missing")
    add("--verify", action="store_true", help="read all audio of a corpus instead")

    help = "list prepared audio, remove what no table lists any more, or forget clips"
    add = parser.add_command("cache", cache, help, "tables", is_intermixed=True)
    add("action", choices=("list", "prune", "forget"), nargs="?", default="list")
    sources = "forget: tables of clips, or audio files, which need not exist any more"
    add("sources", metavar="TABLE|FILE", nargs="*", help=sources)
    out = "forget: also in this corpus of `prepare --out`; repeatable"
    add("--out", metavar="DIR|URL", action="append", default=[], help=out)
    runs = "forget: list files below DIR, such as those of runs, that name or quote the clips"
    add("--runs", metavar="DIR", type=Path, action="append", default=[], help=runs)
    add("--dry-run", action="store_true", help="forget: only say what would be erased")


def cache(options: Namespace) -> None:
    """List the entries of the cache, prune it, or forget clips."""
    from sbkit.base.user_folders import cache_folder
    from sbkit.data.cache import print_entries

    if options.action == "forget":
        _forget(options)
    elif any((options.sources, options.out, options.runs, options.dry_run, options.columns)):
        raise ConfigError("Tables, files and options are for `sbkit cache forget`.")
    elif options.action == "list":
        print_entries(cache_folder())
    else:
        from sbkit.data.forgetting import prune

        prune(cache_folder())


def _forget(options: Namespace) -> None:
    from sbkit.data.forgetting import forget
    from sbkit.data.tables import TableOptions

    if not options.sources:
        raise ConfigError("Name the clips: `sbkit cache forget TABLE|FILE ...`.")
    forget(
        options.sources,
        options=TableOptions.from_settings(
            {name: getattr(options, name) for name in ("columns", "encoding", "tier")}
        ),
        outs=options.out,
        runs=options.runs,
        dry_run=options.dry_run,
    )


def prepare_data(options: Namespace) -> int:
    """Prepare and describe the data of a run, write it as a corpus, or verify a corpus."""
    try:
        return _prepare(options)
    except StoreError as error:
        raise StoreError(f"{error} Rerun the same command once the store answers.") from error


def _prepare(options: Namespace) -> int:
    from sbkit.data.prepared import verify

    if options.verify:
        return PARTLY_DONE if verify(options.source) else 0
    if not options.out and (options.share or options.finish):
        raise ConfigError("--share and --finish need --out: a folder or URL that all write to.")
    if options.out and options.report:
        raise ConfigError("--out writes no report. Run `sbkit prepare --report` separately.")
    if options.out and options.again:
        raise ConfigError("--again is for the cache. With --out, name a new folder.")
    if options.finish:
        return _finish(_spec_of(options))
    share = choose_share(options.share, os.environ)
    if options.out:
        return _write_share(_spec_of(options), share)
    if options.report is not None:
        require_writable(options.report, option="--report")
    _prepare_in_cache(options)
    if options.report is not None:
        _write_report(options)
    return 0


def _prepare_in_cache(options: Namespace) -> None:
    from sbkit.base.user_folders import cache_folder
    from sbkit.config.overrides import parse_overrides
    from sbkit.data.prepared import prepare, read_data_settings
    from sbkit.data.shard import AUDIO
    from sbkit.data.splits import normalize_texts, sample_counts

    settings = read_data_settings(Path(options.source), parse_overrides(options.overrides))
    data = prepare(settings, again=options.again)
    if "text" in settings:  # other recipes read no normalized texts
        data, _ = normalize_texts(settings, data)
    for name, split in data.splits.items():
        hours = sample_counts(split.dataset).sum() / settings["sample_rate"] / 3600
        logger.info(f"{name}: {plural(len(split.dataset), 'utterance')}, {hours:.2f} h")
        counts = Counter(row.reason for row in split.excluded) + Counter(split.filtered)
        for reason, count in counts.items():
            logger.info(f"{name}: {count} left out, {reason}")
    rows = next(iter(data.splits.values())).dataset
    if AUDIO in rows.column_names and settings["audio_store"] != "lazy":
        logger.info(f"prepared audio: {cache_folder()}")


def _write_report(options: Namespace) -> None:
    """Describe the corpus as the recipe prepares it."""
    from sbkit.config.overrides import parse_overrides
    from sbkit.data.data_report import write_data_page, write_data_report
    from sbkit.train.recipe import load_recipe
    from sbkit.train.setup import declare_run, prepare_splits

    spec = declare_run(options.source, parse_overrides(options.overrides))
    splits = prepare_splits(spec, load_recipe(spec))
    facts = write_data_report(
        splits,
        options.report,
        sample_rate=spec.settings["sample_rate"],
        language=spec.settings["language"],
    )
    for name, split in facts["splits"].items():
        if clips := split["other_durations"]:
            ids = listed(clip["id"] for clip in clips)
            logger.info(f"{name}: {plural(len(clips), 'clip')} not as long as stated: {ids}")
    page = options.report / "data_report.html"
    write_data_page(splits, facts, page)
    logger.info(f"report: {page}")


def _spec_of(options: Namespace) -> "Spec":
    from sbkit.config.overrides import parse_overrides
    from sbkit.data.prepared import Spec

    return Spec.of(options.source, parse_overrides(options.overrides), options.out)


def _write_share(spec: "Spec", share: Share) -> int:
    """Write a share of a corpus; one process finishes it as well."""
    from sbkit.data.prepared import plan
    from sbkit.data.work_units import write_units

    write_units(share.of(plan(spec)), "writing shards")
    if share.total > 1:
        logger.info(
            f"Share {share.number} of {share.total} is written. `--finish` writes the index."
        )
        return 0
    return _finish(spec)


def _finish(spec: "Spec") -> int:
    from sbkit.data.prepared import finish

    missing = finish(spec)
    for name in missing:
        logger.info(f"missing: {name}")
    if missing:
        logger.info(f"{plural(len(missing), 'unit')} missing. Rerun their shares, then `--finish`.")
        return ASKED_TO_STOP
    logger.info(f"Train with --data_folder={spec.out}")
    return 0


def choose_share(requested: Share | None, variables: Mapping[str, str]) -> Share:
    """Return the requested share, or by default the share of this task of a SLURM array.

    Raises ConfigError in any other job of several processes, since each would write everything.
    """
    if requested is not None:
        return requested
    if "SLURM_ARRAY_TASK_ID" in variables:
        try:
            first, stride, count = (
                int(variables.get(f"SLURM_ARRAY_TASK_{name}", default))
                for name, default in (("MIN", ""), ("STEP", "1"), ("COUNT", ""))
            )
            index = (int(variables["SLURM_ARRAY_TASK_ID"]) - first) // stride
            if index >= count:
                raise ValueError(f"this is task {index} of {count}, counted from 0")
        except ValueError as error:
            raise ConfigError(
                "SLURM_ARRAY_TASK_ID, _MIN and _COUNT must give a share of an array without gaps, "
                f"but do not: {error}. Pass --share K/N."
            ) from error
        return Share(index + 1, count)
    defaults = ARRAY_INDEX_VARIABLES.items()
    names = [name for name, default in defaults if variables.get(name, default) != default]
    names += [
        index
        for index, count in PROCESS_VARIABLES.items()
        if index in variables and variables.get(count, "1") != "1"
    ]
    if names:
        raise ConfigError(
            f"{names[0]} is set, so this is one of several processes, but no share is given, and "
            "each would write all. Pass --share K/N, with K from 1 to N."
        )
    return Share()
