"""A recognizer chunk by chunk: samples in, log-probabilities out, with a state between.

Legend: B sessions, S samples, T frames of features, U frames of 40 ms, V vocabulary.
"""

from torch import Tensor

from sbkit.audio.fbank import Fbank
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.asr import AsrModel
from sbkit.models.chunks import StreamState
from sbkit.models.frontend import STRIDE, ConvFrontEnd
from sbkit.models.transformer import Transformer


class StreamingModel:
    """The parts of a recognizer that was trained for chunks; holds nothing of a session.

    Attributes:
        step: samples from one chunk to the next.
        window: samples that a chunk is computed of, which are more by what two neighbouring
            windows of the features share.
    """

    def __init__(self, model: AsrModel, chunk: int) -> None:
        """Take a model for which `chunk_of` found that its chunks have so many frames."""
        self._model, parts = model, model.encoder.modules
        self._features, self._front_end, self._encoder = (
            parts[name] for name in ("compute_features", "CNN", "Transformer")
        )
        rate = self._features.sample_rate
        self.step = chunk * STRIDE**2 * shift_samples(rate)
        self.window = self.step - shift_samples(rate) + window_samples(rate)

    def start(self) -> StreamState:
        """Return the state of one session before its first sample."""
        return StreamState(**self._front_end.start(), **self._encoder.start())

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: StreamState
    ) -> tuple[Tensor, Tensor, StreamState]:
        """Score every token at every frame of a chunk: (B, S), (B,) -> (B, U, V), (B,), state.

        audio_lengths: ``window``, or less of a session that ends with this chunk.
        """
        features, lengths = self._features(audio, audio_lengths)
        x, lengths, state = self._front_end.forward_chunk(features, lengths, state)
        states, state = self._encoder.forward_chunk(x, lengths, state)
        return self._model.ctc_log_probs(states), lengths, state


def chunk_of(model: object) -> int | None:
    """Return the frames of a chunk, or None for a model that takes whole clips alone."""
    parts = model.encoder.modules if isinstance(model, AsrModel) else {}
    kinds = {"compute_features": Fbank, "CNN": ConvFrontEnd, "Transformer": Transformer}
    if any(not isinstance(parts.get(name), kind) for name, kind in kinds.items()):
        return None
    streaming = parts["Transformer"].streaming
    return streaming.chunk if streaming is not None and parts["CNN"].is_causal else None
