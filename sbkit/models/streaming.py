"""A recognizer chunk by chunk: samples in, log-probabilities out, with a state between.

Legend: B sessions, S samples, T frames of features, U frames of 40 ms, V vocabulary.
"""

from torch import Tensor

from sbkit.audio.fbank import Fbank
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.asr import AsrModel
from sbkit.models.chunks import StreamState
from sbkit.models.encoder import COMPOSED
from sbkit.models.frontend import STRIDE, ConvFrontEnd
from sbkit.models.transformer import Transformer
from sbkit.models.voice_activity import VoiceActivityModel


class StreamingModel:
    """The parts of a recognizer that was trained for chunks; holds nothing of a session.

    Attributes:
        step: samples from one chunk to the next.
        window: samples that a chunk is computed of, which are more by what two neighbouring
            windows of the features share.
        shortest: samples that have a frame.
    """

    def __init__(
        self, model: AsrModel, features: Fbank, front_end: ConvFrontEnd, encoder: Transformer
    ) -> None:
        """Take a model and its parts, as `streaming_model` finds them."""
        self._model, self.features = model, features
        self._front_end, self._encoder = front_end, encoder
        assert encoder.streaming is not None and encoder.streaming.chunk is not None
        shift = shift_samples(features.sample_rate)
        self.shortest = window_samples(features.sample_rate)
        self.step = encoder.streaming.chunk * STRIDE**2 * shift
        self.window = self.step - shift + self.shortest

    def start(self) -> StreamState:
        """Return the state of one session before its first sample."""
        return StreamState(**self._front_end.start(), **self._encoder.start())

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: StreamState
    ) -> tuple[Tensor, Tensor, StreamState]:
        """Score every token at every frame of a chunk: (B, S), (B,) -> (B, U, V), (B,), state.

        audio_lengths: ``window``, or less of a session that ends with this chunk.
        """
        features, lengths = self.features(audio, audio_lengths)
        return self.forward_features(features, lengths, state)

    def forward_features(
        self, features: Tensor, lengths: Tensor, state: StreamState
    ) -> tuple[Tensor, Tensor, StreamState]:
        """Score every token at every frame of a chunk of features: (B, T, M), (B,) -> same."""
        x, lengths, state = self._front_end.forward_chunk(features, lengths, state)
        states, state = self._encoder.forward_chunk(x, lengths, state)
        return self._model.ctc_log_probs(states), lengths, state


ChunkedModel = StreamingModel | VoiceActivityModel


def streaming_model(model: object) -> ChunkedModel | None:
    """Return what runs a model chunk by chunk, or None for one that takes whole clips alone."""
    if isinstance(model, VoiceActivityModel):
        return model
    parts = model.encoder.modules if isinstance(model, AsrModel) else {}
    features, front_end, encoder = map(parts.get, COMPOSED)
    if (
        isinstance(model, AsrModel)
        and isinstance(features, Fbank)
        and isinstance(front_end, ConvFrontEnd)
        and isinstance(encoder, Transformer)
        and front_end.is_causal
        and encoder.streaming is not None
        and encoder.streaming.chunk is not None
    ):
        return StreamingModel(model, features, front_end, encoder)
    return None
