"""A classifier of utterances: (encoder of audio) -> pooling -> label_lin.

Legend: B utterances, S samples, U frames of the encoder, D model width, V classes.
"""

from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.asr import head_size
from sbkit.models.encoder import AcousticModel, SpecAugment, make_encoder
from sbkit.models.parts import absolute, lengths_argument, raise_signature_error

POOLING = "forward(x, lengths) -> y, with x (B, U, D), lengths (B,) and y (B, D')"


class UtteranceClassifier(AcousticModel):
    """Call the parts of a classifier in their order; one label an utterance."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        classes: int,
        pooling: nn.Module,
        label_lin: nn.Module,
        encoder: nn.Module | None = None,
        compute_features: nn.Module | None = None,
        CNN: nn.Module | None = None,
        Transformer: nn.Module | None = None,
    ) -> None:
        parts = {"encoder": encoder, "compute_features": compute_features}
        super().__init__(
            model=model,
            encoder=make_encoder({**parts, "CNN": CNN, "Transformer": Transformer}),
            heads={"pooling": pooling, "label_lin": label_lin},
        )
        if lengths_argument(pooling.forward, part="pooling", signatures=POOLING)[1] is not absolute:
            raise_signature_error("pooling", POOLING, "its forward takes no `lengths`")
        outputs = head_size(label_lin)
        if outputs != classes:
            raise SbkitError(
                f"`label_lin` must have as many outputs as there are classes ({classes}), but has "
                f"{outputs}. Set its out_features to {classes}."
            )
        self.classes = classes
        self.pooling = pooling
        self.label_lin = label_lin

    def predict(
        self, audio: Tensor, audio_lengths: Tensor, spec_augment: SpecAugment | None = None
    ) -> Tensor:
        """Score every class, in float32: (B, S), (B,) -> (B, V) log-probabilities."""
        inputs = self.encoder.inputs(audio, audio_lengths, spec_augment)
        scores: Tensor = self.label_lin(self.pooling(*self.encoder.part.encode(*inputs)))
        return scores.float().log_softmax(-1)
