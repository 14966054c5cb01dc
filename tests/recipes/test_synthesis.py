"""A voice trains, is exported, and speaks; bad texts get a sentence, and nothing is lost."""

import io
import json
import math
import os
import shutil
import struct
from base64 import b64encode
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import openai
import pytest
import sherpa_onnx
import soundfile
import torch
from speechbrain import Stage

from recipes.synthesis.brain import SynthesisBrain
from recipes.synthesis.data import SpokenBatch, SpokenCollate
from recipes.synthesis.pitch import continuous, track_pitch
from sbkit.audio.io import to_int16
from sbkit.base.errors import SbkitError
from sbkit.bundle.bundle import read_bundle
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import load_hparams, parse_overrides
from sbkit.export.export import export_run
from sbkit.export.parity import Grid
from sbkit.logs.run_log import read_log
from sbkit.models.symbol_alignment import (
    diagonal_prior,
    find_durations,
    find_misaligned,
    forward_sum,
    frame_index,
    mean_by_symbol,
)
from sbkit.runtime.synthesizer import LONGEST_TEXT, Synthesizer
from sbkit.streaming.devices import FilePlayer
from sbkit.streaming.pipeline import Pipeline
from sbkit.tasks.synthesis import describe_as_vits, list_characters
from sbkit.text.symbols import ESPEAK, read_texts, to_symbols
from sbkit.text.vocabulary import ensure_labels
from tests import processes
from tests.runs import ROOT, TINY_VOICE, Workplace, last_parameters, read_json, train_here, with_sgd
from tests.runtime.tones import silence, speak
from tests.serve.server import served
from tests.serve.test_command import serving
from tests.streaming.streaming_tones import streaming_tones

RATE, FRAME = 16_000, 400


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    folders = (f"--data_folder={workplace.release}", f"--output_folder={run}")
    words = ["train.py", str(ROOT / "hparams/tts.yaml"), *folders, *TINY_VOICE]
    assert train_here(words, workplace.cache) == 0
    return run


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    export_run(trained, out)
    return out


@pytest.fixture(scope="module")
def voice(bundle: Path) -> Iterator[Synthesizer]:
    task = read_bundle(bundle).task
    assert task.load is not None
    with task.load(bundle, device="cpu") as voice:
        yield voice


def test_it_is_trained_and_lists_misaligned_clips(trained: Path) -> None:
    epochs = [each for each in read_log(trained / "train_log.jsonl") if "valid_loss" in each]
    assert epochs[1]["valid_loss"] < epochs[0]["valid_loss"]
    tested = read_json(trained / "summary.json")["test"]["test"]
    assert tested["distance"] == pytest.approx(tested["mel_distance"] + tested["vocoder_distance"])
    assert {"pitch_error", "length_ratio", "misaligned"} <= tested.keys()
    assert (trained / "misaligned.tsv").read_text().startswith("id\n")
    drawn = (trained / "speech_test.png").read_bytes()
    assert struct.unpack(">II", drawn[16:24]) == (14 * 80, 3 * 3 * 80)  # pixels
    page = (trained / "report.html").read_text()
    assert b64encode(drawn).decode() in page
    for number, what in product("123", ("recorded", "synthesized")):
        sound = trained / f"speech_test.{number}_{what}.mp3"
        assert soundfile.read(sound)[0].std() > 1e-3
        assert f"{number} {what}: <audio" in page and b64encode(sound.read_bytes()).decode() in page


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> SynthesisBrain:
    folder = tmp_path_factory.mktemp("brain")
    ensure_labels(folder / "symbols.txt", {" ", ".", *"abcdefg"})
    overrides = parse_overrides([*TINY_VOICE, "--dropout=0", f"--output_folder={folder}"])
    hparams = load_hparams(ROOT / "hparams/tts.yaml", overrides)
    return SynthesisBrain(
        modules={"model": hparams["model"]}, hparams=hparams, run_opts={"device": "cpu"}
    )


