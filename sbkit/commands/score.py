"""`sbkit score`: score a trained model on any data, without training or writing into a run.

The model is a bundle, or a run, which is exported first. The data (tables, folders of Kaldi, saved
datasets) is prepared as for training; whole clips are transcribed or classified, and scored.

The files of `--out`, where SET is the name of a source or test set:

summary.json           the results and their provenance, for `sbkit compare`
report.html            the results as one page with audio
wer_SET.txt            every utterance with its errors, for people
utterances_SET.jsonl   the same for programs
suspicious_SET.tsv     utterances that were recognized as another text with confidence, if any
answers_SET.tsv        the class of every utterance, of a classifier
report_by_SET.tsv      with `--report-by`: the metrics by the values of these columns
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from sbkit.base.errors import ConfigError
from sbkit.base.files import require_writable
from sbkit.base.messages import printable
from sbkit.base.versions import __version__
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import describe_provenance
from sbkit.data.batch import user_columns
from sbkit.data.tables import COLUMN_KEYS
from sbkit.evaluate.run_results import SETTINGS, SUMMARY
from sbkit.evaluate.slices import require_columns
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.export import exported_bundle
from sbkit.runtime.scoring import BundleScorer, decoding_facts, provenance_of, settings_of
from sbkit.runtime.test_report import TestReport
from sbkit.runtime.test_sets import name_of, prepare_source, prepare_test_sets, table_knobs
from sbkit.runtime.torch_model import TorchBundle, load_bundle


def score(options: Namespace) -> None:
    """Score a model on tables, or a run on its test sets; print a line for each.

    Raises SbkitError if the model or a source cannot be read, or if ``options.out`` has scores
    already or cannot be written.
    """
    _check_output(options)
    out: Path | None = options.out
    with open_model(options.model, options.user_modules) as loaded:
        bundle = loaded.with_decoder(options.decoder).with_hotwords_option(options.hotwords)
        scorer = BundleScorer(
            bundle, label=options.label, normalizer=options.normalizer, times=out is not None
        )
        report = TestReport(
            out or Path(),
            bundle.task,
            sample_rate=bundle.config.sample_rate,
            labels=bundle.labels,
            report_by=options.report_by,
            quiet=options.quiet,
        )
        for name, rows in _prepare(bundle, options):
            scored = scorer.score(name, rows, quiet=options.quiet)
            facts = decoding_facts(bundle, scored)
            if out is not None:
                facts = report.add(scored, **facts)
            print(printable(report.describe(scored)), flush=True)
            for text in facts.get("notes", []):
                print(printable(f"{name}: {text}"), flush=True)
        if out is not None:
            provenance = provenance_of(bundle)
            version = f"{options.model.name}, sbkit {__version__}"
            report.write(
                notes=[version, describe_provenance(provenance)],
                model=str(options.model),
                **{SETTINGS: settings_of(bundle, options.model), PROVENANCE: provenance},
                device=bundle.model.effective.device,
            )


def _check_output(options: Namespace) -> None:
    if options.out is None and options.report_by:
        raise ConfigError("`--report-by` writes tables, so it needs --out DIR. Add it.")
    if options.out is not None:
        if (options.out / SUMMARY).exists():
            raise ConfigError(
                f"{options.out} already has scores, which are not overwritten. Choose another "
                "folder for --out."
            )
        require_writable(options.out, option="--out")


@contextmanager
def open_model(model: Path, user_modules: frozenset[str] = frozenset()) -> Iterator[TorchBundle]:
    """Load a bundle, or export a run into a temporary folder first."""
    with exported_bundle(model, user_modules) as folder:
        yield load_bundle(folder, user_modules=user_modules)


def _prepare(bundle: TorchBundle, options: Namespace) -> Iterator[tuple[str, datasets.Dataset]]:
    """Prepare each source, or else the test sets of a run; yield their rows by name."""
    names = [name_of(source) for source in options.data]
    if len({*names}) < len(names):
        raise ConfigError(
            "Two of the files have the same name, so their reports would overwrite each other. "
            "Score them one after the other, each with its own --out."
        )
    if not names and (options.model / CONFIG_FILE).exists():
        raise ConfigError(
            f"{options.model} is a bundle, which has no test sets. Name the data: sbkit score "
            "BUNDLE test.csv"
        )
    if names and options.split:
        raise ConfigError("--split names a split of the run, so leave out the files, or --split.")
    given = {name: getattr(options, name) for name in (*COLUMN_KEYS, "encoding")}
    knobs = table_knobs(options.model, given)
    sources = zip(names, options.data, strict=True)
    prepared = ((name, prepare_source(bundle, file, knobs)) for name, file in sources)
    for name, rows in (
        prepared if names else prepare_test_sets(options.model, options.split).items()
    ):
        columns = user_columns(rows.column_names)
        require_columns(options.report_by, {name: columns})
        if options.label and options.label not in columns:
            raise ConfigError(
                f"`--label` must name a column with the right answers, but {name} has no "
                f"`{options.label}`. It has {', '.join(columns)}."
            )
        yield name, rows
