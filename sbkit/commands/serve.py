"""The command `sbkit serve`: open bundles, and answer requests until a signal."""

import gc
from argparse import Namespace
from contextlib import ExitStack, closing, suppress
from dataclasses import fields
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import ConfigError, StopRequestedError
from sbkit.base.files import read_text_lines
from sbkit.base.imports import require_package
from sbkit.base.threads_and_memory import share_free_memory
from sbkit.cli.arguments import Parser

if TYPE_CHECKING:
    from sbkit.runtime.clients import Workers
    from sbkit.serve.middleware import Limits, Metrics
    from sbkit.serve.recognition import RecognitionService
    from sbkit.serve.tts import Voice
    from sbkit.tasks.vad.predict import VoiceDetector


def add_commands(parser: Parser) -> None:
    """Add `serve`."""
    help = "answer OpenAI clients' requests for transcripts and speech"
    groups = "runtime decoding vad import"
    add = parser.add_command("serve", serve, help, groups, opens_bundle=True)
    add("models", metavar="BUNDLE|RUN", type=Path, nargs="+", help="recognizers and voices")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: 8000)")
    add("--alias", action="append", help="another name of the model for clients; repeatable")
    add("--api-key-file", metavar="FILE", type=Path, help="API keys, one per line")
    add("--no-key", action="store_true", help="let other machines connect without an API key")
    origin = "allow web pages of this origin (CORS), * for all; repeatable"
    add("--allow-origin", metavar="URL", action="append", help=origin)
    add("--wyoming", metavar="PORT", type=int, help="port for Home Assistant, without keys")
    wyoming_host = "address to listen on for Home Assistant (default: 127.0.0.1)"
    add("--wyoming-host", metavar="ADDRESS", default="127.0.0.1", help=wyoming_host)
    add_seconds = partial(add, metavar="S", type=float)
    add_seconds("--max-batch-seconds", help="audio in a batch, including padding")
    add_seconds("--max-seconds", help="audio of a request (default: 7200)")
    turn = "length at which a live turn is cut if its client has not ended it (default: 300)"
    add_seconds("--max-turn-seconds", help=turn)
    add_seconds("--max-session-seconds", help="duration of a realtime session (default: 7200)")
    add_seconds("--answer-seconds", help="time until a request is answered (default: 600)")
    add_count = partial(add, metavar="N", type=int)
    add_count("--max-concurrent", help="requests transcribed at the same time (default: 32)")
    add_count("--max-queue", help="further requests that may arrive or wait (default: 128)")
    sessions = "realtime sessions, and connections of Home Assistant (default: 64)"
    add_count("--max-sessions", help=sessions)
    add("--max-mb", metavar="MB", type=float, help="size of a request (default: 25)")
    wait = "time that a request waits for others to share its batch (default: 10)"
    add("--max-wait-ms", metavar="MS", type=float, default=10.0, help=wait)