@pytest.fixture
def batch(brain: SynthesisBrain) -> SpokenBatch:
    random = np.random.default_rng(0)
    rows = [
        {
            **{"id": text, "symbols": text, "percent": 100, "weight": 1, "samples": frames * FRAME},
            "audio": random.normal(0, 1000, frames * FRAME).astype(np.int16),
            "pitch": " ".join(["120"] * frames),
        }
        for text, frames in (("abc de.", 60), ("fag.", 31))
    ]
    return SpokenCollate(brain.hparams.labels, RATE, FRAME)(rows)


def test_only_training_is_given_the_pitch_of_the_recording(
    brain: SynthesisBrain, batch: SpokenBatch
) -> None:
    higher = replace(batch, octaves=batch.octaves + 1)
    for stage, is_given in ((Stage.TRAIN, True), (Stage.VALID, False), (Stage.TEST, False)):
        features = [brain.compute_forward(clips, stage).features for clips in (batch, higher)]
        assert torch.equal(*features) is not is_given


@pytest.mark.parametrize(
    ("name", "change", "of_a_frame", "if_wrong"),
    [
        ("features", 1.0, 1.0, 0.0),
        ("log_durations", math.log(2), 0.1 * (1 - math.log(2)), 0.0),
        ("found", 1.0, 1.0 * 2, 0.0),  # pitch and energy
        ("distance", 1.0, 1.0, 1.0),
    ],
)
def test_losses_are_of_frames_and_of_a_misaligned_clip_the_vocoder_learns_only(
    brain: SynthesisBrain,
    batch: SpokenBatch,
    name: str,
    change: float,
    of_a_frame: float,
    if_wrong: float,
) -> None:
    outputs = brain.compute_forward(batch, Stage.VALID)
    aligned = replace(outputs.aligned, wrong=torch.tensor([False, True]))
    right = replace(
        outputs,
        aligned=aligned,
        features=outputs.expected,
        log_durations=aligned.durations.clamp(min=1).log(),
        found=outputs.variances,
    )
    changed = replace(right, **{name: getattr(right, name) + change})
    before, after = (brain.compute_objectives(x, batch, Stage.VALID) for x in (right, changed))
    assert before.counts.tolist() == [60, 31]
    expected = [60 * of_a_frame, 31 * if_wrong]
    assert (after.sums - before.sums).tolist() == pytest.approx(expected, abs=0.01)


def test_the_vocoder_learns_of_the_middle_of_a_clip_without_its_edges(
    brain: SynthesisBrain, batch: SpokenBatch
) -> None:
    """Of 42 frames from the tenth on, the first and the last are context; 31 frames are fewer."""
    outputs = brain.compute_forward(batch, Stage.VALID)
    audio = batch.audio.float() / 2**15
    assert outputs.piece_lengths.tolist() == [40 * FRAME, 30 * FRAME]
    assert torch.equal(outputs.piece[0], audio[0, 10 * FRAME : 50 * FRAME])
    assert torch.equal(outputs.piece[1, : 30 * FRAME], audio[1, FRAME : 31 * FRAME])
    features, _ = brain.model.features(audio, batch.audio_lengths)
    decoded = brain.model.vocode(features[:1, 9:51], torch.ones(1, 42, 1))
    torch.testing.assert_close(outputs.decoded[:1], decoded[:, FRAME:-FRAME])
    assert not outputs.piece[1, 30 * FRAME :].any() and not outputs.decoded[1, 30 * FRAME :].any()


def test_one_graph_speaks_as_two_do(brain: SynthesisBrain) -> None:
    symbols, scale = torch.tensor([[3, 4, 5, 1, 6, 7, 2]]), torch.tensor([1.7])
    unused = torch.ones(1)
    with torch.no_grad():
        (spoken,) = brain.model.speak(symbols, unused, unused, scale, unused)
        states, durations = brain.model.encode(symbols)
        ends = np.rint(np.cumsum(1.7 * durations[0].double().numpy())).astype(int)
        index = np.repeat(np.arange(7), np.diff([0, *ends]))
        (expected,) = brain.model.decode(states, torch.from_numpy(index)[None])
    assert index[-1] == 6 and index[0] == 0
    torch.testing.assert_close(spoken, expected)


