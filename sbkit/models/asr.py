"""A recognizer: encoder of audio -> linear_stack -> ctc_lin; decoder of the encoder -> seq_lin.

Legend: B utterances, S samples, T frames of features, U frames of the encoder, L tokens, M mel
bins, D model width, V vocabulary.

Training, transcription and export all call this model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.audio.augment import AugmentFeatures
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import ConfigError
from sbkit.base.units import shift_samples, window_samples
from sbkit.models.encoder import COMPOSED, AcousticModel, make_encoder
from sbkit.models.frontend import STRIDE, ConvFrontEnd
from sbkit.models.parts import token_embedding
from sbkit.models.streaming import EncoderState
from sbkit.models.transformer import Transformer
from sbkit.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Predictions:
    """What the model predicts from a batch."""

    states: Tensor  # of the encoder, (B, U, D)
    log_probs: Tensor  # of CTC, (B, U, V)
    intermediate: Tensor | None  # the same from the middle of the encoder, if requested
    frame_lengths: Tensor  # (B,)
    logits: Tensor | None  # of the decoder, (B, L + 1, V), if there were tokens


class AsrModel(AcousticModel):
    """Call the parts of a recognizer in order.

    Parts may be sbkit's, SpeechBrain's or the user's. The encoder is either ``encoder``, or
    ``compute_features``, ``CNN`` and ``Transformer``. Without ``seq_lin`` the model does CTC only;
    without ``linear_stack``, ``ctc_lin`` reads the encoder directly.
    """

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        vocabulary: Vocabulary,
        ctc_lin: nn.Module,
        seq_lin: nn.Module | None = None,
        linear_stack: nn.Module | None = None,
        encoder: nn.Module | None = None,
        compute_features: nn.Module | None = None,
        CNN: nn.Module | None = None,
        Transformer: nn.Module | None = None,
    ) -> None:
        parts = {"encoder": encoder, "compute_features": compute_features}
        parts |= {"CNN": CNN, "Transformer": Transformer}
        built = make_encoder(parts, padding=vocabulary.blank)
        heads = {"ctc_lin": ctc_lin} | ({} if seq_lin is None else {"seq_lin": seq_lin})
        stack = {} if linear_stack is None else {"linear_stack": linear_stack}
        super().__init__(model=model, encoder=built, heads=heads | stack)
        for name, head in heads.items():
            vocabulary.check_head(name=name, outputs=head_size(head))
        embedding = token_embedding(built.part.module)
        if embedding is not None:
            vocabulary.check_embedding(name=built.part.NAME, rows=embedding.num_embeddings)
        self.vocabulary, self.ctc_lin, self.seq_lin = vocabulary, ctc_lin, seq_lin
        self.linear_stack = nn.Identity() if linear_stack is None else linear_stack

    def run(
        self,
        audio: Tensor,
        audio_lengths: Tensor,
        *,
        tokens: Tensor | None,
        return_intermediate: bool,
        spec_augment: AugmentFeatures | None = None,
    ) -> Predictions:
        """Score tokens at every frame, and with ``tokens`` (B, L) also after each of them.

        Raises:
            ConfigError: the encoder has no middle layer or no decoder, but it is requested.
        """
        x, lengths = self.encoder.inputs(audio, audio_lengths, spec_augment)
        part = self.encoder.part
        if tokens is not None:
            tokens = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)  # (B, L + 1)
        middle, decoded = None, None
        if return_intermediate:
            middle, states, lengths = part.encode_with_intermediate(x, lengths)
            if tokens is not None:
                decoded = part.decode(tokens, states, lengths)
        elif tokens is not None:
            states, lengths, decoded = part.encode_and_decode(x, lengths, tokens)
        else:
            states, lengths = part.encode(x, lengths)
        logits = None if decoded is None else self._seq_logits(decoded)
        intermediate = None if middle is None else self.ctc_log_probs(middle)
        return Predictions(states, self.ctc_log_probs(states), intermediate, lengths, logits)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every token at every frame: (B, S), (B,) -> (B, U, V), (B,)."""
        states, frame_lengths = self.encode(audio, audio_lengths)
        return self.ctc_log_probs(states), frame_lengths

    @property
    def samples_per_frame(self) -> int:
        return self.encoder.subsampling.stride

    def ctc_log_probs(self, states: Tensor) -> Tensor:
        """Score every token at every frame, in float32: (B, U, D) -> (B, U, V)."""
        scores: Tensor = self.ctc_lin(self.linear_stack(states))
        return scores.float().log_softmax(-1)

    def decoder_log_probs(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Score every next token, in float32: (B, L), (B, U, D), (B,) -> (B, L + 1, V).

        Raises:
            ConfigError: there is no decoder, or no `seq_lin`.
        """
        prefixed = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)
        decoded = self.encoder.part.decode(prefixed, states, frame_lengths)
        return self._seq_logits(decoded).float().log_softmax(-1)

    @torch.no_grad()
    def score_tokens(
        self, states: Tensor, tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Score hypotheses of one utterance with the decoder: (U, D), (N, L) -> (N, L + 1, V)."""
        states = states.float().expand(len(tokens), *states.shape)
        lengths = torch.full((len(tokens),), states.shape[1])
        scores = self.decoder_log_probs(torch.from_numpy(tokens).to(states.device), states, lengths)
        array: npt.NDArray[np.float64] = scores.double().cpu().numpy()
        return array

    def unused_modules(self, ctc_weight: float) -> tuple[nn.Module, ...]:
        """Return the modules that training does not run: with CTC only, decoder and `seq_lin`."""
        if ctc_weight < 1:
            return ()
        head = () if self.seq_lin is None else (self.seq_lin,)
        return (*self.encoder.part.decoding_modules(), *head)

    def _seq_logits(self, decoded: Tensor) -> Tensor:
        if self.seq_lin is None:
            raise ConfigError(
                "ctc_weight is below 1.0, but the YAML has no `seq_lin`. Add it, or set "
                "--ctc_weight=1.0 to train CTC only."
            )
        logits: Tensor = self.seq_lin(decoded)
        return logits

    def as_streaming(self) -> "StreamingAsrModel | None":
        """Return the model that runs chunk by chunk; None if this one was not trained for it."""
        features, front_end, encoder = map(self.encoder.modules.get, COMPOSED)
        if (
            isinstance(features, Fbank)
            and isinstance(front_end, ConvFrontEnd)
            and isinstance(encoder, Transformer)
            and front_end.is_causal
            and encoder.streaming is not None
            and encoder.streaming.chunk_frames is not None
        ):
            chunk_frames = encoder.streaming.chunk_frames
            return StreamingAsrModel(self, features, front_end, encoder, chunk_frames)
        return None


class StreamingAsrModel:
    """A recognizer as a `StreamingNetwork`: it runs chunk by chunk, and holds no session state."""

    def __init__(
        self,
        model: AsrModel,
        features: Fbank,
        front_end: ConvFrontEnd,
        encoder: Transformer,
        chunk_frames: int,
    ) -> None:
        self._model, self.features = model, features
        self._front_end, self._encoder = front_end, encoder
        shift = shift_samples(features.sample_rate)
        self.shortest = window_samples(features.sample_rate)
        self.step = chunk_frames * STRIDE**2 * shift
        self.window = self.step - shift + self.shortest

    def start(self) -> EncoderState:
        return EncoderState(**self._front_end.start(), **self._encoder.start())

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: EncoderState
    ) -> tuple[Tensor, Tensor, EncoderState]:
        """Score every token at every frame of a chunk: (B, S), (B,) -> (B, U, V), (B,), state.

        audio_lengths: ``window``, or less for a session that ends with this chunk.
        """
        features, lengths = self.features(audio, audio_lengths)
        return self.forward_features(features, lengths, state)

    def forward_features(
        self, features: Tensor, lengths: Tensor, state: EncoderState
    ) -> tuple[Tensor, Tensor, EncoderState]:
        """Score every token at every frame of a chunk of features: (B, T, M), (B,) -> same."""
        x, lengths, state = self._front_end.forward_chunk(features, lengths, state)
        states, state = self._encoder.forward_chunk(x, lengths, state)
        return self._model.ctc_log_probs(states), lengths, state


def head_size(head: nn.Module) -> int:
    """Count the outputs of a head: the rows of its last matrix."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim > 1]
    return matrices[-1].shape[0] if matrices else 0
