"""The command ``sbkit``: check, prepare, tune, export, score and transcribe.

Each command imports what it needs when it runs, so that ``sbkit --help`` answers at once.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.base.errors import BAD_INPUT, FAILED, SbkitError
from sbkit.base.process import Parser, import_own, rarely_collected, run_main
from sbkit.base.text import __version__, printable, printable_json
from sbkit.inference.transcribe.command import add_options as add_transcribe_options
from sbkit.inference.transcribe.command import transcribe as run_transcribe

if TYPE_CHECKING:
    from sbkit.inference.transcribe.classify import Classification

Command = Callable[[argparse.Namespace], int]


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder in which sbkit lies is searched last for modules: that of a checkout has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[1]))
    with rarely_collected():  # a command imports its parts when it runs
        run_main(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command, return its exit code; raises SbkitError for bad input or no package."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if more and options.command not in (_check, _prepare):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options.overrides = more
    options.own = import_own(getattr(options, "imports", ()))
    try:
        code: int = options.command(options)
    except ModuleNotFoundError as error:
        raise SbkitError(
            f"`sbkit {arguments[0]}` needs the package {error.name}, which is not installed. "
            "Install all that sbkit needs: pip install sbkit, without --no-deps."
        ) from error
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action="version", version=f"sbkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, help: str, **more: Any) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=help, **more)
        added.set_defaults(command=command)
        return added

    for add_commands in (_add_data, _add_models, _add_scores, _add_inference):
        add_commands(add)
    return parser


def _add_data(add: Any) -> None:
    # A key of the YAML may begin like an option.
    check = add("check", _check, "check a run before it starts", allow_abbrev=False)
    check.add_argument("yaml", type=Path, metavar="YAML", help="as given to train.py")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--target", metavar="cuda:N", help="the machine meant: N CUDA devices")
    check.add_argument("--strict", action="store_true", help="leave with 1 for notes too")

    help = "decode the data of a run; any number of processes may share the work"
    prepare = add("prepare", _prepare, help, allow_abbrev=False)
    prepare.add_argument("yaml", type=Path, metavar="YAML", help="as given to train.py")
    prepare.add_argument("--report", type=Path, metavar="DIR", help="write the data report there")
    prepare.add_argument(
        "--shards", metavar="DIR|URL", help="write the data there as shards, and nothing else"
    )
    prepare.add_argument(
        "--shard-size", metavar="SIZE", default="1GB", help="of audio (default: 1GB)"
    )

    replay = add("replay", _replay, "run a batch that was not finite again, and name the module")
    replay.add_argument("file", type=Path, metavar="FILE", help="one of RUN/nonfinite/*.json")
    _add_import(replay)

    cache = add("cache", _list_cache, "list and remove prepared audio")
    actions = cache.add_subparsers(metavar="ACTION")
    actions.add_parser("list", help="list it (the default)")
    prune = actions.add_parser("prune", help="remove what is not needed")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="not used for so long")
    prune.add_argument(
        "--unused", action="store_true", help="the corpus folder is gone (the default)"
    )
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    prune.set_defaults(command=_prune_cache)


def _add_models(add: Any) -> None:
    export = add("export", _export, "write everything needed to run a model elsewhere")
    export.add_argument("run", type=Path, metavar="RUN", help="a run folder, as training names it")
    export.add_argument("--out", type=Path, metavar="DIR", required=True, help="the bundle")
    export.add_argument(
        "--formats",
        metavar="NAMES",
        default="",
        help="onnx, torch, sherpa-onnx, speechbrain, hub, with commas; each is compared first",
    )
    export.add_argument("--license", metavar="ID", default="unknown", help="for the model card")
    _add_import(export)

    tune = add("tune", _tune, "choose the weights of a run's decoder on its validation sets")
    tune.add_argument("run", type=Path, metavar="RUN", help="a run folder, as training names it")
    tune.add_argument("--lm-text", type=Path, metavar="TEXT|ARPA", help="of the language models")
    tune.add_argument("--word-lm-order", type=int, metavar="N", help="n-grams of words; 0: none")
    tune.add_argument("--token-lm-order", type=int, metavar="N", help="of tokens; 0: none")
    tune.add_argument("--decoder", choices=("beam", "graph"), help="of the run from now on")
    tune.add_argument("--beam-size", type=int, metavar="N", help="hypotheses")
    tune.add_argument(
        "--attention",
        choices=("rescore", "joint", "none"),
        help="how a trained attention decoder takes part; none: not",
    )

    lm = add("lm", _train_lm, "train an n-gram language model, and write it as ARPA")
    lm.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="a sentence on each line")
    lm.add_argument("--out", type=Path, metavar="FILE", required=True, help="the ARPA file")
    lm.add_argument("--order", type=int, default=3, help="of the n-grams (default: 3)")
    lm.add_argument("--language", metavar="TAG", help="of its normalizer (else the tokenizer's)")
    lm.add_argument(
        "--tokenizer", type=Path, metavar="RUN|BUNDLE", help="make it of its tokens, not of words"
    )


def _add_scores(add: Any) -> None:
    score = add("score", _score, "score a model on data of yours; trains nothing")
    score.add_argument("model", type=Path, metavar="BUNDLE|RUN", help="a bundle or a run folder")
    score.add_argument(
        "data", type=Path, nargs="*", metavar="DATA", help="tables; none: a run's own test sets"
    )
    score.add_argument("--out", type=Path, metavar="DIR", help="write the reports there")
    score.add_argument("--label", metavar="COLUMN", help="of a classifier: the right answers")
    score.add_argument(
        "--report-by", metavar="COLUMN", action="append", default=[], help="may be repeated"
    )
    score.add_argument("--path-column", metavar="COLUMN", help="of the audio files")
    score.add_argument("--text-column", metavar="COLUMN", help="of the transcripts")
    _add_decoder(score)
    _add_import(score)

    compare = add("compare", _compare, "test whether two runs differ")
    for name in ("a", "b"):
        compare.add_argument(
            name, type=Path, metavar=f"RUN_{name.upper()}", help="a run, or a folder of scores"
        )
    compare.add_argument("--json", action="store_true", help="print the figures as JSON")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page of both, too")


def _add_inference(add: Any) -> None:
    transcribe = add("transcribe", run_transcribe, "transcribe audio files")
    add_transcribe_options(transcribe)
    _add_decoder(transcribe)
    _add_import(transcribe)

    doctor = add("doctor", _doctor, "print what models can run on here")
    doctor.add_argument(
        "bundle", type=Path, nargs="?", metavar="BUNDLE", help="whose formats are tried"
    )
    _add_import(doctor)

    classify = add("classify", _classify, "print which label audio files have")
    classify.add_argument("bundle", type=Path, metavar="BUNDLE", help="an exported folder")
    classify.add_argument("files", type=Path, metavar="FILE", nargs="+", help="wav, flac, mp3...")
    classify.add_argument("--format", choices=("text", "json"), default="text")
    _add_import(classify)


def _add_decoder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--decoder",
        choices=("greedy", "beam", "graph"),
        help="beam or graph: with language models; the default is the one that the model has",
    )
    command.add_argument(
        "--hotwords",
        metavar="FILE|WORDS",
        help="phrases to expect: a file, one on each line, or a list with commas",
    )


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module of your own that parts of the model are in; may be repeated",
    )


def _check(options: argparse.Namespace) -> int:
    from sbkit.check.command import check_file

    return check_file(
        options.yaml,
        options.overrides,
        target=options.target,
        as_json=options.json,
        strict=options.strict,
    )


def _prepare(options: argparse.Namespace) -> int:
    from sbkit.train.prepare import prepare_data, prepare_shards

    arguments = [str(options.yaml), *options.overrides]
    if options.shards is not None:
        if options.report is not None:
            raise SbkitError(
                "A report must be of data as training takes it, but --shards only writes it. Call "
                f"again with --report, without --shards and with --data_folder={options.shards}."
            )
        prepare_shards(arguments, options.shards, options.shard_size)
        return 0
    prepare_data(arguments, options.report)
    return 0


def _tune(options: argparse.Namespace) -> int:
    from sbkit.train.tune import tune_run

    given = {
        "lm_text": options.lm_text,
        "word_lm_order": options.word_lm_order,
        "token_lm_order": options.token_lm_order,
        "beam_size": options.beam_size,
        "decoder.beam_size": options.beam_size,  # of which the run's own YAML has the value
        "decoder_type": options.decoder,
        "decoder.kind": options.decoder,
        "attention_decoding": options.attention,
        "decoder.attention": options.attention,
    }
    tune_run(options.run, {key: value for key, value in given.items() if value is not None})
    return 0


def _replay(options: argparse.Namespace) -> int:
    from sbkit.check.replay import replay_file

    return replay_file(options.file)


def _export(options: argparse.Namespace) -> int:
    from sbkit.inference.bundle.export import ExportOptions, export_run

    formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    wanted = ExportOptions(formats=formats, licence=options.license)
    certificates = export_run(options.run, options.out, wanted, own=options.own)
    missed = [
        f"{name} ({kind}) is not written: {reason.rstrip('.')}."
        for name, several in certificates.items()
        for kind, found in several.items()
        for reason in found["reasons"]
    ]
    print(*missed, sep="\n", end="\n" if missed else "", file=sys.stderr)
    print(options.out)
    return FAILED if missed else 0


def _score(options: argparse.Namespace) -> int:
    from sbkit.inference.score import ScoreOptions, score_model

    wanted = ScoreOptions(
        out=options.out,
        label=options.label,
        report_by=options.report_by,
        path_column=options.path_column,
        text_column=options.text_column,
        decoder=options.decoder,
        hotwords=options.hotwords,
    )
    for line in score_model(options.model, options.data, wanted, own=options.own):
        print(printable(line), flush=True)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from sbkit.base.files import to_json
    from sbkit.evaluate import compare

    compared = compare.compare_runs(options.a, options.b)
    if options.html is not None:
        compare.write_comparison(options.html, compared)
    if options.json:
        print(printable_json(to_json(compare.comparison_figures(compared), indent=2)))
    else:
        print("\n".join(map(printable, compare.describe_comparison(compared))))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from sbkit.inference.runtime.doctor import print_report

    return print_report(options.bundle, own=options.own)


def _classify(options: argparse.Namespace) -> int:
    from sbkit.inference.transcribe.classify import classify_files

    code = 0
    for result in classify_files(options.bundle, options.files, own=options.own):
        if isinstance(result, SbkitError):
            print(result, file=sys.stderr)
            code = BAD_INPUT
        else:
            print(_line(result, options), flush=True)
    return code


def _train_lm(options: argparse.Namespace) -> int:
    from sbkit.decoding.language_models import train_texts
    from sbkit.inference.bundle.bundle import language_of
    from sbkit.text.languages import check_language

    language, tokenizer = options.language, options.tokenizer
    if language is None:
        language = "und" if tokenizer is None else language_of(tokenizer)
    check_language(language)
    wanted = {"order": options.order, "tokenizer": tokenizer, "out": options.out}
    print(train_texts(options.texts, language=language, **wanted))
    return 0


def _list_cache(options: argparse.Namespace) -> int:
    from sbkit.data.storage.audio_cache import default_cache
    from sbkit.data.storage.cache import print_entries

    print_entries(default_cache())
    return 0


def _prune_cache(options: argparse.Namespace) -> int:
    from sbkit.data.storage.audio_cache import default_cache
    from sbkit.data.storage.cache import prune

    prune(
        default_cache(),
        older_than=options.older_than,
        unused=options.unused,
        dry_run=options.dry_run,
    )
    return 0


def _line(result: "Classification", options: argparse.Namespace) -> str:
    """Write one result, after the file's name where there are several."""
    if options.format == "json":
        plain = {**asdict(result), "file": str(result.file)}
        return printable_json(json.dumps(plain, ensure_ascii=False))
    named = len(options.files) > 1
    return f"{printable(str(result.file))}\t{result}" if named else str(result)
