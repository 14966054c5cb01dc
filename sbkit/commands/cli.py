"""The command ``sbkit``: its commands, their arguments, and how one of them runs.

A command's handler is a function from the parsed arguments to an exit code. The module that does
the work is imported when the command runs, so that ``sbkit --help`` answers at once.
"""

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from sbkit.base.allocator import keep_freed_memory
from sbkit.base.errors import FAILED, ConfigError, DataError, SbkitError
from sbkit.base.imports import import_user_modules, require_package
from sbkit.base.messages import printable, printable_json
from sbkit.base.process import run_main
from sbkit.base.versions import describe_versions
from sbkit.commands.clip_table import parse_part
from sbkit.logs.handlers import log_to_screen
from sbkit.tasks.task import PRECISIONS, Task, import_object

Handler = Callable[[Namespace], int | None]
Add = Callable[..., object]  # adds an argument to a command: `add_argument` of its parser
AddCommand = Callable[..., Add]

LOGS_TO_STDOUT = ("prepare", "tune")  # other commands print their result on standard output
RECIPE_FOLDERS = ("asr", "classification", "codec", "synthesis", "vad")  # in recipes/, by task
# Python 3.11 does not know TEXT in `speak VOICE --out FILE TEXT`, unless it parses options first.
HAS_OPTIONAL_ARGUMENT = ("doctor", "score", "speak")
TAKES_OVERRIDES = ("check", "config", "prepare")  # --KEY=VALUE for any key of a YAML


