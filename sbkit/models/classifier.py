"""How the parts of an utterance classifier hang together: audio -> encoder -> pooling -> label.

Legend: B utterances, S samples, T frames of features, U frames after the CNN, D model width,
V classes.
"""

from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.models.acoustic_encoder import AcousticEncoder
from sbkit.models.asr import head_size
from sbkit.models.signatures import POOLING_SIGNATURES, lengths_argument, refuse


class UtteranceClassifier(AcousticEncoder):
    """Call the parts of a classifier in their order; one label an utterance."""

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        compute_features: nn.Module,
        CNN: nn.Module,
        Transformer: nn.Module,
        pooling: nn.Module,
        label_lin: nn.Module,
        classes: int,
    ) -> None:
        super().__init__(
            model=model,
            compute_features=compute_features,
            CNN=CNN,
            Transformer=Transformer,
            others={"pooling": pooling, "label_lin": label_lin},
        )
        takes = lengths_argument(pooling.forward, part="pooling", signatures=POOLING_SIGNATURES)
        if takes.form != "absolute":
            refuse("pooling", POOLING_SIGNATURES, "its forward takes no `lengths`")
        outputs = head_size(label_lin)
        if outputs != classes:
            raise SbkitError(
                f"`label_lin` must have as many outputs as there are classes ({classes}), but has "
                f"{outputs}. Set its out_features to {classes}."
            )
        self.classes = classes
        self.pooling = pooling
        self.label_lin = label_lin

    def classify(self, features: Tensor, frame_lengths: Tensor) -> Tensor:
        """Score every class, in float32: (B, T, M), (B,) -> (B, V) log-probabilities."""
        states, lengths = self.encode(features, frame_lengths)
        scores: Tensor = self.label_lin(self.pooling(states, lengths))
        return scores.float().log_softmax(-1)

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        """Score every class, in float32: (B, S), (B,) -> (B, V) log-probabilities."""
        return self.classify(*self.features(audio, audio_lengths))
