"""A server in a thread of this process, which hears the tones of tests/inference/tones.py."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import httpx2
import soundfile
from openai import OpenAI

from sbkit.audio.io import Samples
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.shapes import Shapes
from sbkit.serve.app import Service, make_app
from sbkit.serve.command import Server, bind
from sbkit.serve.limits import Limits
from sbkit.serve.recognizer import Recognizer
from sbkit.serve.state import State
from tests.inference.tones import RATE, ToneModel, speak, tone_bundle

SHAPES = Shapes.of(RATE, batch_seconds=10.0, clips=(1, 2, 4), seconds=(1.0, 2.0, 5.0, 30.0))


@dataclass
class Served:
    """A server, its model, and clients of it."""

    url: str
    bundle: Bundle
    model: ToneModel
    server: Server
    service: Service

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, content: bytes | None, **more: Any) -> httpx2.Response:
        """Post a form as any client would."""
        files = {} if content is None else {"file": ("talk.wav", content)}
        path = f"{self.url}/v1/audio/transcriptions"
        return httpx2.post(path, **{"files": files, "timeout": 30, **more})

    def say(self, text: str) -> bytes:
        return wav(speak(self.bundle.tokenizer, text))

    def metric(self, name: str) -> float:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def wav(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


@contextmanager
def served(folder: Path, *, keys: tuple[str, ...] = (), **limits: Any) -> Iterator[Served]:
    """Serve until the end of the block, which does not wait for the server to be ready."""
    bundle, _, model = tone_bundle(folder)
    bounds = Limits(**limits)
    recognizer = Recognizer(bundle, shapes=SHAPES, wait=0.01, limits=bounds)
    service = Service(
        recognizer=recognizer,
        names=("tones", "whisper-1"),
        created=0,
        declared={"device": "auto"},
        state=State(),
    )
    listening = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    app = make_app(service, limits=bounds, keys=keys)
    server = Server(app, service, grace_seconds=5.0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        sleep(0.01)
    try:
        yield Served(url, bundle, model, server, service)
    finally:
        server.should_exit = True
        thread.join()
        recognizer.close()
        listening.close()
