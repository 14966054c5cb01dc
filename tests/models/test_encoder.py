"""The seam of encoders: audio in, states and their lengths out, whoever wrote the part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor, nn

from sbkit.audio.augment import AddNoise, Augmentation, Compose, SpecAugment
from sbkit.audio.fbank import Fbank
from sbkit.base.errors import SbkitError
from sbkit.models.asr import AsrModel
from sbkit.models.encoder import make_encoder, require_rate
from sbkit.models.subsampling import Subsampling
from sbkit.text.vocabulary import Vocabulary

AUDIO, LENGTHS = 16_384 * torch.ones(2, 1600), torch.tensor([1600, 900])


class Waveforms(nn.Module):
    """Frames of ten samples, and what they were given; a function chooses what is returned."""

    def __init__(self, output: Any = lambda states: states, **declared: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 4)
        self.output, self.given = output, Tensor()
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, audio: Tensor) -> Any:
        self.given = audio
        return self.output(self.lin(audio.unfold(1, 10, 10)))


def test_an_encoder_of_audio_returns_states_in_any_usual_form() -> None:
    for output in (
        lambda states: states,
        lambda states: (states, None),
        lambda states: (states, LENGTHS // 10),
        lambda states: {"last_hidden_state": states},
        lambda states: SimpleNamespace(last_hidden_state=states),
    ):
        states, lengths = make_encoder({"encoder": Waveforms(output)})(AUDIO, LENGTHS)
        assert states.shape == (2, 160, 4)
        assert lengths.tolist() == [160, 90]


def test_frames_are_declared_and_not_found_by_trial() -> None:
    encoder = make_encoder({"encoder": Waveforms(samples_per_frame=10)})
    assert encoder.subsampling == Subsampling(10, 0)
    part = Waveforms(frame_lengths=lambda lengths: (lengths + 5) // 10)
    assert make_encoder({"encoder": part}).subsampling == Subsampling(10, 5)
    assert not part.given.numel()


def test_an_encoder_with_fewer_frames_than_it_declares_is_refused() -> None:
    encoder = make_encoder({"encoder": Waveforms(samples_per_frame=5)})
    with pytest.raises(SbkitError, match="160 frames with lengths of up to 320: it must count"):
        encoder(AUDIO, LENGTHS)


def test_scale_and_precision_are_those_that_the_part_declares() -> None:
    part = Waveforms(audio_scale=1.0, precision="fp32", samples_per_frame=10)
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = make_encoder({"encoder": part})(AUDIO, LENGTHS)
        cast, _ = make_encoder({"encoder": Waveforms()})(AUDIO, LENGTHS)
    assert states.dtype == torch.float32
    assert cast.dtype == torch.bfloat16
    assert (part.given == 0.5).all()
    with pytest.raises(SbkitError, match="`precision` of `encoder` can only be fp32"):
        make_encoder({"encoder": Waveforms(precision="bf16")})


class Masked(Waveforms):
    def forward(self, audio: Tensor, attention_mask: Tensor) -> Any:
        assert attention_mask.sum(1).tolist() == [1600, 900]
        return super().forward(audio)


def test_an_attention_mask_is_one_within_an_utterance() -> None:
    _, lengths = make_encoder({"encoder": Masked(samples_per_frame=10)})(AUDIO, LENGTHS)
    assert lengths.tolist() == [160, 90]


def test_a_recognizer_of_waveforms_trains_ctc_and_has_no_features() -> None:
    part, head = Waveforms(), nn.Linear(4, 6)
    owned = nn.ModuleList([part, head])
    model = AsrModel(model=owned, encoder=part, ctc_lin=head, vocabulary=Vocabulary(6))
    out = model.run(AUDIO, LENGTHS, tokens=None, return_intermediate=False)
    out.log_probs[..., 1].sum().backward()
    assert all(each.grad is not None for each in owned.parameters())
    assert model.samples_per_frame == 10
    hparams = SimpleNamespace(spec_augment=SpecAugment())
    with pytest.raises(SbkitError, match="`spec_augment` masks features, but"):
        Augmentation(hparams, features=model.encoder.features)
    with pytest.raises(SbkitError, match="`encoder` is not in its list"):
        AsrModel(model=nn.ModuleList([head]), encoder=part, ctc_lin=head, vocabulary=Vocabulary(6))


@pytest.mark.parametrize("keys", [(), ("CNN",), ("encoder", "CNN")])
def test_one_encoder_or_its_three_parts(keys: tuple[str, ...]) -> None:
    with pytest.raises(SbkitError, match="either `encoder`, which takes audio, or `compute_fe"):
        make_encoder({key: Waveforms() for key in keys})


def test_parts_for_another_rate_are_refused_however_deep_they_lie(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", [0.1] * 99, 16_000)
    features = nn.Sequential(nn.Identity(), Fbank(sample_rate=8000))
    noise = Compose(parts=[AddNoise(folder=str(tmp_path), sample_rate=8000)])
    for name, part in (("compute_features", features), ("wave_augment", noise)):
        require_rate({name: part}, 8000)
        with pytest.raises(SbkitError, match=f"has 16000 Hz, .* in `{name}` is made for 8000 Hz"):
            require_rate({name: part}, 16_000)