class Parser(argparse.ArgumentParser):
    """Accept `_` for `-` in an option's name, as in the keys of a YAML: --report_by.

    is_intermixed: whether options may precede an optional argument.
    """

    is_intermixed = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse the arguments of this command; a subcommand's own parser gets the rest."""
        arguments = [*map(self._with_dashes, args)]
        if not self.is_intermixed:
            return super().parse_known_args(arguments, namespace)
        self.is_intermixed = False  # in Python 3.11 the next line calls this method
        return self.parse_known_intermixed_args(arguments, namespace)

    def _with_dashes(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        option = name.replace("_", "-")
        return "=".join([option, *value]) if option in self._option_string_actions else argument


class ShowVersions(argparse.Action):
    """Look the versions up only for ``--version``, because that takes as long as the parser."""

    def __call__(self, *_: object) -> None:
        print(describe_versions())
        raise SystemExit(0)


def main() -> None:
    """Run ``sbkit`` with the arguments of the process.

    The folder that contains sbkit is searched last for modules: in a checkout it has `recipes`,
    which is not installed.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    run_main(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Raises SbkitError for bad input, and if a package that sbkit requires is not installed.
    """
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
            if not _is_required(error.name or ""):  # a user's module imports it
                raise
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


def _is_required(module: str) -> bool:
    """Return whether the package of a module is one that sbkit itself requires."""
    from importlib.metadata import PackageNotFoundError, requires  # takes 30 ms

    try:
        requirements = [line for line in requires("sbkit") or () if "extra ==" not in line]
    except PackageNotFoundError:  # sbkit is not installed, as in a checkout
        return False
    return module.partition(".")[0] in {re.split(r"\W", line)[0] for line in requirements}


# ---- arguments that several commands share


def _yaml(add: Add) -> None:
    add("yaml", metavar="YAML", type=Path, help="the YAML, as given to train.py")


def _bundle(add: Add) -> None:
    add("bundle", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")


def _files(add: Add) -> None:
    files = "audio files, folders or glob patterns; - reads standard input"
    add("files", metavar="FILE", nargs="+", help=files)
    raw_rate = "sample rate of standard input without a header (16-bit little-endian mono)"
    add("--raw-rate", metavar="HZ", type=int, help=raw_rate)
    add("--errors", metavar="FILE", type=Path, help="write a JSON line there per failed file")


def _decoding(add: Add) -> None:
    add(
        "--decoder",
        choices=("greedy", "beam", "graph"),
        help="beam and graph use language models; the default is the decoder of the model, and "
        "another must be tuned first: sbkit tune MODEL --decoder graph",
    )
    phrases = "phrases to expect: a file with one per line, or a comma-separated list"
    add("--hotwords", metavar="FILE|WORDS", help=phrases)


def _vad(add: Add) -> None:
    detector = "the voice activity detector that finds speech and pauses"
    add("--vad", metavar="BUNDLE|silero", help=detector)


def _runtime(add: Add) -> None:
    add("--device", default="auto", help="cpu, cuda, cuda:INDEX or auto (default: auto)")
    runtime = "runtime of the model (default: torch)"
    add("--runtime", choices=tuple(PRECISIONS), default="torch", help=runtime)
    precisions = tuple(dict.fromkeys(chain(*PRECISIONS.values())))
    by_runtime = "; ".join(f"{name}: {', '.join(names)}" for name, names in PRECISIONS.items())
    add("--precision", choices=precisions, default="fp32", help=by_runtime)
    add("--compile", choices=("default", "reduce-overhead"), help="compile the model with torch")


def _quiet(add: Add) -> None:
    add("--quiet", action="store_true", help="show no progress")


def _tables(add: Add) -> None:
    add("--path-column", metavar="COLUMN", help="the column of the audio paths")
    _texts(add)


def _texts(add: Add) -> None:
    add("--text-column", metavar="COLUMN", help="the column of the transcripts")
    encoding = "the encoding of the tables and texts, such as cp1252 (default: UTF-8)"
    add("--encoding", metavar="NAME", help=encoding)


def _part(add: Add) -> None:
    part = "do only the K-th of N equal parts, in an array of jobs"
    add("--part", metavar="K/N", type=parse_part, help=part)


def _import(add: Add) -> None:
    module = "import a module of your own that defines parts of the model; repeatable"
    add("--import", dest="imports", metavar="MODULE", action="append", default=[], help=module)


def _server(add: Add) -> None:
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: 8000)")
    add("--alias", action="append", help="another name of the model for clients; repeatable")
    keys = "API keys, one per line; SIGHUP reads the file again"
    add("--api-key-file", metavar="FILE", type=Path, help=keys)
    add("--no-key", action="store_true", help="let other machines connect without an API key")
    origin = "allow web pages of this origin (CORS), * for all; repeatable"
    add("--allow-origin", metavar="URL", action="append", help=origin)


def _limits(add: Add) -> None:
    seconds = partial(add, metavar="S", type=float)
    seconds("--max-batch-seconds", help="audio in a batch, including padding")
    seconds("--max-seconds", help="audio of a request (default: 7200)")
    seconds("--max-session-seconds", help="time of a realtime session (default: 7200)")
    seconds("--receive-seconds", help="time for a request to arrive (default: 60)")
    seconds("--answer-seconds", help="time until its answer is sent (default: 600)")
    seconds("--drain-seconds", help="time after SIGTERM to accept requests (default: 5)")
    seconds("--grace-seconds", help="time after that to finish running requests (default: 30)")
    count = partial(add, metavar="N", type=int)
    count("--max-concurrent", help="requests transcribed at the same time (default: 32)")
    count("--max-queue", help="further requests that may arrive or wait (default: 128)")
    count("--max-sessions", help="realtime sessions (default: 64)")
    count("--max-connections", help="open connections (default: 1000)")
    add("--max-mb", metavar="MB", type=float, help="size of a request (default: 25)")
    wait = "time that a request waits for others to share its batch (default: 10)"
    add("--max-wait-ms", metavar="MS", type=float, default=10.0, help=wait)


# ---- the commands


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(prog="sbkit", description="Training recipes for speech, each from one YAML.")
    parser.add_argument("--version", action=ShowVersions, nargs=0, help="print versions, and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def add_command(name: str, handler: Handler, help: str, *groups: Callable[[Add], None]) -> Add:
        """Add a command with groups of shared arguments; return the adder of its own."""
        # With overrides there are no abbreviations: a key of the YAML may begin like an option.
        abbreviates = name not in TAKES_OVERRIDES
        command = commands.add_parser(name, help=help, allow_abbrev=abbreviates)
        command.set_defaults(handler=handler)
        command.is_intermixed = name in HAS_OPTIONAL_ARGUMENT
        for add_group in groups:
            add_group(command.add_argument)
        return command.add_argument

    _add_training_commands(add_command)
    _add_decoder_commands(add_command)
    _add_scoring_commands(add_command)
    _add_inference_commands(add_command)
    _add_task_commands(add_command)
    return parser


def _imported(path: str) -> Handler:
    """Return a handler that imports a function of `sbkit.commands` by its path, and calls it."""
    return lambda options: import_object(f"sbkit.commands.{path}")(options)


def _imported_with_bundle(path: str) -> Handler:
    """Return the handler of `_imported`, but with a run folder as `bundle` exported first."""

    def handle(options: Namespace) -> int | None:
        with _with_bundle(options) as bundle_options:
            return _imported(path)(bundle_options)

    return handle


def _add_training_commands(add_command: AddCommand) -> None:
    add = add_command("new", _imported("new.new"), "make a project with recipes to edit")
    add("folder", metavar="FOLDER", type=Path, help="the new project")
    add("--recipe", choices=RECIPE_FOLDERS, help="copy only this recipe (default: all)")
    add("--diff", action="store_true", help="show what this sbkit changed since FOLDER was made")

    add = add_command("check", _check, "check a run before it starts", _yaml)
    add("--json", action="store_true", help="print the findings as JSON")
    add("--target", metavar="cuda:COUNT", help="check for a machine with COUNT CUDA devices")
    add("--strict", action="store_true", help="exit with 1 for notes, too")
    add("--learn", action="store_true", help="train on eight clips for a minute: are they learned?")

    add_command("config", _config, "print a YAML with its base and overrides as one file", _yaml)

    prepare = "decode the data of a run; several processes may share the work"
    add = add_command("prepare", _imported("prepare.prepare_data"), prepare, _yaml)
    add("--report", metavar="DIR", type=Path, help="write the data report to DIR")
    add("--verify", action="store_true", help="look at all audio files again, and name changes")
    add("--shards", metavar="DIR|URL", help="only write the data as shards there")
    add("--shard-size", default="1GB", help="audio per shard (default: 1GB)")

    add = add_command("cache", _cache, "list prepared audio, or remove what no corpus needs")
    add("action", choices=("list", "prune"), nargs="?", default="list")

    add = add_command("export", _export, "write all that a model needs to run elsewhere", _import)
    add("run", metavar="RUN", type=Path, help="a run folder, as training prints it")
    add("--out", metavar="DIR", type=Path, required=True, help="the new bundle")
    formats = (
        "comma-separated: onnx, sherpa-onnx, huggingface; each is compared with the trained model "
        "first"
    )
    add("--formats", metavar="NAMES", default="", help=formats)
    add("--license", default="unknown", help="license ID for the model card")


def _add_decoder_commands(add_command: AddCommand) -> None:
    tune = "fit another decoder to a validation set, and keep the better one"
    add = add_command("tune", _imported("tune.tune_model"), tune, _tables, _import)
    add("model", metavar="RUN|BUNDLE", type=Path, help="a run folder or a bundle")
    lm_text = "text of the language models, '[a.txt, b.txt]' for several, or an ARPA file"
    add("--lm-text", metavar="TEXT|ARPA", help=lm_text)
    add("--word-lm-order", metavar="N", type=int, help="word n-grams; 0 for none")
    add("--token-lm-order", metavar="N", type=int, help="token n-grams; 0 for none")
    add("--decoder", choices=("beam", "graph"), help="graph is faster, and only uses words")
    add("--beam-size", metavar="N", type=int, help="number of hypotheses")
    rescoring = "rescore with a trained attention decoder"
    add("--attention-rescoring", action=argparse.BooleanOptionalAction, help=rescoring)
    add("--data", metavar="TABLE", type=Path, help="the validation set (default: the run's sets)")
    add("--out", metavar="DIR", type=Path, help="the new bundle (default: change the run)")
    add("--force", action="store_true", help="replace even a better decoder")

    add = add_command(
        "lm", _train_lm, "train an n-gram language model, and write it as ARPA", _texts
    )
    add("texts", metavar="TEXT", type=Path, nargs="+", help="one sentence per line")
    add("--out", metavar="FILE", type=Path, required=True, help="the ARPA file")
    add("--order", metavar="N", type=int, default=3, help="n of the n-grams (default: 3)")
    add("--language", metavar="TAG", help="normalize text of this language")
    add("--tokenizer", metavar="RUN|BUNDLE", type=Path, help="count its tokens instead of words")


def _add_scoring_commands(add_command: AddCommand) -> None:
    score = "score a model on your data, without training"
    groups = [_tables, _decoding, _quiet, _import]
    add = add_command("score", _imported("score.score"), score, *groups)
    add("model", metavar="BUNDLE|RUN", type=Path, help="a bundle or a run folder")
    add("data", metavar="DATA", type=Path, nargs="*", help="tables (default: the run's test sets)")
    add("--split", metavar="NAME", help="a split of the run, such as train, not its test sets")
    add("--out", metavar="DIR", type=Path, help="write the reports to DIR")
    add("--label", metavar="COLUMN", help="the correct classes, for a classifier")
    add("--report-by", metavar="COLUMN", action="append", default=[], help="group; repeatable")
    normalizer = "also score texts that this wrote: whisper-english, whisper-basic or a language"
    add("--normalizer", metavar="NAME", help=normalizer)

    add = add_command("compare", _compare, "test whether runs differ, and find the best one")
    add("first", metavar="RUN", type=Path, help="a run, or a folder of scores")
    add("others", metavar="RUN", type=Path, nargs="+", help="one or more others")
    add("--json", action="store_true", help="print the figures as JSON")


def _add_inference_commands(add_command: AddCommand) -> None:
    groups = [_bundle, _files, _runtime, _decoding, _vad, _quiet, _import]
    add = add_command("transcribe", _transcribe, "transcribe audio files", *groups)
    formats = ("text", "txt", "json", "srt", "vtt", "tsv", "manifest")
    table = "manifest writes a table of pseudo-labels to train on (default: text)"
    add("--format", choices=formats, default="text", help=table)
    out = "write one file per recording to DIR, or all pseudo-labels to TABLE.csv"
    add("--out", metavar="DIR|TABLE.csv", type=Path, help=out)
    right = (
        "keep utterances that are entirely right with at least this probability (default: 0.9); "
        "0: keep all"
    )
    add("--min-confidence", metavar="P", type=float, help=right)
    add("--segments", metavar="DIR", type=Path, help="also write the utterances kept, as FLAC")
    channel = "the channel to transcribe, counted from 0 (default: all are mixed)"
    add("--channel", metavar="N", type=int, help=channel)
    _part(add)
    live = "print the text of one FILE, - or mic (a microphone) while it is spoken"
    add("--live", action="store_true", help=live)
    add("--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time")

    serve = "answer OpenAI clients' requests for transcripts and speech"
    groups = [_server, _runtime, _limits, _decoding, _vad, _import]
    add = add_command("serve", _serve, serve, *groups)
    add("bundles", metavar="BUNDLE|RUN", type=Path, nargs="+", help="recognizers and voices")

    groups = [_runtime, _vad, _quiet, _import]
    segment = _imported_with_bundle("segment.segment_recording")
    add = add_command("segment", segment, "cut a long recording into utterances", *groups)
    add("recording", metavar="RECORDING", type=Path, help="an audio file of any length")
    add("transcript", metavar="TRANSCRIPT", type=Path, help="its text, in UTF-8")
    model = "a bundle or a run folder that recognizes the language"
    add("--model", dest="bundle", metavar="BUNDLE|RUN", type=Path, required=True, help=model)
    add("--out", metavar="DIR", type=Path, required=True, help="the folder of the table")
    lines = "each line is an utterance (default: each sentence)"
    add("--lines", action="store_true", help=lines)
    score = "leave out utterances with a lower score (default: -3)"
    add("--min-score", metavar="LN_P", type=float, default=-3.0, help=score)

    groups = [_bundle, _files, _quiet, _import]
    classify = _imported_with_bundle("transcribe.classify")
    add = add_command("classify", classify, "print the class of audio files", *groups)
    add("--format", choices=("text", "json"), default="text")


def _add_task_commands(add_command: AddCommand) -> None:
    groups = [_bundle, _runtime, _import]
    for name, help in (("encode", "write audio as codes"), ("decode", "write the audio of codes")):
        add = add_command(name, _run_task, help, *groups)
        add("file", metavar="FILE", type=Path, help="the file to read")
        add("--out", metavar="FILE", type=Path, required=True, help="the file to write")

    add = add_command("speak", _run_task, "write text as speech", *groups, _quiet)
    add("text", metavar="TEXT", nargs="?", help="the text to speak")
    add("--file", metavar="FILE", type=Path, help="a UTF-8 text instead; - is standard input")
    add("--out", metavar="FILE", type=Path, help="the WAV; - is standard output")
    add("--speed", metavar="X", type=float, help="from 0.25 to 4 (default: 1)")
    lines = "a UTF-8 text whose lines become clips, with a table to train on"
    add("--lines", metavar="FILE", type=Path, help=lines)
    add("--out-dir", metavar="DIR", type=Path, help="the folder of these clips")
    speeds = "the lowest and the highest speed of these clips; each has one between them"
    add("--speeds", metavar=("LOW", "HIGH"), type=float, nargs=2, help=speeds)
    _part(add)

    declared = "run a command that the task of a bundle declares"
    add = add_command("run", _run_user_command, declared, *groups)
    add("task_command", metavar="COMMAND", help="the command; all that follows is for it")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    completion = "print a script that completes sbkit's commands in a shell"
    add = add_command("completion", _print_completion, completion)
    add("shell", choices=("bash", "zsh"))

    doctor = "print which devices, packages and formats work on this machine"
    add = add_command("doctor", _imported("doctor.doctor"), doctor, _import)
    add("bundle", metavar="BUNDLE", type=Path, nargs="?", help="try the formats of this bundle")


# ---- handlers


def _check(options: Namespace) -> int:
    keep_freed_memory()  # as training does: the check measures its memory
    from sbkit.commands.check import check

    return check(options)


def _config(options: Namespace) -> None:
    from sbkit.config.hparams import resolve
    from sbkit.config.overrides import parse_overrides

    print(resolve(options.yaml, parse_overrides(options.overrides)).one_file, end="")


def _cache(options: Namespace) -> None:
    from sbkit.data.cache import default_cache, print_entries, prune_orphans

    action = print_entries if options.action == "list" else prune_orphans
    action(default_cache())


def _export(options: Namespace) -> int:
    from sbkit.export.export import export_run
    from sbkit.export.formats import describe_failures

    formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    parity = export_run(
        options.run,
        options.out,
        formats=formats,
        license=options.license,
        user_modules=options.user_modules,
    )
    failures = describe_failures(parity)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(options.out)
    return FAILED if failures else 0


def _train_lm(options: Namespace) -> None:
    from sbkit.bundle.bundle import text_table_of
    from sbkit.data.sentences import read_sentences
    from sbkit.lm.language_models import is_arpa, write_language_model
    from sbkit.text.languages import check_language
    from sbkit.text.normalization import orthography

    tokenizer = options.tokenizer
    table = orthography("und") if tokenizer is None else text_table_of(tokenizer)
    if options.language is not None:
        table = replace(
            orthography(check_language(options.language)),
            keep_case=table.keep_case,
            punctuation=table.punctuation,
        )
    out = options.out
    if out.resolve() in map(Path.resolve, options.texts):
        raise ConfigError(f"`--out` must be a new file, but {out} is one of the texts.")
    for text in filter(is_arpa, options.texts):
        raise DataError(f"A language model is trained on text, but {text} is an ARPA file.")
    knobs = {"text_column": options.text_column, "encoding": options.encoding}
    sentences = read_sentences(options.texts, table, knobs)
    print(write_language_model(out, sentences, order=options.order, tokenizer=tokenizer))


def _compare(options: Namespace) -> None:
    from sbkit.base.files import to_json
    from sbkit.evaluate import compare
    from sbkit.run.results import require_current_results

    folders = [options.first, *options.others]
    for folder in folders:
        require_current_results(folder)
    comparison = compare.compare_runs(folders)
    if options.json:
        print(printable_json(to_json(comparison, indent=2)))
    else:
        print(*map(printable, compare.describe_comparison(comparison)), sep="\n")


def _transcribe(options: Namespace) -> int | None:
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live. Add --live, or leave --pace out.")
    for name in ("min_confidence", "segments", "part"):
        if getattr(options, name) is not None and options.format != "manifest":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"`{option}` needs --format manifest. Add it, or leave {option} out.")
    if options.channel is not None and options.format == "manifest":
        raise ConfigError("`--channel` is not supported with --format manifest.")
    path = "listen.transcribe_live" if options.live else "transcribe.transcribe"
    if options.format == "manifest" and not options.live:
        path = "pseudo_labels.write_pseudo_labels"
    return _imported_with_bundle(path)(options)


def _serve(options: Namespace) -> int:
    for name in ("starlette", "uvicorn", "websockets", "python_multipart", "prometheus_client"):
        require_package(name, extra="serve")
    from sbkit.commands.serve import serve

    names = [folder.resolve().name for folder in options.bundles]
    with ExitStack() as stack:
        bundles = [_open_bundle(folder, options.user_modules) for folder in options.bundles]
        return serve(names, list(map(stack.enter_context, bundles)), options)


def _print_completion(options: Namespace) -> None:
    shtab = require_package("shtab", extra="completion")
    print(shtab.complete(build_parser(), options.shell))


def _run_task(options: Namespace) -> int:
    with _with_bundle(options) as options:
        command = _task_of(options).require_command(options.command)
        return int(import_object(command.run)(options))


def _run_user_command(options: Namespace) -> int:
    with _with_bundle(options) as options:
        task = _task_of(options)
        name = options.task_command
        declared = {n: c.arguments for n, c in task.commands.items() if c.arguments is not None}
        if name not in declared:
            raise ConfigError(
                f"`sbkit run` runs commands that a task declares with `arguments`, and {task.name} "
                f"has no {name}. It has: {', '.join(declared) or 'none'}."
            )
        parser = Parser(prog=f"sbkit run {options.bundle} {name}")
        for argument, details in declared[name]:
            parser.add_argument(argument, **details)
        own_options = vars(options) | vars(parser.parse_args(options.arguments))
        return int(import_object(task.commands[name].run)(Namespace(**own_options)))


def _task_of(options: Namespace) -> Task:
    from sbkit.bundle.bundle import read_bundle

    return read_bundle(options.bundle, user_modules=options.user_modules).task


@contextmanager
def _with_bundle(options: Namespace) -> Iterator[Namespace]:
    """Yield the options with a bundle as `bundle`, made from the run if that is a run folder."""
    with _open_bundle(options.bundle, options.user_modules) as bundle:
        yield Namespace(**vars(options) | {"bundle": bundle})


def _open_bundle(folder: Path, user_modules: frozenset[str]) -> AbstractContextManager[Path]:
    """Return a context that yields the folder of a bundle; a run folder is exported first."""
    if not (folder / "hyperparams.yaml").is_file():
        return nullcontext(folder)  # without importing torch, which runs of ONNX do not need
    from sbkit.export.export import exported_bundle

    return exported_bundle(folder, user_modules)


if __name__ == "__main__":
    main()
