"""A classifier pools an utterance without its padding, and checks its parts."""

from typing import Any

import pytest
import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.models.classifier import AttentiveStatisticsPooling, UtteranceClassifier
from tests.models.test_asr import sbkit_parts


def make_classifier(**changes: Any) -> UtteranceClassifier:
    encoder = sbkit_parts(decoder_layers=0)
    options: dict[str, Any] = {
        **{key: encoder[key] for key in ("compute_features", "CNN", "Transformer")},
        "pooling": AttentiveStatisticsPooling(d_model=16, attention_dim=4),
        "label_lin": nn.Linear(32, 3),
    }
    model = nn.ModuleList(options.values())
    return UtteranceClassifier(**{"model": model, "num_classes": 3, **options, **changes})


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 4}, "3 outputs for 4 classes"),
        (
            {"pooling": nn.Identity()},
            r"`pooling` is called with \(x, lengths\), but its forward takes \(input",
        ),
    ],
)
def test_unsuitable_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SbkitError, match=message):
        make_classifier(**changes)
