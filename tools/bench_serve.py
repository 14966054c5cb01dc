"""Measure `sbkit serve` with many clients, or attack it with misbehaving ones.

python -m tools.bench_serve BUNDLE AUDIO [--clients 32] [--seconds 60] [--rounds 3]
python -m tools.bench_serve BUNDLE AUDIO --realtime [--clients 32] [--seconds 60]
python -m tools.bench_serve BUNDLE AUDIO --soak [--clients 64] [--seconds 300]

AUDIO is a folder of clips. Each round measures many clients, one client, and the plain loop of
`sbkit transcribe` in this process: seconds of audio per second (RTFx), and latencies. With
--realtime, clients speak over WebSockets in real time. A latency is then the time from the end of a
turn to its text, which must equal the text that a single client gets. With --soak, a third of the
requests are good; the others stall, abort or send rubbish, and the table shows the memory over
time. The exit code is 1 if a good request got a wrong answer or none.
"""

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from threading import Thread
from urllib.request import urlopen

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from sbkit.audio.io import Samples, declared_seconds, find_audio_files, read_audio
from sbkit.base.process import run_main
from sbkit.runtime.transcriber import Transcriber
from tools.bench import Figures, measure_once, take_turns

RATE = 24_000  # of realtime sessions
MESSAGE_SAMPLES = 2_400
NUM_SOAK_PARTS = 10  # memory is measured after each
FAILED = "wrong or lost"
LOOP = "plain loop"
ATTACKS = ("connect", "stall", "abort", "rubbish")


@dataclass(frozen=True)
class ExpectedClip:
    """A request, the seconds of its audio, and the right text of its answer."""

    request: bytes
    seconds: float
    text: str


@dataclass
class Results:
    """The results of clients; seconds: of the audio that was answered."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


class Connection:
    """A client's connection; sending opens it again after it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, content: bytes) -> None:
        """Send bytes, over a new connection if none is open."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams[1].write(content)
        await self._streams[1].drain()

    async def receive(self) -> tuple[int, bytes]:
        """Receive the status and the body of a response."""
        assert self._streams is not None
        header = await self._streams[0].readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", header.lower())
        body = await self._streams[0].readexactly(int(length[1])) if length else b""
        return int(header.split()[1]), body

    def close(self) -> None:
        """Abort the connection, without sending what is buffered."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def main() -> int:
    """Measure or attack a server; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("audio", type=Path)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--realtime", action="store_true")
    options = parser.parse_args()
    options.clients = options.clients or (64 if options.soak else 32)
    options.seconds = options.seconds or (300.0 if options.soak else 60.0)
    files = find_audio_files(options.audio)
    with Transcriber.load(options.bundle, times=False, device="cpu") as transcriber:
        clips = [
            ExpectedClip(as_request(file.read_bytes()), declared_seconds(file), str(transcript))
            for file, transcript in zip(files, transcriber.stream(files), strict=True)
        ]
        print(f"{len(clips)} clips of {mean(clip.seconds for clip in clips):.1f} s", flush=True)
        with serving(options.bundle) as port:
            if options.realtime:
                figures = asyncio.run(converse(port, files, options))
                measure_once({f"{options.clients} speakers": lambda: figures})
                return int(figures[FAILED] > 0)
            if options.soak:
                return soak(port, clips, options)
            return measure(port, clips, options, lambda: [*transcriber.stream(files)])


@contextmanager
def serving(bundle: Path) -> Iterator[int]:
    """Start the server, and yield its port once it is ready."""
    words = ("-m", "sbkit", "serve", str(bundle), "--port=0", "--device=cpu")
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = int(server.stderr.readline().rpartition(":")[2])
            print(server.stderr.readline().strip(), flush=True)
            Thread(target=server.stderr.read, daemon=True).start()  # the log of requests
            while True:
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health/ready"):
                    break
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def as_request(content: bytes) -> bytes:
    """Write a request for the transcript of a file."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = part + content + b"\r\n--x--\r\n"
    header = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    return header.encode() + body


def measure(
    port: int,
    clips: Sequence[ExpectedClip],
    options: argparse.Namespace,
    transcribe_all: Callable[[], object],
) -> int:
    """Compare many clients, one client and the plain loop; return the exit code."""

    def measure_clients(number: int) -> Figures:
        results = asyncio.run(run_clients(port, clips, number, options.seconds, ask))
        return figures_of(results, options.seconds)

    def measure_loop() -> Figures:
        start = time.perf_counter()
        seconds = 0.0
        while time.perf_counter() - start < options.seconds:
            transcribe_all()
            seconds += sum(clip.seconds for clip in clips)
        return {"RTFx": seconds / (time.perf_counter() - start)}

    sides: dict[str, Callable[[], Figures]] = {
        f"{options.clients} clients": partial(measure_clients, options.clients),
        "one client": partial(measure_clients, 1),
        LOOP: measure_loop,
    }
    rounds = take_turns(sides, options.rounds, LOOP)
    return int(any(figures.get(FAILED) for measured in rounds.values() for figures in measured))


