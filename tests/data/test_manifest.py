"""Common Voice TSVs as they come, and as they should not."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.manifest import BadRow, Clip, read_manifest


def write(folder: Path, content: str | bytes) -> Path:
    """Write a manifest as it stands."""
    file = folder / "train.tsv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_rows_keep_their_order_and_their_quotes(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'client_id\tpath\tsentence\tage\nann\tb.mp3\t"Well," she said.\t\nbob\ta.mp3\t"Open\t\n',
    )
    clips = tmp_path / "clips"
    assert read_manifest(file).clips == (
        Clip("b", clips / "b.mp3", '"Well," she said.', {"speaker": "ann", "age": ""}),
        Clip("a", clips / "a.mp3", '"Open', {"speaker": "bob", "age": ""}),
    )


WAYS = {
    "plain": "path\tsentence\na.mp3\tÉté\n",
    "carriage returns": "path\tsentence\r\na.mp3\tÉté\r\n",
    "byte order mark": "\ufeffpath\tsentence\na.mp3\tÉté\n",
    "no newline at the end": "path\tsentence\na.mp3\tÉté",
    "blank lines": "path\tsentence\n\na.mp3\tÉté\n\n",
    "other columns, other order": "age\tsentence\tup_votes\tpath\n\tÉté\t2\ta.mp3\n",
    "no extension": "path\tsentence\na\tÉté\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_one_row(tmp_path: Path, way: str) -> None:
    manifest = read_manifest(write(tmp_path, WAYS[way]))
    (clip,) = manifest.clips
    assert (clip.id, clip.path, clip.sentence) == ("a", tmp_path / "clips" / "a.mp3", "Été")
    assert manifest.bad_rows == ()


BAD_ROWS = [
    ("a.mp3", "wrong number of fields", "1 instead of 2"),
    ("a.mp3\thi\tthere", "wrong number of fields", "3 instead of 2"),
    ("\thi", "no path", "the field path is empty"),
    ("../../etc/passwd\thi", "path outside the clips folder", "../../etc/passwd"),
    ("/etc/passwd\thi", "path outside the clips folder", "/etc/passwd"),
    ("x/../../a.mp3\thi", "path outside the clips folder", "x/../../a.mp3"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_a_bad_row_is_noted_and_the_others_stay(
    tmp_path: Path, row: str, reason: str, detail: str
) -> None:
    manifest = read_manifest(write(tmp_path, f"path\tsentence\na.mp3\tyes\n{row}\nb.mp3\tno\n"))
    assert [clip.id for clip in manifest.clips] == ["a", "b"]
    assert manifest.bad_rows == (BadRow("line 3", reason, detail),)


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty"),
    "only a header": ("path\tsentence\n", "at least one clip"),
    "no sentence": ("path\ttext\na.mp3\thi\n", "has path, text. Add sentence"),
    "commas": ("path,sentence\na.mp3,hi\n", "separated by tabs"),
    "Latin-1": ("path\tsentence\na.mp3\tété\n".encode("latin-1"), "tab-separated UTF-8"),
    "binary": (b"\x00\xff\xfe" * 99, "tab-separated UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_manifest_is_refused(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    with pytest.raises(SbkitError, match=words) as caught:
        read_manifest(write(tmp_path, content))
    assert str(tmp_path / "train.tsv") in str(caught.value)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="is missing"):
        read_manifest(tmp_path / "train.tsv")
