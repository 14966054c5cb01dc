"""Transcribe a clip through wyoming-openai, as a file and in realtime, and print it: URL AUDIO."""

import asyncio
import socket
import subprocess
import sys
import time

import soundfile
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient


async def transcribe(port: int, model: str, audio: bytes, rate: int) -> None:
    """Send a clip, as Home Assistant does."""
    form = {"rate": rate, "width": 2, "channels": 1}
    async with AsyncTcpClient("127.0.0.1", port) as client:
        parts = (AudioStart(**form), AudioChunk(audio=audio, **form), AudioStop())
        for part in (Transcribe(name=model, language="en"), *parts):
            await client.write_event(part.event())
        while not Transcript.is_type((event := await client.read_event()).type):
            pass
        print(Transcript.from_event(event).text, flush=True)


if __name__ == "__main__":
    samples, hertz = soundfile.read(sys.argv[2], dtype="int16")
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    options = ["--uri", f"tcp://127.0.0.1:{number}", "--stt-openai-key", "a key"]
    options += ["--stt-openai-url", f"{sys.argv[1]}/v1", "--languages", "en"]
    options += ["--stt-models", "whisper-1", "--stt-realtime-models", "gpt-realtime-whisper"]
    bridge = subprocess.Popen([sys.executable, "-m", "wyoming_openai", *options])
    try:
        with socket.socket() as probe:
            while bridge.poll() is None and probe.connect_ex(("127.0.0.1", number)):
                time.sleep(0.1)
        for name in ("whisper-1", "gpt-realtime-whisper"):
            asyncio.run(transcribe(number, name, samples.tobytes(), hertz))
    finally:
        bridge.terminate()
