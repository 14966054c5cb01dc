"""`tools.bench_levels` mixes sounds with clips as its table says, and prints both tables."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sbkit.audio.io import Samples
from sbkit.evaluate.wer import ErrorCounts, count_errors
from sbkit.export.export import export_run
from sbkit.runtime.runtimes import load_bundle
from sbkit.tasks.asr.session import Final, Session, StreamingRecognizer
from sbkit.tasks.vad.predict import VoiceDetector
from tests.runtime.bundles import make_live_run
from tests.runtime.scripted_speech import LoudSpeech
from tools import bench_levels
from tools.bench_levels import Clip, Recognizer, Recording, Scene, count_characters

RATE = 16_000
HALF_SECOND = RATE // 2


@pytest.fixture
def scene() -> Scene:
    tones = [0.5 * np.sin(np.arange(HALF_SECOND) * hertz) for hertz in (0.3, 0.6)]
    return Scene(Clip(tones[0], "a fox"), Clip(tones[1], "dogs"), RATE)


def decibels(audio: bench_levels.Audio) -> float:
    return float(20 * np.log10(np.abs(audio).max()))


def test_sounds_are_at_full_scale_beside_a_softer_clip(scene: Scene) -> None:
    conditions = bench_levels.speech_conditions()
    lengths = {"click": 80, "bang": 1600, "beep": 4000, "tone": RATE, "loud word": HALF_SECOND}
    gap = round(0.3 * RATE)
    for sound, size in lengths.items():
        for peak in (0, -20):
            before = conditions[f"{sound} before, speech at {peak} dB"](scene).audio
            behind = conditions[f"{sound} behind, speech at {peak} dB"](scene).audio
            assert len(before) == size + gap + HALF_SECOND
            assert decibels(before[:size]) == pytest.approx(0, abs=0.1)
            assert not before[size : size + gap].any()
            assert decibels(before[-HALF_SECOND:]) == pytest.approx(peak)
            np.testing.assert_array_equal(behind[-size:], before[:size])
            np.testing.assert_array_equal(behind[:HALF_SECOND], before[-HALF_SECOND:])
    np.testing.assert_array_equal(conditions["clean"](scene).audio, scene.clip.audio)
    assert decibels(conditions["20 dB softer"](scene).audio) == pytest.approx(-26.02, abs=0.1)


def test_second_speaker_is_softer(scene: Scene) -> None:
    recording = bench_levels.second_speaker(scene, softer_db=10)
    assert recording.text == "a fox dogs"
    assert decibels(recording.audio[:HALF_SECOND]) == pytest.approx(0)
    assert not recording.audio[HALF_SECOND : 2 * HALF_SECOND].any()
    assert decibels(recording.audio[2 * HALF_SECOND :]) == pytest.approx(-10)


def test_rare_speech_is_a_share_of_noise(scene: Scene) -> None:
    audio = bench_levels.rare_speech(scene, share=0.1, snr_db=30).audio
    assert len(audio) == 10 * HALF_SECOND
    parts = audio.reshape(20, -1)  # the clip is in the middle two
    power = 10 * np.log10(np.square(parts).mean(1))
    np.testing.assert_allclose(np.delete(power, [9, 10]) - power[9], -30, atol=0.5)
    assert power[9] == pytest.approx(power[10], abs=0.1)


def test_words_of_a_loud_word_are_not_counted() -> None:
    audio = np.zeros(1)
    texts = {"before": "not a fix", "behind": "a fix not it", None: "not a fix"}
    for side, hypothesis in texts.items():
        counts = count_characters(Recording(audio, "a fox", side), hypothesis)
        assert (counts.errors, counts.reference_length) == ((1 if side else 5), 5)
    assert count_characters(Recording(audio, "a fox", "before"), "").errors == 5


def test_letters_are_counted_where_nobody_speaks(scene: Scene) -> None:
    heard: list[Samples] = []

    def transcribe(clips: Sequence[Samples]) -> list[str]:
        heard.extend(clips)
        return ["a fo  x"]

    recognizer = Recognizer(transcribe, [scene])
    for name, condition in bench_levels.speechless_conditions().items():
        assert recognizer.letters(condition) == "4"
        peak = decibels(heard[-1] / 32_768)
        assert len(heard[-1]) == 10 * RATE and name.endswith(f" at {round(peak)} dB")
    assert len(heard) == 4


def test_clips_of_the_default_corpus_have_all_lengths(
    plain_bundle: Path, asterisk_english: Path
) -> None:
    table = (asterisk_english / "test.tsv").read_text().lower()
    scenes = bench_levels.read_scenes(load_bundle(plain_bundle), None, 3)
    seconds = [len(scene.clip.audio) / scene.rate for scene in scenes]
    assert len(seconds) == 3 and seconds[0] < 1 < seconds[1] < 4 < seconds[2]
    texts = [scene.clip.text for scene in scenes]
    assert [scene.other.text for scene in scenes] == texts[1:] + texts[:1]
    for scene in scenes:
        assert scene.clip.text.split()[0] in table
        assert -20 < decibels(scene.clip.audio) <= 0


class CountingSpeech(LoudSpeech):
    """Speech where audio is loud; the seconds of all streams are counted."""

    seconds = 0.0

    def advance(self, samples: Samples, state: None) -> tuple[Any, None]:
        self.seconds += len(samples) / RATE
        return super().advance(samples, state)


Cells = dict[str, list[str]]  # of a table's rows, by their names; "" for the titles


@pytest.fixture
def live_bundle(tmp_path: Path) -> Path:
    export_run(make_live_run(tmp_path / "run"), tmp_path / "live")
    return tmp_path / "live"


def test_bench_levels_prints_both_tables(
    plain_bundle: Path,
    live_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    clips = [np.random.default_rng(n).integers(-3000, 3000, 2000 + 200 * n) for n in range(3)]
    texts = ["a fox", "", "a big fox"]
    rows = ["path,sentence"]
    for number, (clip, text) in enumerate(zip(clips, texts, strict=True)):
        soundfile.write(tmp_path / f"{number}.wav", clip.astype(np.int16), RATE)
        rows.append(f"{number}.wav,{text}")
    (tmp_path / "test.csv").write_text("\n".join(rows))
    speech_model = CountingSpeech()
    detector = VoiceDetector(speech_model)
    monkeypatch.setattr(VoiceDetector, "load", lambda name, **options: detector)

    def measure(*arguments: object) -> list[Cells]:
        data = ["--data", str(tmp_path / "test.csv"), "--clips=2"]
        monkeypatch.setattr(sys, "argv", ["bench_levels", *map(str, arguments), *data])
        bench_levels.main()
        tables = capsys.readouterr().out.strip().split("\n\n")
        lines = [table.replace("| |", "| - |").splitlines() for table in tables]
        cells = [[line.strip("| ").split(" | ") for line in table] for table in lines]
        return [{name: row for name, *row in table} for table in cells]

    speech, speechless = measure(plain_bundle, live_bundle)
    ways = [(plain_bundle, "transcribed"), (live_bundle, "transcribed"), (live_bundle, "live")]
    assert speech["-"] == speechless["-"] == [f"{bundle}, {way}" for bundle, way in ways]
    assert len(speech) == 2 + 1 + 3 + 5 * 2 * 4 + 2 + 5 * 4  # with the title and the line below
    assert [*speechless][2:] == [
        f"{sound} at {peak} dB" for sound in ("hum", "chords") for peak in (-10, -30)
    ]

    speech, speechless = measure(live_bundle, "--ways", "one-piece", "live", "--vad=loud")
    assert speech["-"] == [f"{live_bundle}, one-piece", f"{live_bundle}, live"]
    assert speechless["-"] == [*speech["-"], f"{live_bundle}, live, --vad"]
    assert speech_model.seconds == pytest.approx(4 * 10, abs=0.1)

    counts = [ErrorCounts(), ErrorCounts()]
    with StreamingRecognizer.load(live_bundle, device="cpu", decoder="greedy") as recognizer:
        for clip, text in zip(clips[::2], texts[::2], strict=True):
            samples = clip.astype(np.int16)
            (piece,) = load_bundle(live_bundle).with_decoder("greedy").transcribe([samples])
            session = Session(recognizer)
            events = session.push(samples) + session.finish()
            live = " ".join(event.text for event in events if isinstance(event, Final))
            for index, hypothesis in enumerate((piece, live)):
                counts[index] += count_errors(text, hypothesis).characters
    assert speech["clean"] == [f"{100 * c.errors / 14:.1f} ({c.errors} / 14)" for c in counts]
