"""The end of a run: its averaged checkpoint is exported, and the bundle is fitted and tested.

    choose the checkpoints to average -> `RUN/bundle` -> its decoder and confidences, fitted to the
    validation sets -> results of the test sets -> figures and pages

Each step leaves its files, so a run that was killed goes on with the step that is missing. What is
tested is what `sbkit export` copies.
"""

import logging
import shutil
from collections.abc import Sequence

from sbkit.base.errors import BundleError, ConfigError, SbkitError
from sbkit.base.versions import __version__
from sbkit.bundle.bundle import read_bundle
from sbkit.bundle.config import CONFIG_FILE
from sbkit.checkpoint.provenance import describe_provenance, read_json
from sbkit.checkpoint.run_config import BUNDLE
from sbkit.decoding.beam import BeamDecoder, declared_decoder
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.decoding.fit import fit_decoder
from sbkit.distributed.device import Placement
from sbkit.distributed.ranks import main_rank_first, rank, single_rank
from sbkit.evaluate.run_results import SETTINGS, read_records
from sbkit.evaluate.wer import FigureDict
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.export.export import (
    add_formats,
    is_outdated,
    modules_of_bundle,
    set_decoder,
    write_bundle,
)
from sbkit.export.formats import PARITY_FILE, declared_formats, describe_failures
from sbkit.export.parity import FULL_GRID
from sbkit.logs.curves import CURVES, draw_curves
from sbkit.logs.run_log import LOG_FILE, RunLog, SplitFigures
from sbkit.runtime.scoring import (
    BundleScorer,
    decoding_facts,
    provenance_of,
    sample_validation,
)
from sbkit.runtime.test_report import ScoredSet, TestReport
from sbkit.runtime.test_sets import BATCH_SECONDS
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.train.brain import Brain
from sbkit.train.setup import RunSetup

logger = logging.getLogger(__name__)


