"""Voice activity as a task: labels, noise, a run, its bundle in torch and ONNX, and who uses it."""

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import pad

from recipes.vad.brain import NoisyOutputs, VadBrain
from recipes.vad.data import (
    NOISE_DRAWS,
    NoisyClips,
    SpeechBatch,
    add_noise,
    add_silence,
    collate,
    make_voices,
    prepare_speech,
    take_noise,
)
from recipes.vad.recipe import VadRecipe
from sbkit.audio.augment import Augmentation, color, make_colored
from sbkit.audio.fbank import MIN_HZ
from sbkit.audio.io import Samples, read_audio
from sbkit.audio.lengths import length_mask
from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import read_spec
from sbkit.data.shard import read_rows
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.vad.predict import SpeechEvent, VoiceDetector
from sbkit.tasks.vad.task import find_speech, speech_of
from sbkit.text.recognized_word import Word
from tests.runs import (
    ROOT,
    TINY_VAD,
    Workplace,
    last_parameters,
    load_brain,
    prompts,
    read_json,
    row_of,
)
from tests.runtime.bundles import make_bundle

VAD_RUN: Any = {"yaml": "hparams/vad.yaml", "tiny": TINY_VAD}
RATE, WINDOW = 16_000, 320
SPLITS = ("train", "dev")


def loud(*runs: float) -> Samples:
    """Return alternately quiet and loud noise; ``runs`` are the seconds of each."""
    random = np.random.default_rng(0)
    levels = [5.0 if index % 2 == 0 else 3000.0 for index in range(len(runs))]
    parts = [random.normal(0, x, round(s * RATE)) for s, x in zip(runs, levels, strict=True)]
    return np.concatenate(parts).astype(np.int16)


def windows_of(spans: str, count: int) -> Any:
    return speech_of({"speech": spans, "audio": np.zeros(count * WINDOW)}, RATE)


def test_find_speech_labels_loud_windows_near_words_with_short_pauses() -> None:
    clip = loud(0.5, 1.0, 0.1, 0.5, 0.6, 0.3, 0.5)
    assert np.array_equal(find_speech(clip, RATE, None), windows_of("0.50-2.10 2.70-3.00", 175))
    words = [Word("one", 0.55, 1.2), Word("two", 1.3, 2.0)]
    assert np.array_equal(find_speech(clip, RATE, words), windows_of("0.50-2.10", 175))
    assert not find_speech(clip, RATE, []).any()
    clip = loud(0.5, 1.5, 0.5)
    assert np.array_equal(find_speech(clip, RATE, words[1:]), windows_of("1.20-2.00", 125))


def test_add_silence_moves_labels_with_the_audio() -> None:
    speech, lead = torch.zeros(2, 50, dtype=torch.bool), torch.tensor([0, 25])
    speech[:, 10:30] = True
    audio = pad(torch.ones(2, 50 * WINDOW) * speech.repeat_interleave(WINDOW, 1), (0, 7))
    audio, speech = add_silence(audio, speech, lead, total=25, window=WINDOW)
    assert speech.nonzero()[[0, 20], 1].tolist() == [10, 35]
    assert torch.equal(audio.view(2, -1, WINDOW).abs().amax(2) > 0, speech)


def band_power(signal: Tensor) -> Tensor:
    """Return the power (B,) of (B, S) above the lowest frequency of the features."""
    spectrum = torch.fft.rfft(signal.double()).abs().square()
    hertz = torch.fft.rfftfreq(signal.shape[1], 1 / RATE)
    power: Tensor = 2 * spectrum[:, hertz >= MIN_HZ].sum(1) / signal.shape[1] ** 2
    return power


