"""Run bundles with torch or onnxruntime: transcription, voice detection, codecs and synthesis.

A model runs in a thread of its own. Torch is only imported to run a bundle with it.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.runtime.codec import Codec as Codec
    from sbkit.runtime.runtimes import open_model as open_model
    from sbkit.runtime.synthesizer import Synthesizer as Synthesizer
    from sbkit.runtime.torch_model import load_bundle as load_bundle
    from sbkit.runtime.transcriber import Transcriber as Transcriber
    from sbkit.runtime.transcriber import Transcript as Transcript
    from sbkit.runtime.voice_detector import VoiceDetector as VoiceDetector

__getattr__, __dir__ = lazy_names(
    "sbkit.runtime",
    Codec="codec",
    Synthesizer="synthesizer",
    Transcriber="transcriber",
    Transcript="transcriber",
    VoiceDetector="voice_detector",
    load_bundle="torch_model",
    open_model="runtimes",
)