def serve(options: Namespace) -> int:
    """Serve bundles and runs by the names of their folders until a signal; return the exit code."""
    packages = ("starlette", "uvicorn", "websockets", "python_multipart", "pydantic")
    for name in (*packages, "prometheus_client"):
        require_package(name, extra="serve")
    from sbkit.bundle.config import CONFIG_FILE
    from sbkit.runtime.clients import Workers
    from sbkit.runtime.model_thread import require_as_requested
    from sbkit.runtime.runtimes import AUTO, FIRST_GPU, warn_once
    from sbkit.serve.api import ServedModel, ServedModels
    from sbkit.serve.app import LOCAL_HOSTS, Service
    from sbkit.serve.middleware import Limits, Metrics
    from sbkit.serve.server import bind, make_server, run
    from sbkit.tasks.vad.predict import open_detector

    names = [folder.resolve().name for folder in options.models]
    if len({*names}) < len(names):
        raise ConfigError(f"Two of the models have the same name: {', '.join(names)}. Rename one.")
    share_free_memory()
    values = {limit.name: getattr(options, limit.name) for limit in fields(Limits)}
    limits = Limits(**{name: value for name, value in values.items() if value is not None})
    metrics = Metrics()
    keys = _read_keys(options.api_key_file) if options.api_key_file else ()
    with ExitStack() as stack:
        listener = stack.enter_context(closing(bind(options.host, options.port)))
        is_local = ip_address(listener.getsockname()[0]).is_loopback
        if not (is_local or options.no_key or keys):
            raise ConfigError(
                f"`--host {options.host}` admits other machines. Pass --api-key-file FILE, or "
                "--no-key to admit everyone."
            )
        wyoming = None
        if options.wyoming is not None:
            require_package("wyoming", extra="wyoming")
            wyoming = bind(options.wyoming_host, options.wyoming)
            stack.enter_context(closing(wyoming))
        workers = Workers(limits.max_concurrent)
        models: list[ServedModel] = []
        detector = open_detector(options)
        for name, folder in zip(names, options.bundles, strict=True):
            engine = _open(folder, options, limits, detector, workers, metrics)
            stack.enter_context(closing(engine))
            device = FIRST_GPU if options.device == "cuda" else options.device
            device = engine.runs_on.device if device == AUTO else device
            require_as_requested(engine.runs_on, device=device, precision=options.precision)
            created = int((folder / CONFIG_FILE).stat().st_mtime)
            readme = folder / "README.md"
            is_file = readme.is_file() and not readme.is_symlink()  # `/card` shows it to anybody
            card = readme.read_text("utf-8", "replace") if is_file else ""
            models.append(ServedModel(name=name, engine=engine, created=created, readme=card))
        stack.enter_context(closing(workers))  # before the engines that they use
        reason = warn_once(options.runtime) if options.device == AUTO else None
        service = Service(
            models=ServedModels(models=models, aliases=options.alias or ()),
            limits=limits,
            declared={name: getattr(options, name) for name in ("device", "runtime", "precision")},
            note=reason and f"No GPU is used, because {reason.partition('. ')[0]}.",
            metrics=metrics,
            keys=keys,
            hosts=(*LOCAL_HOSTS, options.host if is_local else "*"),
            origins=[origin.lower() for origin in options.allow_origin or ()],
        )
        gc.freeze()  # loaded objects stay, so only objects of requests are searched for cycles
        gc.collect()
        with suppress(StopRequestedError):  # uvicorn passes the signal on once it has stopped
            run(make_server(service), service, listener, wyoming)
    return 0


def _open(
    folder: Path,
    options: Namespace,
    limits: "Limits",
    detector: "VoiceDetector | None",
    workers: "Workers",
    metrics: "Metrics",
) -> "RecognitionService | Voice":
    from sbkit.bundle.bundle import read_bundle
    from sbkit.runtime.batch_shapes import BatchShapes
    from sbkit.runtime.runtimes import load_in_thread, model_options
    from sbkit.serve.recognition import RecognitionService
    from sbkit.serve.tts import Voice
    from sbkit.tasks.asr.bundle import as_recognizer
    from sbkit.tasks.asr.predict import default_batch_seconds
    from sbkit.tasks.asr.recordings import recognizer_options

    task = read_bundle(folder, user_modules=options.user_modules).task
    if task.predicts == "audio":
        synthesizer = task.open_synthesizer(folder, **model_options(options))
        return Voice(synthesizer, workers=workers, metrics=metrics)
    task.require_prediction("text", command="transcribe")
    opened = load_in_thread(folder, streaming="also", **recognizer_options(options))
    bundle = as_recognizer(opened)
    batch_seconds = options.max_batch_seconds or default_batch_seconds(bundle.model.runs_on)
    return RecognitionService(
        bundle=bundle,
        shapes=BatchShapes.grid(bundle.config.sample_rate, batch_seconds=batch_seconds),
        wait_seconds=options.max_wait_ms / 1000,
        limits=limits,
        detector=detector,
        workers=workers,
        metrics=metrics,
    )


def _read_keys(file: Path) -> list[str]:
    """Read the API keys of a file with one key per line, or a comment after #."""
    lines = read_text_lines(file, subject="`--api-key-file`")
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:  # the server would be open to everyone
        raise ConfigError(f"`--api-key-file {file}` has no keys. Write one per line.")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"A key of `--api-key-file {file}` is not printable ASCII.")
    return keys