@pytest.mark.parametrize("name", ["white", "pink", "brown", "babble"])
def test_add_noise_has_its_ratio_in_the_band_of_the_features_in_any_batch(name: str) -> None:
    """Also with rumble and an offset, which are below the band."""
    clips = [3000 * torch.randn(count * RATE) for count in (1, 2)]
    index = {"white": 0, "pink": 4, "brown": 8, "babble": 4}[name]
    colored = make_colored(RATE, torch.device("cpu"))[index : index + 1]
    voices = make_voices(clips if name == "babble" else [], RATE)
    lengths, speech = torch.tensor([100, 250]), torch.zeros(2, 250, dtype=torch.bool)
    speech[:, 20:60] = True
    time = torch.arange(250 * WINDOW)
    below = 5000 * torch.sin(2 * torch.pi * 2 * time / RATE) + 2000
    spoken = 1000 * torch.randn(2, len(time)) * speech.repeat_interleave(WINDOW, 1)
    audio = (spoken + below) * length_mask(lengths * WINDOW, len(time), time.device)

    def added(rows: int, windows: int) -> Tensor:
        clips, is_speech = audio[:rows, : windows * WINDOW], speech[:rows, :windows]
        draws = torch.linspace(0, 0.9999, 2 * NOISE_DRAWS).view(2, -1)[:rows]
        noise = take_noise(colored, voices, draws, windows * WINDOW)
        mask = length_mask(lengths[:rows] * WINDOW, windows * WINDOW, noise.device)
        ratios = torch.tensor([10.0, torch.inf])[:rows]
        return add_noise(clips, is_speech, noise, ratios, mask) - clips

    alone, together = added(1, 100), added(2, 250)
    torch.testing.assert_close(together[:1, : 100 * WINDOW], alone, rtol=1e-4, atol=1e-2)
    assert not together[0, 100 * WINDOW :].any() and not together[1].any()
    power = band_power(spoken[:1, 20 * WINDOW : 60 * WINDOW]) / band_power(alone)
    assert float(10 * power.log10()) == pytest.approx(10.0, abs=0.5)


def test_pink_noise_has_equal_power_in_each_octave() -> None:
    spectrum = torch.fft.rfft(color(torch.randn(RATE), 1.0, RATE)).abs().square()
    octaves = [float(spectrum[first : 2 * first].sum()) for first in (400, 1600, 3200)]
    assert octaves == pytest.approx([octaves[0]] * 3, rel=0.2)
    assert float(spectrum[:20].sum()) == pytest.approx(0.0, abs=1e-3)


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> VadBrain:
    folder = tmp_path_factory.mktemp("brain")
    return load_brain(VadRecipe, "vad", f"--output_folder={folder}")


def batch_of(*clips: Samples, weights: list[int]) -> SpeechBatch:
    rows = [row_of(str(n), clip, weight=weights[n]) for n, clip in enumerate(clips)]
    return collate(rows, sample_rate=RATE)


NOISE = {"sample_rate": RATE, "silence_seconds": 2.0, "snr_db": [0, 30], "gain_db": [-20, 10]}


def test_training_draws_silence_and_validation_repeats_its_noise(
    brain: VadBrain,
) -> None:
    batch = batch_of(loud(0.3, 0.5, 0.2), loud(0.5, 0.2), weights=[1, 1])
    labels = [batch.speech[0].nonzero().flatten(), batch.speech[1].nonzero().flatten()]
    assert [len(windows) for windows in labels] == [25, 10]
    validated = []
    for seed, stage in ((1, Stage.VALID), (2, Stage.VALID), (3, Stage.TEST)):
        torch.manual_seed(seed)
        with seeded_draws(batch.ids):
            scored = brain.compute_forward(batch, stage)
        validated.append(scored.log_probs)
        for speech, windows in zip(scored.noisy.speech, labels, strict=True):
            # a second of silence precedes the clip, and another follows
            assert speech.nonzero().flatten().tolist() == (windows + 50).tolist()
    assert scored.frames.tolist() == [50 + 50 + 50 - 1, 50 + 35 + 50 - 1]
    assert torch.equal(validated[0], validated[1]) and torch.equal(validated[0], validated[2])
    with seeded_draws(batch.ids, epoch=1):
        trained = brain.compute_forward(batch, Stage.TRAIN)
    assert not torch.equal(trained.log_probs, validated[0])
    for speech, windows in zip(trained.noisy.speech, labels, strict=True):
        offsets = speech.nonzero().flatten() - windows
        assert 0 <= offsets[0] <= 100 and (offsets == offsets[0]).all()


