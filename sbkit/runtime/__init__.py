"""Run bundles with torch or onnxruntime: recognition, live speech, voice activity, codecs, TTS.

A model runs in a thread of its own. Torch is only imported to run a bundle with it. Speech that is
still being spoken has a `Session` of a `StreamingRecognizer`, which turns samples into `Event`s.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.runtime.codec import Codec as Codec
    from sbkit.runtime.runtimes import open_model as open_model
    from sbkit.runtime.session import EndpointRules as EndpointRules
    from sbkit.runtime.session import Event as Event
    from sbkit.runtime.session import Final as Final
    from sbkit.runtime.session import Session as Session
    from sbkit.runtime.session import StreamingRecognizer as StreamingRecognizer
    from sbkit.runtime.sources import audio_blocks as audio_blocks
    from sbkit.runtime.synthesizer import Synthesizer as Synthesizer
    from sbkit.runtime.torch_model import load_bundle as load_bundle
    from sbkit.runtime.transcriber import Transcriber as Transcriber
    from sbkit.runtime.transcriber import Transcript as Transcript
    from sbkit.runtime.voice_detector import VoiceDetector as VoiceDetector

__getattr__, __dir__ = lazy_names(
    "sbkit.runtime",
    Codec="codec",
    EndpointRules="session",
    Event="session",
    Final="session",
    Session="session",
    StreamingRecognizer="session",
    Synthesizer="synthesizer",
    Transcriber="transcriber",
    Transcript="transcriber",
    VoiceDetector="voice_detector",
    audio_blocks="sources",
    load_bundle="torch_model",
    open_model="runtimes",
)
