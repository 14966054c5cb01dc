"""Measure `sbkit serve` with many clients, or attack it with misbehaving ones.

python -m tools.bench_serve BUNDLE AUDIO [--runtime onnx] [--clients 32] [--seconds 60] [--rounds 3]
python -m tools.bench_serve BUNDLE AUDIO --realtime [--clients 32] [--seconds 60]
python -m tools.bench_serve BUNDLE AUDIO --soak [--clients 64] [--seconds 300]

AUDIO is a folder of clips. Each round measures many clients, then one client, then the plain loop
of `sbkit transcribe` in this process. Prints seconds of audio per second (RTFx), latencies, and the
mean batch. With --realtime the clients speak over WebSockets in real time. The latency is then from
the end of a turn to its text, which must equal the text that a single client gets. With --soak a
third of the requests is good; the others stall, abort or send rubbish. Prints how many good answers
are wrong or lost, and the memory over time. The exit code is 1 if an answer is wrong.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from threading import Thread
from urllib.request import urlopen

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from sbkit.audio.io import Samples, declared_seconds, find_audio_files, read_audio
from sbkit.base.process import exit_code
from sbkit.runtime.transcriber import Transcriber

HEADER = (
    "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: here\r\nContent-Length: {}\r\n"
    "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
)
PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
END = b"\r\n--x--\r\n"
RATE, MESSAGE_SAMPLES = 24_000, 2_400  # of realtime sessions: a second, and a message
NUM_SOAK_PARTS = 10  # memory is measured after each


@dataclass(frozen=True)
class ExpectedClip:
    """A request, and the right text of its answer."""

    request: bytes
    seconds: float
    text: str


@dataclass
class Results:
    """The results of clients; latencies: of good answers; seconds: of their audio."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)


class Connection:
    """A client's connection, which is opened again after it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, content: bytes) -> None:
        """Send bytes."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams[1].write(content)
        await self._streams[1].drain()

    async def receive(self) -> tuple[int, bytes]:
        """Receive a response: its status and its body."""
        assert self._streams is not None
        header = await self._streams[0].readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", header.lower())
        body = await self._streams[0].readexactly(int(length[1])) if length else b""
        return int(header.split()[1]), body

    def close(self) -> None:
        """Close it at once, whatever is on its way."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def main() -> int:
    """Measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("audio", type=Path)
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--decoder", help="greedy, or the bundle's own")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--realtime", action="store_true")
    options = parser.parse_args()
    options.clients = options.clients or (64 if options.soak else 32)
    options.seconds = options.seconds or (300.0 if options.soak else 60.0)
    files = find_audio_files(options.audio)
    load = {"runtime": options.runtime, "decoder": options.decoder, "device": "cpu"}
    with Transcriber.load(options.bundle, times=False, **load) as transcriber:
        clips = [
            ExpectedClip(as_request(file.read_bytes()), declared_seconds(file), transcript.text)
            for file, transcript in zip(files, transcriber.transcribe_batch(files), strict=True)
        ]
        print(f"{len(clips)} clips of {mean(clip.seconds for clip in clips):.1f} s", flush=True)
        with serving(options) as port:
            if options.realtime:
                return asyncio.run(converse(port, files, options))
            if options.soak:
                return soak(port, clips, options)
            return measure(port, clips, options, lambda: transcriber.transcribe_batch(files))


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[int]:
    """Start the server, and yield its port once it is ready."""
    command = [sys.executable, "-m", "sbkit", "serve", str(options.bundle), "--port", "0"]
    command += ["--device", "cpu", "--runtime", options.runtime]
    command += ["--decoder", options.decoder] if options.decoder else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
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
    """Write a whole request with a file."""
    body = PART + content + END
    return HEADER.format(len(body)).encode() + body


def measure(
    port: int,
    clips: Sequence[ExpectedClip],
    options: argparse.Namespace,
    loop: Callable[[], object],
) -> int:
    """Alternate between many clients, one client and the plain loop; print the medians."""
    rates: dict[str, list[float]] = {"many": [], "one": [], "loop": []}
    wrong = 0
    for _ in range(options.rounds):
        for name, clients in (("many", options.clients), ("one", 1)):
            before = batches(port)
            results = asyncio.run(run_clients(port, clips, clients, options.seconds, ask))
            rates[name].append(results.seconds / options.seconds)
            wrong += results.kinds.total() - results.kinds["right"]
            print(describe(f"{clients} clients", results, options.seconds, before, batches(port)))
        began, seconds = time.perf_counter(), 0.0
        while time.perf_counter() - began < options.seconds:
            loop()
            seconds += sum(clip.seconds for clip in clips)
        rates["loop"].append(seconds / (time.perf_counter() - began))
        print(f"plain loop: {rates['loop'][-1]:.0f} RTFx", flush=True)
    many, one, plain = (median(rounds) for rounds in rates.values())
    print(f"many clients: {many / one:.2f} times one client, {many / plain:.2f} times the loop")
    return int(wrong > 0)


def batches(port: int) -> tuple[float, float, float]:
    """Return how many batches there were, and their clips and seconds."""
    return (
        metric(port, "sbkit_batch_clips_count"),
        metric(port, "sbkit_batch_clips_sum"),
        metric(port, "sbkit_batch_seconds_sum"),
    )


