"""The choice of the corpus, and manifests that a user names."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.AsteriskPrompts import corpus as asterisk_prompts
from recipes.CommonVoice import corpus as common_voice
from recipes.OwnData import corpus as own_data
from recipes.prepare import corpus_of
from sbkit.base.errors import SbkitError
from sbkit.data.corpus import check_shares, deal_speakers, describe_corpus, splits_of

ROOT = Path(__file__).parents[2]


def test_corpora_do_not_import_each_other() -> None:
    corpora = {file.parent.name for file in (ROOT / "recipes").glob("*/corpus.py")}
    for file in (ROOT / "recipes").glob("*/*.py"):
        named = set(re.findall(r"from recipes\.(\w+)", file.read_text()))
        assert not named & corpora - {file.parent.name}, file


def test_corpus_of_follows_the_yaml(tmp_path: Path) -> None:
    assert corpus_of({"data_folder": None}) is asterisk_prompts
    assert corpus_of({"data_folder": None, "manifest": {"train": "a.csv"}}) is own_data
    assert corpus_of({"corpus": "recipes.CommonVoice.corpus"}) is common_voice
    (tmp_path / "fr" / "clips").mkdir(parents=True)
    assert corpus_of({"data_folder": str(tmp_path)}) is common_voice
    assert corpus_of({"data_folder": str(tmp_path / "fr")}) is common_voice


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_folder": f"{ROOT}/docs"}, "has none of these layouts"),
        ({"data_folder": __file__}, "is not a folder"),
        ({"data_folder": "http://127.0.0.1:1/shards"}, "cannot be reached"),
        ({"corpus": "recipes.nothing"}, "cannot be imported"),
        ({"corpus": "json"}, "has no function splits and no read"),
    ],
)
def test_corpus_of_refuses_unknown_data(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        corpus_of(settings)


@pytest.mark.parametrize("name", ["CommonVoice", "LibriSpeech"])
def test_corpus_of_a_folder_needs_data_folder(name: str) -> None:
    settings = {"corpus": f"recipes.{name}.corpus", "data_folder": None, "language": "en"}
    with pytest.raises(SbkitError, match="`data_folder` names none"):
        corpus_of(settings).splits(settings)


def test_describe_corpus_returns_name_and_license() -> None:
    corpus = describe_corpus(asterisk_prompts, {"language": ["en", "es", "ru"]})
    assert corpus == {"name": "Asterisk prompts", "license": "CC-BY-SA-3.0 and CC-BY-3.0"}
    own: Any = SimpleNamespace(about=lambda settings: {"name": "mine", "license": "mit"})
    assert describe_corpus(own, {"corpus": "my.corpus"})["name"] == "mine"
    for settings, name in (({"data_folder": "/data/cv-fr/"}, "cv-fr"), ({}, None)):
        assert describe_corpus(common_voice, settings) == {"name": name, "license": None}


def test_key_splits_applies_to_a_user_corpus() -> None:
    module: Any = SimpleNamespace(splits=lambda _: {"train": ("a", "b"), "valid": ("dev",)})
    splits = splits_of(module, {"splits": {"train": "a", "test": "b"}})
    assert splits == {"train": ("a",), "valid": ("dev",), "test": ("b",)}


@pytest.mark.parametrize("shares", [{"dev": 0.1, "test": 0.1}, {"dev": 0.4, "test": 0.5}])
def test_later_speakers_move_only_who_fills_a_split(shares: dict[str, float]) -> None:
    """In 109 of 200 such tables they moved somebody, also from train to test."""
    in_another_order = check_shares(dict(reversed(shares.items())))
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
    corpus = corpus_of(settings)
    clips = corpus.read(settings, "dev")
    assert [clip.id for clip in clips] == ["en/clips/a.mp3", "en", "es/clips/a.mp3", "es"]
    assert [clip.columns["language"] for clip in clips] == ["en", "en", "es", "es"]
    assert corpus.splits(settings)["valid"] == ("dev",)
    settings |= {"splits": {"train": "validated"}}
    assert corpus.splits(settings)["train"] == ("validated",)
    with pytest.raises(SbkitError, match="Choose among: dev, test, train, validated"):
        corpus.splits(settings | {"splits": {"test": "other"}})
