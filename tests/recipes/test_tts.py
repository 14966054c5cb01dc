"""A voice trains, is exported, and speaks; bad texts get a sentence, and nothing is lost."""

import io
import json
import math
import shutil
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openai
import pytest
import soundfile
import torch
from speechbrain import Stage

from recipes.tts.brain import TtsBrain
from recipes.tts.data import prepare_spoken
from recipes.tts.recipe import TtsRecipe
from sbkit.audio.decode import Signal
from sbkit.audio.io import encode_audio
from sbkit.base.errors import PARTLY_DONE, SbkitError
from sbkit.bundle.bundle import read_bundle
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import read_spec
from sbkit.tasks.tts.model import (
    diagonal_prior,
    find_durations,
    find_misaligned,
    forward_sum_loss,
    frame_index,
    mean_by_symbol,
)
from sbkit.tasks.tts.predict import MAX_SPOKEN_CHARACTERS, Synthesizer
from sbkit.tasks.tts.recordings import SpokenBatch, SpokenCollate, interpolate, track_pitch
from sbkit.tasks.tts.symbols import ESPEAK, read_texts, to_symbols
from sbkit.text.vocabulary import ensure_labels
from tests.runs import (
    ROOT,
    TINY_VOICE,
    Workplace,
    load_brain,
    read_json,
    records_of,
    row_of,
    times_of,
    with_sgd,
)
from tests.serve.server import running_server
from tests.stores import read_split

RATE, FRAME = 16_000, 400


@pytest.fixture(scope="module")
def trained(task_bundles: Path) -> Path:
    return task_bundles.parent / "run_of_tts"


@pytest.fixture(scope="module")
def bundle(task_bundles: Path) -> Path:
    return task_bundles / "tts"


@pytest.fixture(scope="module")
def voice(bundle: Path) -> Iterator[Synthesizer]:
    voice = read_bundle(bundle).task.open_synthesizer(bundle, device="cpu")
    assert isinstance(voice, Synthesizer)
    with voice:
        yield voice