def metric(port: int, name: str) -> float:
    """Read a metric of the server."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        value = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert value is not None
    return float(value[1])


def describe(
    name: str,
    results: Results,
    seconds: float,
    before: Sequence[float],
    after: Sequence[float],
) -> str:
    """Describe a round in one line."""
    ordered = sorted(results.latencies) or [0.0]
    parts = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 0.99)]
    count, clips, padded = (end - begin for begin, end in zip(before, after, strict=True))
    return (
        f"{name}: {results.seconds / seconds:.0f} RTFx, {len(ordered) / seconds:.1f} answers/s, "
        f"latency p50 {1e3 * parts[0]:.0f}, p95 {1e3 * parts[1]:.0f}, p99 {1e3 * parts[2]:.0f} ms, "
        f"batches of {clips / max(1, count):.1f} clips and {padded / max(1, count):.1f} s; "
        f"{dict(results.kinds)}"
    )


async def run_clients(
    port: int,
    clips: Sequence[ExpectedClip],
    clients: int,
    seconds: float,
    act: Callable[..., object],
) -> Results:
    """Let clients act until the time is over, each with its own connection."""
    results, until = Results(), time.perf_counter() + seconds

    async def client(number: int) -> None:
        choose, connection = random.Random(number), Connection(port)
        while time.perf_counter() < until:
            await act(connection, choose.choice(clips), results, choose)  # type: ignore[misc]
        connection.close()

    await asyncio.gather(*map(client, range(clients)))
    return results


async def ask(
    connection: Connection, clip: ExpectedClip, results: Results, _: random.Random
) -> None:
    """Ask for a transcript, and compare it."""
    began = time.perf_counter()
    try:
        await connection.send(clip.request)
        status, body = await connection.receive()
    except (OSError, EOFError):
        connection.close()
        results.kinds["lost"] += 1
        return
    results.latencies.append(time.perf_counter() - began)
    if status == 200:
        right = json.loads(body)["text"] == clip.text
        results.seconds += clip.seconds
        results.kinds["right" if right else "wrong"] += 1
    else:
        results.kinds[str(status)] += 1


async def converse(port: int, files: Sequence[Path], options: argparse.Namespace) -> int:
    """Let clients speak in real time, after one client that collects the expected texts."""
    results, expected = Results(), dict[Path, str]()
    spoken = {file: read_audio(file, RATE) for file in files}

    async def say_each(clip_files: Iterable[Path], pace: float) -> None:
        async with connect(f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription") as socket:
            options = {"audio": {"input": {"turn_detection": None}}}
            await socket.send(json.dumps({"type": "session.update", "session": options}))
            for file in clip_files:
                text, seconds = await say(socket, spoken[file], pace)
                if expected.setdefault(file, text) != text:
                    results.kinds["wrong"] += 1
                elif pace:
                    results.kinds["right"] += 1
                    results.latencies.append(seconds)
                    results.seconds += len(spoken[file]) / RATE

    def choices(number: int) -> Iterator[Path]:
        choose, until = random.Random(number), time.perf_counter() + options.seconds
        while time.perf_counter() < until:
            yield choose.choice(files)

    await say_each(files, 0.0)
    before = batches(port)
    await asyncio.gather(*(say_each(choices(n), 1.0) for n in range(options.clients)))
    name = f"{options.clients} speakers"
    print(describe(name, results, options.seconds, before, batches(port)))
    return int(results.kinds["wrong"] > 0)


async def say(socket: ClientConnection, samples: Samples, pace: float) -> tuple[str, float]:
    """Say a clip message by message; return its text, and the seconds until it arrived."""
    began, num_sent = time.perf_counter(), 0
    for message in np.array_split(samples, 1 + len(samples) // MESSAGE_SAMPLES):
        audio = base64.b64encode(message.tobytes()).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        num_sent += len(message)
        await asyncio.sleep(pace * (began + num_sent / RATE - time.perf_counter()))
    ended = time.perf_counter()
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
    while not (event := json.loads(await socket.recv()))["type"].endswith("completed"):
        assert event["type"] != "error", event
    return event["transcript"], time.perf_counter() - ended


async def misbehave(
    connection: Connection, clip: ExpectedClip, results: Results, choose: random.Random
) -> None:
    """Ask as `ask` does, or misbehave."""
    kind = choose.choice(("good", "good", "connect", "stall", "abort", "rubbish"))
    if kind == "good":
        await ask(connection, clip, results, choose)
        return
    with suppress(OSError, EOFError):
        if kind == "rubbish":
            await connection.send(as_request(choose.randbytes(choose.randrange(50_000))))
            await connection.receive()
        elif kind == "connect":
            await connection.send(choose.randbytes(20))
        else:
            part = choose.randrange(len(clip.request)) if kind == "stall" else None
            await connection.send(clip.request[:part])
            await asyncio.sleep(choose.uniform(0, 2 if kind == "stall" else 0.1))
    results.kinds[kind] += 1
    connection.close()


def soak(port: int, clips: Sequence[ExpectedClip], options: argparse.Namespace) -> int:
    """Attack the server; print how many good requests failed, and its memory over time."""
    memory: list[float] = []
    total, seconds = Counter[str](), options.seconds / NUM_SOAK_PARTS
    for _ in range(NUM_SOAK_PARTS):
        results = asyncio.run(run_clients(port, clips, options.clients, seconds, misbehave))
        total += results.kinds
        memory.append(metric(port, "process_resident_memory_bytes") / 1e6)
    print(f"{options.seconds:g} s of {options.clients} clients: {dict(total)}")
    print(f"memory in MB over time: {', '.join(f'{mb:.0f}' for mb in memory)}")
    bad = {"connect", "stall", "abort", "rubbish", "right"}
    return int(bool(total.keys() - bad))


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt as error:
        code = exit_code(error)
    sys.exit(code)
