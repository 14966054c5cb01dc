"""`sbkit score` and `sbkit compare`: score a model on any data, and compare runs.

A model is scored without training or writing into a run. It is a bundle, or a run, which is
exported first. The data (tables, saved datasets) is prepared as for training;
whole clips are transcribed and scored.

The files of `--out`, where SET is the name of a source or test set:

summary.json           the results and their provenance, for `sbkit compare`
report.html            the results as one page with audio
wer_SET.txt            every utterance with its errors, for people
utterances_SET.jsonl   the same for programs
report_by_SET.tsv      with `--report-by`: the metrics by the values of these columns
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_CONFIG_FILE, is_run, require_writable, to_json
from sbkit.base.machine import PRECISIONS
from sbkit.base.messages import printable, printable_json
from sbkit.base.versions import __version__
from sbkit.cli.arguments import Parser

if TYPE_CHECKING:
    import datasets

    from sbkit.bundle.bundle import Bundle
    from sbkit.runtime.torch_model import TorchModel


def add_commands(parser: Parser) -> None:
    """Add `score` and `compare`."""
    help = "score a model on your data, without training"
    groups = "tables decoding language quiet import model"
    add = parser.add_command("score", score, help, groups, is_intermixed=True)
    add("data", metavar="DATA", type=Path, nargs="*", help="tables (default: the run's test sets)")
    add(
        "--split",
        metavar="NAME",
        help="a split of the run, such as train, instead of its test sets",
    )
    add("--out", metavar="DIR", type=Path, help="write the reports to DIR")
    add("--report-by", metavar="COLUMN", action="append", default=[], help="group; repeatable")
    add("--device", default="cpu", help="cpu, cuda, cuda:INDEX or auto (default: cpu)")
    add("--precision", choices=PRECISIONS["torch"], default="fp32", help="default: fp32")
    normalizer = "also score normalized texts: whisper-english, whisper-basic or a language"
    add("--normalizer", metavar="NAME", help=normalizer)
    add("--json", action="store_true", help="print the figures as JSON")

    add = parser.add_command("compare", compare, "test whether runs differ, and find the best one")
    add("first", metavar="RUN", type=Path, help="a run, or a folder of scores")
    add("others", metavar="RUN", type=Path, nargs="+", help="one or more others")
    add("--json", action="store_true", help="print the figures as JSON")


def score(options: Namespace) -> None:
    """Score a model on tables, or a run on its test sets; print a line for each, or JSON."""
    from sbkit.evaluate.run_results import SETTINGS_FIELD, SUMMARY, read_json
    from sbkit.export.export import exported_bundle
    from sbkit.runtime.runtimes import load_bundle
    from sbkit.runtime.score_report import ScoreReport
    from sbkit.runtime.scoring import BundleScorer

    (folder,) = options.models
    modules = options.user_modules
    out: Path | None = options.out
    if out is None and options.report_by:
        raise ConfigError("`--report-by` writes tables, so it needs --out DIR. Add it.")
    if out is not None:
        if (out / SUMMARY).exists() or is_run(out):
            raise ConfigError(
                f"{out} is a run or already has scores. Choose another folder for --out."
            )
        require_writable(out, option="--out")
    with exported_bundle(folder, modules) as source:
        bundle = load_bundle(
            source,
            device=options.device,
            precision=options.precision,
            decoder=options.decoder,
            hotwords=options.hotwords,
            user_modules=modules,
            language=options.language,
        )
        scorer = BundleScorer(bundle, normalizer=options.normalizer, times=out is not None)
        report = ScoreReport(
            out or Path(),
            bundle.task,
            sample_rate=bundle.config.sample_rate,
            labels=bundle.labels,
            report_by=options.report_by,
        )
        figures: dict[str, dict[str, Any]] = {}  # as in `summary.json`
        for name, rows, as_tested in _prepare(bundle, folder, options):
            scored = scorer.score(name, rows, as_tested=as_tested)
            facts = dict(bundle.facts(scored.rows))
            if out is not None:
                facts = report.add(scored, **facts)
            line = report.describe(scored)
            figures[name] = report.entries[name] | facts
            if not options.json:
                print(printable(line), flush=True)
                for text in facts.get("notes", []):
                    print(printable(f"{name}: {text}"), flush=True)
        if options.json:
            print(printable_json(to_json({"test": figures, "model": str(folder)})), flush=True)
        if out is not None:
            config = bundle.config
            bundle_settings = {"sample_rate": config.sample_rate, "language": config.language}
            run_config = read_json(folder / RUN_CONFIG_FILE) or {}
            report.write(
                notes=[f"{folder.name}, sbkit {__version__}"],
                model=str(folder),
                **{SETTINGS_FIELD: run_config.get(SETTINGS_FIELD, bundle_settings)},
                provenance=bundle.provenance,
                device=bundle.model.runs_on.device,
            )


def _prepare(
    bundle: "Bundle[TorchModel]", folder: Path, options: Namespace
) -> Iterator[tuple[str, "datasets.Dataset", Any]]:
    """Prepare the tables, by default the test sets of a run; yield name, rows and `as_tested`."""
    from sbkit.bundle.config import CONFIG_FILE
    from sbkit.data.batch import user_columns
    from sbkit.evaluate.slices import require_columns
    from sbkit.runtime.score_sets import (
        name_of,
        prepare_test_sets,
        prepare_user_set,
        table_settings,
    )

    names = [name_of(path) for path in options.data]
    if len({*names}) < len(names):
        raise ConfigError("Two of the files have the same name. Score each with its own --out.")
    if not names and (folder / CONFIG_FILE).exists():
        raise ConfigError(f"{folder} has no test sets. Name data: sbkit score BUNDLE test.csv")
    if names and options.split:
        raise ConfigError("--split names a split of the run, so it cannot be combined with files.")
    prepared: Iterable[tuple[str, datasets.Dataset]]
    if names:
        as_tested = None
        named = {name: getattr(options, name) for name in ("columns", "encoding", "tier")}
        settings = table_settings(folder, **named)
        prepared_sets = (prepare_user_set(bundle, path, settings) for path in options.data)
        prepared = zip(names, prepared_sets, strict=True)
    else:
        splits = prepare_test_sets(folder, options.split, options.user_modules)
        as_tested, prepared = splits.as_tested, splits.test.items()
    for name, rows in prepared:
        require_columns(options.report_by, {name: user_columns(rows.column_names)})
        yield name, rows, as_tested


def compare(options: Namespace) -> None:
    """Print how runs differ, and whether chance explains it."""
    from sbkit.evaluate.compare import compare_runs, describe_comparison

    comparison = compare_runs([options.first, *options.others])
    if options.json:
        print(printable_json(to_json(comparison, indent=2)))
    else:
        print(*map(printable, describe_comparison(comparison)), sep="\n")
