"""w2v-BERT and FastConformer: exact beside padding, trained whole, and exported for any length."""

import pytest
import torch
from torch import Tensor, nn

from sbkit.inference.formats.traced import trace
from sbkit.models.pretrained.parts import PretrainedEncoder, PretrainedFeatures, PretrainedFrontEnd
from tests.models.pretrained.folders import make_parts, tiny_config

FAMILIES = ("wav2vec2-bert", "parakeet_encoder")
LENGTHS = torch.tensor([16_000, 11_111, 5_040, 300])


class Whole(nn.Module):
    """Features, front-end and encoder, as one module."""

    def __init__(self, model_type: str, **knobs: float) -> None:
        super().__init__()
        config = tiny_config(model_type)
        self.features = PretrainedFeatures(config=config).eval()
        self.front_end: PretrainedFrontEnd
        self.encoder: PretrainedEncoder
        self.front_end, self.encoder = make_parts(config, **knobs)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, frames = self.front_end(*self.features(audio, lengths))
        return self.encoder.encode(x, frames), frames


def noise(lengths: Tensor) -> Tensor:
    audio = torch.randn(
        len(lengths), int(lengths.max()), generator=torch.Generator().manual_seed(0)
    )
    return audio * (torch.arange(audio.shape[1]) < lengths.unsqueeze(1)) / 10


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_a_clip_does_not_depend_on_its_batch(model_type: str) -> None:
    model = Whole(model_type)
    audio = noise(LENGTHS)
    together, frames = model(audio, LENGTHS)
    torch.testing.assert_close(
        frames, model.front_end.frame_lengths(model.features.frame_lengths(LENGTHS))
    )
    for number, length in enumerate(LENGTHS):
        alone, count = model(audio[number : number + 1, :length], length.view(1))
        assert count == frames[number]
        within = slice(int(count))
        torch.testing.assert_close(together[number, within], alone[0, within], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_parameter_learns_and_no_statistics_change(model_type: str) -> None:
    model = Whole(model_type, layerdrop=0.0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states, _ = model.train()(noise(LENGTHS), LENGTHS)
    states.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_it_is_traced_for_any_batch_and_length(model_type: str) -> None:
    model = Whole(model_type)
    lengths = torch.tensor([16_000, 12_000, 8_000])
    program = trace(model, noise(lengths), lengths).module()
    for lengths in (torch.tensor([4_000]), torch.tensor([23_456, 20_000])):
        states, frames = program(noise(lengths), lengths)
        expected, counts = model(noise(lengths), lengths)
        assert frames.tolist() == counts.tolist()
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
