"""How the parts of a recognizer hang together: audio -> features -> CNN -> Transformer -> heads.

Legend: B utterances, S samples, T frames of 10 ms, U frames after the CNN, L tokens, M mel bins,
D model width, V vocabulary.

Training, transcription and export all call this one model.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.acoustic_encoder import AcousticEncoder, striding_of
from sbkit.models.encoder_adapter import token_embedding
from sbkit.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class EncoderOutput:
    """What training sees of an utterance.

    intermediate (B, U, D) of half of the encoder, if asked for; states (B, U, D) of all of it;
    frame_lengths (B,); logits (B, L + 1, V) of the decoder, if there were tokens.
    """

    intermediate: Tensor | None
    states: Tensor
    frame_lengths: Tensor
    logits: Tensor | None


class AsrModel(AcousticEncoder):
    """Call the parts of a recognizer in their order.

    Parts may be sbkit's, SpeechBrain's or the user's; `sbkit/models/signatures.py` says how they
    are told apart. Without ``seq_lin`` it does CTC alone.
    """

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: nn.Module,
        CNN: nn.Module,
        Transformer: nn.Module,
        ctc_lin: nn.Module,
        seq_lin: nn.Module | None = None,
        vocabulary: Vocabulary,
    ) -> None:
        heads = {"ctc_lin": ctc_lin} | ({} if seq_lin is None else {"seq_lin": seq_lin})
        super().__init__(
            model=model,
            compute_features=compute_features,
            CNN=CNN,
            Transformer=Transformer,
            others=heads,
            padding=vocabulary.blank,
        )
        for name, head in heads.items():
            vocabulary.check_head(name=name, outputs=head_size(head))
        embedding = token_embedding(Transformer)
        if embedding is not None:
            vocabulary.check_embedding(name="Transformer", rows=embedding.num_embeddings)
        self.vocabulary = vocabulary
        self.ctc_lin = ctc_lin
        self.seq_lin = seq_lin

    def run(
        self,
        features: Tensor,
        frame_lengths: Tensor,
        *,
        tokens: Tensor | None,
        return_intermediate: bool,
    ) -> EncoderOutput:
        """Encode for training, and decode (B, L) tokens if there are any.

        Raises SbkitError where the Transformer has no middle or no decoder and is asked for it.
        """
        x, frame_lengths = self.subsample(features, frame_lengths)
        if tokens is not None:
            tokens = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)  # (B, L + 1)
        intermediate, decoded = None, None
        if return_intermediate:
            intermediate, states = self.encoder.encode_with_intermediate(x, frame_lengths)
            if tokens is not None:
                decoded = self.encoder.decode(tokens, states, frame_lengths)
        elif tokens is not None:
            states, decoded = self.encoder.encode_and_decode(x, frame_lengths, tokens)
        else:
            states = self.encoder.encode(x, frame_lengths)
        logits = None if decoded is None else self._seq_logits(decoded)
        return EncoderOutput(intermediate, states, frame_lengths, logits)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every token at every frame: (B, S), (B,) -> (B, U, V), (B,)."""
        states, frame_lengths = self.encode(*self.features(audio, audio_lengths))
        return self.ctc_log_probs(states), frame_lengths

    def samples_per_frame(self, sample_rate: int) -> int:
        """Measure how many samples of audio go by from one frame of CTC to the next."""
        device = next(self.model.parameters()).device
        return striding_of(self.features, self.front_end, sample_rate, device).stride

    def ctc_log_probs(self, states: Tensor) -> Tensor:
        """Score every token at every frame, in float32: (B, U, D) -> (B, U, V)."""
        scores: Tensor = self.ctc_lin(states)
        return scores.float().log_softmax(-1)

    def decoder_log_probs(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Score each token and what follows the last: (B, L), (B, U, D), (B,) -> (B, L + 1, V).

        In float32. Raises SbkitError where there is no decoder, or no `seq_lin`.
        """
        begun = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)
        decoded = self.encoder.decode(begun, states, frame_lengths)
        return self._seq_logits(decoded).float().log_softmax(-1)

    def unused_modules(self, ctc_weight: float) -> tuple[nn.Module, ...]:
        """Return what a run of this weight never calls: with CTC alone, the decoder and its head.

        They get no gradient, and that is no fault.
        """
        if ctc_weight < 1:
            return ()
        head = () if self.seq_lin is None else (self.seq_lin,)
        return (*self.encoder.decoding_modules(), *head)

    def _seq_logits(self, decoded: Tensor) -> Tensor:
        if self.seq_lin is None:
            raise SbkitError(
                "`seq_lin` must be declared while ctc_weight is below 1.0, but is not. Add it to "
                "the YAML, or set --ctc_weight=1.0 to train CTC alone."
            )
        logits: Tensor = self.seq_lin(decoded)
        return logits


def head_size(head: nn.Module) -> int:
    """Count the outputs of a head: the rows of its last matrix."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim > 1]
    return matrices[-1].shape[0] if matrices else 0
