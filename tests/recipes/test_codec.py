"""A codec trains, is exported, and codes audio; no index reaches its network unchecked."""

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from speechbrain import Stage
from torchaudio.functional import melscale_fbanks

from recipes.codec.brain import CodecBrain
from recipes.codec.recipe import CodecRecipe
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.data.batch import Batch, collate_audio
from sbkit.models.loss import Loss
from sbkit.models.spectral_losses import mel_distance, spectral_distance
from sbkit.models.vocoder import ConvNeXt, LogMel, VocoderDecoder, VocoderEncoder, fourier_basis
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.codec.codes import HEADER, CodeSpace, EncodedAudio, read_codes, write_codes
from sbkit.tasks.codec.model import FiniteScalarQuantizer
from sbkit.tasks.codec.predict import Codec
from sbkit.tasks.codec.task import CodecTask, CodedUtterance
from tests.runs import (
    TINY_CODEC,
    Workplace,
    last_parameters,
    load_brain,
    read_json,
    records_of,
    row_of,
    with_sgd,
)

SPACE = CodeSpace(4, (8, 5, 5, 5))
RATE = 16_000
INVALID_CODES = {
    "size": np.array([[0, 1000]]),
    "below": np.array([[0, 0], [3, -1]]),
    "unsigned": np.full((1, 2), np.iinfo(np.uint64).max),
    "floats": np.zeros((1, 2)),
    "another codebook": np.zeros((3, 3), np.int64),
    "one dimension": np.zeros(2, np.int64),
    "nothing": np.zeros((0, 2), np.int64),
}


@pytest.fixture(scope="module")
def trained(task_bundles: Path) -> Path:
    return task_bundles.parent / "run_of_codec"


@pytest.fixture(scope="module")
def bundle(task_bundles: Path) -> Path:
    return task_bundles / "codec"


@pytest.fixture(scope="module")
def clip(workplace: Workplace) -> Path:
    return min((workplace.release / "clips").iterdir())


@pytest.fixture(scope="module", params=["torch", "onnx"])
def codec(bundle: Path, request: pytest.FixtureRequest) -> Iterator[Codec]:
    with Codec.load(bundle, device="cpu", runtime=request.param, step_seconds=0.4) as codec:
        yield codec


@pytest.mark.slow(20)
def test_codec_yaml_is_trained_and_counts_its_codes(trained: Path) -> None:
    epochs = records_of(trained, "epoch")
    assert epochs[1]["valid_loss"] < epochs[0]["valid_loss"]
    assert {"mel_distance", "usage_1", "perplexity_1", "entropy_1"} <= epochs[0].keys()
    figures = read_json(trained / "summary.json")["test"]["test"]
    rows = (trained / "codes_test.tsv").read_text().splitlines()
    counts = np.array([row.split("\t")[1:] for row in rows[1:]], int)  # (size, G)
    assert counts.shape == (1000, 2)
    assert [figures[f"usage_{n}"] for n in range(2)] == pytest.approx((counts > 0).mean(0))
    assert (trained / "codes_test.png").stat().st_size > 1000


def test_measure_counts_codes_and_report_notes_dead_codebooks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes = np.array([[0, 3], [1, 3], [0, 3], [1, 3]])
    measured = CodecTask().measure([CodedUtterance(2.0, codes, 4)])
    per_codebook = {"usage": (0.5, 0.25), "perplexity": (2.0, 1.0), "entropy": (1.0, 0.0)}
    for name, values in per_codebook.items():
        assert (measured[f"{name}_0"], measured[f"{name}_1"]) == values
    assert (measured["mel_distance"], measured["usage"]) == (2.0, 0.375)
    coded = [CodedUtterance(2.0, np.tile(codes, (9, 1)), 4)]
    CodecTask().report(tmp_path, "test", coded, CodecTask().measure(coded), None)
    (note,) = caplog.messages  # all four could occur, and one does
    assert "most codes of codebook 1 are dead in test (25% occur)" in note
    all_different = np.tile(np.arange(36)[:, None], (1, 2))
    coded = [CodedUtterance(2.0, all_different, 1000)]
    CodecTask().report(tmp_path, "dev", coded, CodecTask().measure(coded), None)
    assert caplog.messages == [note]


