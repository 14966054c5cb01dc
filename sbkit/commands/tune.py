"""`sbkit tune`: fit another decoder to a validation set, and keep the better one.

model: a run or a bundle -> log-probabilities of its validation set -> errors of its decoder
-> another decoder: language models, weights, confidences -> its errors -> kept, or written
"""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from sbkit.base.errors import SbkitError
from sbkit.base.files import (
    building,
    fsync_tree,
    require_writable,
    to_json,
    write_bytes_atomically,
    write_text_atomically,
)
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE
from sbkit.bundle.protocols import Encoded
from sbkit.checkpoint.folder import hold
from sbkit.checkpoint.provenance import make_provenance, read_json
from sbkit.checkpoint.run_config import RESOLVED
from sbkit.commands.score import ScoreOptions, prepare_source
from sbkit.config.ranges import require_in_range
from sbkit.data.splits import sample_counts
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.confidence import CONFIDENCE_FILE, GREEDY, WordAligner
from sbkit.decoding.ctc_decoder import CtcDecoder
from sbkit.decoding.decoder import (
    ATTENTION,
    BEAM_SIZE,
    DECODER_FILE,
    KINDS,
    LANGUAGE_MODELS,
    NO_ATTENTION,
    BeamDecoder,
)
from sbkit.decoding.language_models import (
    TOKENS,
    WORDS,
    digest_of,
    load_language_models,
    replace_language_models,
)
from sbkit.decoding.tune import (
    TuningUtterance,
    count_all_errors,
    error_of,
    fit_confidences,
    fit_weights,
    limit_tokens,
    order_of,
    used_weights,
)
from sbkit.evaluate.utterances import PROVENANCE
from sbkit.evaluate.wer import Scores
from sbkit.export.export import CARD, as_bundle, change_config, require_free
from sbkit.export.held_out import read_whole_clips
from sbkit.lm.storage import save
from sbkit.logs.progress import shown
from sbkit.runtime.torch_model import TorchBundle, load_bundle
from sbkit.train.run import Run

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.model"
DECODER_FILES = (DECODER_FILE, CONFIDENCE_FILE, LANGUAGE_MODELS)
EARLIER = "earlier_decoder"  # a folder of a run: its decoder before the last `sbkit tune`
MOST_SECONDS = 2400.0  # of audio: a sample's tokens, where each frame of 40 ms has one
FORMATS_WITHOUT_DECODER = ("onnx", "torch")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is changed, and what becomes of it; None leaves a thing as it is.

    Attributes:
        lm_text, word_lm_order, token_lm_order: of the language models.
        decoder, beam_size, attention: of the search.
        data: a table that is the validation set; None for those of a run.
        out: a folder for a bundle with the new decoder; None to replace that of the run.
        force: replace a decoder that is better.
    """

    lm_text: Path | None = None
    word_lm_order: int | None = None
    token_lm_order: int | None = None
    decoder: str | None = None
    beam_size: int | None = None
    attention: str | None = None
    data: Path | None = None
    out: Path | None = None
    force: bool = False

    @property
    def orders(self) -> dict[str, int]:
        """Return the orders of n-grams that are given, by the model."""
        given = {WORDS: self.word_lm_order, TOKENS: self.token_lm_order}
        return {name: order for name, order in given.items() if order is not None}


def tune_model(
    model: Path, options: TuneOptions, *, user_modules: frozenset[str] = frozenset()
) -> None:
    """Fit another decoder to a validation set; write it where it is better, or where told to.

    ``user_modules`` names modules of the user's that hold parts of the model.
    Raises SbkitError: the model is no run and no bundle of a recognizer, or the options do not fit.
    """
    is_bundle = (model / CONFIG_FILE).exists()
    _check_options(model, options, is_bundle=is_bundle)
    with as_bundle(model, user_modules) as source, TemporaryDirectory() as folder:
        bundle = load_bundle(source, user_modules=user_modules)
        if bundle.task.predicts != "text":
            raise SbkitError(
                f"A model must be of a recognizer to be tuned, but {model} is none. Leave it."
            )
        new = Path(folder)
        run = None if is_bundle else Run(model / RESOLVED, _overrides(options, new))
        if run is not None:
            hold(model)  # nothing trains it meanwhile
            run.check_ranges()
        _make_language_models(model, bundle, run, options, new / LANGUAGE_MODELS)
        search = _declare_search(bundle, run, options, new / LANGUAGE_MODELS)
        is_better = _fit(bundle, search, _validation_sets(bundle, run, options), new)
        if options.out is not None:
            _copy_bundle(source, new, options.out.resolve())
            logger.info(f"written with the new decoder: {options.out}")
        elif is_better or options.force:
            _replace(model, new)
            logger.info(
                f"{model} has the new decoder; the one before is in {model / EARLIER}, and the "
                f"results are of that one. Measure again: sbkit score {model} --out DIR"
            )
        else:
            logger.info(
                f"{model} keeps its decoder, since the new one is no better. To have the new one "
                "all the same, pass --force, or --out DIR for a bundle."
            )


def _check_options(model: Path, options: TuneOptions, *, is_bundle: bool) -> None:
    if is_bundle and (options.data is None or options.out is None):
        raise SbkitError(
            "A bundle must be tuned on data that is named, and to a new bundle, but "
            f"{'--data' if options.data is None else '--out'} is missing. Call it as: sbkit tune "
            f"{model} --data dev.csv --out NEW"
        )
    if options.out is not None:
        if options.out.resolve() == model.resolve():
            raise SbkitError(f"--out must be a new folder, but is {model} itself. Choose another.")
        require_free(options.out)
        require_writable(options.out.parent, option="--out")


def _overrides(options: TuneOptions, folder: Path) -> dict[str, object]:
    """Return what makes the recipe train the language models in a folder of their own."""
    given = {f"{name[:-1]}_lm_order": order for name, order in options.orders.items()}
    text = {} if options.lm_text is None else {"lm_text": str(options.lm_text)}
    return {"output_folder": str(folder), **given, **text}


# ---- another decoder


def _make_language_models(
    model: Path, bundle: TorchBundle, run: Run | None, options: TuneOptions, file: Path
) -> None:
    """Write the language models of the new decoder: those of the model, or others on request."""
    if (model / LANGUAGE_MODELS).is_file():
        shutil.copyfile(model / LANGUAGE_MODELS, file)
    if run is not None and (options.lm_text or options.orders):
        shutil.copyfile(model / TOKENIZER, file.with_name(TOKENIZER))
        run.prepare_labels()  # the recipe trains the language models, too
    elif options.lm_text is not None:
        said = replace_language_models(
            file,
            options.lm_text,
            options.orders,
            language=bundle.config.language or "und",
            tokenizer=bundle.tokenizer,
        )
        logger.info("\n".join(said))
    elif options.orders:
        raise SbkitError(
            "The language models of a bundle must be of a text, since it has no transcripts, but "
            "--lm-text is missing. Name a text or an ARPA file."
        )
    if not file.exists():
        save({}, file, metadata={"tokenizer": digest_of(bundle.tokenizer)})


def _declare_search(
    bundle: TorchBundle, run: Run | None, options: TuneOptions, language_models: Path
) -> BeamDecoder:
    """Return the new search before its weights are chosen: as the one there is, but for options."""
    knobs: Mapping[str, Any] = {} if run is None else run.knobs
    declared = {
        "kind": knobs.get("decoder_type", KINDS[0]),
        "beam_size": knobs.get("beam_size", BEAM_SIZE),
        "attention": knobs.get("attention_decoding"),
    }
    if bundle.decoder is not None:
        declared = {name: getattr(bundle.decoder, name) for name in declared}
    network = bundle.model.network
    attends = network.seq_lin is not None and knobs.get("ctc_weight", 0) < 1
    if not attends and options.attention in ATTENTION:
        raise SbkitError(
            f"`--attention {options.attention}` must have an attention decoder that is trained, "
            "but this model has CTC alone. Leave it out."
        )
    given = {
        "kind": options.decoder,
        "beam_size": options.beam_size,
        "attention": options.attention if attends else NO_ATTENTION,
    }
    declared |= {name: value for name, value in given.items() if value is not None}
    require_in_range({"beam_size": declared["beam_size"]}, BeamDecoder.RANGES)
    models = load_language_models(language_models, bundle.tokenizer)
    search = BeamDecoder(tokenizer=bundle.tokenizer, language_models=models, **declared)
    search.check_graph()
    if not any(used_weights(search)):
        raise SbkitError(
            "A decoder must have a language model to be tuned, but there is none. Pass "
            "--word-lm-order 3, and for a bundle --lm-text."
        )
    return search


# ---- a validation set


def _validation_sets(
    bundle: TorchBundle, run: Run | None, options: TuneOptions
) -> Mapping[str, datasets.Dataset]:
    """Prepare the table that is named, or the validation sets of the run."""
    if options.data is None and run is not None:
        return run.prepare_splits().valid
    source = options.data or Path()
    name = source.stem or source.resolve().stem
    return {name: prepare_source(bundle, source, ScoreOptions(), name)}


def _encode(
    bundle: TorchBundle, sets: Mapping[str, datasets.Dataset], *, attends: bool
) -> Iterator[TuningUtterance]:
    """Compute the log-probabilities of as much of the validation sets as a sample may hold."""
    rate = bundle.config.sample_rate
    for rows in sets.values():
        ids, samples = rows["id"][:], sample_counts(rows)
        order = sorted(range(len(rows)), key=lambda row: order_of(ids[row]))
        fits = samples[order].cumsum() <= seconds_to_samples(MOST_SECONDS, rate)
        for batch in read_whole_clips(rows.select(sorted(order[: max(1, fits.sum())])), rate):
            several = [*batch.values()]
            encoded = bundle.model.encode([row["audio"] for row in several])
            for row, each in zip(several, encoded, strict=True):
                attention = _attention(bundle, each) if attends else None
                seconds = samples_to_seconds(len(row["audio"]), rate)
                yield TuningUtterance(each.log_probs, row["text"], attention, row["id"], seconds)


def _attention(bundle: TorchBundle, encoded: Encoded) -> AttentionDecoder:
    score = partial(bundle.model.decoder_log_probs, encoded.states)
    return AttentionDecoder(log_probs=score, eos=bundle.tokenizer.vocabulary.eos)


def _fit(
    bundle: TorchBundle, search: BeamDecoder, sets: Mapping[str, datasets.Dataset], folder: Path
) -> bool:
    """Choose the weights and write the decoder; return whether it is better than the bundle's."""
    old, by_words, names = bundle.decoder, bundle.config.has_words, list(sets)
    attends = search.attention is not None or (old is not None and old.attention is not None)
    utterances = limit_tokens(_encode(bundle, sets, attends=attends))
    aligner = WordAligner(
        tokenizer=bundle.tokenizer,
        samples_per_frame=bundle.model.samples_per_frame,
        sample_rate=bundle.config.sample_rate,
        lm=search.language_models.words,
    )
    had = CtcDecoder.of(old, aligner).search
    with shown("decoding as before", len(utterances)) as advance:
        before = count_all_errors(had, utterances, bundle.tokenizer, lambda: advance(1))
    kind = GREEDY if old is None else old.kind
    logger.info(f"before ({kind}): {_describe(before, by_words)} ({', '.join(names)})")
    total = sum(map(len, sets.values()))
    search, chosen = fit_weights(search, utterances, sets=names, total=total, by_words=by_words)
    after = chosen.scores
    logger.info(f"after ({search.kind}): {_describe(after, by_words)} ({', '.join(names)})")
    fitted = fit_confidences(aligner, search, utterances, sets=names)
    confidences = {name: fit.plain() for name, fit in fitted.items()}
    decoder = {**search.plain(), "chosen_on": [] if chosen.kept else names, **chosen.plain()}
    for name, record in ((DECODER_FILE, decoder), (CONFIDENCE_FILE, confidences)):
        write_text_atomically(folder / name, to_json(record, indent=1) + "\n")
    return error_of(after, by_words=by_words) < error_of(before, by_words=by_words)


