"""The Russian voice: word times from phones, and a release from a package."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.debian.release import RELEASE_VERSION
from recipes.FestvoxRu import corpus
from recipes.FestvoxRu.corpus import write_release
from recipes.FestvoxRu.phones import SOUNDS, Phone, read_labels, time_words
from sbkit.base.errors import SbkitError
from sbkit.data.tables import TableOptions, read_release
from sbkit.export.export import exported_bundle
from sbkit.runtime.synthesizer import Synthesizer
from tests.runs import TINY, TINY_VOICE, read_json, train_here

TEXT = """( ru_0001 "Сн+ова, он здесь." )
( ru_0002 "\\"Я рад\\", - сказал он." )
no sentence
"""
LABELS = {
    "ru_0001": "s n oo v ay pau oo n zz d ee ss",
    "ru_0002": "j aa r aa t pau s k a z aa l oo n",
}


def labels(phones: str, *, seconds: float = 0.1) -> str:
    """Write labels as the package has them: a pause, and phones of the same duration."""
    names = ["pau", *phones.split(), "pau"]
    return "#\n" + "".join(
        f"{seconds * number:.5f} 125 {name}\n" for number, name in enumerate(names, start=1)
    )


def make_package(root: Path, text: str = TEXT, phones: dict[str, str] = LABELS) -> Path:
    """Write the files of an unpacked package: two seconds of noise for each sentence."""
    voice = root / "usr/share/festival/voices/russian/a_voice"
    for folder in ("etc", "wav", "lab"):
        (voice / folder).mkdir(parents=True)
    (voice / "etc/txt.done.data").write_text(text, encoding="utf-8")
    random = np.random.default_rng(0)
    for name, spoken in phones.items():
        (voice / "lab" / f"{name}.lab").write_text(labels(spoken), encoding="utf-8")
        noise = random.integers(-9000, 9000, 32_000).astype(np.int16)
        soundfile.write(voice / "wav" / f"{name}.wav", noise, 16_000)
    return root


def make_voice(root: Path) -> Path:
    """Make a package of thirty sentences of two words, with phones after their letters."""
    words = ["дом", "рад", "она", "его", "лист", "вода"]
    texts = [f"{one} {two}" for one in words for two in words if one != two]
    lines = (f'( ru_{n:04} "{text}" )\n' for n, text in enumerate(texts))
    spoken = {
        f"ru_{n:04}": " ".join(min(SOUNDS[letter]) for letter in text if letter != " ")
        for n, text in enumerate(texts)
    }
    return make_package(root, "".join(lines), spoken)


# words, the phones as the package writes them, and the phones of each word
SPOKEN = [
    ("я ем", "j aa j ee m", ["j aa", "j ee m"]),
    ("подъезд", "p a d j ee z t", ["p a d j ee z t"]),
    ("он надеется", "oo n n a dd ee j i c ae", ["oo n", "n a dd ee j i c ae"]),
    ("длинный нос", "d ll ii n y j n oo s", ["d ll ii n y j", "n oo s"]),
    ("счастье есть", "sch aa ss tt j ae j ee ss tt", ["sch aa ss tt j ae", "j ee ss tt"]),
    ("без сна", "bb ae s s n aa", ["bb ae s", "s n aa"]),
]


@pytest.mark.parametrize(("words", "phones", "expected"), SPOKEN)
def test_time_words_finds_the_phones_of_each_word(
    words: str, phones: str, expected: list[str]
) -> None:
    counts = np.cumsum([0, *(len(word_phones.split()) for word_phones in expected)])
    spoken = [Phone(name, 2.0 * at, 2.0 * at + 2) for at, name in enumerate(phones.split())]
    times = time_words(words.split(), spoken)
    assert times == [(2.0 * a, 2.0 * b) for a, b in zip(counts, counts[1:], strict=False)]


@pytest.mark.parametrize("words", ["она читала", ""])
def test_time_words_refuses_phones_of_another_sentence(words: str) -> None:
    spoken = read_labels(labels("k ay rr ae s p a n dd ee n t"))
    with pytest.raises(SbkitError, match=f"'{words}' do not match its words: .* for 12 phones"):
        time_words(words.split(), spoken)


@pytest.mark.parametrize("line", ["0.5 125", "0.05 125 a"])
def test_read_labels_refuses_a_malformed_line(line: str) -> None:
    with pytest.raises(SbkitError, match="should be a rising time, a number and a phone"):
        read_labels(f"#\n0.10000 125 pau\n{line}\n")


def test_release_has_plain_sentences_and_word_times_without_pauses(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    write_release(make_package(tmp_path / "root"), tmp_path / "release")
    manifest = read_release(tmp_path / "release" / "validated.tsv", TableOptions(language="ru"))
    assert manifest.excluded == ()
    clips = {clip.id: clip for clip in manifest}
    sentences = {name: clip.sentence for name, clip in clips.items()}
    assert sentences == {"ru_0001": "Снова, он здесь.", "ru_0002": '"Я рад", - сказал он.'}
    times = {name: clip.columns["word_times"] for name, clip in clips.items()}
    assert times == {
        "ru_0001": "0.100-0.600 0.700-0.900 0.900-1.300",
        "ru_0002": "0.100-0.300 0.300-0.600 0.700-1.300 1.300-1.500",
    }
    samples, rate = soundfile.read(clips["ru_0001"].path, dtype="int16")
    assert rate == 16_000
    assert len(samples) == 32_000


def fill_cache(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the release of a package into the cache."""
    release = cache / f"festvox-ru/9-r{RELEASE_VERSION}/ru"
    release.mkdir(parents=True)
    write_release(package, release)
    monkeypatch.setenv("SBKIT_CACHE", str(cache))


def test_festvox_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing release is not fetched again, and has one language."""
    fill_cache(tmp_path / "cache", make_package(tmp_path / "root"), monkeypatch)
    assert corpus.splits({})["valid"] == ("dev",)
    clips = corpus.read({"language": "ru"}, "train")
    assert [clip.id for clip in clips] == ["ru_0002"]  # the other is in dev
    with pytest.raises(SbkitError, match="The corpus FestvoxRu is in ru"):
        corpus.read({"language": "en"}, "train")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(tmp_path / "cache", make_voice(tmp_path / "root"), monkeypatch)


def train(yaml: str, *knobs: str, folder: Path) -> Path:
    """Train on it as the commands of the READMEs do; return the run folder."""
    corpus_knobs = ("--corpus=recipes.FestvoxRu.corpus", "--language=ru")
    words = ["train.py", yaml, *knobs, *corpus_knobs, f"--output_folder={folder / 'run'}"]
    assert train_here(words, folder / "cache") == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.usefixtures("release")
def test_festvox_recognizer_trains(tmp_path: Path) -> None:
    run = train("hparams/ctc.yaml", *TINY, "--number_of_epochs=1", folder=tmp_path)
    assert read_json(run / "summary.json")["test"]


@pytest.mark.slow
@pytest.mark.usefixtures("release")
def test_festvox_voice_reads_cyrillic(tmp_path: Path) -> None:
    once = ("--check=False", "--number_of_epochs=1")
    run = train("hparams/tts.yaml", *TINY_VOICE, *once, folder=tmp_path)
    with exported_bundle(run) as folder, Synthesizer.load(folder, device="cpu") as voice:
        assert [note for note in voice.stream("2 лист").notes if "два" in note]
        assert voice.speak("2 лист").std() > 0
