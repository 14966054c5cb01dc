"""Transcribe a file at a server with Pipecat and LiveKit, and print the texts: URL < AUDIO.

Then say the file to the voice assistant of the docs, and print what it recognizes and answers.
"""

import asyncio
import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import soundfile
from livekit.agents.stt import SpeechEventType
from livekit.agents.utils import http_context
from livekit.plugins import openai
from livekit.rtc import AudioFrame
from openai import OpenAI
from pipecat.frames import frames
from pipecat.pipeline.worker import PipelineParams
from pipecat.processors.filters.identity_filter import IdentityFilter
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import SleepFrame, run_test

from docs.examples.voice_assistant import build_pipeline
from tests.serve.server import wav

KEY, MODEL, TEXT = "a key", "whisper-1", "the dog"
OUT = 24_000  # samples a second of speech
VOICE = {"model": "anna", "voice": "alloy"}


async def livekit(url: str, audio: bytes, rate: int) -> None:
    """Send a clip as a file, speech of its text, and the clip in realtime up to an endpoint."""
    frame = AudioFrame(audio, rate, 1, len(audio) // 2)
    options = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL}
    result = await openai.STT(**options).recognize(frame)
    print(result.alternatives[0].text, flush=True)
    async with http_context.open():
        voice = openai.TTS(base_url=f"{url}/v1", api_key=KEY, response_format="wav", **VOICE)
        spoken = await voice.synthesize(TEXT).collect()
        result = await openai.STT(**options).recognize(spoken)
        print(result.alternatives[0].text, flush=True)
        stream = openai.STT(**options, use_realtime=True).stream()
        stream.push_frame(frame)
        async for event in stream:
            if event.type == SpeechEventType.FINAL_TRANSCRIPT:
                print(event.alternatives[0].text, flush=True)
                break
        await stream.aclose()


async def pipecat(url: str, audio: bytes, rate: int) -> None:
    """Send a clip as a file and in realtime, with marks of its speech; then speech of its text."""
    socket = f"{url.replace('http', 'ws')}/v1/realtime"
    start, stop = frames.VADUserStartedSpeakingFrame(), frames.VADUserStoppedSpeakingFrame()
    for kind, base_url in ((OpenAISTTService, f"{url}/v1"), (OpenAIRealtimeSTTService, socket)):
        service = kind(api_key=KEY, base_url=base_url, settings=kind.Settings(model=MODEL))
        down = await run(service, [start, *input_frames(audio, rate), stop], rate)
        texts = [frame.text for frame in down if isinstance(frame, frames.TranscriptionFrame)]
        print(*texts, flush=True)
    settings = OpenAITTSService.Settings(**VOICE)
    voice = OpenAITTSService(api_key=KEY, base_url=f"{url}/v1", settings=settings)
    print_speech(url, await run(voice, [frames.TTSSpeakFrame(TEXT)], rate))


async def assistant(url: str, audio: bytes, rate: int) -> None:
    """Say a clip to the voice assistant, and recognize the answer that it speaks."""
    pipeline = build_pipeline(url, microphone=IdentityFilter(), loudspeaker=IdentityFilter())
    print_speech(url, await run(pipeline, input_frames(audio, rate), rate))


async def run(part: FrameProcessor, sent: Sequence[frames.Frame], rate: int) -> Sequence[Any]:
    """Run a part of a pipeline with frames, and return those that it passes on."""
    down, _ = await run_test(
        part,  # it needs a second to connect, and three to answer
        frames_to_send=[SleepFrame(1.0), *sent, SleepFrame(3.0)],
        pipeline_params=PipelineParams(audio_in_sample_rate=rate, audio_out_sample_rate=OUT),
        start_timeout=20.0,
    )
    return down


def input_frames(audio: bytes, rate: int) -> list[frames.InputAudioRawFrame]:
    """Cut a clip into the blocks of 20 ms that a microphone would send."""
    step = rate // 50 * 2
    blocks = [audio[start : start + step] for start in range(0, len(audio), step)]
    return [frames.InputAudioRawFrame(block, rate, 1) for block in blocks]


def print_speech(url: str, down: Sequence[Any]) -> None:
    """Print the text that the server recognizes in the speech of frames."""
    spoken = b"".join(frame.audio for frame in down if isinstance(frame, frames.TTSAudioRawFrame))
    client = OpenAI(api_key=KEY, base_url=f"{url}/v1").audio.transcriptions
    speech = ("speech.wav", wav(np.frombuffer(spoken, "<i2"), OUT))
    print(client.create(model=MODEL, file=speech).text, flush=True)


if __name__ == "__main__":
    samples, hertz = soundfile.read(io.BytesIO(sys.stdin.buffer.read()), dtype="int16")
    for client in (livekit, pipecat, assistant):
        asyncio.run(client(sys.argv[1], samples.tobytes(), hertz))