class RunEnding:
    """The last steps of a run, which every rank takes; rank 0 writes.

    brain: of the run, after `fit`.
    """

    def __init__(self, setup: RunSetup, brain: Brain) -> None:
        self._setup = setup
        self._brain = brain
        self._loaders = setup.loaders
        self._folder = setup.values.folder / BUNDLE
        self._batch_seconds: float = setup.values.knobs.get("eval_batch_seconds", BATCH_SECONDS)

    def finish(self) -> None:
        """Export the run and test the bundle."""
        brain = self._brain
        with brain.guarded():
            brain.load_tested_weights()
            bundle = self.export()
            if bundle is not None and bundle.task.predicts == "text":
                bundle = self.fit(bundle)
        # Not watched: an exporter may work for longer than `stall_seconds` without a sign of life.
        # A signal ends it at once, and no format is half-written.
        if bundle is not None:
            self.write_formats()
        with brain.guarded():
            sets = [self.score(bundle, name) for name in self._loaders.test]
            if rank() == 0:
                self.report(bundle, sets)

    def export(self) -> TorchBundle | None:
        """Write the averaged checkpoint as a bundle, if that is missing; load it on the device.

        Returns None for a model that no bundle can hold; then the checkpoint itself is tested.

        Raises:
            DeviceError: the bundle does not run on the device of the run.
        """
        self._brain.ping("export")
        with main_rank_first():
            if rank() == 0 and is_outdated(self._setup.values.folder):
                shutil.rmtree(self._folder, ignore_errors=True)
                try:
                    write_bundle(self._setup.values.folder, self._folder)
                except (BundleError, ConfigError) as error:
                    logger.warning(
                        "note: the checkpoint itself is tested, by the metrics of a validation, "
                        f"and no format is written, because no bundle can hold it. {error}"
                    )
        self._brain.ping("export")
        if not self._folder.exists():
            return None
        precision = self._setup.values.knobs["eval_precision"]
        return load_bundle(
            self._folder,
            user_modules=modules_of_bundle(self._folder),
            placement=Placement(self._brain.device, precision),
        )

    def fit(self, bundle: TorchBundle) -> TorchBundle:
        """Fit the declared decoder, and confidences, unless the bundle has them; write both."""
        decoder = declared_decoder(self._setup.hparams)
        if not self._is_fitted(bundle, decoder):
            valid = self._setup.splits.valid
            rescores = decoder is not None and decoder.attention_rescoring
            sample = sample_validation(
                bundle, valid, with_attention=rescores, batch_seconds=self._batch_seconds
            )
            self._brain.leave_if_asked()
            fitted = fit_decoder(
                decoder,
                bundle.decoder_pool.decoder.aligner,
                sample,
                splits=[*valid],
                by_words=bundle.config.has_words,
            )
            with main_rank_first():
                if rank() == 0:
                    models = (
                        None
                        if decoder is None
                        else self._setup.values.folder / LANGUAGE_MODELS_FILE
                    )
                    set_decoder(self._folder, self._folder, fitted, models)
        contents = read_bundle(self._folder, user_modules=modules_of_bundle(self._folder))
        return TorchBundle.from_contents(contents, bundle.model)

    def _is_fitted(self, bundle: TorchBundle, decoder: BeamDecoder | None) -> bool:
        """Return whether an earlier start has fitted this decoder: its settings are the same."""
        if read_json(self._folder / CONFIG_FILE)["confidence"] is None:
            return False
        if decoder is None or bundle.decoder is None:
            return decoder is bundle.decoder
        if decoder.needs_tuning:
            decoder = decoder.copy_with(weights=bundle.decoder.weights)
        folders = (self._setup.values.folder, self._folder)
        models = {(folder / LANGUAGE_MODELS_FILE).read_bytes() for folder in folders}
        return decoder.plain() == bundle.decoder.plain() and len(models) == 1

    def write_formats(self) -> None:
        """Write the missing ones of the formats that the YAML declares; log which of them fail."""
        run, knobs = self._setup.values.folder, self._setup.values.knobs
        with main_rank_first():
            if rank() == 0:
                try:
                    declared = declared_formats(knobs, self._setup.recipe)
                    names = [n for n in declared if not (self._folder / n / PARITY_FILE).exists()]
                    # One rank compares them on all test clips, not only on its own share.
                    with single_rank():
                        reports = add_formats(run, names, FULL_GRID) if names else {}
                    failures = describe_failures(reports)
                except SbkitError as error:
                    failures = [f"No format is written: {error}"]
                for failure in failures:
                    logger.warning(failure)

    def score(self, bundle: TorchBundle | None, name: str) -> ScoredSet:
        """Score the bundle on a test set; without a bundle, the checkpoint."""
        brain = self._brain
        rows = self._loaders.splits.test[name]
        if bundle is not None and bundle.task.scores_bundles:
            scorer = BundleScorer(bundle, batch_seconds=self._batch_seconds)
            scored = scorer.score(name, rows, max_batches=brain.max_evaluated_batches)
        else:
            network = None if bundle is None else bundle.model.network
            results = brain.score_batches(self._loaders.test[name], network)
            scored = ScoredSet.gather(name, rows, results)
        brain.leave_if_asked()
        return scored

    def report(self, bundle: TorchBundle | None, sets: Sequence[ScoredSet]) -> None:
        """Write the results into the run folder, and log a line for each test set."""
        setup, brain = self._setup, self._brain
        task = setup.recipe
        report = TestReport(
            setup.values.folder,
            task,
            sample_rate=setup.values.knobs["sample_rate"],
            labels=setup.labels,
            metrics=brain.evaluator.metrics if type(brain).metrics else None,
            measure=brain.evaluator.measure if type(brain).metrics else None,
            report_by=setup.values.knobs["report_by"] or (),
        )
        for scored in sets:
            facts: FigureDict = {}
            if bundle is not None:
                facts = decoding_facts(bundle, scored)
                if note := (bundle.config.decoder or {}).get("note"):
                    facts["notes"] = [note, *facts.get("notes", ())]
            report.add(scored, **facts)

        run_log = RunLog(setup.values.folder, resume_step=brain.optimizer_step)
        for name, entry in report.entries.items():
            metrics = {key: entry[key] for key in brain.evaluator.metrics if key in entry}
            run_log.write(
                SplitFigures(
                    epoch=brain.hparams.epoch_counter.limit,
                    step=brain.optimizer_step,
                    split=name,
                    metrics=metrics,
                    decoder=entry.get("decoder"),
                )
            )
        run_log.close()

        config = read_json(self._folder / CONFIG_FILE) or {}
        num_averaged = len(config.get("checkpoints", ())) or brain.num_averaged
        weights = f"mean of {num_averaged} checkpoints" if num_averaged > 1 else "best checkpoint"
        provenance = None if bundle is None else provenance_of(bundle)
        parameters = sum(p.numel() for p in brain.modules.parameters())
        model_facts = f"{parameters / 1e6:.1f} M parameters, {weights}, sbkit {__version__}"
        training = brain.training_metrics
        speed = training.audio_seconds / training.train_seconds if training.train_seconds else None
        draw_curves(
            setup.values.folder / LOG_FILE, setup.values.folder / CURVES, brain.evaluator.metrics
        )
        report.write(
            notes=[model_facts, describe_provenance(provenance)],
            model=str(setup.values.folder),
            **{SETTINGS: read_records(setup.values.folder).get(SETTINGS), PROVENANCE: provenance},
            parameters=parameters,
            train_seconds=round(training.train_seconds, 1),
            audio_seconds=round(training.audio_seconds, 1),
            rtfx=speed and round(speed, 1),
            device=str(brain.device),
        )
        for scored in sets:
            logger.info(f"{report.describe(scored)}, {weights}")
        for line in report.notes:
            logger.info(line)
