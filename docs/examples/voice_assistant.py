"""Talk to an assistant: Pipecat holds the conversation, `sbkit serve` listens and speaks.

    sbkit serve my-live-model my-voice
    python docs/examples/voice_assistant.py [http://127.0.0.1:8000]

The second command needs PortAudio and `pip install 'pipecat-ai[local,openai]'`, but not sbkit: it
may run in another environment, on another machine. Wear headphones: what the microphone hears
interrupts the answer. Ctrl-C ends the conversation.

    microphone -> OpenAIRealtimeSTTService -> UserTurnProcessor -> AnswerProcessor
        -> OpenAITTSService -> loudspeaker
"""

import asyncio
import sys

from loguru import logger
from pipecat.frames.frames import Frame, TranscriptionFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.turns.user_turn_processor import UserTurnProcessor
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

API_KEY = "none"  # one of the keys of the server; any text if it needs none


async def answer(text: str) -> str:
    """Repeat what the user said; ask a language model here instead."""
    return text


class AnswerProcessor(FrameProcessor):
    """Answer the transcript of each turn; new speech cancels an answer that is not finished."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            print(">", frame.text, flush=True)
            reply = await answer(frame.text)
            print("<", reply, flush=True)
            await self.push_frame(TTSSpeakFrame(reply))
        else:
            await self.push_frame(frame, direction)


def build_pipeline(url: str, microphone: FrameProcessor, loudspeaker: FrameProcessor) -> Pipeline:
    """Put the services of a server between a microphone and a loudspeaker."""
    recognizer = OpenAIRealtimeSTTService(
        api_key=API_KEY,
        base_url=f"{url.replace('http', 'ws', 1)}/v1/realtime",
        turn_detection={"type": "server_vad"},  # the server finds the ends of turns
        settings=OpenAIRealtimeSTTService.Settings(model="whisper-1", language=None),
    )
    turns = UserTurnProcessor(user_turn_strategies=ExternalUserTurnStrategies())
    voice = OpenAITTSService(
        api_key=API_KEY,
        base_url=f"{url}/v1",
        settings=OpenAITTSService.Settings(model="tts-1", voice="alloy"),
    )
    return Pipeline([microphone, recognizer, turns, AnswerProcessor(), voice, loudspeaker])


async def main(url: str) -> None:
    """Hold a conversation with the default microphone and loudspeaker."""
    # Imported here because a test runs the pipeline on a machine without PortAudio.
    from pipecat.transports.local.audio import LocalAudioTransport, LocalAudioTransportParams

    logger.configure(handlers=[{"sink": sys.stderr, "level": "WARNING"}])
    devices = LocalAudioTransport(
        LocalAudioTransportParams(audio_in_enabled=True, audio_out_enabled=True)
    )
    pipeline = build_pipeline(url, devices.input(), devices.output())
    runner = WorkerRunner()
    await runner.add_workers(PipelineWorker(pipeline, idle_timeout_secs=None))
    await runner.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
