"""A value counts as its key's kind, whichever way it comes: true, false, or text as written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sbkit.base.ranges import FLAG, FLAG_WORDS, LIST, RANGES, Kind
from sbkit.config.hparams import load_hparams, read_knobs, save_yaml
from sbkit.config.overrides import nest_overrides, parse_overrides
from tests.config.conftest import refusal

FLAGS = [name for name, kind in RANGES.items() if kind == FLAG]
TEXTS = [name for name, kind in RANGES.items() if isinstance(kind, Kind) and "text" in kind.forms]
LISTS = [name for name, kind in RANGES.items() if kind == LIST]
SPELLINGS = [
    (spell(word), value)
    for word, value in FLAG_WORDS.items()
    for spell in (str.lower, str.title, str.upper, '"{}"'.format, "'{}'".format)
]
NUMBERS_AND_DATES = "007 1e3 1.10 0o17 0x1F 1_000 .5 +5 .inf 1:30 2026-11-27 2026-11-27T10:00:00"
WORDS_AS_TEXT = "no on off y N NO"  # no is also Norwegian


def in_file(folder: Path, text: str, old: str, names: list[str]) -> dict[str, object]:
    return values(folder, dict.fromkeys(names, text))


def in_base(folder: Path, text: str, old: str, names: list[str]) -> dict[str, object]:
    values(folder, dict.fromkeys(names, text))
    (folder / "a.yaml").rename(folder / "base.yaml")
    return values(folder, {"base": "base.yaml"})


def over_base(folder: Path, text: str, old: str, names: list[str]) -> dict[str, object]:
    values(folder, dict.fromkeys(names, old))
    (folder / "a.yaml").rename(folder / "base.yaml")
    return values(folder, {"base": "base.yaml", **dict.fromkeys(names, text)})


def on_command_line(folder: Path, text: str, old: str, names: list[str]) -> dict[str, object]:
    overrides = parse_overrides([f"--{name}={text}" for name in names])
    return values(folder, dict.fromkeys(names, old), overrides)


def in_python(folder: Path, text: str, old: str, names: list[str]) -> dict[str, object]:
    overrides = nest_overrides({name: text.strip("'\"") for name in names})
    return values(folder, dict.fromkeys(names, old), overrides)


def values(
    folder: Path, lines: dict[str, str], overrides: dict[str, object] | None = None
) -> dict[str, object]:
    """Return the values of a YAML, which are also those of its objects and of its run folder."""
    file = folder / "a.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, text in lines.items()))
    knobs = dict(read_knobs(file, overrides or {}).items())
    save_yaml(folder / "hyperparams.yaml", file, overrides or {})
    for same in (read_knobs(folder / "hyperparams.yaml", {}), load_hparams(file, overrides or {})):
        assert dict(same.items()) == knobs
    return knobs


Way = Callable[[Path, str, str, list[str]], dict[str, object]]
WAYS = pytest.mark.parametrize("way", [in_file, in_base, over_base, on_command_line, in_python])


@WAYS
def test_words_for_true_and_false_count_as_such(way: Way, tmp_path: Path) -> None:
    for text, value in SPELLINGS:
        assert way(tmp_path, text, str(not value), FLAGS) == dict.fromkeys(FLAGS, value), text


@WAYS
def test_text_is_read_as_it_is_written(way: Way, tmp_path: Path) -> None:
    for text in f"{NUMBERS_AND_DATES} {WORDS_AS_TEXT}".split():
        assert way(tmp_path, text, "x", TEXTS) == dict.fromkeys(TEXTS, text)


@pytest.mark.parametrize("way", [in_file, over_base, on_command_line])
def test_items_of_a_list_and_named_texts_are_read_as_written(way: Way, tmp_path: Path) -> None:
    texts = [*NUMBERS_AND_DATES.split(), *WORDS_AS_TEXT.split(), "true", "False"]
    for name in LISTS:
        assert way(tmp_path, f"[{', '.join(texts)}]", "[]", [name]) == {name: texts}
    for text in texts:
        for name in ("manifest", "splits", "where"):
            expected = {name: {"007": text, "b": [text]}}
            assert way(tmp_path, f"{{007: {text}, b: [{text}]}}", "{}", [name]) == expected


def test_words_for_false_in_an_argument_count_as_in_its_base_or_are_refused(path: Path) -> None:
    own = path.with_name("own.yaml")
    own.write_text("base: ctc.yaml\nmixed: off\n")
    assert read_knobs(own, {})["mixed"] is False
    block = "a: !new:sbkit.models.transformer.Transformer\n    gradient_checkpointing: no\n"
    own.write_text(block)
    assert "`a.gradient_checkpointing` must be true or false, but is 'no'." in refusal(own, {})