def figures_of(results: Results, seconds: float) -> Figures:
    """Return the figures of a round of some seconds."""
    p50, p95 = np.percentile(results.latencies or [np.nan], (50, 95))
    return {
        "RTFx": results.seconds / seconds,
        "answers/s": len(results.latencies) / seconds,
        **{"p50 (ms)": 1e3 * p50, "p95 (ms)": 1e3 * p95},
        FAILED: results.outcomes.total() - results.outcomes["right"],
    }


async def run_clients(
    port: int,
    clips: Sequence[ExpectedClip],
    clients: int,
    seconds: float,
    act: Callable[..., Awaitable[None]],
) -> Results:
    """Let clients act until the time is over, each with its own connection."""
    results = Results()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        dice = random.Random(number)
        connection = Connection(port)
        while time.perf_counter() < end:
            await act(connection, dice.choice(clips), results, dice)
        connection.close()

    await asyncio.gather(*map(client, range(clients)))
    return results


async def ask(
    connection: Connection, clip: ExpectedClip, results: Results, _: random.Random
) -> None:
    """Ask for a transcript, and compare it."""
    start = time.perf_counter()
    try:
        await connection.send(clip.request)
        status, body = await connection.receive()
    except (OSError, EOFError):
        connection.close()
        results.outcomes["lost"] += 1
        return
    results.latencies.append(time.perf_counter() - start)
    if status == 200:
        is_right = json.loads(body)["text"] == clip.text
        results.seconds += clip.seconds
        results.outcomes["right" if is_right else "wrong"] += 1
    else:
        results.outcomes[str(status)] += 1


async def converse(port: int, files: Sequence[Path], options: argparse.Namespace) -> Figures:
    """Let clients speak in real time, after one client that collects the expected texts."""
    results = Results()
    expected: dict[Path, str] = {}
    samples = {file: read_audio(file, RATE) for file in files}

    async def say_files(clip_files: Iterable[Path], pace: float) -> None:
        async with connect(f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription") as socket:
            session = {"audio": {"input": {"turn_detection": None}}}
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            for file in clip_files:
                text, seconds = await say(socket, samples[file], pace)
                if expected.setdefault(file, text) != text:
                    results.outcomes["wrong"] += 1
                elif pace:
                    results.outcomes["right"] += 1
                    results.latencies.append(seconds)
                    results.seconds += len(samples[file]) / RATE

    def random_files(number: int) -> Iterator[Path]:
        dice = random.Random(number)
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            yield dice.choice(files)

    await say_files(files, 0.0)
    await asyncio.gather(*(say_files(random_files(n), 1.0) for n in range(options.clients)))
    return figures_of(results, options.seconds)


async def say(socket: ClientConnection, samples: Samples, pace: float) -> tuple[str, float]:
    """Send a clip; return its text, and the seconds from the end of the clip to the text.

    pace: 1 sends in real time, 0 at once.
    """
    start = time.perf_counter()
    num_sent = 0
    for message in np.array_split(samples, 1 + len(samples) // MESSAGE_SAMPLES):
        audio = base64.b64encode(message.tobytes()).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        num_sent += len(message)
        await asyncio.sleep(pace * (start + num_sent / RATE - time.perf_counter()))
    ended = time.perf_counter()
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
    while not (event := json.loads(await socket.recv()))["type"].endswith("completed"):
        assert event["type"] != "error", event
    return event["transcript"], time.perf_counter() - ended


async def misbehave(
    connection: Connection, clip: ExpectedClip, results: Results, dice: random.Random
) -> None:
    """Ask for a transcript in a third of the calls; attack the server in the others."""
    attack = dice.choice(("none", "none", *ATTACKS))
    if attack == "none":
        await ask(connection, clip, results, dice)
        return
    with suppress(OSError, EOFError):
        if attack == "rubbish":
            await connection.send(as_request(dice.randbytes(dice.randrange(50_000))))
            await connection.receive()
        elif attack == "connect":
            await connection.send(dice.randbytes(20))
        elif attack == "stall":
            await connection.send(clip.request[: dice.randrange(len(clip.request))])
            await asyncio.sleep(dice.uniform(0, 2))
        else:
            await connection.send(clip.request)
            await asyncio.sleep(dice.uniform(0, 0.1))
    results.outcomes[attack] += 1
    connection.close()


def soak(port: int, clips: Sequence[ExpectedClip], options: argparse.Namespace) -> int:
    """Attack the server, and print a row for each tenth of the time; return the exit code."""
    failures = 0

    def attack() -> Figures:
        nonlocal failures
        seconds = options.seconds / NUM_SOAK_PARTS
        results = asyncio.run(run_clients(port, clips, options.clients, seconds, misbehave))
        outcomes = {name: results.outcomes[name] for name in ("right", *ATTACKS)}
        failed = results.outcomes.total() - sum(outcomes.values())
        failures += failed
        with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            metrics = response.read().decode()
        (resident,) = re.findall(r"(?m)^process_resident_memory_bytes (\S+)$", metrics)
        return {**outcomes, FAILED: failed, "memory (MB)": float(resident) / 1e6}

    measure_once({f"{options.clients} clients, {n}": attack for n in range(NUM_SOAK_PARTS)})
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
