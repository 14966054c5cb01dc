"""`sbkit prepare`: the data of a run, decoded into the cache or written as shards."""

from collections.abc import Sequence
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable
from sbkit.config.hparams import parse_command
from sbkit.data.corpora.columns import shard_numbers
from sbkit.data.report import measure_data, write_data_report
from sbkit.data.storage.audio_cache import default_cache
from sbkit.data.storage.filesystem import Storage
from sbkit.data.storage.write_shards import ShardOptions, parse_size, write_shards
from sbkit.logs.log import log
from sbkit.train.run import Run


def prepare_data(arguments: Sequence[str], report: Path | None = None) -> None:
    """Prepare the data of a run and describe it, with a page into ``report``.

    Nothing is trained, and no run folder is made. Raises SbkitError: bad input.
    """
    run = Run(*parse_command(arguments))
    run.check_ranges()
    if report is not None:
        require_writable(report, option="--report")
    rate, language = run.knobs["sample_rate"], run.knobs.get("language")
    facts = measure_data(run.splits, sample_rate=rate, language=language)
    for name, split in facts["splits"].items():
        log(f"{name}: {split['utterances']} utterances, {split['hours']:.2f} h")
    for each in facts["left_out"]:
        log(f"{each['split']}: {each['utterances']} left out, {each['reason']}")
    if not shard_numbers(run.splits.train).any():
        log(f"prepared audio: {default_cache()}")
    if report is not None:
        _, page = write_data_report(run.splits, report, sample_rate=rate, language=language)
        log(f"report: {page}")


def prepare_shards(arguments: Sequence[str], destination: str, shard_size: str) -> None:
    """Write the data of a run as shards, or this process's share of them.

    Raises SbkitError: bad input, or there is no room.
    """
    run = Run(*parse_command(arguments))
    run.check_ranges()
    if run.recipe.corpus is None:
        raise SbkitError(
            "The recipe must name its `corpus` for shards to be made of it, but does not. Add "
            "corpus=recipes.corpora.corpus_of to the recipe."
        )
    corpus = run.recipe.corpus(run.knobs)
    options = ShardOptions(
        sample_rate=run.knobs["sample_rate"],
        store=run.knobs.get("audio_store", "pcm"),
        shard_bytes=parse_size(shard_size),
        seed=run.knobs["seed"],
    )
    roles = corpus.splits(run.knobs)
    sources = {name: corpus.read(run.knobs, name) for names in roles.values() for name in names}
    if write_shards(Storage.at(destination), options, sources, roles) is not None:
        log(f"Train with --data_folder={destination}")
