"""A server in a thread of this process, for the tones of tests/runtime/tones.py."""

import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
import numpy as np
import soundfile
import uvicorn
from openai import OpenAI
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import connect

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import EffectiveRuntime, Encoded
from sbkit.runtime.batch_shapes import BatchShapes
from sbkit.runtime.clients import Workers
from sbkit.runtime.model_thread import ModelThread
from sbkit.serve.api import ServedModel, ServedModels
from sbkit.serve.app import TRANSCRIPTION_ROUTE, Service
from sbkit.serve.middleware import Limits, Metrics
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.server import bind, make_server, run
from sbkit.serve.tts import Voice
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.tts.predict import Speech
from sbkit.tasks.vad.predict import VoiceDetector
from sbkit.text.tokenizer import Tokenizer
from tests.runtime.tones import RATE, ToneModel, speak, tone_bundle

SHAPES = BatchShapes.grid(RATE, batch_seconds=10.0, clips=(1, 2, 4, 8), seconds=(1, 2, 5, 30))
Tones = tuple[AsrBundle[ModelThread], Tokenizer, ToneModel]


@dataclass
class RunningServer:
    """A server, its model, and clients of it."""

    port: int
    model: ToneModel
    tokenizer: Tokenizer
    http_server: uvicorn.Server
    service: Service
    thread: threading.Thread
    wyoming_port: int | None

    def __post_init__(self) -> None:  # a cached property is made by several threads at once
        self.client = httpx2.Client(base_url=self.url, timeout=120.0)

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="a key", max_retries=0, http_client=self.client
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx2.Response:
        return self.client.get(path)

    def post(self, audio: bytes | None = None, **more: Any) -> httpx2.Response:
        """Post a form with a file, or any other body."""
        form = {} if audio is None else {"files": {"file": ("talk.wav", audio)}}
        return self.client.post(TRANSCRIPTION_ROUTE, **form, **more)

    def say(self, text: str) -> bytes:
        return wav(speak(self.tokenizer, text))

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    @contextmanager
    def busy(self) -> Iterator[threading.Event]:
        """Keep the model busy with its first batch until the end of the block.

        Yields an event that is set once the model has this batch.
        """
        start, end, encode = threading.Event(), threading.Event(), self.model.encode

        def wait(clips: Sequence[Samples], sides: Any = ()) -> list[Encoded]:
            start.set()
            end.wait()
            return encode(clips, sides)

        self.model.encode = wait  # type: ignore[method-assign]
        try:
            yield start
        finally:
            end.set()
            self.model.encode = encode  # type: ignore[method-assign]


class ToneSpeaker:
    """Say a text in tones, sentence by sentence."""

    sample_rate, language = RATE, "en"
    runs_on = EffectiveRuntime(runtime="tones", device="cpu", precision="fp32")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def stream(self, text: str, speed: float = 1.0, max_seconds: float = math.inf) -> Speech:
        sentences = [part.strip() for part in text.split(".") if part.strip()]
        if not sentences or not set(text) <= set("abcdefghijklmnopqrstuvwxyz ."):
            raise SbkitError(f"Only letters can be spoken, but the text is {text}.")
        spoken = (speak(self._tokenizer, sentence) / np.float32(32768) for sentence in sentences)
        audio = (np.resize(sentence, round(len(sentence) / speed)) for sentence in spoken)
        return Speech(audio, ())

    def close(self) -> None:
        pass


def wav(samples: Samples, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


def handshake(server: RunningServer, path: str = "/v1/realtime", **options: Any) -> Response:
    """Open a WebSocket and close it, unless the server refuses it; return its answer."""
    try:
        with connect(f"ws://127.0.0.1:{server.port}{path}", **options) as session:
            assert session.response is not None
            return session.response
    except InvalidStatus as refused:
        return refused.response


def silence(seconds: float) -> bytes:
    return wav(np.zeros(round(seconds * RATE), np.int16))


def wait_for(condition: Any) -> None:
    until = monotonic() + 20
    while not condition():
        assert monotonic() < until
        sleep(0.01)


@contextmanager
def running_server(
    folder: Path,
    *,
    tones: Tones | None = None,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    is_ready: bool = True,
    language: str | None = None,
    readme: str = "",
    detector: VoiceDetector | None = None,
    speaker: Callable[[Tokenizer], Any] | None = None,
    second: Tones | None = None,
    speaks_wyoming: bool = False,
    **limits: Any,
) -> Iterator[RunningServer]:
    """Serve a recognizer, perhaps a second one, and the voice that ``speaker`` makes, if any.

    Yields once the server is ready, unless ``is_ready`` is false.
    """
    bundle, tokenizer, model = tones or tone_bundle(folder)
    bundle = replace(bundle, config=replace(bundle.config, language=language))
    bundles = {"tones": bundle} if second is None else {"tones": bundle, "second": second[0]}
    bounds = Limits(**limits)
    workers, metrics = Workers(bounds.max_concurrent), Metrics()
    models: list[ServedModel] = []
    for name, recognizer_bundle in bundles.items():
        recognizer = RecognitionService(
            bundle=recognizer_bundle,
            shapes=SHAPES,
            wait_seconds=0.01,
            limits=bounds,
            workers=workers,
            metrics=metrics,
            detector=detector,
        )
        models.append(ServedModel(name=name, engine=recognizer, readme=readme))
    if speaker is not None:
        voice = Voice(speaker(tokenizer), workers=workers, metrics=metrics)
        models.append(ServedModel(name="anna", engine=voice))
    service = Service(
        models=ServedModels(models=models),
        limits=bounds,
        declared={"device": "auto"},
        metrics=metrics,
        keys=keys,
        origins=origins,
    )
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    http_server = make_server(service)
    wyoming = bind("127.0.0.1", 0) if speaks_wyoming else None
    wyoming_port = wyoming and wyoming.getsockname()[1]
    thread = threading.Thread(target=run, args=(http_server, service, listener, wyoming))
    thread.start()
    try:
        wait_for(lambda: http_server.started and service.is_ready == is_ready)
        fields = (port, model, tokenizer, http_server, service, thread, wyoming_port)
        yield (server := RunningServer(*fields))
        server.client.close()
    finally:
        http_server.should_exit = True
        thread.join()
        workers.close()
        for served in models:
            if isinstance(served.engine, RecognitionService):  # the caller closes the speaker
                served.engine.close()
        listener.close()