@pytest.fixture
def brain(tmp_path: Path) -> CodecBrain:
    return load_brain(CodecRecipe, "codec", *TINY_CODEC, f"--output_folder={tmp_path}")


def test_losses_are_weighted_and_ignore_clips_without_weight(
    brain: CodecBrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second clip only fills a rank's share; the third is shorter."""
    random = np.random.default_rng(0)
    rows = [
        row_of(str(n), random.normal(0, 3000, size).astype(np.int16), weight=weight)
        for n, (size, weight) in enumerate(((8000, 1), (8000, 0), (5000, 1)))
    ]
    batch = Batch(**collate_audio(rows, RATE))
    outputs = brain.compute_forward(batch, Stage.VALID)
    audio, decoded, lengths = outputs.audio, outputs.decoded, outputs.lengths
    assert audio.abs().max() < 1 and outputs.num_frames.tolist() == [20, 20, 13]
    assert decoded[2, :5000].any() and not decoded[2, 5000:].any()
    scores = brain.score(outputs, batch)
    assert [score.codes.shape for score in scores] == [(20, 2), (20, 2), (13, 2)]
    line = CodecTask().describe(CodecTask().measure(scores))
    described = [figure.split()[0] for figure in line.split(", ")]
    assert described == ["mel_distance", "usage", "perplexity", "entropy"]
    assert scores[2].mel_distance_per_frame == pytest.approx(
        outputs.mel_distance_sum[2].item() / 13
    )
    weights = {"mel_weight": 2.0, "spectral_weight": 3.0}
    for name, value in weights.items():
        monkeypatch.setattr(brain.hparams, name, value)
    spectral, mask = spectral_distance(decoded, audio, lengths), torch.tensor([1, 0, 1])
    expected = 2.0 * 400 * outputs.mel_distance_sum + 3.0 * spectral
    loss = brain.compute_objectives(outputs, batch, Stage.TRAIN)
    assert isinstance(loss, Loss) and loss.counts.tolist() == [8000, 0, 5000]
    torch.testing.assert_close(loss.sums, expected * mask)
    monkeypatch.setattr(brain.hparams, "adversarial_weight", 0.5)
    losses = brain.compute_objectives(outputs, batch, Stage.TRAIN)
    assert isinstance(losses, dict)
    discriminator = brain.hparams.discriminator
    fooled = expected + 0.5 * lengths * discriminator(decoded, lengths, 1.0)
    torch.testing.assert_close(losses["generator"].sums, fooled * mask)
    errors = discriminator(audio, lengths, 1.0) + discriminator(decoded, lengths, 0.0)
    torch.testing.assert_close(losses["discriminator"].sums, errors * mask)
    assert losses["discriminator"].counts.tolist() == [1, 0, 1]
    losses["discriminator"].sums.sum().backward()
    assert all(p.grad is None for p in brain.network.decoder.parameters())
    assert all(p.grad is not None for p in discriminator.parameters())


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_train_codec_and_discriminator_like_one(
    trained: Path, workplace: Workplace, tmp_path: Path
) -> None:
    options = ("--adversarial_weight=0.5", "--lr=0.01")
    sgd: Any = {"yaml": with_sgd("codec", tmp_path), "tiny": TINY_CODEC}
    one, two = workplace.parameters_by_ranks(tmp_path, *options, **sgd)
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-6), name
    untrained = last_parameters(trained)  # its discriminator, which has no weight
    names = [name for name in one if ".stacks." in name]
    assert names and not any(torch.equal(one[name], untrained[name]) for name in names)


