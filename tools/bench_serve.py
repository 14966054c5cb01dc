"""Measure `sbkit serve` with many clients.

python -m tools.bench_serve BUNDLE AUDIO [--clients 32] [--seconds 60] [--rounds 3]

AUDIO is a folder of clips. Each round measures many clients, one client, and the plain loop of
`sbkit transcribe`, which runs in this process: seconds of audio per second (RTFx), and latencies.
The exit code is 1 if an answer was wrong.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from threading import Thread
from urllib.request import urlopen

import numpy as np

from sbkit.audio.io import declared_seconds, find_audio_files
from sbkit.base.process import run_main
from sbkit.tasks.asr.predict import Transcriber
from tools.bench import Figures, take_turns

WRONG_ANSWERS = "wrong"
PLAIN_LOOP = "plain loop"


@dataclass(frozen=True)
class ExpectedClip:
    """A request, the seconds of its audio, and the right text of its answer."""

    request: bytes
    seconds: float
    text: str


@dataclass
class Results:
    """The results of clients; `seconds` counts the audio with right answers."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_wrong: int = 0


def main() -> int:
    """Measure a server; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("audio", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files = find_audio_files(options.audio)
    with Transcriber.load(options.bundle, times=False, device="cpu") as transcriber:
        clips = [
            ExpectedClip(as_request(file.read_bytes()), declared_seconds(file), str(transcript))
            for file, transcript in zip(files, transcriber.stream(files), strict=True)
        ]
        print(f"{len(clips)} clips of {mean(clip.seconds for clip in clips):.1f} s", flush=True)
        with serving(options.bundle) as port:
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
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n"
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
        results = asyncio.run(run_clients(port, clips, number, options.seconds))
        p50, p95 = np.percentile(results.latencies or [np.nan], (50, 95))
        return {
            "RTFx": results.seconds / options.seconds,
            "answers/s": len(results.latencies) / options.seconds,
            **{"p50 (ms)": 1e3 * p50, "p95 (ms)": 1e3 * p95},
            WRONG_ANSWERS: results.num_wrong,
        }

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
        PLAIN_LOOP: measure_loop,
    }
    rounds = take_turns(sides, options.rounds, PLAIN_LOOP)
    return int(any(figures.get(WRONG_ANSWERS) for figures in chain(*rounds.values())))


async def run_clients(
    port: int, clips: Sequence[ExpectedClip], clients: int, seconds: float
) -> Results:
    """Let clients send requests until the time is over, each over its own connection."""
    results = Results()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        dice = random.Random(number)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (begin := time.perf_counter()) < end:
            clip = dice.choice(clips)
            writer.write(clip.request)
            header = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", header.lower())
            body = await reader.readexactly(int(length[1])) if length else b""
            results.latencies.append(time.perf_counter() - begin)
            if header.split()[1] == b"200" and json.loads(body)["text"] == clip.text:
                results.seconds += clip.seconds
            else:
                results.num_wrong += 1
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    return results


if __name__ == "__main__":
    run_main(main)
