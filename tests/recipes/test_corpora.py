"""The classes of corpora, their choice, and the splits of their speakers."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import recipes
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import corpora, corpus_of, deal_speakers, parse_split_shares
from tests.stores import read_split

ROOT = Path(__file__).parents[2]


def test_corpora_do_not_import_each_other() -> None:
    names = {file.parent.name for file in (ROOT / "recipes").glob("*/corpus.py")}
    for file in (ROOT / "recipes").glob("*/*.py"):
        named = set(re.findall(r"from recipes\.(\w+)", file.read_text()))
        assert not named & names - {file.parent.name}, file


LAYOUTS = {  # a file of each folder, by the class that recognizes it
    "fr/clips/a.mp3": "CommonVoice",
    "clips/a.mp3": "CommonVoice",
    "ss-corpus-en.tsv": "CommonVoice",
    "train-960/84/7/84-7.trans.txt": "LibriSpeech",
    "LibriSpeech/dev/84/84-7.trans.txt": None,
    "a_supervisions_train.jsonl.gz": "Lhotse",
    "train/wav.scp": "Lhotse",
    "a_cuts_train.jsonl": "Lhotse",
    "talk.eaf": "OwnData",
    "sessions/talk.TextGrid": "OwnData",
    "train.tsv": None,
    "metadata.csv": None,
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_a_folder_is_recognized_by_one_class(file: str, tmp_path: Path) -> None:
    settings = {"data_folder": str(tmp_path)}
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    if LAYOUTS[file]:
        assert type(corpus_of(settings)).__name__ == LAYOUTS[file]
    else:
        with pytest.raises(SbkitError, match=rf"data_folder must be .* but {tmp_path} is none"):
            corpus_of(settings)


def test_a_folder_of_two_layouts_needs_the_key_corpus(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "cuts_train.jsonl").touch()
    choices = "`corpus: recipes.CommonVoice.corpus` or `corpus: recipes.Lhotse.corpus`"
    with pytest.raises(SbkitError, match=choices):
        corpus_of({"data_folder": str(tmp_path)})


MODULE = """
from sbkit import Clip, Corpus
class Notes(Corpus):
    layout = "a folder of notes"
    @classmethod
    def recognizes(cls, settings):
        return str(settings.get("data_folder")).endswith("notes")
    def splits(self):
        return {"train": ("a", "b"), "valid": ("dev",)}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a corpus in a second place of the package `recipes`."""
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "X").mkdir()
    return tmp_path / "X"


def test_a_corpus_is_added_in_one_folder(package: Path) -> None:
    (package / "corpus.py").write_text(MODULE)
    assert corpora()["recipes.X.corpus"].__name__ == "Notes"
    with pytest.raises(SbkitError, match="data_folder must be .* a folder of notes.* is none"):
        corpus_of({"data_folder": str(package)})
    settings = {"data_folder": "/data/notes", "splits": {"train": "a", "test": "b"}}
    corpus = corpus_of(settings)
    assert corpus.roles() == {"train": ("a",), "valid": ("dev",), "test": ("b",)}
    assert corpus.describe() == {"name": None, "license": None}  # not that of its folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_folder": "/no/folder"}, "data_folder must be .* but /no/folder does not exist"),
        ({"data_folder": "http://127.0.0.1:1/shards"}, "cannot be reached"),
        ({"corpus": "recipes.nothing"}, "cannot be imported"),
        ({"corpus": "json"}, "json of a corpus must have one class derived .* but has none"),
    ],
)
def test_corpus_of_refuses_unknown_data(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        corpus_of(settings)


@pytest.mark.parametrize("name", ["CommonVoice", "LibriSpeech"])
def test_corpus_of_a_folder_needs_data_folder(name: str) -> None:
    settings = {"corpus": f"recipes.{name}.corpus", "data_folder": None, "language": "en"}
    with pytest.raises(SbkitError, match="`data_folder` is not set"):
        corpus_of(settings).splits()


def test_default_corpus_has_a_name_and_the_licenses_of_its_languages() -> None:
    corpus = corpus_of({"language": ["en", "es", "ru"]}).describe()
    assert corpus == {"name": "Asterisk prompts", "license": "CC-BY-SA-3.0 and CC-BY-3.0"}


def test_page_of_corpora_has_each_class() -> None:
    page = (ROOT / "docs/corpora.md").read_text()
    rows = page.partition("\n## ")[0].splitlines()  # of the first table
    for corpus in corpora().values():
        words = corpus.layout or corpus.name or "`manifest`"
        assert sum(words in row for row in rows) == 1, words


@pytest.mark.parametrize("shares", [{"dev": 0.1, "test": 0.1}, {"dev": 0.4, "test": 0.5}])
def test_later_speakers_move_only_who_fills_a_split(shares: dict[str, float]) -> None:
    """In 109 of 200 such tables they moved somebody, also from train to test."""
    in_another_order = parse_split_shares(dict(reversed(shares.items())))
    for trial in range(200):
        speakers = [f"{trial}-{n}" for n in range(60)]
        first = deal_speakers(speakers[: 3 + trial % 10], in_another_order, "a.csv")
        later = deal_speakers(speakers, shares, "a.csv")
        sizes = Counter(first.values())
        assert all(later[name] == split or sizes[split] == 1 for name, split in first.items())
        assert {*sizes} == {*later.values()} == {"train", "dev", "test"}


def test_releases_of_two_languages_are_one_corpus(tmp_path: Path) -> None:
    for language in ("en", "es"):
        (tmp_path / language / "clips").mkdir(parents=True)
        for split in ("train", "dev", "test", "validated"):
            rows = f"path\tsentence\na.mp3\thi\n{language}.mp3\tyo\n"
            (tmp_path / language / f"{split}.tsv").write_text(rows)
    settings = {"data_folder": str(tmp_path), "language": ["en", "es"]}
    clips = [*read_split(settings, "dev")]
    assert [clip.id for clip in clips] == ["en/clips/a.mp3", "en", "es/clips/a.mp3", "es"]
    assert [clip.columns["language"] for clip in clips] == ["en", "en", "es", "es"]
    assert corpus_of(settings).roles()["valid"] == ("dev",)
    settings |= {"splits": {"train": "validated"}}
    assert corpus_of(settings).roles()["train"] == ("validated",)
