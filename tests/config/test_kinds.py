"""A value counts as its key's kind, whichever way it comes: true, false, or text as written."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from sbkit.base.ranges import FLAG_WORDS
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.config.keys import KEYS
from sbkit.config.overrides import nest_overrides, parse_overrides

FLAGS = [name for name, key in KEYS.items() if key.type is bool]
NOT_TEXTS = {"recipe", "decoder"}  # a module, and an object
TEXTS = [name for name in KEYS.keys() - NOT_TEXTS if "a" in KEYS[name].values]
LISTS = [name for name, key in KEYS.items() if key.type == list[str] | None]
# Numbers, times and flags to some YAML; `no` is also Norwegian.
WRITTEN = "007 1e3 1.10 0o17 0x1F 1_000 .5 +5 .inf 1:30 2026-11-27 2026-11-27T10:00:00 no on y N"
SPELLINGS = (str.lower, str.title, str.upper, '"{}"'.format, "'{}'".format)


def read(way: str, folder: Path, text: str, old: str, names: list[str]) -> Mapping[str, object]:
    """Return values that are written one way; those of the objects and the run folder are equal."""
    new_lines, old_lines = ("".join(f"{n}: {t}\n" for n in names) for t in (text, old))
    base, own, overrides = "", new_lines, dict[str, object]()
    match way:
        case "base":
            base, own = new_lines, "base: base.yaml\n"
        case "over base":
            base, own = old_lines, f"base: base.yaml\n{new_lines}"
        case "command line":
            own, overrides = old_lines, parse_overrides([f"--{name}={text}" for name in names])
        case "Python":
            own = old_lines
            overrides = nest_overrides(dict.fromkeys(names, text.strip("'\"")))
    (folder / "base.yaml").write_text(base)
    (folder / "own.yaml").write_text(own)
    (folder / "hyperparams.yaml").write_text(read_spec(folder / "own.yaml", overrides).one_file)
    settings = read_spec(folder / "own.yaml", overrides).settings
    assert load_hparams(folder / "own.yaml", overrides) == settings
    assert read_spec(folder / "hyperparams.yaml").settings == settings
    return settings


@pytest.mark.parametrize("way", ["file", "base", "over base", "command line", "Python"])
def test_word_or_text_is_read_by_its_kind(way: str, tmp_path: Path) -> None:
    for word, flag in FLAG_WORDS.items():
        for spell in SPELLINGS:
            settings = read(way, tmp_path, spell(word), str(not flag), FLAGS)
            assert settings == dict.fromkeys(FLAGS, flag)
    for text in WRITTEN.split():
        assert read(way, tmp_path, text, "x", TEXTS) == dict.fromkeys(TEXTS, text)


@pytest.mark.parametrize("way", ["file", "over base", "command line"])
def test_texts_in_lists_and_mappings_are_read_as_written(way: str, tmp_path: Path) -> None:
    texts = [*WRITTEN.split(), "true", "False"]
    assert read(way, tmp_path, f"[{', '.join(texts)}]", "[]", LISTS) == dict.fromkeys(LISTS, texts)
    for text in texts:
        value = read(way, tmp_path, f"{{007: {text}, b: [{text}]}}", "{}", ["where"])["where"]
        assert value == {"007": text, "b": [text]}


def test_word_for_another_key_counts_as_in_its_base(path: Path) -> None:
    own = path.with_name("own.yaml")
    own.write_text("base: ctc.yaml\nmixed: Off\n")
    assert read_spec(own, parse_overrides(["--mixed=yes"])).settings["mixed"] is True
    assert read_spec(own).settings["mixed"] is False