def test_spectral_distance_of_twice_the_level_follows_its_definition() -> None:
    """Each frame differs by ln 2 over its hop, and the convergence is 1."""
    audio = torch.randn(2, 2048, generator=torch.Generator().manual_seed(0))
    audio[1, 1024:] = 0
    distances = spectral_distance(2 * audio, audio, torch.tensor([2048, 1024]))
    expected = [
        np.mean([math.log(2) * (samples // hop + 1) * hop + samples for hop in (64, 128, 256)])
        for samples in (2048, 1024)
    ]
    assert distances.tolist() == pytest.approx(expected, rel=1e-3)
    quiet = 1e-6 * audio[:1]  # below MIN_MAGNITUDE
    assert spectral_distance(2 * quiet, quiet, torch.tensor([2048])).item() < 1


def test_log_mel_equals_the_log_mel_of_windows_around_their_hop() -> None:
    """Hann windows of four hops, 30 samples before their hop and 30 after it; two to a frame."""
    features = LogMel(n_mels=5, hop=20, sample_rate=2000)
    audio = torch.randn(2, 130, generator=torch.Generator().manual_seed(0))
    audio[1, 70:] = 0
    pairs, frames = features(audio, torch.tensor([130, 70]))
    assert (pairs.shape, frames.tolist()) == ((2, 4, 10), [4, 2])
    filters = melscale_fbanks(41, 20.0, 1000.0, 5, 2000)
    assert torch.equal(features.filters, filters)
    padded = torch.nn.functional.pad(audio, (30, 60))
    for row, hop in ((0, 0), (0, 3), (0, 7), (1, 3)):
        window = padded[row, 20 * hop : 20 * hop + 80] * torch.hann_window(80)
        expected = (torch.fft.rfft(window).abs() @ filters).clamp(min=1e-5).log()
        of_hop = pairs[row, hop // 2, 5 * (hop % 2) : 5 * (hop % 2) + 5]
        torch.testing.assert_close(of_hop, expected, atol=1e-3, rtol=1e-3)
    assert not pairs[1, 2:].any()
    distance = mel_distance(features, 2 * audio, audio, torch.tensor([130, 70]))
    assert distance.tolist() == pytest.approx([4 * math.log(2), 2 * math.log(2)], rel=1e-2)


@pytest.mark.parametrize("hop", [20, 21])
def test_log_mel_and_vocoder_have_the_same_frames_with_any_hop(hop: int) -> None:
    features = LogMel(n_mels=5, hop=hop, sample_rate=2000)
    decoder = VocoderDecoder(hop=hop, d_model=4, d_ffn=8, num_layers=0, num_fine_layers=0)
    stacked, frames = features(torch.zeros(1, 5 * hop), torch.tensor([5 * hop]))
    assert (stacked.shape, frames.tolist()) == ((1, 3, 10), [3])
    assert decoder(torch.zeros(1, 3, 4), torch.ones(1, 3, 1)).shape == (1, 6 * hop)


def test_vocoder_decoder_inverts_spectra() -> None:
    decoder = VocoderDecoder(hop=20, d_model=4, d_ffn=8, num_layers=1, num_fine_layers=1)
    audio = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    windows = torch.nn.functional.pad(audio, (30, 30)).unfold(1, 80, 20)
    real, imaginary = (windows @ fourier_basis(80)).chunk(2, 2)
    spectra = torch.complex(real, imaginary)
    head = torch.cat([spectra.abs().log(), spectra.angle()], 2)
    with patch.object(decoder.head, "forward", lambda x: head):
        decoded = decoder(torch.zeros(1, 5, 4), torch.ones(1, 5, 1))
        torch.testing.assert_close(decoded[:, 30:-30], audio[:, 30:-30], atol=1e-5, rtol=1e-4)
        half = decoder(torch.zeros(1, 5, 4), torch.tensor([1.0, 1, 0, 0, 0]).view(1, 5, 1))
    assert not half[:, 80 + 30 :].any() and half[:, 80 : 80 + 30].any()
    angles = spectra.angle()
    loud = [torch.cat([torch.full((1, 10, 41), level), angles], 2) for level in (6.0, 50.0)]
    with patch.object(decoder.head, "forward", side_effect=loud):
        ends = [decoder(torch.zeros(1, 5, 4), torch.ones(1, 5, 1)) for _ in loud]
    assert torch.equal(*ends)
    assert [block.scale.unique().tolist() for block in ConvNeXt(4, 4, 8)] == [[0.25]] * 4
    encoder = VocoderEncoder(n_mels=5, d_model=4, d_ffn=8, num_layers=2)
    # a sample depends on states up to three frames away, and on windows
    assert (decoder.context, encoder.context) == (6, 7)


def test_quantizer_rounds_levels_with_the_gradient_of_no_rounding() -> None:
    """The channels are the digits of a code, the first the lowest."""
    quantizer = FiniteScalarQuantizer(d_model=2, groups=1, levels=[4, 3])
    with torch.no_grad():
        for layer in (quantizer.to_levels, quantizer.from_levels):
            layer.weight.copy_(torch.eye(2))
            layer.bias.zero_()
    inputs = torch.tensor([[[-9.0, -9.0], [9.0, -9.0], [0.1, 0.1], [-9.0, 9.0]]])
    inputs.requires_grad_()
    states, codes = quantizer(inputs)
    assert codes.flatten().tolist() == [0 + 4 * 0, 3 + 4 * 0, 2 + 4 * 1, 0 + 4 * 2]
    expected = [[-1.0, -1.0], [1.0, -1.0], [1 / 3, 0.0], [-1.0, 1.0]]
    torch.testing.assert_close(states[0], torch.tensor(expected))
    states.sum().backward()
    assert inputs.grad is not None
    slopes = inputs.grad[0, 2]
    assert slopes.tolist() == pytest.approx([1.001 * 0.8, 1.001], abs=0.12)


def test_quantizer_decode_returns_the_rounded_states() -> None:
    quantizer = FiniteScalarQuantizer(d_model=8, groups=2, levels=[4, 3])
    states, codes = quantizer(torch.randn(3, 200, 8) * 5)
    assert torch.equal(codes.unique(), torch.arange(12))
    assert torch.allclose(quantizer.decode(codes), states, atol=1e-6)


@pytest.mark.parametrize("codec", ["torch"], indirect=True)
@pytest.mark.parametrize("name", INVALID_CODES)
def test_decode_refuses_invalid_codes(name: str, codec: Codec) -> None:
    with (
        patch.object(Codec, "run", side_effect=AssertionError("the network was run")),
        pytest.raises(SbkitError, match="^Codes must be "),
    ):
        codec.decode(EncodedAudio(INVALID_CODES[name], 800))
    with pytest.raises(SbkitError, match="^Codes must be "):
        [*codec.decode_stream([INVALID_CODES[name]])]


def test_encode_refuses_non_finite_audio(codec: Codec) -> None:
    with pytest.raises(SbkitError, match="reaches nan"):
        codec.encode(np.array([0.0, np.nan]), RATE)


def test_streams_of_blocks_equal_whole_audio(codec: Codec, bundle: Path, clip: Path) -> None:
    samples, _ = soundfile.read(clip, dtype="int16")
    coded = codec.encode(samples, RATE)
    audio = codec.decode(coded)
    assert len(audio) == len(samples)
    for size in (160, 1000, 7000):
        blocks = [samples[None, at : at + size] for at in range(0, len(samples), size)]
        assert np.array_equal(np.concatenate([*codec.encode_stream(blocks)]), coded.codes)
    live = iter(np.split(samples, range(160, len(samples), 160)))
    next(codec.encode_stream(live))
    assert next(live, None) is not None  # the codes came before the end of the clip
    code_blocks = [coded.codes[at : at + 3] for at in range(0, len(coded.codes), 3)]
    decoded = np.concatenate([*codec.decode_stream(code_blocks)])
    assert np.array_equal(decoded[: len(samples)], audio)
    with pickle.loads(pickle.dumps(codec)) as copied:
        assert np.array_equal(copied.encode(clip).codes, coded.codes)
        assert copied.runs_on == codec.runs_on
    with Codec.load(bundle, device="cpu") as one_window:
        assert np.array_equal(one_window.encode(samples, RATE).codes, coded.codes)
        assert np.abs(one_window.decode(coded).astype(int) - audio).max() <= 1


def test_bundle_omits_the_discriminator(trained: Path, bundle: Path) -> None:
    names = load_file(bundle / "model.safetensors").keys()
    assert names == {name for name in last_parameters(trained) if ".stacks." not in name}
    assert "discriminator" not in (bundle / "config.json").read_text()


def test_padding_does_not_change_codes(bundle: Path, clip: Path) -> None:
    model = load_bundle(bundle).model
    samples, _ = soundfile.read(clip, dtype="float32")
    short = samples[:9000]
    alone, _ = model.run("encode", short[None], np.array([9000]))
    batch = np.zeros((2, len(samples)), np.float32)
    batch[0], batch[1, :9000] = samples, short
    together, frames = model.run("encode", batch, np.array([len(samples), 9000]))
    assert frames.tolist() == [-(-len(samples) // 400), 23]
    assert np.array_equal(together[1, :23], alone[0]) and not together[1, 23:].any()


def test_encode_and_decode_commands_write_files(
    bundle: Path, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, wav = tmp_path / "talk.codes", tmp_path / "talk.wav"
    assert sbkit(["encode", str(bundle), str(clip), "--out", str(codes)]) == 0
    assert sbkit(["decode", str(bundle), str(codes), "--out", str(wav)]) == 0
    info = soundfile.info(wav)
    assert (info.frames, info.samplerate) == (soundfile.info(clip).frames, RATE)
    frames = -(-info.frames // 400)
    assert codes.stat().st_size == HEADER.size + -(-frames * 2 * 10 // 8)  # bytes
    with pytest.raises(SbkitError, match="`sbkit transcribe` cannot run .* bundle: codec"):
        sbkit(["transcribe", str(bundle), str(clip)])


def test_read_codes_refuses_damaged_files(tmp_path: Path) -> None:
    assert (SPACE.bits, CodeSpace(1, (8, 8)).bits) == (10, 6)
    file, key = tmp_path / "a.codes", SPACE.fingerprint()
    codes = np.random.default_rng(0).integers(0, 1000, (7, 4))
    write_codes(file, EncodedAudio(codes, 2700), SPACE, key)
    clip = read_codes(file, SPACE, key, frame=400)
    assert np.array_equal(clip.codes, codes) and clip.samples == 2700
    whole = file.read_bytes()
    for content, match in (
        (whole[:-1], "it has 34 bytes, not 35"),
        (whole + b"\0", "truncated or changed"),
        (whole[:50], "truncated or changed"),
        (whole[:40], "is of another codec"),
        (b"RIFF" + whole[4:], "is not a file of codes"),
        (b"", "is not a file of codes"),
        (whole[: HEADER.size] + b"\xff" * 35, "from 0 to 999, but .* has 1023"),
    ):
        file.write_bytes(content)
        with pytest.raises(SbkitError, match=match):
            read_codes(file, SPACE, key, frame=400)
    file.write_bytes(whole)
    with pytest.raises(SbkitError, match="is of another codec"):
        read_codes(file, SPACE, SPACE.fingerprint(weights="others"), frame=400)


@pytest.mark.parametrize(("groups", "levels"), [(0, (8,)), (1, ()), (1, (1, 5))])
def test_code_space_without_codes_is_refused(groups: int, levels: tuple[int, ...]) -> None:
    with pytest.raises(SbkitError, match="levels of at least 2"):
        CodeSpace(groups, levels)


def test_head_of_another_size_is_refused() -> None:
    with pytest.raises(SbkitError, match="has 1063 outputs for 1000 codes"):
        SPACE.check_head("head", 1063)
