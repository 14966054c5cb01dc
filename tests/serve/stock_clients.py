"""Transcribe a file at a server with Pipecat and LiveKit, and print the texts: URL AUDIO.

Then say the file to the voice assistant of the docs, and print what it recognizes and answers.
"""

import asyncio
import io
import sys
from collections.abc import Iterable

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
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import SleepFrame, run_test

from docs.examples.voice_assistant import build_pipeline

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
    params = PipelineParams(audio_in_sample_rate=rate)
    for kind, base_url in ((OpenAISTTService, f"{url}/v1"), (OpenAIRealtimeSTTService, socket)):
        service = kind(api_key=KEY, base_url=base_url, settings=kind.Settings(model=MODEL))
        frames_sent = [
            SleepFrame(1.0),  # until it has connected
            frames.VADUserStartedSpeakingFrame(),
            *input_frames(audio, rate),
            frames.VADUserStoppedSpeakingFrame(),
            SleepFrame(3.0),  # until the answer has come
        ]
        down, _ = await run_test(
            service, frames_to_send=frames_sent, pipeline_params=params, start_timeout=20.0
        )
        texts = [frame.text for frame in down if isinstance(frame, frames.TranscriptionFrame)]
        print(*texts, flush=True)
    voice = OpenAITTSService(
        api_key=KEY, base_url=f"{url}/v1", settings=OpenAITTSService.Settings(**VOICE)
    )
    down, _ = await run_test(
        voice,
        frames_to_send=[frames.TTSSpeakFrame(TEXT), SleepFrame(3.0)],
        pipeline_params=PipelineParams(audio_out_sample_rate=OUT),
        start_timeout=20.0,
    )
    print(recognize_speech(url, down), flush=True)


async def assistant(url: str, audio: bytes, rate: int) -> None:
    """Say a clip to the voice assistant, and recognize the answer that it speaks."""
    down, _ = await run_test(
        build_pipeline(url, microphone=IdentityFilter(), loudspeaker=IdentityFilter()),
        frames_to_send=[SleepFrame(1.0), *input_frames(audio, rate), SleepFrame(3.0)],
        pipeline_params=PipelineParams(audio_in_sample_rate=rate, audio_out_sample_rate=OUT),
        start_timeout=20.0,
    )
    print(recognize_speech(url, down), flush=True)


def input_frames(audio: bytes, rate: int) -> list[frames.InputAudioRawFrame]:
    """Cut a clip into the blocks of 20 ms that a microphone would send."""
    step = rate // 50 * 2
    blocks = [audio[start : start + step] for start in range(0, len(audio), step)]
    return [frames.InputAudioRawFrame(block, rate, 1) for block in blocks]


def recognize_speech(url: str, down: Iterable[frames.Frame]) -> str:
    """Return the text that the server recognizes in the speech of frames."""
    spoken = b"".join(frame.audio for frame in down if isinstance(frame, frames.TTSAudioRawFrame))
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(spoken, "<i2"), OUT, format="WAV")
    client = OpenAI(api_key=KEY, base_url=f"{url}/v1")
    speech = ("speech.wav", file.getvalue())
    return client.audio.transcriptions.create(model=MODEL, file=speech).text


if __name__ == "__main__":
    samples, hertz = soundfile.read(sys.argv[2], dtype="int16")
    for client in (livekit, pipecat, assistant):
        asyncio.run(client(sys.argv[1], samples.tobytes(), hertz))
