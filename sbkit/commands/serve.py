"""The command `sbkit serve`: open bundles, and answer requests until a signal."""

import gc
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path

from sbkit.base.allocator import share_free_memory
from sbkit.base.errors import ConfigError
from sbkit.bundle.bundle import read_bundle
from sbkit.bundle.config import CONFIG_FILE
from sbkit.commands.transcribe import open_detector, recognizer_options
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.model_thread import require_effective
from sbkit.runtime.runtimes import AUTO, FIRST_GPU, model_options
from sbkit.runtime.transcriber import default_batch_seconds, open_recognizer
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.serve.api import ServedModel, ServedModels
from sbkit.serve.app import Service
from sbkit.serve.middleware import Keys, Limits, Metrics, State
from sbkit.serve.recognition import RecognitionService, Workers
from sbkit.serve.server import Server, bind
from sbkit.serve.tts import Voice
from sbkit.tasks.task import import_object

ALIASES = {
    RecognitionService: (
        "gpt-transcribe",
        "gpt-4o-transcribe",
        "gpt-4o-mini-transcribe",
        "whisper-1",
    ),
    Voice: ("gpt-4o-mini-tts", "tts-1", "tts-1-hd"),
}


def serve(names: Sequence[str], folders: Sequence[Path], options: Namespace) -> int:
    """Serve bundles by their names until a signal arrives, and return the exit code.

    Raises SbkitError if a bundle cannot be used or runs on another device, two have the same name,
    or the options do not fit.
    """
    if len({*names}) < len(names):
        raise ConfigError(
            "Clients choose a bundle by the name of its folder, but two are the same: "
            f"{', '.join(names)}. Rename one."
        )
    share_free_memory()
    values = {limit.name: getattr(options, limit.name) for limit in fields(Limits)}
    limits = Limits(**{name: value for name, value in values.items() if value is not None})
    metrics = Metrics()
    state = State()
    keys = Keys(options.api_key_file)
    with ExitStack() as stack:
        listening = stack.enter_context(closing(bind(options.host, options.port)))
        is_local = ip_address(listening.getsockname()[0]).is_loopback
        if not (is_local or options.no_key or options.api_key_file):
            raise ConfigError(
                f"`--host {options.host}` admits clients on other machines, which needs keys. Pass "
                "--api-key-file FILE, or --no-key to admit everyone."
            )
        workers = stack.enter_context(closing(Workers(limits.max_concurrent)))
        models: list[ServedModel] = []
        detector = open_detector(options)
        for name, folder in zip(names, folders, strict=True):
            engine = _open(folder, options, limits, detector, workers, metrics)
            stack.enter_context(closing(engine))
            device = FIRST_GPU if options.device == "cuda" else options.device
            device = engine.effective.device if device == AUTO else device
            require_effective(engine.effective, device=device, precision=options.precision)
            created = int((folder / CONFIG_FILE).stat().st_mtime)
            readme = folder / "README.md"
            is_file = readme.is_file() and not readme.is_symlink()  # `/card` shows it to anybody
            card = readme.read_text("utf-8", "replace") if is_file else ""
            models.append(ServedModel(name=name, engine=engine, created=created, readme=card))
        kinds = {type(model.engine) for model in models}
        aliases = {kind: options.alias or ALIASES[kind] for kind in ALIASES if kind in kinds}
        service = Service(
            models=ServedModels(models=models, aliases=aliases),
            limits=limits,
            declared={name: getattr(options, name) for name in ("device", "runtime", "precision")},
            state=state,
            metrics=metrics,
            origins=options.allow_origin or (),
        )
        gc.freeze()  # loaded objects stay, so only objects of requests are searched for cycles
        gc.collect()
        server = Server(service, keys=keys)
        server.run(sockets=[listening])
    return server.exit_code()


def _open(
    folder: Path,
    options: Namespace,
    limits: Limits,
    detector: VoiceDetector | None,
    workers: Workers,
    metrics: Metrics,
) -> RecognitionService | Voice:
    """Open a bundle as a recognizer, or as a voice if its task is synthesis."""
    task = read_bundle(folder, user_modules=options.user_modules).task
    if task.synthesizer_class is not None:
        synthesizer_class = import_object(task.synthesizer_class)
        synthesizer = synthesizer_class.load(folder, **model_options(options))
        return Voice(synthesizer, workers=workers, metrics=metrics)
    bundle = open_recognizer(folder, streaming="also", **recognizer_options(options))
    batch_seconds = options.max_batch_seconds or default_batch_seconds(bundle.model.effective)
    return RecognitionService(
        bundle,
        shapes=BatchShapes.table(bundle.config.sample_rate, batch_seconds=batch_seconds),
        wait_seconds=options.max_wait_ms / 1000,
        max_seconds=limits.max_seconds,
        detector=detector,
        workers=workers,
        metrics=metrics,
    )
