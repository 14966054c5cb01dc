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
    BUNDLES,
    DECODER,
    ERRORS,
    FILES,
    HOTWORDS,
    IMPORT,
    LIMITING,
    LISTENING,
    QUIET,
    RAW_RATE,
    RUN,
    RUNNING,
    VAD,
    YAML,
    Parser,
    boolean,
    choice,
    flag,
    path,
    text,
)
from sbkit.logs.handlers import log_to_screen
from sbkit.tasks.task import Argument, import_object

Command = Callable[[argparse.Namespace], int | None]
OWN = text("command", "COMMAND", "of the task; its own arguments follow")
LOG_IS_OUTPUT = ("prepare", "tune")  # standard output of the others holds their result
COMMANDS: dict[str, tuple[Command, str, tuple[Argument, ...]]] = {}


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder in which sbkit lies is searched last for modules: that of a checkout has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    run_main(lambda: run(sys.argv[1:]))  # a command imports its parts when it runs


def run(arguments: Sequence[str]) -> int:
    """Run one command, return its exit code; raises SbkitError for bad input or no package."""
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action="version", version=f"sbkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="name")
    for name, (_, help, several) in COMMANDS.items():
        # A key of the YAML, or an option of a task's own command, may begin like an option.
        takes_others = YAML in several or OWN in several
        added = commands.add_parser(name, help=help, allow_abbrev=not takes_others)
        for argument, details in several:
            added.add_argument(argument, **details)
    options, more = parser.parse_known_args(arguments)
    command, _, taken = COMMANDS[options.name]
    if more and YAML not in taken and OWN not in taken:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options.overrides = more
    with log_to_screen(
        to_stderr=options.name not in LOG_IS_OUTPUT,
        format="%(asctime)s %(message)s" if options.name == "serve" else "%(message)s",
    ):
        return _run(command, options)


def _run(command: Command, options: argparse.Namespace) -> int:
    """Import the user's modules, and run a command."""
    folders = [getattr(options, each, None) for each in ("bundle", "model")]
    folders += getattr(options, "bundles", [])
    options.user_modules = import_user_modules(
        getattr(options, "imports", ()), next(filter(None, folders), None)
    )
    try:
        return command(options) or 0
    except ModuleNotFoundError as error:
        raise SbkitError(
            f"`sbkit {options.name}` needs the package {error.name}, which is not installed. "
            "Install all that sbkit needs: pip install sbkit, without --no-deps."
        ) from error


def command(name: str, help: str, *arguments: Argument) -> Callable[[Command], Command]:
    """Add a function to the commands, with the arguments that it takes."""

    def add(function: Command) -> Command:
        COMMANDS[name] = function, help, arguments
        return function

    return add


