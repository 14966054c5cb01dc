"""An encoder of any form takes audio, and returns states and their lengths."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor, nn

from sbkit.audio.augment import AddNoise, Augmentation, Compose, SpecAugment
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import ConfigError
from sbkit.models.asr import AsrModel
from sbkit.models.encoder import make_encoder, require_rate
from sbkit.models.parts import Subsampling
from sbkit.text.vocabulary import Vocabulary

AUDIO, LENGTHS = 16_384 * torch.ones(2, 1600), torch.tensor([1600, 900])


class WaveformEncoder(nn.Module):
    """Encodes frames of ten samples and keeps its input; ``output`` chooses what it returns."""

    def __init__(self, output: Any = lambda states: states, **declared: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 4)
        self.output, self.input = output, Tensor()
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, audio: Tensor) -> Any:
        self.input = audio
        return self.output(self.lin(audio.unfold(1, 10, 10)))


class MaskedEncoder(WaveformEncoder):
    def forward(self, audio: Tensor, attention_mask: Tensor) -> Any:
        assert attention_mask.sum(1).tolist() == [1600, 900]
        return super().forward(audio)


def test_encoder_may_return_states_in_any_usual_form() -> None:
    for part in (
        WaveformEncoder(),
        WaveformEncoder(lambda states: (states, None)),
        WaveformEncoder(lambda states: (states, LENGTHS // 10)),
        WaveformEncoder(lambda states: {"last_hidden_state": states}),
        WaveformEncoder(lambda states: SimpleNamespace(last_hidden_state=states)),
        MaskedEncoder(samples_per_frame=10),
    ):
        states, lengths = make_encoder({"encoder": part})(AUDIO, LENGTHS)
        assert states.shape == (2, 160, 4)
        assert lengths.tolist() == [160, 90]


def test_declared_frames_are_used_instead_of_measured_ones() -> None:
    encoder = make_encoder({"encoder": WaveformEncoder(samples_per_frame=10)})
    assert encoder.subsampling == Subsampling(10, 0)
    part = WaveformEncoder(frame_lengths=lambda lengths: (lengths + 5) // 10)
    assert make_encoder({"encoder": part}).subsampling == Subsampling(10, 5)
    assert not part.input.numel()
    wrong = make_encoder({"encoder": WaveformEncoder(samples_per_frame=5)})
    with pytest.raises(ConfigError, match="160 frames with lengths of up to 320: it must count"):
        wrong(AUDIO, LENGTHS)


def test_encoder_runs_in_its_declared_scale_and_precision() -> None:
    part = WaveformEncoder(audio_scale=1.0, precision="fp32", samples_per_frame=10)
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = make_encoder({"encoder": part})(AUDIO, LENGTHS)
        cast, _ = make_encoder({"encoder": WaveformEncoder()})(AUDIO, LENGTHS)
    assert (states.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    assert (part.input == 0.5).all()
    with pytest.raises(ConfigError, match="`precision` of `encoder` can only be fp32"):
        make_encoder({"encoder": WaveformEncoder(precision="bf16")})


def test_recognizer_of_waveforms_trains_ctc_and_has_no_features() -> None:
    part, head = WaveformEncoder(), nn.Linear(4, 6)
    owned = nn.ModuleList([part, head])
    model = AsrModel(model=owned, encoder=part, ctc_lin=head, vocabulary=Vocabulary(6))
    out = model.run(AUDIO, LENGTHS, tokens=None, return_intermediate=False)
    out.log_probs[..., 1].sum().backward()
    assert all(parameter.grad is not None for parameter in owned.parameters())
    assert model.samples_per_frame == 10
    hparams = SimpleNamespace(spec_augment=SpecAugment())
    with pytest.raises(ConfigError, match="`spec_augment` masks features, but"):
        Augmentation(hparams, features=model.encoder.features)


@pytest.mark.parametrize("keys", [(), ("CNN",), ("encoder", "CNN")])
def test_encoder_needs_one_part_or_three(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="either `encoder`, which takes audio, or `compute_fe"):
        make_encoder({key: WaveformEncoder() for key in keys})


def test_nested_parts_for_another_sample_rate_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", [0.1] * 99, 16_000)
    features = nn.Sequential(nn.Identity(), Fbank(sample_rate=8000))
    noise = Compose(parts=[AddNoise(folder=str(tmp_path), sample_rate=8000)])
    for name, part in (("compute_features", features), ("wave_augment", noise)):
        require_rate({name: part}, 8000)
        with pytest.raises(ConfigError, match=f"has 16000 Hz, .* in `{name}` is made for 8000 Hz"):
            require_rate({name: part}, 16_000)