def test_a_clip_is_learned_without_the_silence_around_it(brain: SynthesisBrain) -> None:
    """From 40 ms before its speech, at a whole frame, to 40 ms after it; pauses within stay."""
    random = np.random.default_rng(0)
    runs = ((0.5, 5), (1.0, 3000), (0.4, 5), (1.0, 3000), (0.5, 5))
    audio = np.concatenate([random.normal(0, level, round(s * RATE)) for s, level in runs])
    row = {
        **{"id": "a", "symbols": "abc.", "percent": 100, "weight": 1, "samples": len(audio)},
        "audio": audio.astype(np.int16),
        "pitch": " ".join(str(100 + frame) for frame in range(-(-len(audio) // FRAME))),
    }
    trimmed = SpokenCollate(brain.hparams.labels, RATE, FRAME)([row])
    first, end = round(0.46 * RATE) // FRAME * FRAME, round(2.94 * RATE)
    assert np.array_equal(trimmed.audio[0].numpy(), row["audio"][first:end])
    frames = torch.arange(first // FRAME, -(-end // FRAME))
    torch.testing.assert_close(trimmed.octaves[0], ((100 + frames) / 150).log2())


@pytest.mark.slow(30)
@pytest.mark.ddp
def test_two_ranks_take_the_steps_of_one(workplace: Workplace, tmp_path: Path) -> None:
    """What is drawn is off: dropout, and which piece of a clip the vocoder learns of."""
    yaml = with_sgd("tts", tmp_path)
    weights = []
    for ranks in (1, 2):
        folders = (f"--data_folder={workplace.release}", f"--output_folder={tmp_path / str(ranks)}")
        words = ["train.py", str(yaml), *folders, *TINY_VOICE, "--dropout=0", "--piece_frames=400"]
        done = processes.run([*words, "--lr=0.01"], ranks=ranks, SBKIT_CACHE=workplace.cache)
        assert done.returncode == 0, done.stderr
        weights.append(last_parameters(tmp_path / str(ranks)))
    one, two = weights
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-6), name


def test_sentences_come_one_by_one(voice: Synthesizer) -> None:
    first, second = voice.stream("Please hold. Press one")
    assert first.dtype == np.float32 and np.abs(first).max() <= 16
    pause = round(0.25 * voice.sample_rate)
    assert not first[-pause:].any() and (len(first) - pause) % FRAME == 0
    assert np.array_equal(voice.speak("Press one"), second)
    quick, _ = voice.stream("Please hold. Press one", 2.0)
    assert len(quick) - len(voice.speak("Please hold.", 2.0)) == pause // 2
    assert (voice.sample_rate, voice.language) == (RATE, "en")


def test_openais_client_is_spoken_to(voice: Synthesizer, tmp_path: Path) -> None:
    text = "Please hold. Press one"
    with served(tmp_path, speaker=voice) as here:
        speech: Any = partial(here.openai.audio.speech.create, model="anna", voice="alloy")
        for speed in (1.0, 2.0):
            made = speech(input=text, response_format="pcm", speed=speed).content
            seconds = len(voice.speak(text, speed)) / RATE
            assert len(made) / 2 / 24_000 == pytest.approx(seconds, abs=0.001)
        for bad in ("\x1b[2J", "?!", "привет"):
            with pytest.raises(openai.BadRequestError, match="Text must have"):
                speech(input=bad)
        with pytest.raises(openai.BadRequestError, match="at most 360 s long, but .* about 4"):
            speech(input="7 " * 1000)
        headers = speech(input="Press 1").response.headers
        assert json.loads(headers["x-sbkit-notes"]) == ['"1" is read "one".']
        every = " ".join(map(str, range(140)))
        assert 1900 < len(speech(input=every).response.headers["x-sbkit-notes"]) <= 2000
        events = speech(input="Press 1", stream_format="sse").text
        assert json.loads(events.split("data: ")[-1])["notes"] == ['"1" is read "one".']


@pytest.mark.slow(30)
def test_a_recognizer_and_a_voice_are_served_together(exported: Path, bundle: Path) -> None:
    with serving(exported, beside=[bundle]) as (client, _):
        ready = client.get("/health/ready").json()
        assert [each["name"] for each in ready["models"]] == ["tiny", "bundle"]
        assert [each["effective"]["device"] for each in ready["models"]] == ["cpu", "cpu"]
        asked = {"model": "tts-1", "voice": "alloy", "input": "Press one", "response_format": "wav"}
        speech = client.post("/v1/audio/speech", json=asked).content
        found = client.post("/v1/audio/transcriptions", files={"file": speech})
        assert found.status_code == 200


def test_a_pipeline_answers_by_it(voice: Synthesizer, tmp_path: Path) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    player = partial(FilePlayer, tmp_path / "answer.wav")
    with recognizer:
        pipeline = Pipeline(recognizer, "I heard {}.".format, synthesizer=voice, player=player)
        pipeline.run([speak(tokenizer, "the dog"), silence(2.0)])
    answer, rate = soundfile.read(tmp_path / "answer.wav", dtype="int16")
    assert rate == voice.sample_rate
    assert np.array_equal(answer, to_int16(voice.speak("I heard the dog.")))


def test_speed_divides_the_length(voice: Synthesizer) -> None:
    usual, fast = (len(voice.speak("please hold the line", each)) for each in (1.0, 2.0))
    assert abs(fast - usual / 2) <= FRAME


@pytest.mark.slow(30)
def test_onnx_says_the_same(
    trained: Path, voice: Synthesizer, workplace: Workplace, tmp_path: Path
) -> None:
    grid = Grid(batches=(1, 3), seconds=(0.3, 1.0))
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}):
        found = export_run(trained, tmp_path / "bundle", formats=["onnx", "sherpa-onnx"], grid=grid)
    reasons = {
        name: each["reasons"] for several in found.values() for name, each in several.items()
    }
    assert reasons == {"encode": [], "decode": [], "speak": []}
    with Synthesizer.load(tmp_path / "bundle", device="cpu", runtime="onnx") as other:
        assert other.effective.runtime == "onnx"
        assert np.allclose(other.speak("Press one."), voice.speak("Press one."), atol=1e-4)
    spoken = sherpa_speaks(tmp_path / "bundle" / "sherpa-onnx", "PRESS one.", speed=1.25)
    assert np.allclose(spoken, voice.speak("Press one.", speed=1.25), atol=1e-4)


def sherpa_speaks(folder: Path, text: str, speed: float) -> Any:
    vits = sherpa_onnx.OfflineTtsVitsModelConfig(
        model=str(folder / "speak.onnx"), tokens=str(folder / "tokens.txt")
    )
    config = sherpa_onnx.OfflineTtsConfig(model=sherpa_onnx.OfflineTtsModelConfig(vits=vits))
    options = sherpa_onnx.GenerationConfig()
    options.speed, options.silence_scale = speed, 1.0
    spoken = sherpa_onnx.OfflineTts(config).generate(text, options)
    assert spoken.sample_rate == RATE
    return np.array(spoken.samples, np.float32)


def test_a_voice_of_phonemes_is_none_for_sherpa() -> None:
    for kind, is_refused in (("characters", False), ("phonemes", True)):
        bundle = SimpleNamespace(
            model=SimpleNamespace(settings={"kind": kind}),
            config=SimpleNamespace(language="en"),
            labels=SimpleNamespace(names=["a"]),
        )
        with pytest.raises(SbkitError, match="reads phonemes") if is_refused else nullcontext():
            assert describe_as_vits(bundle)[1] == {"tokens.txt": "A 0\na 0\n"}


def test_characters_have_their_capitals() -> None:
    assert list_characters(["-", "?", "i", "ß", "ж", "e\N{COMBINING ACUTE ACCENT}"]).split(
        "\n"
    ) == [*("- 0", "? 1", "I 2", "Ж 4", "i 2", "ß 3", "ж 4", "")]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "but is empty"),
        (" \n", "but is empty"),
        ("x" * (LONGEST_TEXT + 1), f"but has {LONGEST_TEXT + 1}"),
        ("a\0b", "control characters, but has the character"),
        ("\N{CJK UNIFIED IDEOGRAPH-4F60}", "words that this voice can read, which knows en"),
        ("...!", "words that this voice can read"),
    ],
)
def test_bad_text_gets_a_sentence_at_the_call(voice: Synthesizer, text: str, match: str) -> None:
    with pytest.raises(SbkitError, match=match):
        voice.stream(text)
    with pytest.raises(SbkitError, match=r"`speed` must be from 0\.25 to 4"):
        voice.stream("Press one", 5.0)


