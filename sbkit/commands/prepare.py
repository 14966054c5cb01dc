"""`sbkit prepare` and `sbkit cache`: data of a run, decoded, described, or written as shards."""

import logging
from argparse import Namespace
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import PARTLY_DONE, ConfigError
from sbkit.base.files import require_writable
from sbkit.base.messages import listed, plural
from sbkit.cli.arguments import Parser

if TYPE_CHECKING:
    from sbkit.train.setup import RunValues

logger = logging.getLogger(__name__)


def add_commands(parser: Parser) -> None:
    """Add `prepare` and `cache`."""
    help = "decode the data of a run; several processes may share the work"
    add = parser.add_command(
        "prepare", prepare_data, help, "share", takes_overrides=True, logs_to_stdout=True
    )
    add("source", metavar="YAML", help="the YAML, as given to train.py; the shards of --verify")
    add("--report", metavar="DIR", type=Path, help="write the data report to DIR")
    add("--again", action="store_true", help="read all audio files again, and count changes")
    add("--verify", action="store_true", help="read the shards in a folder or at a URL instead")
    add("--shards", metavar="DIR|URL", help="only write the data as shards there")
    add("--shard-size", default="1GB", help="audio per shard (default: 1GB)")

    add = parser.add_command("cache", cache, "list prepared audio, or remove what no corpus needs")
    add("action", choices=("list", "prune"), nargs="?", default="list")


def cache(options: Namespace) -> None:
    """List the entries of the cache, or remove those of no corpus."""
    from sbkit.base.content_cache import default_cache
    from sbkit.data.cache import print_entries, prune_orphans

    action = print_entries if options.action == "list" else prune_orphans
    action(default_cache())


def prepare_data(options: Namespace) -> int:
    """Prepare the data of a run and describe it, write it as shards, or verify shards."""
    from sbkit.base.content_cache import default_cache, verifying
    from sbkit.config.overrides import parse_overrides
    from sbkit.data.data_report import measure_data, write_data_report
    from sbkit.data.shard import LAZY
    from sbkit.data.sharded_corpus import verify_shards
    from sbkit.data.splits import shard_numbers
    from sbkit.train.setup import prepare_splits, read_values

    if options.verify:
        return PARTLY_DONE if verify_shards(options.source) else 0
    if options.shards and options.report:
        raise ConfigError("--shards writes no report. Run `sbkit prepare --report` separately.")
    if options.share and not options.shards:
        raise ConfigError("`--share` needs --shards: other processes share the work by themselves.")
    values = read_values(Path(options.source), parse_overrides(options.overrides))
    values.require_in_range()
    if options.shards is not None:
        write_run_as_shards(values, options.shards, options.shard_size, options.share)
        return 0
    report: Path | None = options.report
    if report is not None:
        require_writable(report, option="--report")
    rate = values.settings["sample_rate"]
    language = values.settings.get("language")
    recipe = values.load_recipe()
    with verifying() if options.again else nullcontext():
        splits = prepare_splits(values, recipe)
    facts = measure_data(splits, sample_rate=rate, language=language)
    for name, split in facts["splits"].items():
        logger.info(f"{name}: {plural(split['utterances'], 'utterance')}, {split['hours']:.2f} h")
        if clips := split["other_durations"]:
            ids = listed(clip["id"] for clip in clips)
            logger.info(f"{name}: {plural(len(clips), 'clip')} not as long as stated: {ids}")
    for group in facts["left_out"]:
        logger.info(f"{group['split']}: {group['utterances']} left out, {group['reason']}")
    if not shard_numbers(splits.train).any() and values.settings.get("audio_store") != LAZY:
        logger.info(f"prepared audio: {default_cache()}")
    if report is not None:
        _, page = write_data_report(splits, report, sample_rate=rate, language=language)
        logger.info(f"report: {page}")
    return 0


def write_run_as_shards(
    values: "RunValues", destination: str, shard_size: str, share: tuple[int, int] | None
) -> None:
    """Write the data of a run as shards, or this process's share of them.

    The rows that `where` and `skip_quality_tags` leave out are not written.
    """
    from sbkit.data.filesystem import Storage
    from sbkit.data.filters import filter_manifests
    from sbkit.data.manifest import Manifest
    from sbkit.data.sharded_corpus import ShardOptions, parse_size, write_shards

    corpus = values.load_recipe().corpus(values.settings)
    if corpus is None:
        raise ConfigError("`--shards` needs a recipe of recipes.prepare.CorpusRecipe.")
    options = ShardOptions(
        sample_rate=values.settings["sample_rate"],
        store=values.settings.get("audio_store", "pcm"),
        shard_bytes=parse_size(shard_size),
        seed=values.settings["seed"],
    )
    roles = corpus.roles()
    sources = {name: Manifest.join(corpus.blocks(name)) for name in chain(*roles.values())}
    manifests = filter_manifests(sources, values.settings)
    for split, manifest in manifests.items():
        for reason, count in manifest.filtered.items():
            logger.info(f"{split}: {count} left out, {reason}")
    facts = corpus.describe()
    written = write_shards(Storage(destination), options, manifests, roles, facts, share)
    if written is not None:
        logger.info(f"Train with --data_folder={destination}")