def test_tts_yaml_is_trained_and_reports_examples_and_misaligned_clips(trained: Path) -> None:
    epochs = records_of(trained, "epoch")
    assert epochs[1]["valid_loss"] < epochs[0]["valid_loss"]
    figures = read_json(trained / "summary.json")["test"]["test"]
    parts = figures["mel_distance"] + figures["vocoder_distance"]
    assert figures["distance"] == pytest.approx(parts)
    assert {"pitch_error", "length_ratio", "misaligned"} <= figures.keys()
    assert (trained / "misaligned.tsv").read_text().startswith("id\n")
    picture = (trained / "speech_test.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (14 * 80, 3 * 3 * 80)  # pixels
    page = (trained / "report.html").read_text()
    assert b64encode(picture).decode() in page
    for number, name in product("123", ("recorded", "synthesized")):
        mp3 = trained / f"speech_test.{number}_{name}.mp3"
        assert soundfile.read(mp3)[0].std() > 1e-3
        assert f"{number} {name}: <audio" in page and b64encode(mp3.read_bytes()).decode() in page


@pytest.mark.usefixtures("own_cache")
def test_columns_of_a_table_are_not_taken_for_computed_ones(tmp_path: Path) -> None:
    tone = 0.3 * np.sin(2 * np.pi * 200 * np.arange(RATE) / RATE)
    soundfile.write(tmp_path / "a.wav", tone, RATE)
    (tmp_path / "t.csv").write_text("path,sentence,pitch,symbols\na.wav,Hello.,183.2,5\n")
    tables = {"manifest": {"train": str(tmp_path / "t.csv"), "dev": str(tmp_path / "t.csv")}}
    train = prepare_spoken(read_spec(ROOT / "hparams/tts.yaml", tables).settings).train
    assert train["symbols"][0] == "hello."
    assert train["pitch"][0].split()[10] == "200"


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> TtsBrain:
    folder = tmp_path_factory.mktemp("brain")
    ensure_labels(folder / "symbols.txt", {" ", ".", *"abcdefg"})
    options = ("--dropout=0", f"--output_folder={folder}")
    return load_brain(TtsRecipe, "tts", *TINY_VOICE, *options)


@pytest.fixture
def batch(brain: TtsBrain) -> SpokenBatch:
    random = np.random.default_rng(0)
    rows = [
        row_of(
            text,
            random.normal(0, 1000, frames * FRAME).astype(np.int16),
            symbols=text,
            pitch=" ".join(["120"] * frames),
        )
        for text, frames in (("abc de.", 60), ("fag.", 31))
    ]
    return SpokenCollate(brain.hparams.labels, RATE, FRAME)(rows)


def test_only_training_uses_the_recorded_pitch(brain: TtsBrain, batch: SpokenBatch) -> None:
    higher = replace(batch, octaves=batch.octaves + 1)
    for stage, is_used in ((Stage.TRAIN, True), (Stage.VALID, False), (Stage.TEST, False)):
        features = [brain.compute_forward(clips, stage).features for clips in (batch, higher)]
        assert torch.equal(*features) is not is_used


@pytest.mark.parametrize(
    ("name", "change", "per_frame", "if_misaligned"),
    [
        ("features", 1.0, 1.0, 0.0),
        ("log_durations", math.log(2), 0.1 * (1 - math.log(2)), 0.0),
        ("predicted_variances", 1.0, 1.0 * 2, 0.0),  # pitch and energy
        ("distance", 1.0, 1.0, 1.0),
    ],
)
def test_losses_count_frames_and_a_misaligned_clip_only_trains_the_vocoder(
    brain: TtsBrain,
    batch: SpokenBatch,
    name: str,
    change: float,
    per_frame: float,
    if_misaligned: float,
) -> None:
    outputs = brain.compute_forward(batch, Stage.VALID)
    perfect = replace(
        outputs,
        is_misaligned=torch.tensor([False, True]),
        features=outputs.target,
        log_durations=outputs.durations.clamp(min=1).log(),
        predicted_variances=outputs.variances,
    )
    changed = replace(perfect, **{name: getattr(perfect, name) + change})
    before, after = (brain.compute_objectives(x, batch, Stage.VALID) for x in (perfect, changed))
    assert before.counts.tolist() == [60, 31]
    expected = [60 * per_frame, 31 * if_misaligned]
    assert (after.sums - before.sums).tolist() == pytest.approx(expected, abs=0.01)


def test_vocoder_is_validated_on_middle_of_clip_without_edges(
    brain: TtsBrain, batch: SpokenBatch
) -> None:
    """The first and the last of 42 frames are context; a clip of 31 frames has fewer."""
    outputs = brain.compute_forward(batch, Stage.VALID)
    audio = batch.audio.float() / 2**15
    assert outputs.segment_lengths.tolist() == [40 * FRAME, 30 * FRAME]
    assert torch.equal(outputs.segment[0], audio[0, 10 * FRAME : 50 * FRAME])
    assert torch.equal(outputs.segment[1, : 30 * FRAME], audio[1, FRAME : 31 * FRAME])
    features, _ = brain.network.compute_features(audio, batch.audio_lengths)
    decoded = brain.network.vocode(features[:1, 9:51], torch.ones(1, 42, 1))
    torch.testing.assert_close(outputs.decoded[:1], decoded[:, FRAME:-FRAME])
    assert not outputs.segment[1, 30 * FRAME :].any() and not outputs.decoded[1, 30 * FRAME :].any()


def test_collate_trims_the_silence_around_a_clip(brain: TtsBrain) -> None:
    """It keeps 40 ms on both sides, and pauses within."""
    random = np.random.default_rng(0)
    runs = ((0.5, 5), (1.0, 3000), (0.4, 5), (1.0, 3000), (0.5, 5))
    audio = np.concatenate([random.normal(0, level, round(s * RATE)) for s, level in runs])
    pitch = " ".join(str(100 + frame) for frame in range(-(-len(audio) // FRAME)))
    row = row_of("a", audio.astype(np.int16), symbols="abc.", pitch=pitch)
    trimmed = SpokenCollate(brain.hparams.labels, RATE, FRAME)([row])
    first, end = round(0.46 * RATE) // FRAME * FRAME, round(2.94 * RATE)
    assert np.array_equal(trimmed.audio[0].numpy(), row["audio"][first:end])
    frames = torch.arange(first // FRAME, -(-end // FRAME))
    torch.testing.assert_close(trimmed.octaves[0], ((100 + frames) / 150).log2())


@pytest.mark.slow(30)
@pytest.mark.ddp
def test_two_ranks_equal_one(workplace: Workplace, tmp_path: Path) -> None:
    """Without random draws: no dropout, and whole clips for the vocoder."""
    options = ("--dropout=0", "--segment_frames=400", "--lr=0.01")
    sgd: Any = {"yaml": with_sgd("tts", tmp_path), "tiny": TINY_VOICE}
    one, two = workplace.parameters_by_ranks(tmp_path, *options, **sgd)
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-6), name


def test_stream_yields_sentences_with_pauses(voice: Synthesizer) -> None:
    first, second = voice.stream("Please hold. Press one")
    assert first.dtype == np.float32 and np.abs(first).max() <= 16
    pause = round(0.25 * voice.sample_rate)
    assert not first[-pause:].any() and (len(first) - pause) % FRAME == 0
    assert np.array_equal(voice.speak("Press one"), second)
    quick, _ = voice.stream("Please hold. Press one", 2.0)
    assert len(quick) - len(voice.speak("Please hold.", 2.0)) == pause // 2
    assert (voice.sample_rate, voice.language) == (RATE, "en")


def test_openai_client_gets_speech_notes_and_errors(voice: Synthesizer, tmp_path: Path) -> None:
    text = "Please hold. Press one"
    with running_server(tmp_path, speaker=lambda _: voice) as server:
        speech: Any = partial(server.openai.audio.speech.create, model="anna", voice="alloy")
        for speed in (1.0, 2.0):
            pcm = speech(input=text, response_format="pcm", speed=speed).content
            seconds = len(voice.speak(text, speed)) / RATE
            assert len(pcm) / 2 / 24_000 == pytest.approx(seconds, abs=0.001)
        for bad in ("\u200d", "?!", "привет"):
            with pytest.raises(openai.BadRequestError, match="has no words"):
                speech(input=bad)
        with pytest.raises(openai.BadRequestError, match="at most 360 s long, but .* about 4"):
            speech(input="7 " * 1000)
        body = json.dumps({"input": "Press 1 \u200d", "stream_format": "sse"})
        headers = {"Content-Type": "application/json"}
        answer = server.client.post("/v1/audio/speech", content=body, headers=headers)
        last_event = answer.text.splitlines()[-2]
        assert json.loads(last_event.removeprefix("data: "))["notes"] == [
            '"1" is read "one".',
            "Characters that cannot be read aloud are left out: U+200D.",
        ]
        headers = speech(input="<speak>Press <break time='1s'/> 1 &lt; 2</speak>").response.headers
        assert json.loads(headers["x-sbkit-notes"])[:2] == [
            "SSML is not supported, so its tags are left out: <speak>, <break>.",
            '"1" is read "one".',
        ]


@pytest.mark.slow(30)
def test_onnx_synthesizes_the_same(bundle: Path, voice: Synthesizer) -> None:
    with Synthesizer.load(bundle, device="cpu", runtime="onnx") as onnx:
        assert onnx.runs_on.runtime == "onnx"
        assert np.allclose(onnx.speak("Press one."), voice.speak("Press one."), atol=1e-4)
        texts = [onnx.read("Press one. Hold."), onnx.read("Please hold the line.")]
        first, second = onnx.synthesize(texts, [1.0, 0.7])
        assert np.allclose(first, voice.speak("Press one. Hold."), atol=1e-4)
        assert np.allclose(second, voice.speak("Please hold the line.", 0.7), atol=1e-4)


def test_stream_refuses_bad_text_at_the_call(voice: Synthesizer) -> None:
    with pytest.raises(SbkitError, match="text is empty"):
        voice.stream("")
    with pytest.raises(SbkitError, match=f"more than {MAX_SPOKEN_CHARACTERS} characters"):
        voice.stream("x" * (MAX_SPOKEN_CHARACTERS + 1))
    with pytest.raises(SbkitError, match=r"`speed` must be from 0\.25 to 4"):
        voice.stream("Press one", 5.0)


def test_speak_command_writes_a_file_or_standard_output(
    bundle: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    wav, text = tmp_path / "hello.wav", tmp_path / "hello.txt"
    text.write_text("Press 1.")
    assert sbkit(["speak", str(bundle), "--file", str(text), "--out", str(wav)]) == 0
    assert sbkit(["speak", str(bundle), "--out", "-", "--speed", "1", "press one."]) == 0
    out, errors = capsysbinary.readouterr()
    assert b'note: "1" is read "one".' in errors
    assert out == wav.read_bytes()
    assert soundfile.info(io.BytesIO(out)).samplerate == RATE
    with pytest.raises(SbkitError, match="either a text or --file"):
        sbkit(["speak", str(bundle), "--out", str(wav)])


# -- `sbkit speak --lines`

LINES = ["Press one.", "", 'Hold, "please".', "Press \N{GREEK SMALL LETTER OMEGA}.", "Press one."]
LINES += ["", "Hold 2.", "Please hold. Press one"]  # two sentences
SPOKEN = {LINES[0], LINES[2], LINES[6], LINES[7]}


@pytest.fixture
def speak_lines(bundle: Path, tmp_path: Path) -> Callable[..., int]:
    (tmp_path / "some.txt").write_bytes("\r\n".join(LINES).encode() + b"\n")
    words = ["speak", str(bundle), "--lines", str(tmp_path / "some.txt"), "--device=cpu"]
    return lambda *options: sbkit([*words, "--out-dir", str(tmp_path / "clips"), *options])


def read_table(table: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a table by their texts, as training reads them."""
    manifest = read_split({"manifest": {"train-synthetic": str(table)}}, "train-synthetic")
    assert not manifest.excluded
    return {clip.sentence: {**clip.columns, "audio": str(clip.path)} for clip in manifest}


def test_lines_become_clips_with_a_table_to_train_on(
    speak_lines: Callable[..., int],
    voice: Synthesizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert speak_lines("--speeds", "0.9", "1.1") == PARTLY_DONE
    assert "some.txt, line 2: left out. The text is empty." in caplog.text
    assert "some.txt, line 4: left out. No training clip of this voice has ω." in caplog.text
    rows = read_table(tmp_path / "clips/some.csv")
    assert rows.keys() == SPOKEN
    minutes = sum(float(row["duration"]) for row in rows.values()) / 60
    output = capsys.readouterr().out
    assert output.endswith(f": 4 clips ({minutes:.1f} min); 2 lines left out\n")
    speeds = {float(row["speed"]) for row in rows.values()}  # drawn by a hash of the weights
    assert len(speeds) > 1 and min(speeds) >= 0.9 and max(speeds) <= 1.1
    for text, row in rows.items():
        audio, rate = soundfile.read(row["audio"], dtype="float32")
        assert audio == pytest.approx(voice.speak(text, float(row["speed"])), abs=1e-4)
        assert (rate, float(row["duration"])) == (RATE, round(len(audio) / RATE, 3))
    present = times_of(tmp_path / "clips", "*.flac")
    assert speak_lines("--speeds", "0.9", "1.1") == PARTLY_DONE
    assert times_of(tmp_path / "clips", "*.flac") == present
    assert read_table(tmp_path / "clips/some.csv") == rows
    with pytest.raises(SbkitError, match="some.csv was begun with another speeds"):
        speak_lines("--speeds", "0.9", "1.2")


def test_parts_are_the_whole_and_an_interrupted_part_goes_on(
    speak_lines: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_encoded = 0

    def encode_once(*arguments: Any) -> bytes:
        nonlocal num_encoded
        num_encoded += 1
        if num_encoded == 2:
            raise KeyboardInterrupt
        return encode_audio(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sbkit.audio.io.encode_audio", encode_once)
        speak_lines("--share", "1/2")
    before = times_of(tmp_path / "clips", "*.flac")
    assert len(before) == 1
    speak_lines("--share", "1/2")
    assert before.items() <= times_of(tmp_path / "clips", "*.flac").items()
    assert speak_lines("--share", "2/2") == PARTLY_DONE
    parts = [read_table(tmp_path / f"clips/some.{number}-of-2.csv").keys() for number in (1, 2)]
    assert parts[0] | parts[1] == SPOKEN and not parts[0] & parts[1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--lines", "some.txt"], "needs --out-dir DIR with --lines"),
        (["Hold.", "--lines", "some.txt", "--out-dir", "new"], "`TEXT` cannot be used with --line"),
        (["--lines", "gone.txt", "--out-dir", "new"], "gone.txt"),
        (["--lines", "some.txt", "--out-dir", "new", "--share", "17/16"], "`--share` .* 17/16"),
        (["--lines", "some.txt", "--out-dir", "new", "--speeds", "1.1", "0.9"], "but is 1.1 0.9"),
        (["Hold.", "--share", "1/2", "--out", "hold.wav"], "`--share` cannot be used without"),
        (["Hold."], "needs --out FILE"),
    ],
)
def test_speak_refuses_options_that_do_not_fit(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("Hold.")
    with pytest.raises(SbkitError, match=match):
        sbkit(["speak", str(bundle), *options])
    assert {file.name for file in tmp_path.rglob("*")} == {"some.txt"}


def test_find_durations_equals_the_best_of_all_paths() -> None:
    scores = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    frames, symbols = torch.tensor([7, 5]), torch.tensor([4, 2])
    durations = find_durations(scores, frames, symbols).tolist()
    for row, count, duration in zip(scores, frames.tolist(), durations, strict=True):
        length = np.count_nonzero(duration)
        totals = {}
        for cuts in combinations(range(1, count), length - 1):
            path = np.diff([0, *cuts, count])
            totals[*path] = float(row[range(count), np.arange(length).repeat(path)].sum())
        assert duration == [*max(totals, key=totals.__getitem__)] + [0] * (4 - length)


def test_diagonal_prior_is_a_beta_binomial() -> None:
    """Its moments by the definition: 3 trials, a = 1 ... 7 and b = 7 ... 1."""
    prior, symbols = diagonal_prior(7, 4).exp(), torch.arange(4.0)
    a = torch.arange(1.0, 8)
    mean = 3 * a / 8
    assert torch.allclose(prior.sum(1), torch.ones(7))
    assert torch.allclose(prior @ symbols, mean)
    assert torch.allclose(prior @ symbols.square() - mean**2, 3 * a * (8 - a) * (8 + 3) / (64 * 9))


def test_forward_sum_equals_the_sum_over_all_paths() -> None:
    """A path has the symbols in their order, for any number of frames, and blanks between."""
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    losses = forward_sum_loss(scores, torch.tensor([5, 4]), torch.tensor([3, 2]))
    for row, frames, symbols, loss in zip(scores, (5, 4), (3, 2), losses.tolist(), strict=True):
        with_blank = torch.cat([torch.full((5, 1), -1.0), row], 1).log_softmax(1)
        total = 0.0
        for path in product(range(4), repeat=frames):
            symbols_of_path = [symbol for symbol, _ in groupby(path) if symbol]
            if symbols_of_path == [*range(1, symbols + 1)]:
                total += math.exp(with_blank[range(frames), path].sum())
        assert loss == pytest.approx(-math.log(total), rel=1e-4)


def test_frame_index_and_mean_by_symbol_follow_durations() -> None:
    durations = torch.tensor([[2, 1, 3]])
    index = frame_index(durations, 8)
    assert index.tolist() == [[0, 0, 1, 2, 2, 2, 2, 2]]
    values = torch.tensor([[1.0, 3.0, 5.0, 2.0, 2.0, 8.0, 0.0, 0.0]])
    assert mean_by_symbol(values, index, durations).tolist() == [[2.0, 5.0, 4.0]]


@pytest.mark.parametrize(
    ("durations", "pauses", "is_misaligned"),
    [
        ([3, 2, 4, 5, 3, 2], [], False),
        ([3, 2, 40, 5, 3, 2], [], True),
        ([3, 2, 40, 5, 3, 2], [2], False),  # a comma
        ([3, 2, 40, 5], [], False),  # four letters
        ([40, 30, 40], [], False),  # "DVD"
        ([1, 1, 1, 1, 20, 1], [], True),
        ([1, 1, 0, 0, 0, 0], [], True),  # more symbols than frames
    ],
)
def test_find_misaligned_finds_durations_that_no_speech_has(
    durations: list[int], pauses: list[int], is_misaligned: bool
) -> None:
    counts, is_pause = torch.tensor([len(durations)]), torch.zeros(1, len(durations)).bool()
    is_pause[:, pauses] = True
    misaligned = find_misaligned(torch.tensor([durations]), counts, is_pause, 24)
    assert misaligned.tolist() == [is_misaligned]


def harmonics(hertz: float, seconds: float) -> Signal:
    at = np.arange(round(seconds * RATE)) / RATE
    waves: Signal = sum(np.sin(2 * np.pi * hertz * n * at) / n for n in range(1, 8))
    return 5000 * waves


@pytest.mark.parametrize("hertz", [90, 333])
def test_track_pitch_finds_the_fundamental_of_a_signal(hertz: float) -> None:
    clip = np.concatenate([np.zeros(RATE), harmonics(hertz, 1.0)]).astype(np.int16)
    pitch = track_pitch(clip, RATE, FRAME)
    assert len(pitch) == 80 and np.flatnonzero(pitch)[0] in (39, 40)  # a window is two frames
    assert np.allclose(pitch[42:78], hertz, rtol=0.01)
    assert np.allclose(interpolate(pitch), hertz, rtol=0.02)


def test_track_pitch_follows_a_jump_and_a_short_clip_has_a_frame() -> None:
    halves = np.concatenate([harmonics(120, 0.5), harmonics(200, 0.5)])
    pitch = track_pitch(halves.astype(np.int16), RATE, FRAME)
    assert np.allclose(pitch[1:18], 120, rtol=0.02) and np.allclose(pitch[22:-1], 200, rtol=0.02)
    for samples in (0, 300):
        assert track_pitch(np.zeros(samples, np.int16), RATE, FRAME).tolist() == [0.0]


def test_track_pitch_ignores_creaks() -> None:
    at = np.arange(RATE) / RATE
    every_second = np.floor(at * 200) % 2 == 1
    creaks = (at > 0.45) & (at < 0.55) & every_second
    clip = harmonics(200, 1.0) * np.where(creaks, 0.6, 1)
    pitch = track_pitch(clip.astype(np.int16), RATE, FRAME)
    assert np.allclose(pitch[1:-1], 200, rtol=0.02)


@pytest.mark.skipif(shutil.which(ESPEAK) is None, reason="espeak-ng is not installed")
def test_read_texts_in_phonemes_keeps_marks() -> None:
    (phonemes,) = read_texts(["Hello, world. Press 1"], "en", "phonemes")
    assert [symbol for symbol in phonemes if symbol in ",.?"] == [",", "."]
    symbols = to_symbols(phonemes)
    assert "".join(symbols) == phonemes and "ˈɜː" in symbols
    with pytest.raises(SbkitError, match="which has no tlh"):
        read_texts(["Hello"], "tlh", "phonemes")


def test_read_texts_in_phonemes_needs_espeak() -> None:
    with patch.object(shutil, "which", return_value=None), pytest.raises(SbkitError) as error:
        read_texts(["not said before"], "en", "phonemes")
    assert "apt-get install espeak-ng" in str(error.value)