def test_notes_name_what_is_left_out(voice: Synthesizer) -> None:
    notes = voice.stream("Press 1 \N{GREEK SMALL LETTER OMEGA}").notes
    assert notes == (
        '"1" is read "one".',
        "No clip of this voice has \N{GREEK SMALL LETTER OMEGA}, which is left out.",
    )


def test_the_command_writes_a_file_or_standard_output(
    bundle: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    wav, text = tmp_path / "hello.wav", tmp_path / "hello.txt"
    text.write_text("Press 1.")
    assert sbkit(["speak", str(bundle), "--file", str(text), "--out", str(wav)]) == 0
    assert sbkit(["speak", str(bundle), "press one.", "--out", "-", "--speed", "1"]) == 0
    out, errors = capsysbinary.readouterr()
    assert b'note: "1" is read "one".' in errors
    assert out == wav.read_bytes()
    assert soundfile.info(io.BytesIO(out)).samplerate == RATE
    with pytest.raises(SbkitError, match="a text or --file, one of them"):
        sbkit(["speak", str(bundle), "--out", str(wav)])


def test_the_best_path_is_found() -> None:
    scores = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    frames, symbols = torch.tensor([7, 5]), torch.tensor([4, 2])
    found = find_durations(scores, frames, symbols).tolist()
    for row, count, some in zip(scores, frames.tolist(), found, strict=True):
        length = sum(each > 0 for each in some)
        paths = [
            np.diff([0, *cuts, count]).tolist()
            for cuts in combinations(range(1, count), length - 1)
        ]
        best = max(
            paths, key=lambda path: float(row[range(count), np.arange(length).repeat(path)].sum())
        )
        assert some == best + [0] * (4 - length)


def test_the_prior_is_a_beta_binomial_along_the_diagonal() -> None:
    """Its moments by the definition: 3 trials, a = 1 ... 7 and b = 7 ... 1."""
    prior, symbols = diagonal_prior(7, 4).exp(), torch.arange(4.0)
    a = torch.arange(1.0, 8)
    mean = 3 * a / 8
    assert torch.allclose(prior.sum(1), torch.ones(7))
    assert torch.allclose(prior @ symbols, mean)
    assert torch.allclose(prior @ symbols.square() - mean**2, 3 * a * (8 - a) * (8 + 3) / (64 * 9))


def test_alignments_are_summed_over_all_paths() -> None:
    """A path has the symbols in their order, for any number of frames, and blanks between."""
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    losses = forward_sum(scores, torch.tensor([5, 4]), torch.tensor([3, 2]))
    for row, frames, symbols, loss in zip(scores, (5, 4), (3, 2), losses.tolist(), strict=True):
        with_blank = torch.cat([torch.full((5, 1), -1.0), row], 1).log_softmax(1)
        total = 0.0
        for path in product(range(4), repeat=frames):
            read = [symbol for symbol, _ in groupby(path) if symbol]
            if read == [*range(1, symbols + 1)]:
                total += math.exp(with_blank[range(frames), path].sum())
        assert loss == pytest.approx(-math.log(total), rel=1e-4)


def test_frames_belong_to_their_symbols() -> None:
    durations = torch.tensor([[2, 1, 3]])
    index = frame_index(durations, 8)
    assert index.tolist() == [[0, 0, 1, 2, 2, 2, 2, 2]]
    values = torch.tensor([[1.0, 3.0, 5.0, 2.0, 2.0, 8.0, 0.0, 0.0]])
    assert mean_by_symbol(values, index, durations).tolist() == [[2.0, 5.0, 4.0]]


@pytest.mark.parametrize(
    ("durations", "pauses", "is_wrong"),
    [
        ([3, 2, 4, 5, 3, 2], [], False),
        ([3, 2, 40, 5, 3, 2], [], True),
        ([3, 2, 40, 5, 3, 2], [2], False),  # a comma
        ([3, 2, 40, 5], [], False),  # four letters
        ([40, 30, 40], [], False),  # "DVD"
        ([1, 1, 1, 1, 20, 1], [], True),
    ],
)
def test_durations_that_no_speech_has(
    durations: list[int], pauses: list[int], is_wrong: bool
) -> None:
    counts, is_pause = torch.tensor([len(durations)]), torch.zeros(1, len(durations)).bool()
    is_pause[:, pauses] = True
    found = find_misaligned(torch.tensor([durations]), counts, is_pause, 24)
    assert found.tolist() == [is_wrong]


@pytest.mark.parametrize("hertz", [90, 150, 333])
def test_pitch_is_that_of_the_signal(hertz: float) -> None:
    at = np.arange(RATE) / RATE
    waves = sum(np.sin(2 * np.pi * hertz * n * at) / n for n in range(1, 8))
    clip = np.concatenate([np.zeros(RATE, np.int16), (5000 * waves).astype(np.int16)])
    pitch = track_pitch(clip, RATE, FRAME)
    assert len(pitch) == 80 and np.flatnonzero(pitch)[0] in (39, 40)  # a window is two frames
    assert np.allclose(pitch[42:78], hertz, rtol=0.01)
    assert np.allclose(continuous(pitch), hertz, rtol=0.02)


def test_pitch_follows_a_voice_and_a_short_clip_has_a_frame() -> None:
    at = np.arange(RATE // 2) / RATE
    halves = [
        sum(np.sin(2 * np.pi * hertz * n * at) / n for n in range(1, 8)) for hertz in (120, 200)
    ]
    pitch = track_pitch((5000 * np.concatenate(halves)).astype(np.int16), RATE, FRAME)
    assert np.allclose(pitch[1:18], 120, rtol=0.02) and np.allclose(pitch[22:-1], 200, rtol=0.02)
    for samples in (0, 300):
        assert track_pitch(np.zeros(samples, np.int16), RATE, FRAME).tolist() == [0.0]


def test_pitch_stays_where_a_voice_creaks() -> None:
    at = np.arange(RATE) / RATE
    waves = sum(np.sin(2 * np.pi * 200 * n * at) / n for n in range(1, 8))
    every_second = np.floor(at * 200) % 2 == 1
    creaks = (at > 0.45) & (at < 0.55) & every_second
    pitch = track_pitch((5000 * waves * np.where(creaks, 0.6, 1)).astype(np.int16), RATE, FRAME)
    assert np.allclose(pitch[1:-1], 200, rtol=0.02)


@pytest.mark.skipif(shutil.which(ESPEAK) is None, reason="espeak-ng is not installed")
def test_phonemes_keep_the_marks() -> None:
    (found,) = read_texts(["Hello, world. Press 1"], "en", "phonemes")
    assert [each for each in found if each in ",.?"] == [",", "."]
    symbols = to_symbols(found)
    assert "".join(symbols) == found and "ˈɜː" in symbols
    with pytest.raises(SbkitError, match="it has no voice tlh"):
        read_texts(["Hello"], "tlh", "phonemes")


def test_phonemes_need_espeak() -> None:
    with patch.object(shutil, "which", return_value=None), pytest.raises(SbkitError) as error:
        read_texts(["not said before"], "en", "phonemes")
    assert "apt-get install espeak-ng" in str(error.value)
