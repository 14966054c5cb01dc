"""The command ``sbkit``: check, prepare, tune, export, score and transcribe.

Each command imports what it needs when it runs, so that ``sbkit --help`` answers at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.errors import FAILED, ConfigError, SbkitError
from sbkit.base.imports import import_user_modules, require_package
from sbkit.base.messages import printable, printable_json
from sbkit.base.process import run_main
from sbkit.base.versions import __version__
from sbkit.commands.arguments import (
    BUNDLE,
    DECODING,
    FILES,
    IMPORT,
    LIMITS,
    QUIET,
    RUNTIME,
    SERVER,
    VAD,
    YAML,
    Parser,
)
from sbkit.logs.handlers import log_to_screen
from sbkit.tasks.task import import_object

Command = Callable[[argparse.Namespace], int | None]
AddCommand = Callable[..., Parser]

LOGS_TO_STDOUT = ("prepare", "tune")  # other commands print their result on standard output


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder that contains sbkit is searched last for modules: in a checkout it has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    run_main(lambda: run(sys.argv[1:]))  # a command imports its parts when it runs


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; raises SbkitError for bad input or no package."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = unknown
    with log_to_screen(
        to_stderr=options.command not in LOGS_TO_STDOUT,
        format="%(asctime)s %(message)s" if options.command == "serve" else "%(message)s",
    ):
        folders = [getattr(options, name, None) for name in ("bundle", "model")]
        folders += getattr(options, "bundles", [])
        options.user_modules = import_user_modules(
            getattr(options, "imports", ()), next(filter(None, folders), None)
        )
        try:
            return options.handler(options) or 0
        except ModuleNotFoundError as error:
            raise SbkitError(
                f"`sbkit {options.command}` needs the package {error.name}, which is not "
                "installed. Install all that sbkit needs: pip install sbkit, without --no-deps."
            ) from error


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action="version", version=f"sbkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def add_command(
        name: str,
        handler: Command,
        help: str,
        *parents: Parser,
        takes_overrides: bool = False,
    ) -> Parser:
        # With overrides there are no abbreviations: a key of the YAML may begin like an option.
        added = commands.add_parser(
            name, help=help, parents=parents, allow_abbrev=not takes_overrides
        )
        added.set_defaults(handler=handler, takes_overrides=takes_overrides)
        return added

    _add_training_commands(add_command)
    _add_decoder_commands(add_command)
    _add_scoring_commands(add_command)
    _add_inference_commands(add_command)
    _add_task_commands(add_command)
    return parser


def _add_training_commands(add_command: AddCommand) -> None:
    check = add_command("check", _check, "check a run before it starts", YAML, takes_overrides=True)
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--target", metavar="cuda:N", help="check for a machine with N CUDA devices")
    check.add_argument("--strict", action="store_true", help="exit with 1 for notes, too")

    add_command(
        "config",
        _config,
        "print a YAML as one file, with its base and the overrides given here",
        YAML,
        takes_overrides=True,
    )

    prepare = add_command(
        "prepare",
        _prepare,
        "decode the data of a run; several processes may share the work",
        YAML,
        takes_overrides=True,
    )
    prepare.add_argument("--report", metavar="DIR", type=Path, help="write the data report to DIR")
    prepare.add_argument("--shards", metavar="DIR|URL", help="only write the data as shards there")
    prepare.add_argument("--shard-size", default="1GB", help="audio per shard (default: 1GB)")

    cache = add_command("cache", _cache, "list prepared audio, or remove what no corpus needs")
    cache.add_argument("action", choices=("list", "prune"), nargs="?", default="list")

    export = add_command("export", _export, "write all that a model needs to run elsewhere", IMPORT)
    export.add_argument("run", metavar="RUN", type=Path, help="a run folder, as training prints it")
    export.add_argument("--out", metavar="DIR", type=Path, required=True, help="the new bundle")
    export.add_argument(
        "--formats",
        metavar="NAMES",
        default="",
        help="comma-separated: onnx, torch, sherpa-onnx, speechbrain, hub; each is compared with "
        "the trained model first",
    )
    export.add_argument("--license", default="unknown", help="license ID for the model card")


def _add_decoder_commands(add_command: AddCommand) -> None:
    tune = add_command(
        "tune", _tune, "fit another decoder to a validation set, and keep the better one", IMPORT
    )
    tune.add_argument("model", metavar="RUN|BUNDLE", type=Path, help="a run folder or a bundle")
    tune.add_argument(
        "--lm-text", metavar="TEXT|ARPA", type=Path, help="text or ARPA file of the language model"
    )
    tune.add_argument("--word-lm-order", metavar="N", type=int, help="word n-grams; 0 for none")
    tune.add_argument("--token-lm-order", metavar="N", type=int, help="token n-grams; 0 for none")
    tune.add_argument(
        "--decoder", choices=("beam", "graph"), help="graph is faster, and only uses words"
    )
    tune.add_argument("--beam-size", metavar="N", type=int, help="number of hypotheses")
    tune.add_argument(
        "--attention-rescoring",
        action=argparse.BooleanOptionalAction,
        help="rescore with a trained attention decoder",
    )
    tune.add_argument(
        "--data", metavar="TABLE", type=Path, help="the validation set (default: those of the run)"
    )
    tune.add_argument(
        "--out", metavar="DIR", type=Path, help="write a new bundle there (default: into the run)"
    )
    tune.add_argument("--force", action="store_true", help="replace even a better decoder")

    lm = add_command("lm", _train_lm, "train an n-gram language model, and write it as ARPA")
    lm.add_argument("texts", metavar="TEXT", type=Path, nargs="+", help="one sentence per line")
    lm.add_argument("--out", metavar="FILE", type=Path, required=True, help="the ARPA file")
    lm.add_argument(
        "--order", metavar="N", type=int, default=3, help="n of the n-grams (default: 3)"
    )
    lm.add_argument("--language", metavar="TAG", help="normalize text of this language")
    lm.add_argument(
        "--tokenizer", metavar="RUN|BUNDLE", type=Path, help="count its tokens instead of words"
    )


def _add_scoring_commands(add_command: AddCommand) -> None:
    score = add_command(
        "score", _score, "score a model on your data, without training", DECODING, QUIET, IMPORT
    )
    score.add_argument("model", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")
    score.add_argument(
        "data", metavar="DATA", type=Path, nargs="*", help="tables (default: the run's test sets)"
    )
    score.add_argument("--out", metavar="DIR", type=Path, help="write the reports to DIR")
    score.add_argument("--label", metavar="COLUMN", help="the correct classes, for a classifier")
    score.add_argument(
        "--report-by", metavar="COLUMN", action="append", default=[], help="group; repeatable"
    )
    score.add_argument("--path-column", metavar="COLUMN", help="the audio files")
    score.add_argument("--text-column", metavar="COLUMN", help="the transcripts")

    compare = add_command("compare", _compare, "test whether runs differ, and find the best one")
    compare.add_argument("first", metavar="RUN", type=Path, help="a run, or a folder of scores")
    compare.add_argument("others", metavar="RUN", type=Path, nargs="+", help="one or more others")
    compare.add_argument("--json", action="store_true", help="print the figures as JSON")
    compare.add_argument("--html", metavar="FILE", type=Path, help="also write a page (two runs)")


def _add_inference_commands(add_command: AddCommand) -> None:
    transcribe = add_command(
        *("transcribe", _transcribe, "transcribe audio files"),
        *(BUNDLE, FILES, RUNTIME, DECODING, VAD, QUIET, IMPORT),
    )
    formats = ("text", "txt", "json", "srt", "vtt", "tsv")
    transcribe.add_argument("--format", choices=formats, default="text", help="(default: text)")
    transcribe.add_argument(
        "--out", metavar="DIR", type=Path, help="write a file for each there instead of printing"
    )
    transcribe.add_argument(
        "--live",
        action="store_true",
        help="print the text of one FILE, - or mic (a microphone) while it is spoken",
    )
    transcribe.add_argument(
        "--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time"
    )

    serve = add_command(
        *("serve", _serve, "answer OpenAI clients' requests for transcripts and speech"),
        *(SERVER, RUNTIME, LIMITS, DECODING, VAD, IMPORT),
    )
    serve.add_argument(
        *("bundles",), metavar="BUNDLE|RUN", type=Path, nargs="+", help="recognizers and voices"
    )

    classify = add_command(
        *("classify", _classify, "print the class of audio files"),
        *(BUNDLE, FILES, QUIET, IMPORT),
    )
    classify.add_argument("--format", choices=("text", "json"), default="text")


def _add_task_commands(add_command: AddCommand) -> None:
    for name, help in (("encode", "write audio as codes"), ("decode", "write the audio of codes")):
        code = add_command(name, _run_task, help, BUNDLE, RUNTIME, IMPORT)
        code.add_argument("file", metavar="FILE", type=Path, help="the file to read")
        code.add_argument(
            "--out", metavar="FILE", type=Path, required=True, help="the file to write"
        )

    speak = add_command("speak", _run_task, "write text as speech", BUNDLE, RUNTIME, IMPORT)
    speak.add_argument("text", metavar="TEXT", nargs="?", help="the text to speak")
    speak.add_argument(
        "--file", metavar="FILE", type=Path, help="a UTF-8 text instead; - reads standard input"
    )
    speak.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="the WAV; - is standard output"
    )
    speak.add_argument(
        "--speed", metavar="X", type=float, default=1.0, help="from 0.25 to 4 (default: 1)"
    )

    user_command = add_command(
        *("run", _run_user_command, "run a command that the task of a bundle declares"),
        *(BUNDLE, RUNTIME, IMPORT),
        takes_overrides=True,
    )
    user_command.add_argument(
        "task_command", metavar="COMMAND", help="the command; its own arguments follow"
    )

    doctor = add_command("doctor", _doctor, "print what models can run on here", IMPORT)
    doctor.add_argument(
        *("bundle",), metavar="BUNDLE", type=Path, nargs="?", help="try the formats of this bundle"
    )


def _check(options: argparse.Namespace) -> int:
    keep_freed_memory()  # as training does, whose memory is measured
    from sbkit.commands.check import check_file

    return check_file(
        options.yaml,
        options.overrides,
        target=options.target,
        as_json=options.json,
        strict=options.strict,
    )


def _config(options: argparse.Namespace) -> None:
    from sbkit.config.hparams import resolve
    from sbkit.config.overrides import parse_overrides

    print(resolve(options.yaml, parse_overrides(options.overrides)).one_file, end="")


def _prepare(options: argparse.Namespace) -> None:
    from sbkit.commands.train import prepare_data, prepare_shards

    arguments = [str(options.yaml), *options.overrides]
    if options.shards and options.report:
        raise ConfigError("--shards only writes data; for --report, run `sbkit prepare` once more.")
    if options.shards is None:
        prepare_data(arguments, options.report)
    else:
        prepare_shards(arguments, options.shards, options.shard_size)


def _cache(options: argparse.Namespace) -> None:
    from sbkit.data.cache import default_cache, print_entries, prune

    if options.action == "list":
        print_entries(default_cache())
    else:
        prune(default_cache())


def _export(options: argparse.Namespace) -> int:
    from sbkit.export.export import export_run

    formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    parity = export_run(
        options.run,
        options.out,
        formats=formats,
        license=options.license,
        user_modules=options.user_modules,
    )
    failures = [
        f"{name} ({kind}) is not written: {reason.rstrip('.')}."
        for name, reports in parity.items()
        for kind, report in reports.items()
        for reason in report["reasons"]
    ]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(options.out)
    return FAILED if failures else 0


def _tune(options: argparse.Namespace) -> None:
    from sbkit.commands.tune import TuneOptions, tune_model

    chosen = {name: getattr(options, name) for name in TuneOptions.__dataclass_fields__}
    tune_model(options.model, TuneOptions(**chosen), user_modules=options.user_modules)


def _train_lm(options: argparse.Namespace) -> None:
    from sbkit.bundle.bundle import language_of
    from sbkit.lm.language_models import train_texts
    from sbkit.text.languages import check_language

    language, tokenizer = options.language, options.tokenizer
    if language is None:
        language = "und" if tokenizer is None else language_of(tokenizer)
    check_language(language)
    print(
        train_texts(
            options.texts,
            language=language,
            order=options.order,
            tokenizer=tokenizer,
            out=options.out,
        )
    )


def _score(options: argparse.Namespace) -> None:
    from sbkit.commands.score import ScoreOptions, score_model

    chosen = {name: getattr(options, name) for name in ScoreOptions.__dataclass_fields__}
    for line in score_model(
        options.model, options.data, ScoreOptions(**chosen), user_modules=options.user_modules
    ):
        print(printable(line), flush=True)


def _compare(options: argparse.Namespace) -> None:
    from sbkit.base.files import to_json
    from sbkit.checkpoint.provenance import require_current_results
    from sbkit.evaluate import compare

    folders = [options.first, *options.others]
    if len(folders) > 2 and options.html is not None:
        raise ConfigError(f"`--html` writes a page of two runs, but there are {len(folders)}.")
    for folder in folders:
        require_current_results(folder)
    comparison = compare.compare_runs(folders)
    if options.html is not None:
        compare.write_comparison(options.html, comparison)
    print(
        printable_json(to_json(comparison, indent=2))
        if options.json
        else "\n".join(map(printable, compare.describe_comparison(comparison)))
    )


def _transcribe(options: argparse.Namespace) -> int:
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live. Add --live, or leave --pace out.")
    with _opened(options.bundle, options.user_modules) as options.bundle:
        options.detector = None
        if options.vad is not None:
            from sbkit.runtime.voice_detector import VoiceDetector

            options.detector = VoiceDetector.load(
                options.vad, device=options.device, runtime=options.runtime
            )
        if options.live:
            from sbkit.commands.listen import transcribe_live

            return transcribe_live(options)
        from sbkit.commands.transcribe import transcribe

        return transcribe(options)


def _serve(options: argparse.Namespace) -> int:
    for name in ("starlette", "uvicorn", "websockets", "python_multipart", "prometheus_client"):
        require_package(name, extra="serve")
    from sbkit.commands.serve import serve

    names = [folder.resolve().name for folder in options.bundles]
    with ExitStack() as stack:
        folders = [
            stack.enter_context(_opened(folder, options.user_modules)) for folder in options.bundles
        ]
        return serve(names, folders, options)


def _classify(options: argparse.Namespace) -> int:
    from sbkit.commands.transcribe import classify

    with _opened(options.bundle, options.user_modules) as options.bundle:
        return classify(options)


def _run_task(options: argparse.Namespace) -> int:
    from sbkit.bundle.bundle import read_bundle

    with _opened(options.bundle, options.user_modules) as options.bundle:
        task = read_bundle(options.bundle, user_modules=options.user_modules).task
        return int(import_object(task.require_command(options.command).run)(options))


def _run_user_command(options: argparse.Namespace) -> int:
    from sbkit.bundle.bundle import read_bundle

    with _opened(options.bundle, options.user_modules) as options.bundle:
        task = read_bundle(options.bundle, user_modules=options.user_modules).task
        commands = {name: c for name, c in task.commands.items() if c.arguments is not None}
        if (command := commands.get(options.task_command)) is None:
            raise ConfigError(
                f"`sbkit run` runs commands that a task declares with `arguments`, and {task.name} "
                f"has no {options.task_command}. It has: {', '.join(commands) or 'none'}."
            )
        parser = Parser(prog=f"sbkit run {options.bundle} {options.task_command}")
        for argument, details in command.arguments or ():
            parser.add_argument(argument, **details)
        parser.parse_args(options.overrides, options)
        return int(import_object(command.run)(options))


def _opened(folder: Path, user_modules: frozenset[str]) -> AbstractContextManager[Path]:
    """Return the folder of a bundle; a run folder is exported first, which imports more."""
    if not (folder / "hyperparams.yaml").is_file():
        return nullcontext(folder)
    from sbkit.export.export import as_bundle

    return as_bundle(folder, user_modules)


def _doctor(options: argparse.Namespace) -> int:
    from sbkit.commands.doctor import print_report

    return print_report(options.bundle, user_modules=options.user_modules)


if __name__ == "__main__":
    main()