def _describe(scores: Scores, by_words: bool) -> str:
    rates = {"CER": (scores.characters, "characters")}
    if by_words:
        rates["WER"] = (scores.words, "words")
    return ", ".join(
        f"{name} {100 * counts.rate:.1f} % ({counts.errors} / {counts.total} {unit})"
        for name, (counts, unit) in rates.items()
    )


# ---- what is written


def _replace(run: Path, new: Path) -> None:
    """Replace the decoder of a run, and keep the files before; a run killed midway has none."""
    earlier = run / EARLIER
    shutil.rmtree(earlier, ignore_errors=True)
    earlier.mkdir()
    for name in DECODER_FILES:
        if (run / name).exists():
            (run / name).rename(earlier / name)
    for name in reversed(DECODER_FILES):
        if (new / name).exists():
            write_bytes_atomically(run / name, (new / name).read_bytes())


def _copy_bundle(bundle: Path, new: Path, out: Path) -> None:
    """Copy a bundle with another decoder; formats that the decoder has a part in are left out."""
    with building(out) as beside:
        for each in bundle.iterdir():
            if each.is_symlink() or any(path.is_symlink() for path in each.rglob("*")):
                logger.info(
                    f"{each.name} is left out: a link may lead to a file that is not the bundle's"
                )
            elif each.is_file():
                shutil.copyfile(each, beside / each.name)
            elif each.name in FORMATS_WITHOUT_DECODER:
                shutil.copytree(each, beside / each.name)
            else:
                logger.info(f"{each.name} is left out, since it may be of the decoder before")
        shutil.copyfile(new / LANGUAGE_MODELS, beside / LANGUAGE_MODELS)
        decoder, confidence = (read_json(new / name) for name in (DECODER_FILE, CONFIDENCE_FILE))
        if (card := beside / CARD).is_file():
            card.write_text(_without_results(card.read_text(encoding="utf-8")), encoding="utf-8")
        record = make_provenance(
            weights=(beside / WEIGHTS_FILE).read_bytes(),
            decoder=decoder,
            language_models=(beside / LANGUAGE_MODELS).read_bytes(),
            confidence=confidence,
        )
        changed = {"decoder": decoder, "confidence": confidence, PROVENANCE: record}
        change_config(beside, **changed)  # and the checksums
        fsync_tree(beside)
        shutil.rmtree(out, ignore_errors=True)


def _without_results(card: str) -> str:
    """Take out of a model's card what was measured with the decoder before."""
    card = re.sub(r"^model-index:\n(?:[ -] .*\n)*", "", card, count=1, flags=re.M)
    results = "## Results\n\nNot measured with this decoder: `sbkit score FOLDER test.csv`\n\n"
    return re.sub(r"^## Results\n.*?(?=^## |\Z)", results, card, count=1, flags=re.M | re.S)
