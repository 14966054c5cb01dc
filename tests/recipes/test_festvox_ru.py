"""The Russian voice: a release from a package."""

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.debian.release import write_release
from recipes.FestvoxRu.corpus import read_clips
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import corpus_of
from sbkit.export.export import exported_bundle
from sbkit.tasks.tts.predict import Synthesizer
from tests.runs import TINY_VOICE, train_here
from tests.stores import read_split

TEXT = """( ru_0001 "Сн+ова, он здесь." )
( ru_0002 "\\"Я рад\\", - сказал он." )
no sentence
"""


def make_package(root: Path, text: str = TEXT) -> Path:
    """Write the files of an unpacked package: two seconds of noise for each sentence."""
    voice = root / "usr/share/festival/voices/russian/a_voice"
    for folder in ("etc", "wav"):
        (voice / folder).mkdir(parents=True)
    (voice / "etc/txt.done.data").write_text(text, encoding="utf-8")
    random = np.random.default_rng(0)
    for name in re.findall(r"ru_\d+", text):
        noise = random.integers(-9000, 9000, 32_000).astype(np.int16)
        soundfile.write(voice / "wav" / f"{name}.wav", noise, 16_000)
    return root


def make_voice(root: Path) -> Path:
    words = ["дом", "рад", "она", "его", "лист", "вода"]
    texts = [f"{one} {two}" for one in words for two in words if one != two]
    lines = (f'( ru_{n:04} "{text}" )\n' for n, text in enumerate(texts))
    return make_package(root, "".join(lines))


def test_release_has_plain_sentences(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    write_release(tmp_path / "release", read_clips(make_package(tmp_path / "root")))
    settings = {"data_folder": tmp_path / "release", "language": "ru"}
    manifest = read_split(settings, "validated")
    assert manifest.excluded == ()
    clips = {clip.id: clip for clip in manifest}
    sentences = {name: clip.sentence for name, clip in clips.items()}
    assert sentences == {"ru_0001": "Снова, он здесь.", "ru_0002": '"Я рад", - сказал он.'}
    samples, rate = soundfile.read(clips["ru_0001"].path, dtype="int16")
    assert rate == 16_000
    assert len(samples) == 32_000


@pytest.mark.usefixtures("own_cache")
def test_data_of_a_run_needs_this_corpus_in_several_folders_too() -> None:
    """A run of somebody else's may name it so."""
    settings = {"corpus": "recipes.FestvoxRu.corpus", "data_folder": ["/a", "/b"]}
    with pytest.raises(SbkitError, match="--corpus=recipes.FestvoxRu.corpus --language=ru"):
        corpus_of(settings).require_fetched()


def fill_cache(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    monkeypatch.setattr("recipes.debian.release.fetch_packages", lambda *_: ("9", package))


def test_festvox_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of tables."""
    fill_cache(tmp_path / "cache", make_package(tmp_path / "root"), monkeypatch)
    settings = {"corpus": "recipes.FestvoxRu.corpus", "language": "ru"}
    assert corpus_of(settings).state()
    assert read_split(settings, "train").ids == ["ru_0002"]  # the other is in dev


@pytest.mark.slow
def test_festvox_voice_reads_cyrillic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trained as by the commands of the READMEs."""
    fill_cache(tmp_path / "cache", make_voice(tmp_path / "root"), monkeypatch)
    run = tmp_path / "run"
    once = ("--check=False", "--number_of_epochs=1", f"--output_folder={run}")
    corpus_settings = ("--corpus=recipes.FestvoxRu.corpus", "--language=ru")
    words = ["train.py", "hparams/tts.yaml", *TINY_VOICE, *once, *corpus_settings]
    assert train_here(words, tmp_path / "cache") == 0
    with exported_bundle(run) as folder, Synthesizer.load(folder, device="cpu") as voice:
        assert [note for note in voice.stream("2 лист").notes if "два" in note]
        assert voice.speak("2 лист").std() > 0
