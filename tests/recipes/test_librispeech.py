"""A small folder with the layout of LibriSpeech, written from the default corpus."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.corpus import corpus_of
from tests.runs import prompts
from tests.stores import read_split

SPLITS = ("train-clean-100", "train-other-500", "dev-clean", "test-clean", "test-other")


def write_chapter(chapter: Path, clips: Iterator[tuple[Path, str]], *, count: int) -> None:
    chapter.mkdir(parents=True)
    name, lines = f"{chapter.parent.name}-{chapter.name}", []
    for number in range(count):
        clip, text = next(clips)
        shutil.copy(clip, chapter / f"{name}-{number:04}.flac")
        lines.append(f"{name}-{number:04} {text.upper()}\n")
    (chapter / f"{name}.trans.txt").write_text("".join(lines))


@pytest.fixture
def root(tmp_path: Path, asterisk_english: Path) -> Path:
    """Write two speakers in each split, with two clips each."""
    clips = prompts(asterisk_english, "train")
    for split in SPLITS:
        for speaker in ("84", "1089"):
            write_chapter(tmp_path / "LibriSpeech" / split / speaker / "7", clips, count=2)
    (tmp_path / "LibriSpeech" / "SPEAKERS.TXT").write_text(
        ";ID |SEX| SUBSET |MINUTES| NAME\n84   | F | dev-clean | 8 | Ann\n1089 | M | x | 8 | Bob\n"
    )
    return tmp_path


def settings(folder: Path, **options: object) -> Mapping[str, object]:
    return {"data_folder": str(folder), "language": "en", **options}


def test_librispeech_roles_are_the_existing_splits(root: Path) -> None:
    for folder in (root, root / "LibriSpeech"):
        assert corpus_of(settings(folder)).splits() == {
            "train": ["train-clean-100", "train-other-500"],
            "valid": ["dev-clean"],
            "test": ["test-clean", "test-other"],
        }
    named = settings(root, splits={"test": "test-other", "valid": ["dev-clean"]})
    assert corpus_of(named).roles()["test"] == ("test-other",)


def test_librispeech_clips_have_words_and_columns(root: Path) -> None:
    clips = read_split(settings(root), "test-other")
    assert clips.excluded == ()
    assert [clip.id for clip in clips] == ["1089-7-0000", "1089-7-0001", "84-7-0000", "84-7-0001"]
    expected = {"speaker": "84", "chapter": "7", "language": "en", "gender": "female"}
    assert clips[2].columns == expected
    assert all(clip.path.is_file() and clip.sentence.isupper() for clip in clips)


def test_librispeech_lines_and_files_without_a_partner_are_excluded(root: Path) -> None:
    chapter = root / "LibriSpeech" / "dev-clean" / "84" / "7"
    (chapter / "84-7-0000.flac").unlink()
    (chapter / "84-7-0001.flac").rename(chapter / "84-7-0001.FLAC")
    (chapter / "84-7-0009.wav").touch()
    (chapter / "84-7-0001.wav").touch()  # 84-7-0001.FLAC is there, too
    with (chapter / "84-7.trans.txt").open("a") as file:
        file.write("\n84-7-0005\n")
    manifest = read_split(settings(root), "dev-clean")
    assert [clip.id for clip in manifest] == ["1089-7-0000", "1089-7-0001", "84-7-0001"]
    assert manifest[2].path.suffix == ".FLAC"
    assert [(bad.id, bad.reason) for bad in manifest.excluded] == [
        ("84-7-0001.wav", "second audio file of an id"),
        ("84-7-0000", "no audio file"),
        ("84-7-0005", "no audio file"),
        ("84-7-0009.wav", "no transcript"),
    ]


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": "train-960"}, r"'train-960'.*: dev-clean, test-cl"),
        (
            {"valid": "dev-clean", "test": ["test-clean", "dev-clean"]},
            "'dev-clean' is in both `splits.valid` and `splits.test`",
        ),
        ({"valid": []}, "is empty. Choose at least one split"),
        ("train", "`splits` must map train, valid, test"),
    ],
)
def test_resolve_splits_refuses_bad_names(root: Path, splits: object, words: str) -> None:
    with pytest.raises(SbkitError, match=words):
        corpus_of(settings(root, splits=splits)).roles()
