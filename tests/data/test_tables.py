"""Tables of releases: their forms, their bad rows, and files that are refused."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.data.columns import find_split_column, is_span
from sbkit.data.manifest import Clip, Excluded, Manifest, check_locale
from sbkit.data.tables import TableOptions, read_release


def read_manifest(file: Path) -> Manifest:
    return read_release(file, TableOptions(language="en"))


def write(folder: Path, content: str) -> Path:
    """Write a manifest unchanged."""
    file = folder / "train.tsv"
    file.write_bytes(content.encode())
    return file


WAYS = {
    "plain": "path\tsentence\na.mp3\tÉté\n",
    "carriage returns": "path\tsentence\r\na.mp3\tÉté\r\n",
    "byte order mark": "\ufeffpath\tsentence\na.mp3\tÉté\n",
    "no newline at the end": "path\tsentence\na.mp3\tÉté",
    "blank lines": "path\tsentence\n\na.mp3\tÉté\n\n",
    "other order": "sentence\tpath\nÉté\ta.mp3\n",
    "tabs at the end": "path\tsentence\t\na.mp3\tÉté\t\n",
    "capitals and spaces": "Path \tSentence\na.mp3\tÉté\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_read_table_accepts_every_form_of_a_row(tmp_path: Path, way: str) -> None:
    manifest = read_manifest(write(tmp_path, WAYS[way]))
    assert [*manifest] == [Clip("a", tmp_path / "clips/a.mp3", "Été", {"language": "en"})]
    assert manifest.excluded == ()


def test_text_column_false_reads_a_table_without_transcripts(tmp_path: Path) -> None:
    table = "path\tTranscript\tlanguage\na.mp3\t\tde\n"
    for content in (table, f"{table}\t\tde\n"):  # a bad row, too
        file = write(tmp_path, content)
        (clip,) = read_release(file, TableOptions(text_column=False, language="en"))
        columns = {"Transcript": "", "language": "de"}
        assert clip == Clip("a", tmp_path / "clips/a.mp3", "", columns)
        file.write_text(content.replace("Transcript", "words"))
        with pytest.raises(SbkitError, match="set `text_column: False`"):
            read_release(file, TableOptions(language="en"))


BAD_ROWS = [
    ("a.mp3", "wrong number of fields", "1 instead of 2"),
    ("a.mp3\thi\tthere", "wrong number of fields", "3 instead of 2"),
    ("\thi", "no path", "the field of the path is empty"),
    ("../../etc/passwd\thi", "path outside the clips folder", "../../etc/passwd"),
    ("/etc/passwd\thi", "path outside the clips folder", "/etc/passwd"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_bad_row_is_excluded_and_the_others_stay(
    tmp_path: Path, row: str, reason: str, detail: str
) -> None:
    manifest = read_manifest(write(tmp_path, f"path\tsentence\na.mp3\tyes\n{row}\nb.mp3\tno\n"))
    assert [clip.id for clip in manifest] == ["a", "b"]
    assert manifest.excluded == (Excluded("row 3", reason, detail),)


REFUSED = {
    "empty": ("", "is empty"),
    "an empty spreadsheet": (",,\n,,\n", "is empty"),
    "only a header": ("path\tsentence\n", "a header but no rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_table_refuses_what_is_not_a_table(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    with pytest.raises(SbkitError, match=words) as caught:
        read_manifest(write(tmp_path, content))
    assert str(tmp_path / "train.tsv") in str(caught.value)


def test_read_table_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="is not a file"):
        read_manifest(tmp_path / "train.tsv")


def test_columns_of_splits_and_times_are_known_by_their_values() -> None:
    values = {"set": ["Train", "dev", ""], "subset": ["red", "test"], "split": ["red"]}
    assert find_split_column(["subset", "set"], values.__getitem__) == "set"
    assert find_split_column(["subset"], values.__getitem__) is None
    assert find_split_column(["split"], values.__getitem__) == "split"
    assert is_span("timestamp", [0.5, 2])
    assert not is_span("timestamp", ["a", "b"]) and not is_span("times", [1, 2, 3])


def test_release_finds_the_extension_of_a_clip(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.flac").touch()
    clips = read_manifest(write(tmp_path, "path\tsentence\na\thi\nb\tyo\nv1.0/c\tme\n"))
    assert [clip.path.name for clip in clips] == ["a.flac", "b.mp3", "c.mp3"]


def test_to_manifest_by_columns_equals_by_rows(tmp_path: Path) -> None:
    names = ["a.mp3", "x/y-1/b.c.wav", "A_2.flac"]
    rows = ["path\tsentence", *(f"{name}\t" for name in names)]
    plain = read_manifest(write(tmp_path, "\n".join(rows)))
    by_row = read_manifest(write(tmp_path, "\n".join([*rows, "é.mp3\t"])))
    assert [*plain] == [*by_row][:3]
    assert [(clip.id, clip.path) for clip in by_row] == [
        (id, tmp_path / "clips" / name)
        for id, name in zip(["a", "b.c", "A_2", "é"], [*names, "é.mp3"], strict=True)
    ]


def test_columns_with_reserved_names_are_renamed(tmp_path: Path) -> None:
    row = 'path\tsentence\ttext\tclient_id\tweight\na.wav\t"hi\tHI\tann\t61 kg\n'
    (clip,) = read_manifest(write(tmp_path, row))
    columns = {"manifest_text": "HI", "speaker": "ann", "manifest_weight": "61 kg"}
    assert clip == Clip("a", tmp_path / "clips/a.wav", '"hi', {**columns, "language": "en"})


def locales(*tags: str) -> Manifest:
    clips = (Clip(str(n), Path(str(n)), "hi", {"locale": tag}) for n, tag in enumerate(tags))
    return Manifest.of(clips)


def test_check_locale_refuses_a_manifest_of_another_language() -> None:
    [*check_locale(locales("de", "de-AT", "").blocks(), "de")]
    [*check_locale(locales("", "").blocks(), "en")]
    [*check_locale(locales("sv-SE", "sv-SE", "fi").blocks(), "sv")]
    with pytest.raises(SbkitError, match=r"is en, but 2 of 4 rows .* locale de\. Set `l"):
        [*check_locale(locales("fr", "de", "de", "en").blocks(), "en")]
