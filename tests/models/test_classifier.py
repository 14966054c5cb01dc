"""A classifier pools an utterance without its padding, and checks its parts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.models.classifier import AttentiveStatisticsPooling, UtteranceClassifier
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.layers import GlobalNorm
from sbkit.models.transformer import Transformer


def make_parts() -> dict[str, nn.Module]:
    return {
        "compute_features": Fbank(n_mels=20),
        "CNN": ConvFrontEnd(normalize=GlobalNorm(n_mels=20), n_mels=20, channels=8, d_model=8),
        "Transformer": Transformer(d_model=8, nhead=2, d_ffn=8, num_encoder_layers=1, dropout=0.0),
        "pooling": AttentiveStatisticsPooling(d_model=8, attention_dim=4),
        "label_lin": nn.Linear(16, 3),
    }


def make_classifier(**changes: Any) -> UtteranceClassifier:
    options: dict[str, Any] = {"classes": 3, **make_parts(), **changes}
    owned = [part for part in options.values() if isinstance(part, nn.Module)]
    return UtteranceClassifier(**({"model": nn.ModuleList(owned)} | options))


def test_pooling_is_the_weighted_mean_and_deviation_without_padding() -> None:
    torch.manual_seed(0)
    pooling = AttentiveStatisticsPooling(d_model=5, attention_dim=3)
    x = torch.randn(4, 7, 5, requires_grad=True)
    pooled = pooling(x, torch.tensor([7, 4, 1, 0]))
    for row, length in enumerate((7, 4)):
        frames = x[row, :length]
        weights = pooling.attention(frames).softmax(0)
        mean = (weights * frames).sum(0)
        deviation = ((weights * frames.square()).sum(0) - mean.square()).sqrt()
        torch.testing.assert_close(pooled[row], torch.cat([mean, deviation]))
    assert not pooled[3].any()  # no frames
    pooled.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in pooling.parameters())]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_scores_of_an_utterance_do_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    model = make_classifier()
    audio, lengths = 1000 * torch.randn(2, 16_000), torch.tensor([16_000, 9000])
    audio[1, 9000:] = 0
    scores = model.predict(audio, lengths)
    assert (scores.shape, scores.dtype) == ((2, 3), torch.float32)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(2))
    torch.testing.assert_close(model.predict(audio[1:, :9000], lengths[1:])[0], scores[1])
    nn.functional.nll_loss(scores, torch.tensor([0, 2])).backward()
    assert all(p.grad is not None for p in model.model.parameters())


class MeanPooling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 4}, "3 outputs for 4 classes"),
        ({"pooling": MeanPooling()}, "`pooling` must have forward"),
        ({"model": nn.ModuleList(list(make_parts().values()))}, "`CNN` is not in its list"),
    ],
)
def test_unsuitable_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SbkitError, match=message):
        make_classifier(**changes)
