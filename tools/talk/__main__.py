"""Talk to an echo: microphone, recognizer, callback, synthesizer, loudspeaker.

python -m tools.talk BUNDLE [SOURCE] [--voice BUNDLE] [--vad BUNDLE|silero] [--out FILE]

BUNDLE is a streaming recognizer; SOURCE is a file, which is paced in real time, or mic. Without a
voice, espeak-ng speaks. Prints the recognized text, the answer and, after each turn, the
milliseconds that each stage added from the end of the last word to the first sound. With --out, the
answers are written to a file, which the recognizer then transcribes.
"""

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from sbkit.audio.io import FULL_SCALE
from sbkit.audio.resample import Signal
from sbkit.base.errors import ConfigError
from sbkit.base.process import run_main
from sbkit.runtime.synthesizer import Synthesizer
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.streaming.session import Event, Final, Session, StreamingRecognizer
from sbkit.streaming.sources import MICROPHONE, audio_blocks
from tools.talk.pipeline import Answer, Pipeline, TextToSpeech, Turn
from tools.talk.players import FilePlayer, Speakers


class Espeak:
    """The voice of the command espeak-ng."""

    sample_rate: ClassVar = 22_050
    HEADER_BYTES = 44  # of WAV

    def __init__(self, language: str) -> None:
        """Choose a language; raises ConfigError without the command."""
        if shutil.which("espeak-ng") is None:
            raise ConfigError(
                "There is no voice. Pass --voice BUNDLE, or install espeak-ng (on Debian: apt-get "
                "install espeak-ng)."
            )
        self._command = ["espeak-ng", "-v", language, "--stdin", "--stdout"]

    def stream(self, text: str) -> Iterator[Signal]:
        """Yield the whole sound of a text (S,)."""
        process = subprocess.run(
            self._command, input=text.encode(), capture_output=True, check=True
        )
        samples = np.frombuffer(process.stdout[self.HEADER_BYTES :], "<i2")
        yield samples.astype(np.float32) / np.float32(FULL_SCALE)


def show(event: Event | Turn) -> None:
    """Print recognized text, an answer, or the trace of a turn."""
    match event:
        case Final(text=text):
            print(">", text, flush=True)
        case Answer(text=text):
            print("<", text, flush=True)
        case Turn():
            print(" ", event, flush=True)


def main() -> None:
    """Repeat all speech until the source ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("bundle", metavar="BUNDLE", type=Path)
    parser.add_argument("source", metavar="SOURCE", nargs="?", default=MICROPHONE)
    parser.add_argument("--voice", metavar="BUNDLE", type=Path)
    parser.add_argument("--vad", metavar="BUNDLE|silero")
    parser.add_argument("--out", metavar="FILE", type=Path, help="in place of the loudspeaker")
    parser.add_argument("--pace", metavar="X", type=float, default=1.0, help="of a file")
    parser.add_argument("--language", metavar="CODE", default="en", help="of espeak-ng")
    options = parser.parse_args()
    detector = None if options.vad is None else VoiceDetector.load(options.vad)
    with ExitStack() as stack:
        recognizer = stack.enter_context(StreamingRecognizer.load(options.bundle))
        voice: TextToSpeech
        if options.voice is None:
            voice = Espeak(options.language)
        else:
            voice = stack.enter_context(Synthesizer.load(options.voice))
        Pipeline(
            recognizer,
            lambda text: text,
            detector=detector,
            synthesizer=voice,
            player=partial(FilePlayer, options.out) if options.out else Speakers,
            on_event=show,
        ).run(audio_blocks(options.source, recognizer.sample_rate, pace=options.pace))
        if options.out is not None:
            print(f"recognized again: {_recognize(recognizer, options.out)}")


def _recognize(recognizer: StreamingRecognizer, file: Path) -> str:
    session = Session(recognizer)
    events: list[Event] = []
    for block in audio_blocks(str(file), recognizer.sample_rate):
        events += session.push(block)
    events += session.finish()
    return " ".join(event.text for event in events if isinstance(event, Final))


if __name__ == "__main__":
    run_main(main)
