"""A recognizer: encoder of audio -> linear_stack -> ctc_lin; decoder of the encoder -> seq_lin.

Legend: B utterances, S samples, U frames of the encoder, L tokens, D model width, V vocabulary.

Training, transcription and export all call this one model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.encoder import AcousticModel, SpecAugment, make_encoder
from sbkit.models.parts import token_embedding
from sbkit.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Predictions:
    """What the model makes of a batch.

    states (B, U, D) of the encoder; log_probs (B, U, V) of CTC and, if asked for, from the middle
    of the encoder; frame_lengths (B,); logits (B, L + 1, V) of the decoder, if there were tokens.
    """

    states: Tensor
    log_probs: Tensor
    intermediate: Tensor | None
    frame_lengths: Tensor
    logits: Tensor | None


class AsrModel(AcousticModel):
    """Call the parts of a recognizer in their order.

    Parts may be sbkit's, SpeechBrain's or the user's; the encoder is ``encoder``, or
    ``compute_features``, ``CNN`` and ``Transformer``. Without ``seq_lin`` it does CTC alone, and
    without ``linear_stack`` nothing stands between encoder and ``ctc_lin``.
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
        made = make_encoder(parts, padding=vocabulary.blank)
        heads = {"ctc_lin": ctc_lin} | ({} if seq_lin is None else {"seq_lin": seq_lin})
        stack = {} if linear_stack is None else {"linear_stack": linear_stack}
        super().__init__(model=model, encoder=made, heads=heads | stack)
        for name, head in heads.items():
            vocabulary.check_head(name=name, outputs=head_size(head))
        embedding = token_embedding(made.part.module)
        if embedding is not None:
            vocabulary.check_embedding(name=made.part.NAME, rows=embedding.num_embeddings)
        self.vocabulary = vocabulary
        self.ctc_lin = ctc_lin
        self.seq_lin = seq_lin
        self.linear_stack = nn.Identity() if linear_stack is None else linear_stack

    def run(
        self,
        audio: Tensor,
        audio_lengths: Tensor,
        *,
        tokens: Tensor | None,
        return_intermediate: bool,
        spec_augment: SpecAugment | None = None,
    ) -> Predictions:
        """Score tokens at every frame, and after each of (B, L) tokens if there are any.

        Raises SbkitError where the encoder has no middle or no decoder and is asked for it.
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
        """How many samples of audio go by from one frame of CTC to the next."""
        return self.encoder.subsampling.stride

    def ctc_log_probs(self, states: Tensor) -> Tensor:
        """Score every token at every frame, in float32: (B, U, D) -> (B, U, V)."""
        scores: Tensor = self.ctc_lin(self.linear_stack(states))
        return scores.float().log_softmax(-1)

    def decoder_log_probs(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Score each token and what follows the last: (B, L), (B, U, D), (B,) -> (B, L + 1, V).

        In float32. Raises SbkitError where there is no decoder, or no `seq_lin`.
        """
        begun = nn.functional.pad(tokens, (1, 0), value=self.vocabulary.bos)
        decoded = self.encoder.part.decode(begun, states, frame_lengths)
        return self._seq_logits(decoded).float().log_softmax(-1)

    @torch.no_grad()
    def score_tokens(
        self, states: Tensor, tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Score sequences of one utterance as above, in numpy: (U, D), (N, L) -> (N, L + 1, V)."""
        states = states.float().expand(len(tokens), *states.shape)
        lengths = torch.full((len(tokens),), states.shape[1])
        scored = self.decoder_log_probs(torch.from_numpy(tokens).to(states.device), states, lengths)
        found: npt.NDArray[np.float64] = scored.double().cpu().numpy()
        return found

    def unused_modules(self, ctc_weight: float) -> tuple[nn.Module, ...]:
        """Return the modules that CTC alone does not run: the decoder and its head."""
        if ctc_weight < 1:
            return ()
        head = () if self.seq_lin is None else (self.seq_lin,)
        return (*self.encoder.part.decoding_modules(), *head)

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
