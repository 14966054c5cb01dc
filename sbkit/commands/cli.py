"""The command ``sbkit``: its commands, their arguments, and how one of them runs.

A command is a function from the parsed arguments to an exit code. It is imported when it runs, so
that ``sbkit --help`` answers at once.
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.errors import FAILED, ConfigError, SbkitError
from sbkit.base.imports import import_user_modules, require_package
from sbkit.base.messages import printable, printable_json
from sbkit.base.process import run_main
from sbkit.base.versions import __version__
from sbkit.logs.handlers import log_to_screen
from sbkit.tasks.task import PRECISIONS, import_object

Command = Callable[[Namespace], int | None]
AddCommand = Callable[..., Callable[..., object]]

LOGS_TO_STDOUT = ("prepare", "tune")  # other commands print their result on standard output
RECIPE_FOLDERS = ("asr", "classification", "codec", "synthesis", "vad")  # in recipes/, by task
TAKES_OVERRIDES = ("check", "config", "prepare", "run")  # or other arguments that sbkit cannot know


class Parser(argparse.ArgumentParser):
    """Accept `_` for `-` in an option's name, as in the keys of a YAML: --report_by."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse the arguments of this command; a subcommand's own parser gets the rest."""
        return super().parse_known_args([*map(self._with_dashes, args)], namespace)

    def _with_dashes(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        option = name.replace("_", "-")
        return "=".join([option, *value]) if option in self._option_string_actions else argument


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder that contains sbkit is searched last for modules: in a checkout it has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    run_main(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; raises SbkitError for bad input or no package."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.command not in TAKES_OVERRIDES:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = unknown
    with log_to_screen(
        to_stderr=options.command not in LOGS_TO_STDOUT,
        format="%(asctime)s %(message)s" if options.command == "serve" else "%(message)s",
    ):
        options.user_modules = _import_user_modules(options)
        try:
            return options.handler(options) or 0
        except ModuleNotFoundError as error:
            raise SbkitError(
                f"`sbkit {options.command}` needs the package {error.name}, which is not "
                "installed. Install all that sbkit needs: pip install sbkit, without --no-deps."
            ) from error


def _import_user_modules(options: Namespace) -> frozenset[str]:
    """Import what `--import` names; the source in a bundle only runs once it is verified."""
    names = getattr(options, "imports", [])
    if not names:
        return frozenset()
    from sbkit.bundle.config import CONFIG_FILE, BundleFiles

    folders = [getattr(options, "bundle", None), getattr(options, "model", None)]
    sources: dict[Path, dict[str, bytes]] = {}
    runs: list[Path] = []
    for folder in [*filter(None, folders), *getattr(options, "bundles", [])]:
        if (folder / CONFIG_FILE).exists() or not (folder / "hyperparams.yaml").is_file():
            sources[folder] = BundleFiles(folder).read_modules(names)
        else:
            runs.append(folder)
    sys.path += [str(folder.resolve()) for folder in (Path.cwd(), *runs)]
    return import_user_modules(names, sources)


# ---- arguments that several commands share, as parents of their parsers

shared = partial(Parser, add_help=False)

YAML = shared()
YAML.add_argument("yaml", metavar="YAML", type=Path, help="the YAML, as given to train.py")

BUNDLE = shared()
BUNDLE.add_argument("bundle", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")

FILES = shared()
add = FILES.add_argument
add(
    *("files",),
    metavar="FILE",
    nargs="+",
    help="audio files, folders or glob patterns; - reads standard input",
)
add(
    "--raw-rate",
    metavar="HZ",
    type=int,
    help="sample rate of standard input without a header (16-bit little-endian mono)",
)
add("--errors", metavar="FILE", type=Path, help="write a JSON line to FILE for each failed file")

DECODING = shared()
add = DECODING.add_argument
add(
    "--decoder",
    choices=("greedy", "beam", "graph"),
    help="beam and graph use language models; the default is the decoder of the model, and "
    "another must be tuned first: sbkit tune MODEL --decoder graph",
)
add(
    "--hotwords",
    metavar="FILE|WORDS",
    help="phrases to expect: a file with one per line, or a comma-separated list",
)

VAD = shared()
VAD.add_argument(
    "--vad",
    metavar="BUNDLE|silero",
    help="the voice activity detector that finds speech and pauses",
)

RUNTIME = shared()
add = RUNTIME.add_argument
add("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
add("--runtime", choices=PRECISIONS, default="torch", help="runtime of the model (default: torch)")
add(
    "--precision",
    choices=tuple(dict.fromkeys(chain(*PRECISIONS.values()))),
    default="fp32",
    help="; ".join(f"{runtime}: {', '.join(names)}" for runtime, names in PRECISIONS.items()),
)
add("--compile", choices=("default", "reduce-overhead"), help="compile the model with torch first")

QUIET = shared()
QUIET.add_argument("--quiet", action="store_true", help="show no progress")

IMPORT = shared()
IMPORT.add_argument(
    "--import",
    dest="imports",
    metavar="MODULE",
    action="append",
    default=[],
    help="import a module of your own that defines parts of the model; repeatable",
)

SERVER = shared()
add = SERVER.add_argument
add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
add("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: 8000)")
add("--alias", action="append", help="another name of the model for clients; repeatable")
add(
    "--api-key-file",
    metavar="FILE",
    type=Path,
    help="API keys, one per line; SIGHUP reads the file again",
)
add("--no-key", action="store_true", help="admit clients on other machines without a key")
add(
    "--allow-origin",
    metavar="URL",
    action="append",
    help="allow web pages of this origin (CORS), * for all; repeatable",
)

LIMITS = shared()
add = partial(LIMITS.add_argument, metavar="S", type=float)
add("--max-batch-seconds", help="audio in a batch, including padding")
add("--max-seconds", help="audio of a request (default: 7200)")
add("--max-session-seconds", help="audio of a realtime session (default: 7200)")
add("--receive-seconds", help="time for a request to arrive (default: 60)")
add("--answer-seconds", help="time until the end of its answer (default: 600)")
add("--drain-seconds", help="time after SIGTERM when requests are still accepted (default: 5)")
add("--grace-seconds", help="time after that to finish running requests (default: 30)")
add = partial(LIMITS.add_argument, metavar="N", type=int)
add("--max-concurrent", help="requests transcribed at the same time (default: 32)")
add("--max-queue", help="requests that may wait for those (default: 128)")
add("--max-sessions", help="realtime sessions (default: 64)")
add("--max-connections", help="open connections (default: 1000)")
LIMITS.add_argument("--max-mb", metavar="MB", type=float, help="size of a request (default: 25)")
LIMITS.add_argument(
    "--max-wait-ms",
    metavar="MS",
    type=float,
    default=10.0,
    help="time that a request waits for others to share its batch (default: 10)",
)


# ---- the commands


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action="version", version=f"sbkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def add_command(
        name: str, handler: Command | str, help: str, *parents: Parser
    ) -> Callable[..., object]:
        """Add a command, and return the function that adds its arguments.

        handler: a function from the parsed arguments, or its dotted path in `sbkit.commands`.
        """
        # With overrides there are no abbreviations: a key of the YAML may begin like an option.
        abbreviates = name not in TAKES_OVERRIDES
        added = commands.add_parser(name, help=help, parents=parents, allow_abbrev=abbreviates)
        added.set_defaults(handler=_importing(handler) if isinstance(handler, str) else handler)
        return added.add_argument

    _add_training_commands(add_command)
    _add_decoder_commands(add_command)
    _add_scoring_commands(add_command)
    _add_inference_commands(add_command)
    _add_task_commands(add_command)
    return parser


def _importing(path: str) -> Command:
    return lambda options: import_object(f"sbkit.commands.{path}")(options)


def _add_training_commands(add_command: AddCommand) -> None:
    add = add_command("new", "new.new", "make a project with the recipes as source to edit")
    add("folder", metavar="FOLDER", type=Path, help="the new project")
    add("--recipe", choices=RECIPE_FOLDERS, help="only what this one needs (default: all)")
    add("--diff", action="store_true", help="show what this sbkit changed since FOLDER was made")

    add = add_command("check", _check, "check a run before it starts", YAML)
    add("--json", action="store_true", help="print the findings as JSON")
    add("--target", metavar="cuda:N", help="check for a machine with N CUDA devices")
    add("--strict", action="store_true", help="exit with 1 for notes, too")

    add_command("config", _config, "print a YAML with its base and overrides as one file", YAML)

    add = add_command(
        *("prepare", "train.prepare_data"),
        *("decode the data of a run; several processes may share the work", YAML),
    )
    add("--report", metavar="DIR", type=Path, help="write the data report to DIR")
    add("--shards", metavar="DIR|URL", help="only write the data as shards there")
    add("--shard-size", default="1GB", help="audio per shard (default: 1GB)")

    add = add_command("cache", _cache, "list prepared audio, or remove what no corpus needs")
    add("action", choices=("list", "prune"), nargs="?", default="list")

    add = add_command("export", _export, "write all that a model needs to run elsewhere", IMPORT)
    add("run", metavar="RUN", type=Path, help="a run folder, as training prints it")
    add("--out", metavar="DIR", type=Path, required=True, help="the new bundle")
    add(
        "--formats",
        metavar="NAMES",
        default="",
        help="comma-separated: onnx, torch, sherpa-onnx, speechbrain, hub; each is compared with "
        "the trained model first",
    )
    add("--license", default="unknown", help="license ID for the model card")


def _add_decoder_commands(add_command: AddCommand) -> None:
    add = add_command(
        *("tune", "tune.tune"),
        *("fit another decoder to a validation set, and keep the better one", IMPORT),
    )
    add("model", metavar="RUN|BUNDLE", type=Path, help="a run folder or a bundle")
    add("--lm-text", metavar="TEXT|ARPA", type=Path, help="text or ARPA of the language model")
    add("--word-lm-order", metavar="N", type=int, help="word n-grams; 0 for none")
    add("--token-lm-order", metavar="N", type=int, help="token n-grams; 0 for none")
    add("--decoder", choices=("beam", "graph"), help="graph is faster, and only uses words")
    add("--beam-size", metavar="N", type=int, help="number of hypotheses")
    add(
        "--attention-rescoring",
        action=argparse.BooleanOptionalAction,
        help="rescore with a trained attention decoder",
    )
    add("--data", metavar="TABLE", type=Path, help="the validation set (default: the run's sets)")
    add("--out", metavar="DIR", type=Path, help="the new bundle (default: change the run)")
    add("--force", action="store_true", help="replace even a better decoder")

    add = add_command("lm", _train_lm, "train an n-gram language model, and write it as ARPA")
    add("texts", metavar="TEXT", type=Path, nargs="+", help="one sentence per line")
    add("--out", metavar="FILE", type=Path, required=True, help="the ARPA file")
    add("--order", metavar="N", type=int, default=3, help="n of the n-grams (default: 3)")
    add("--language", metavar="TAG", help="normalize text of this language")
    add("--tokenizer", metavar="RUN|BUNDLE", type=Path, help="count its tokens instead of words")


def _add_scoring_commands(add_command: AddCommand) -> None:
    add = add_command(
        *("score", "score.score", "score a model on your data, without training"),
        *(DECODING, QUIET, IMPORT),
    )
    add("model", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")
    add("data", metavar="DATA", type=Path, nargs="*", help="tables (default: the run's test sets)")
    add("--out", metavar="DIR", type=Path, help="write the reports to DIR")
    add("--label", metavar="COLUMN", help="the correct classes, for a classifier")
    add("--report-by", metavar="COLUMN", action="append", default=[], help="group; repeatable")
    add("--path-column", metavar="COLUMN", help="the audio files")
    add("--text-column", metavar="COLUMN", help="the transcripts")

    add = add_command("compare", _compare, "test whether runs differ, and find the best one")
    add("first", metavar="RUN", type=Path, help="a run, or a folder of scores")
    add("others", metavar="RUN", type=Path, nargs="+", help="one or more others")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--html", metavar="FILE", type=Path, help="also write a page (two runs)")


def _add_inference_commands(add_command: AddCommand) -> None:
    add = add_command(
        *("transcribe", _transcribe, "transcribe audio files"),
        *(BUNDLE, FILES, RUNTIME, DECODING, VAD, QUIET, IMPORT),
    )
    formats = ("text", "txt", "json", "srt", "vtt", "tsv")
    add("--format", choices=formats, default="text", help="(default: text)")
    add("--out", metavar="DIR", type=Path, help="write a file for each there, print nothing")
    add(
        "--live",
        action="store_true",
        help="print the text of one FILE, - or mic (a microphone) while it is spoken",
    )
    add("--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time")

    add = add_command(
        *("serve", _serve, "answer OpenAI clients' requests for transcripts and speech"),
        *(SERVER, RUNTIME, LIMITS, DECODING, VAD, IMPORT),
    )
    add("bundles", metavar="BUNDLE|RUN", type=Path, nargs="+", help="recognizers and voices")

    add = add_command(
        *("classify", _classify, "print the class of audio files", BUNDLE, FILES, QUIET, IMPORT)
    )
    add("--format", choices=("text", "json"), default="text")


def _add_task_commands(add_command: AddCommand) -> None:
    for name, help in (("encode", "write audio as codes"), ("decode", "write the audio of codes")):
        add = add_command(name, _run_task, help, BUNDLE, RUNTIME, IMPORT)
        add("file", metavar="FILE", type=Path, help="the file to read")
        add("--out", metavar="FILE", type=Path, required=True, help="the file to write")

    add = add_command("speak", _run_task, "write text as speech", BUNDLE, RUNTIME, IMPORT)
    add("text", metavar="TEXT", nargs="?", help="the text to speak")
    add("--file", metavar="FILE", type=Path, help="a UTF-8 text instead; - is standard input")
    add("--out", metavar="FILE", type=Path, required=True, help="the WAV; - is standard output")
    add("--speed", metavar="X", type=float, default=1.0, help="from 0.25 to 4 (default: 1)")

    add = add_command(
        *("run", _run_user_command, "run a command that the task of a bundle declares"),
        *(BUNDLE, RUNTIME, IMPORT),
    )
    add("task_command", metavar="COMMAND", help="the command; its own arguments follow")

    add = add_command("doctor", "doctor.doctor", "print what models can run on here", IMPORT)
    add("bundle", metavar="BUNDLE", type=Path, nargs="?", help="try the formats of this bundle")


def _check(options: Namespace) -> int:
    keep_freed_memory()  # as training does, whose memory is measured
    from sbkit.commands.check import check

    return check(options)


def _config(options: Namespace) -> None:
    from sbkit.config.hparams import resolve
    from sbkit.config.overrides import parse_overrides

    print(resolve(options.yaml, parse_overrides(options.overrides)).one_file, end="")


def _cache(options: Namespace) -> None:
    from sbkit.data.cache import default_cache, print_entries, prune

    (print_entries if options.action == "list" else prune)(default_cache())


def _export(options: Namespace) -> int:
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


def _train_lm(options: Namespace) -> None:
    from sbkit.bundle.bundle import language_of
    from sbkit.lm.language_models import train_texts
    from sbkit.text.languages import check_language

    tokenizer = options.tokenizer
    language = options.language
    if language is None:
        language = "und" if tokenizer is None else language_of(tokenizer)
    check_language(language)
    texts, order, out = options.texts, options.order, options.out
    print(train_texts(texts, language=language, order=order, tokenizer=tokenizer, out=out))


def _compare(options: Namespace) -> None:
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
    if options.json:
        print(printable_json(to_json(comparison, indent=2)))
    else:
        print(*map(printable, compare.describe_comparison(comparison)), sep="\n")


def _transcribe(options: Namespace) -> int:
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live. Add --live, or leave --pace out.")
    with _opened(options.bundle, options.user_modules) as options.bundle:
        path = "listen.transcribe_live" if options.live else "transcribe.transcribe"
        return _importing(path)(options) or 0


def _classify(options: Namespace) -> int:
    from sbkit.commands.transcribe import classify

    with _opened(options.bundle, options.user_modules) as options.bundle:
        return classify(options)


def _serve(options: Namespace) -> int:
    for name in ("starlette", "uvicorn", "websockets", "python_multipart", "prometheus_client"):
        require_package(name, extra="serve")
    from sbkit.commands.serve import serve

    names = [folder.resolve().name for folder in options.bundles]
    with ExitStack() as stack:
        folders = [
            stack.enter_context(_opened(folder, options.user_modules)) for folder in options.bundles
        ]
        return serve(names, folders, options)


def _run_task(options: Namespace) -> int:
    from sbkit.bundle.bundle import read_bundle

    with _opened(options.bundle, options.user_modules) as options.bundle:
        task = read_bundle(options.bundle, user_modules=options.user_modules).task
        return int(import_object(task.require_command(options.command).run)(options))


def _run_user_command(options: Namespace) -> int:
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


if __name__ == "__main__":
    main()