@command(
    "check",
    "check a run before it starts",
    YAML,
    flag("--json", "print the findings as JSON"),
    text("--target", "cuda:N", "the machine meant: N CUDA devices"),
    flag("--strict", "leave with 1 for notes too"),
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


@command("config", "print a YAML as one file: with its base, and the values given here", YAML)
def _config(options: argparse.Namespace) -> None:
    from sbkit.config.hparams import parse_overrides, resolve

    print(resolve(options.yaml, parse_overrides(options.overrides)).one_file, end="")


@command(
    "prepare",
    "decode the data of a run; any number of processes may share the work",
    YAML,
    path("--report", "DIR", "write the data report there"),
    text("--shards", "DIR|URL", "write the data there as shards, and nothing else"),
    text("--shard-size", "SIZE", "of audio (default: 1GB)", default="1GB"),
)
def _prepare(options: argparse.Namespace) -> None:
    from sbkit.commands.train import prepare_data, prepare_shards

    arguments = [str(options.yaml), *options.overrides]
    if options.shards and options.report:
        raise SbkitError("--report must come without --shards, which only writes data. Call twice.")
    if options.shards is None:
        prepare_data(arguments, options.report)
    else:
        prepare_shards(arguments, options.shards, options.shard_size)


@command(
    "cache",
    "list prepared audio, or remove what no corpus needs",
    ("action", {"choices": ("list", "prune"), "nargs": "?", "default": "list"}),
)
def _cache(options: argparse.Namespace) -> None:
    from sbkit.data.cache import default_cache, print_entries, prune

    if options.action == "list":
        print_entries(default_cache())
    else:
        prune(default_cache())


@command(
    "export",
    "write everything needed to run a model elsewhere",
    RUN,
    path("--out", "DIR", "the bundle", required=True),
    text(
        *("--formats", "NAMES"),
        help="onnx, torch, sherpa-onnx, speechbrain, hub, with commas; each is compared first",
        default="",
    ),
    text("--license", "ID", "for the model card", default="unknown"),
    IMPORT,
)
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
    missed = [
        f"{name} ({kind}) is not written: {reason.rstrip('.')}."
        for name, several in parity.items()
        for kind, found in several.items()
        for reason in found["reasons"]
    ]
    print(*missed, sep="\n", end="\n" if missed else "", file=sys.stderr)
    print(options.out)
    return FAILED if missed else 0


@command(
    "tune",
    "fit another decoder to a validation set, and keep the better one",
    path("model", "RUN|BUNDLE", "a run folder or a bundle"),
    path("--lm-text", "TEXT|ARPA", "of the language models"),
    text("--word-lm-order", "N", "n-grams of words; 0: none", type=int),
    text("--token-lm-order", "N", "of tokens; 0: none", type=int),
    choice("--decoder", "beam", "graph", help="graph: faster, with only the model of words"),
    text("--beam-size", "N", "hypotheses", type=int),
    boolean("--attention-rescoring", "by a trained attention decoder"),
    path("--data", "TABLE", "the validation set (default: those of the run)"),
    path("--out", "DIR", "write a bundle with the new decoder there (default: into the run)"),
    flag("--force", "replace the decoder of the run even if the new one is no better"),
    IMPORT,
)
def _tune(options: argparse.Namespace) -> None:
    from sbkit.commands.tune import TuneOptions, tune_model

    wanted = {each: getattr(options, each) for each in TuneOptions.__dataclass_fields__}
    tune_model(options.model, TuneOptions(**wanted), user_modules=options.user_modules)


@command(
    "lm",
    "train an n-gram language model, and write it as ARPA",
    path("texts", "TEXT", "a sentence on each line", nargs="+"),
    path("--out", "FILE", "the ARPA file", required=True),
    text("--order", "N", "of the n-grams (default: 3)", type=int, default=3),
    text("--language", "TAG", "of its normalizer (else the tokenizer's)"),
    path("--tokenizer", "RUN|BUNDLE", "make it of its tokens, not of words"),
)
def _train_lm(options: argparse.Namespace) -> None:
    from sbkit.bundle.bundle import language_of
    from sbkit.decoding.language_models import train_texts
    from sbkit.text.languages import check_language

    language, tokenizer = options.language, options.tokenizer
    if language is None:
        language = "und" if tokenizer is None else language_of(tokenizer)
    check_language(language)
    wanted = {"order": options.order, "tokenizer": tokenizer, "out": options.out}
    print(train_texts(options.texts, language=language, **wanted))


@command(
    "score",
    "score a model on data of yours; trains nothing",
    path("model", "BUNDLE|RUN", "a bundle or a run folder"),
    path("data", "DATA", "tables; none: a run's own test sets", nargs="*"),
    path("--out", "DIR", "write the reports there"),
    text("--label", "COLUMN", "of a classifier: the right answers"),
    text("--report-by", "COLUMN", "repeatable", action="append", default=[]),
    text("--path-column", "COLUMN", "of the audio files"),
    text("--text-column", "COLUMN", "of the transcripts"),
    DECODER,
    HOTWORDS,
    QUIET,
    IMPORT,
)
def _score(options: argparse.Namespace) -> None:
    from sbkit.commands.score import ScoreOptions, score_model

    wanted = {each: getattr(options, each) for each in ScoreOptions.__dataclass_fields__}
    for line in score_model(
        options.model, options.data, ScoreOptions(**wanted), user_modules=options.user_modules
    ):
        print(printable(line), flush=True)


@command(
    "compare",
    "test whether two runs differ, or find the best of several",
    path("first", "RUN", "a run, or a folder of scores"),
    path("others", "RUN", "others; the best of all is marked", nargs="+"),
    flag("--json", "print the figures as JSON"),
    path("--html", "FILE", "write a page of two runs, too"),
)
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


@command(
    "transcribe",
    "transcribe audio files",
    BUNDLE,
    FILES,
    RAW_RATE,
    choice("--format", "text", "txt", "json", "srt", "vtt", "tsv", default="text"),
    path("--out", "DIR", "write a file for each there, instead of printing"),
    ERRORS,
    *RUNNING,
    DECODER,
    HOTWORDS,
    VAD,
    flag("--live", "print the text of one FILE, - or mic (a microphone) as it comes"),
    text("--pace", "X", "with --live, of a file: 1 for real time (default: at once)", type=float),
    QUIET,
    IMPORT,
)
def _transcribe(options: argparse.Namespace) -> int:
    if options.pace is not None and not options.live:
        raise SbkitError("`--pace` must come with --live, but does not. Add it, or leave it out.")
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


@command(
    "serve",
    "answer the requests of OpenAI's clients for transcripts and speech",
    BUNDLES,
    *LISTENING,
    *RUNNING,
    *LIMITING,
    DECODER,
    HOTWORDS,
    VAD,
    IMPORT,
)
def _serve(options: argparse.Namespace) -> int:
    for name in ("starlette", "uvicorn", "websockets", "python_multipart", "prometheus_client"):
        require_package(name, extra="serve")
    from sbkit.commands.serve import serve

    names = [each.resolve().name for each in options.bundles]
    with ExitStack() as stack:
        folders = [
            stack.enter_context(_opened(each, options.user_modules)) for each in options.bundles
        ]
        return serve(names, folders, options)


@command(
    "classify",
    "print which label audio files have",
    BUNDLE,
    FILES,
    RAW_RATE,
    choice("--format", "text", "json", default="text"),
    ERRORS,
    QUIET,
    IMPORT,
)
def _classify(options: argparse.Namespace) -> int:
    from sbkit.commands.transcribe import classify

    with _opened(options.bundle, options.user_modules) as options.bundle:
        return classify(options)


CODING = BUNDLE, path("file", "FILE", "to read"), path("--out", "FILE", "to write", required=True)


@command("encode", "write audio as codes", *CODING, *RUNNING, IMPORT)
@command("decode", "write the audio of codes", *CODING, *RUNNING, IMPORT)
@command(
    "speak",
    "write text as speech",
    BUNDLE,
    text("text", "TEXT", "what is to be said", nargs="?"),
    path("--file", "FILE", "a text of UTF-8, - for standard input, in its place"),
    path("--out", "FILE", "the WAV to write, - for standard output", required=True),
    text("--speed", "X", "from 0.25 to 4 (default: 1)", type=float, default=1.0),
    *RUNNING,
    IMPORT,
)
def _run_of_task(options: argparse.Namespace) -> int:
    from sbkit.bundle.bundle import read_bundle

    with _opened(options.bundle, options.user_modules) as options.bundle:
        task = read_bundle(options.bundle, user_modules=options.user_modules).task
        return int(import_object(task.require_command(options.name).run)(options))


@command("run", "run a command that a bundle's own task has", BUNDLE, OWN, *RUNNING, IMPORT)
def _run_own(options: argparse.Namespace) -> int:
    from sbkit.bundle.bundle import read_bundle

    with _opened(options.bundle, options.user_modules) as options.bundle:
        task = read_bundle(options.bundle, user_modules=options.user_modules).task
        commands = {
            name: each for name, each in task.commands.items() if each.arguments is not None
        }
        if (command := commands.get(options.command)) is None:
            raise ConfigError(
                f"`sbkit run` runs commands that a task declares with `arguments`, and {task.name} "
                f"has no {options.command}. It has: {', '.join(commands) or 'none'}."
            )
        parser = Parser(prog=f"sbkit run {options.bundle} {options.command}")
        for argument, details in command.arguments or ():
            parser.add_argument(argument, **details)
        parser.parse_args(options.overrides, options)
        return int(import_object(command.run)(options))


def _opened(folder: Path, user_modules: frozenset[str]) -> AbstractContextManager[Path]:
    """Name the bundle, or make one of a run, for which more is imported."""
    if not (folder / "hyperparams.yaml").is_file():
        return nullcontext(folder)
    from sbkit.export.export import as_bundle

    return as_bundle(folder, user_modules)


@command(
    "doctor",
    "print what models can run on here",
    path("bundle", "BUNDLE", "whose formats are tried", nargs="?"),
    IMPORT,
)
def _doctor(options: argparse.Namespace) -> int:
    from sbkit.commands.doctor import print_report

    return print_report(options.bundle, user_modules=options.user_modules)


if __name__ == "__main__":
    main()