def test_training_draws_level_and_noise_and_validation_uses_10_db() -> None:
    clip = loud(0.3, 0.5, 0.2)
    batch = batch_of(*[clip] * 64, weights=[1] * 64)
    augmentation = Augmentation(object(), features=object())

    def heard(training: bool, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clip in silence and noise, and without the noise: 2 x (B, S)."""
        noisy_clips = NoisyClips({**NOISE, **settings}, None)
        noisy = noisy_clips.add_to(batch, augmentation if training else None)
        clean = torch.zeros_like(noisy.audio)
        for row, first in zip(clean, noisy.speech.float().argmax(1) - 15, strict=True):
            row[first * WINDOW : first * WINDOW + len(clip)] = torch.from_numpy(clip)
        return noisy.audio, clean

    torch.manual_seed(0)
    audio, clean = heard(True, noise_prob=0.0)
    gains = 20 * (audio.abs().amax(1) / clean.abs().amax(1)).log10()
    assert -20 <= gains.min() < -10 and 0 < gains.max() <= 10
    for training, low, high in ((True, 0, 30), (False, 10, 10)):
        audio, clean = heard(training, noise_prob=1.0, gain_db=[0, 0])
        speech = torch.from_numpy(clip[15 * WINDOW : 40 * WINDOW]).float().square().mean()
        ratios = 10 * (speech / (audio - clean).square().mean(1)).log10()
        assert (audio - clean).std(1).min() > 1  # not constant
        share = (high - low) / 5
        assert low - 0.5 <= ratios.min() <= low + share + 0.5
        assert high - share - 0.5 <= ratios.max() <= high + 0.5


def test_loss_and_score_count_the_frames_within_an_utterance(brain: VadBrain) -> None:
    """A window is judged four frames later. The second utterance only fills a rank's share."""
    batch = batch_of(*[np.ones(960, np.int16)] * 3, weights=[1, 0, 1])
    probabilities = torch.tensor([[0.9, 0.4, 0.8], [0.6, 0.6, 0.6], [0.3, 0.3, 0.3]])
    probabilities = pad(probabilities, (4, 0))
    speech = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    log_probs = torch.stack([1 - probabilities, probabilities], 2).log()
    scored = NoisyOutputs(log_probs, torch.tensor([6, 7, 7]), replace(batch, speech=speech))
    loss = brain.compute_objectives(scored, batch, Stage.TRAIN)
    likelihoods = torch.tensor([0.9 * 0.4, 1.0, 0.3 * 0.7 * 0.7])
    torch.testing.assert_close(loss.sums, -likelihoods.log())
    assert loss.counts.tolist() == [6, 0, 7]
    changed = replace(batch, speech=speech ^ (torch.arange(3) == 2))
    counts = brain.score(scored._replace(noisy=changed), batch)
    assert counts == [(2, 1, 4, 0), (2, 0, 5, 1), (2, 2, 5, 0)]
    assert brain.measure(counts)["DCF"] == pytest.approx(0.75 * 3 / 6 + 0.25 * 1 / 14)


def prepare_labels(folder: Path, **tables: list[str | None]) -> dict[str, list[str]]:
    """Prepare tables of clips of 2 s with labels, None for no column; return those of splits."""
    for name, labels in tables.items():
        rows = ["path,speech" if labels[0] is not None else "path"]
        for n, label in enumerate(labels):
            soundfile.write(folder / f"{name}{n}.wav", loud(0.5, 1.0 + n / 100, 0.5), RATE)
            rows.append(f"{name}{n}.wav" + (f',"{label}"' if label is not None else ""))
        (folder / f"{name}.csv").write_text("\n".join(rows))
    manifest = {k: [str(folder / f"{n}.csv") for n in tables if n.startswith(k)] for k in SPLITS}
    settings = {"manifest": manifest, "columns": {"text": None}, "recognizer": None}
    splits = prepare_speech({**read_spec(ROOT / "hparams/vad.yaml").settings, **settings})
    return {name: [*split["speech"]] for name, split in splits.named().items()}


@pytest.mark.usefixtures("own_cache")
def test_spans_are_within_their_clips_and_clips_without_the_column_have_their_levels(
    tmp_path: Path,
) -> None:
    """All others were silence, and the best detector found nothing."""
    for label in (
        *("200-1000", "3200-31999", "0.1-2.6", "-0.2-1.5", "0.1-0.5 1.5-0.9", "[[0.2, 1.5]]"),
        *("0,2-1,5", "0.1-0.2,0.3-0.4", "0.2", "nan-1", "1-inf"),
    ):
        words = rf"1 clip of train have others: train1 \({re.escape(label)}, of 2.01 s\)"
        with pytest.raises(SbkitError, match=words):
            prepare_labels(tmp_path, train=["0.1-1.5", label], dev=["0.1-0.9"])
        with pytest.raises(SbkitError, match="within the clip, but in scored it is "):
            speech_of({"id": "scored", "speech": label, "audio": loud(0.5, 1.01, 0.5)}, RATE)
    with pytest.raises(SbkitError, match="`speech` is empty for all clips of dev"):
        prepare_labels(tmp_path, train=["0.1-1.5"], dev=["", ""])
    labels: list[str | None] = ["0.2-0.8 1.5-2.4", ""]
    joined = prepare_labels(tmp_path, train=labels, train_b=[None], dev=["0.1-0.9"])
    assert joined["train"] == ["0.20-0.80 1.50-2.00", "", "0.50-1.50"]
    assert prepare_labels(tmp_path, train=labels, dev=["0.1-0.9"])["train"] == labels


@pytest.mark.usefixtures("own_cache")
def test_labels_of_other_toolkits_are_read_or_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NeMo's `label` was ignored, so that its background was speech."""
    caplog.set_level("INFO")

    def prepare(column: str, *labels: str) -> list[int]:
        """Prepare clips with labels, and return how many windows of each are speech."""
        rows = [f'{{"audio_filepath": "{n}.wav", "{column}": {x}}}' for n, x in enumerate(labels)]
        for n, row in enumerate(rows):
            soundfile.write(tmp_path / f"{n}.wav", loud(0.5, 1.0 + n / 100, 0.5), RATE)
            (tmp_path / f"{n}.json").write_text(row)
        tables = [str(tmp_path / f"{n}.json") for n in range(len(rows))]
        settings = {"manifest": dict.fromkeys(SPLITS, tables), "columns": {"text": None}}
        settings |= {"recognizer": None}
        splits = prepare_speech({**read_spec(ROOT / "hparams/vad.yaml").settings, **settings})
        is_read = column != "kind" and not all('"speech":' in label for label in labels)
        assert any(f", {column}" in name for name in splits.fingerprints) == is_read
        train = splits.train
        return [speech_of(row, RATE).sum() for row in read_rows(train, range(len(train)))]

    assert prepare("label", '"speech"', '"background"', "null", '"yes"') == [50, 0, 51, 52]
    assert prepare("Class", '"Speech"', '"NonSpeech"') == [50, 0]
    no_speech = ("no speech", "no_speech", "No", "sil", "_background_noise_", "noise,music")
    assert not any(prepare("label", *(f'"{label}"' for label in no_speech)))
    speech = ("[laughter] hello", "2020-01-01", "1-2 people", "10", "noise, speech")
    assert all(prepare("label", *(f'"{label}"' for label in speech)))
    assert prepare("label", '1, "speech": "0.5-1"', '0, "speech": ""') == [25, 0]
    assert prepare("kind", '"noise"', "0") == [50, 51]
    assert caplog.text.count("`label` says which clips have no speech.") == 1
    for label in (
        "0",
        "true",
        "1.0",
        '"0 0 1 1"',
        "[0, 1, 1]",
        "[[0.1, 1.5]]",
        '[{"start": 1}]',
        '"0-1.5"',
        '"0-1.5 1.8-2"',
    ):
        with pytest.raises(SbkitError, match="`is_speech` has the label .* in a column `speech`"):
            prepare("is_speech", label, 'null, "speech": "0.5-1"')


def test_prepare_speech_labels_loud_windows_near_aligned_words(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    bundle = make_bundle(tmp_path)
    settings = read_spec(
        ROOT / "hparams/vad.yaml", {"data_folder": str(workplace.release)}
    ).settings
    with pytest.raises(SbkitError, match="/none"):
        prepare_speech({**settings, "recognizer": str(tmp_path / "none")})
    test = prepare_speech({**settings, "recognizer": str(bundle)}).test["test"]
    recognizer = load_bundle(bundle)
    for row in read_rows(test, range(len(test))):
        (words,) = recognizer.align([row["audio"]], [row["text"]])
        expected = find_speech(row["audio"], RATE, words)
        assert row["speech"] and np.array_equal(speech_of(row, RATE), expected)


@pytest.mark.slow
@pytest.mark.ddp
def test_two_ranks_equal_one(workplace: Workplace, tmp_path: Path) -> None:
    for ranks, seconds in ((1, 120), (2, 3)):  # evaluation batches change no figure
        options = ["--check=false", "--number_of_epochs=1", f"--eval_batch_seconds={seconds}"]
        process = workplace.train_forked(tmp_path / str(ranks), *options, ranks=ranks, **VAD_RUN)
        assert process.returncode == 0, process.stderr
    alone, shared = (last_parameters(tmp_path / str(ranks)) for ranks in (1, 2))
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-5)
    scores = [read_json(tmp_path / str(ranks) / "summary.json")["test"] for ranks in (1, 2)]
    assert scores[0] == scores[1]


@pytest.fixture(scope="module")
def bundle(task_bundles: Path) -> Path:
    summary = read_json(task_bundles.parent / "run_of_vad/summary.json")
    test = summary["test"]["test"]
    assert 0 <= test["miss"] <= 1 and 0 <= test["false_alarm"] <= 1
    assert summary["parameters"] == 12_801
    return task_bundles / "vad"


@pytest.mark.slow
def test_detector_finds_the_same_speech_in_blocks_and_by_onnx(
    bundle: Path, asterisk_english: Path, tmp_path: Path
) -> None:
    clips = [read_audio(clip, RATE) for clip, _ in list(prompts(asterisk_english, "test"))[:3]]
    audio = np.concatenate([np.pad(clip, 4000) for clip in clips])
    detector = VoiceDetector.load(bundle)
    start = audio[: 100 * WINDOW + 240]
    onset = float(np.median(detector.model.advance(start, detector.start().model)[0]))
    rules = {"onset": onset, "offset": onset, "shortest": 0.02, "hang_over": 0.04}
    detector = VoiceDetector(detector.model, type(detector.rules)(**rules, padding=0.0))
    expected = detector.speech_segments(audio)
    assert expected
    by_onnx = VoiceDetector(VoiceDetector.load(bundle, runtime="onnx").model, detector.rules)
    for tested in (detector, by_onnx, pickle.loads(pickle.dumps(by_onnx))):
        events, state = list[SpeechEvent](), tested.start()
        for first in range(0, len(audio), 1111):
            new, state = tested.push(audio[first : first + 1111], state)
            events += new
        times = [event.seconds for event in [*events, *tested.finish(state)]]
        assert list(zip(times[::2], times[1::2], strict=True)) == expected
    soundfile.write(tmp_path / "talk.wav", audio, RATE)
    talk = [str(make_bundle(tmp_path)), str(tmp_path / "talk.wav")]
    for name in (str(bundle), "silero"):
        assert sbkit(["transcribe", *talk, "--vad", name, "--decoder", "greedy"]) == 0
    with pytest.raises(SbkitError, match="Use: sbkit transcribe RECOGNIZER talk.wav --vad"):
        sbkit(["encode", str(bundle), "any.wav", "--out", "any.codes"])
    with pytest.raises(SbkitError, match="sbkit transcribe"):  # a detector labels no speech
        prepare_speech({"sample_rate": RATE, "recognizer": str(bundle)})
    with pytest.raises(SbkitError, match="at 16000 Hz, but the recognizer's is at 8000 Hz"):
        detector.require_rate(8000)
