"""What a program wrote as a table is read as it was written, or refused; no row vanishes."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import soundfile

from sbkit.audio.io import AudioSpan, read_audio
from sbkit.base.errors import SbkitError
from sbkit.data import tables
from sbkit.data.audio_tables import AudioTable
from sbkit.data.columns import CUT_SHORT
from sbkit.data.common_voice import read_releases
from sbkit.data.manifest import Clip, Excluded, Manifest, check_locale
from sbkit.data.tables import TableOptions
from sbkit.models.pretrained.folder import _match_tensors
from tests.data.test_spans import read
from tests.data.test_splits import prepare_manifest

Rows = list[tuple[str, str, str]]  # path, sentence, speaker
HEADER = ("path", "sentence", "speaker")
PIECES = (  # of a field
    *("hi", "yes no", "nan", "NULL", "NA", "None", "true", "3,50", "1.5", "-", "été", "你好"),
    *('"', '""', '5"', '"Hi," she said', ",", ";", "|", "a|b", "x; y", " ", "\\", "#", "'", "=1"),
    "I'm",
)
LINE_BREAKS = ("\n", "one\ntwo, three", '"a"\n"b"', "\r\n")


def draw_field(source: random.Random) -> str:
    pieces = (*PIECES, *LINE_BREAKS)
    return " ".join(source.choices(pieces, k=source.randrange(4))).strip()


def by_csv(rows: Rows, delimiter: str, quoting: int) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=quoting).writerows([HEADER, *rows])
    return text.getvalue()


def by_pandas(rows: Rows, delimiter: str) -> str:
    return str(pd.DataFrame(rows, columns=HEADER).to_csv(index=False, sep=delimiter))


def by_json(rows: Rows, ensure_ascii: bool) -> str:
    dump = json.JSONEncoder(ensure_ascii=ensure_ascii).encode
    return "\n".join(dump(dict(zip(HEADER, row, strict=True))) for row in rows)


QUOTINGS = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC)
WRITERS: list[Callable[[Rows], str]] = [
    *(partial(by_csv, delimiter=sign, quoting=quoting) for sign in ",;|" for quoting in QUOTINGS),
    *(partial(by_pandas, delimiter=sign) for sign in ",;|"),
    *(partial(by_json, ensure_ascii=ensure_ascii) for ensure_ascii in (True, False)),
    lambda rows: str(pd.DataFrame(rows, columns=HEADER).to_json(orient="records", lines=True)),
]
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


def rows_of(manifest: Manifest) -> Rows:
    return [(clip.path.name, clip.sentence, clip.columns["speaker"]) for clip in manifest]


@pytest.mark.parametrize("writer", range(len(WRITERS)))
def test_tables_are_read_as_they_were_written(
    writer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(writer)
    for number in range(30):
        monkeypatch.setattr(tables, "BATCH_ROWS", 1 + number)
        count = source.randrange(1, 12)
        rows = [(f"{n}.wav", draw_field(source), draw_field(source)) for n in range(count)]
        content = WRITERS[writer](rows).encode(ENCODINGS[number % len(ENCODINGS)])
        file = tmp_path / f"{number}.csv"
        if number % 2:
            file, content = file.with_suffix(".csv.gz"), gzip.compress(content)
        file.write_bytes(content)
        manifest = read(file)
        assert (rows_of(manifest), manifest.excluded) == (rows, ()), content
    pd.DataFrame(rows, columns=HEADER).to_parquet(tmp_path / "a.parquet")
    assert rows_of(read(tmp_path / "a.parquet")) == rows


@pytest.mark.parametrize("delimiter", list(",;|\t"))
def test_stray_quotes_lose_no_row(delimiter: str, tmp_path: Path) -> None:
    """One quotation mark in a table made 11 of 44 rows, and nothing was said."""
    words = ("hi", "yes no", "été", "5")
    refused = 0
    for seed in range(60):
        source = random.Random(seed)
        rows = [(f"{n}.wav", " ".join(source.choices(words, k=3)), "ann") for n in range(20)]
        for _ in range(source.randrange(1, 4)):
            n = source.randrange(20)
            path, text, speaker = rows[n]
            text = source.choice([f'"{text}', f'{text}"', f'a "{text}', f'"a" {text}'])
            rows[n] = (path, text, speaker)
        file = tmp_path / f"{seed}.csv"
        file.write_text("\n".join(delimiter.join(row) for row in (HEADER, *rows)))
        try:
            manifest = read(file)
        except SbkitError as error:
            refused += 1
            number = int(str(error).partition(": line ")[2].split()[0])
            assert rows[number - 2][1].startswith('"')
            continue
        lost = {int(row.id.removeprefix("row ")) - 2 for row in manifest.excluded}
        assert lost <= {19}  # of the last row, a mark that is never closed joins the fields
        texts = [clip.sentence.replace('"', "") for clip in manifest]
        assert texts == [row[1].replace('"', "") for n, row in enumerate(rows) if n not in lost]
    assert bool(refused) == (delimiter != "\t")


def test_values_that_are_no_texts_are_missing_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    start = '{"path": "a.wav", "text": "hi", "speaker": NaN, "age": 3}\n{"path": "b.wav", "text": '
    for value in ("null", "NaN"):
        file.write_text(f"{start}{value}}}")
        manifest = read(file)
        assert manifest.sentences == ["hi", ""]
        assert manifest[0].columns == {"speaker": "", "age": "3", "language": "en"}
    for value in ("true", "12", "[1]", '{"a": 1}'):
        file.write_text(f"{start}{value}}}")
        with pytest.raises(SbkitError, match="the text of row 2 is .*but a transcript is a text"):
            read(file)
    table = tmp_path / "a.parquet"
    pd.DataFrame({"path": ["a.wav", "b.wav"], "text": ["hi", float("nan")]}).to_parquet(table)
    assert read(table).sentences == ["hi", ""]
    pd.DataFrame({"path": ["a.wav"], "text": [12]}).to_parquet(table)
    with pytest.raises(SbkitError, match="the text of row 1 is '12', of the type int"):
        read(table)


def test_a_speaker_is_one_however_the_number_is_written(tmp_path: Path) -> None:
    """A column of pandas with a missing number has floats."""
    rows = {"path": ["a.wav", "b.wav", "c.wav"], "text": ["hi"] * 3, "spk": [7, 7, None]}
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "b.parquet")
    pd.DataFrame(rows).to_json(tmp_path / "c.json", orient="records", lines=True)
    (tmp_path / "d.csv").write_text("path, text, spk\na.wav, hi, 7\nb.wav, hi, 7 \nc.wav, hi,\n")
    for file in tmp_path.iterdir():
        speakers = [clip.columns["speaker"] for clip in read(file)]
        assert speakers == ["7", "7", ""], file


@pytest.mark.parametrize(
    ("lines", "clips"),
    [  # rows, the clips: their paths, texts and speakers
        (
            ['{"path": "a.wav", "text": "hi", "spk": "ann"}', '{"path": "b.wav", "text": "yo"}'],
            [("a.wav", "hi", "ann"), ("b.wav", "yo", "")],
        ),
        (
            ['{"audio": {"path": "a.wav"}, "text": "hi", "Speaker ID": 7}', "null"],
            [("a.wav", "hi", "7")],
        ),
        (
            ['{"path": "a.wav", "text": "hi", "text": "yo"}', '{"path": "b.wav", "text": "so"}'],
            [("b.wav", "so", "")],
        ),
        (['"path"\t"text"', '"a.wav"\t"well, ""so"""'], [("a.wav", 'well, "so"', "")]),
    ],
)
def test_cells_are_found_by_every_usual_name(lines: list[str], clips: Rows, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(lines))
    manifest = read(tmp_path / "a.txt")
    assert [(c.path.name, c.sentence, c.columns.get("speaker", "")) for c in manifest] == clips
    starts_with_header = lines[0][0] != "{"
    assert len(manifest) + len(manifest.excluded) == len(lines) - starts_with_header


@pytest.mark.parametrize(
    "lines",
    [
        ["id,path,text", '1,clips/a,"hello', "2,clips/b,foo", '3,clips/c,bar"', "4,clips/d,ok"],
        ["path\ttext", 'a.wav\t"line one', 'line two"', "b.wav\tok"],
    ],
)
def test_quote_that_swallows_rows_is_refused_by_its_line(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(SbkitError, match="a.csv: line 2 opens a quotation mark") as refused:
        read(tmp_path / "a.csv")
    assert (refused.value.file, refused.value.line) == (f"{tmp_path / 'a.csv'}", 2)


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_left_out_rows_are_named_by_their_line(
    batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", batch_rows)
    lines = ["path,text", "", 'a.wav,"x', 'y"', "only", ",", "b.wav"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    manifest = read(tmp_path / "a.csv")
    assert manifest.sentences == ["x\ny"]
    assert [row.id for row in manifest.excluded] == ["row 5", "row 7"]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", partial(pa.Codec("zstd").compress, asbytes=True)),
    ],
)
def test_compressed_table_is_read_or_called_damaged(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = tmp_path / f"a.csv.{suffix}"
    text = "path,text\n" + "".join(f"{n}.wav,number {n}\n" for n in range(999))
    file.write_bytes(compress(text.encode()))
    assert len(read(file)) == 999
    file.write_bytes(file.read_bytes()[:-99])
    with pytest.raises(SbkitError, match="a.csv.* is damaged"):
        read(file)


def test_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    sentences = ["as far as it is ASCII"] * 3000 + ["Привет, как дела"] * 5
    rows = [f"{n}.wav;{sentence}\n" for n, sentence in enumerate(sentences)]
    file.write_text("".join(["path;sentence\n", *rows]), encoding="cp1251")
    with pytest.raises(SbkitError, match=r"line 3002 is not utf-8 text.*`encoding`"):
        read(file)
    assert read(file, encoding="cp1251").sentences == sentences
    with pytest.raises(SbkitError, match="`encoding`: unknown encoding: klingon"):
        read(file, encoding="klingon")


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_folder_of_clips_has_a_table(name: str, tmp_path: Path) -> None:
    table = "file_name,transcription\na/x.mp3,hi\n"
    if name.endswith("jsonl"):
        table = '{"file_name": "a/x.mp3", "transcription": "hi"}'
    (tmp_path / name).write_text(table)
    (clip,) = read(tmp_path)
    assert (clip.path, clip.sentence) == (tmp_path / "a/x.mp3", "hi")


def test_manifests_of_speechbrain_are_read(tmp_path: Path) -> None:
    """`start` and `stop` count samples of the file; `$data_root` is the key `data_folder`."""
    soundfile.write(tmp_path / "talk.wav", np.zeros(80_000, np.int16), 8000)
    header = "ID,duration,wav,start,stop,spk_id,wrd"
    rows = ["u1,1.0,$data_root/talk.wav,4000,12000,ann,HI", "u2,1.0,$data_root/yo.wav,,,bob,YO"]
    wrong = "u3,1.0,$data_root/talk.wav,2026-01-01,12000,ann,NO"
    (tmp_path / "a.csv").write_text("\n".join([header, *rows, wrong]))
    (excluded,) = read(tmp_path / "a.csv", data_folder=str(tmp_path)).excluded
    assert excluded.detail.startswith("talk.wav: could not convert")
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]))
    span = {"file": "$data_root/talk.wav", "start": 4000, "stop": 12000}
    document = {
        "u1": {"wav": span, "duration": 1.0, "spk_id": "ann", "wrd": "HI"},
        "u2": {"wav": "$data_root/yo.wav", "duration": 1.0, "spk_id": "bob", "wrd": "YO"},
    }
    text = json.dumps(document, indent=2).replace("$data_root/yo", "{data_root}/yo")
    (tmp_path / "a.json").write_text(text)
    for name in ("a.csv", "a.json"):
        manifest = read(tmp_path / name, data_folder=str(tmp_path))
        assert manifest.ids == ["u1", "u2"]
        assert [*manifest.spans] == [
            AudioSpan(str(tmp_path / "talk.wav"), 500_000, 1_500_000),
            AudioSpan(str(tmp_path / "yo.wav")),
        ]
        assert [clip.columns["speaker"] for clip in manifest] == ["ann", "bob"]
        reasons = [row.reason for row in read(tmp_path / name).excluded]
        assert reasons == [
            "no $data_root",
            f"no {'$data_root' if '.csv' in name else '{data_root}'}",
        ]
    (tmp_path / "b.csv").write_text("path,text\na.wav,hi\n")
    with pytest.raises(SbkitError, match=r"no path in .*b.csv begins with"):
        read(tmp_path / "b.csv", data_folder=str(tmp_path))


def test_paths_of_a_file_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / normalize("NFD", "für.wav")).touch()
    spelled = ["./a.wav", "a.wav", "sub/../a.wav", "sub//.././a.wav", f"{tmp_path}/a.wav"]
    spelled += ["~/a.wav", "~/sub/../a.wav", "für.wav", ".//für.wav"]
    rows = ["path,text", *(f"{path},hi" for path in spelled)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    reasons = [row.reason for row in read(tmp_path / "a.csv").excluded]
    assert reasons == ["clip listed twice"] * 7


# ---- releases of Common Voice, and columns


def read_manifest(file: Path) -> Manifest:
    options = TableOptions(language="en")
    return Manifest.join(read_releases({"en": file.parent}, file.stem, options))


def write(folder: Path, content: str) -> Path:
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


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ("a.mp3", "wrong number of fields", "1 instead of 2"),
        ("a.mp3\thi\tthere", "wrong number of fields", "3 instead of 2"),
        ("\thi", "no path", "the field of the path is empty"),
        ("../../etc/passwd\thi", "path outside the clips folder", "../../etc/passwd"),
        ("/etc/passwd\thi", "path outside the clips folder", "/etc/passwd"),
        ("~/a.wav\thi", "path outside the clips folder", "~/a.wav"),
    ],
)
def test_bad_row_alone_is_excluded(tmp_path: Path, row: str, reason: str, detail: str) -> None:
    manifest = read_manifest(write(tmp_path, f"path\tsentence\na.mp3\tyes\n{row}\nb.mp3\tno\n"))
    assert [clip.id for clip in manifest] == ["a", "b"]
    assert manifest.excluded == (Excluded("row 3", reason, detail),)


REFUSED = {
    "missing": (None, "not a file"),
    "empty": ("", "is empty"),
    "an empty spreadsheet": (",,\n,,\n", "is empty"),
    "only a header": ("path\tsentence\n", "a header but no rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_table_refuses_what_is_not_a_table(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    if content is not None:
        write(tmp_path, content)
    with pytest.raises(SbkitError, match=f"{tmp_path}/train.tsv .*{words}"):
        read_manifest(tmp_path / "train.tsv")


def test_clips_of_first_releases_have_no_extension(tmp_path: Path) -> None:
    clips = read_manifest(write(tmp_path, "path\tsentence\nb\tyo\nv1.0/c\tme\n"))
    assert [clip.path.name for clip in clips] == ["b.mp3", "c.mp3"]


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


def locales(*tags: str) -> Manifest:
    clips = (Clip(str(n), Path(str(n)), "hi", {"locale": tag}) for n, tag in enumerate(tags))
    return Manifest.of(clips)


def test_check_locale_accepts_regions_and_a_few_rows_of_another_language() -> None:
    check_locale(locales("de", "de-AT", "").rows, "de")
    check_locale(locales("", "").rows, "en")
    check_locale(locales("sv-SE", "sv-SE", "fi").rows, "sv")
    check_locale(locales("en", "it", "it").rows, "mul")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
POINTED = (".csv", ".tsv.gz", ".json", ".jsonl", ".parquet", ".tar", ".wav", ".mp3", ".safetensors")


@pytest.mark.parametrize("ending", POINTED)
def test_pointer_of_git_lfs_is_named_with_what_to_do(ending: str, tmp_path: Path) -> None:
    """A pointer was "no column path" or "not recognized as audio"."""
    file = tmp_path / f"model{ending}"
    file.write_text(POINTER)
    words = "is a pointer of git-lfs, not the file. Run git lfs pull in its repository"
    with pytest.raises(SbkitError, match=f"{file} .*{words}"):
        if ending in (".wav", ".mp3"):
            read_audio(file)
        elif ending == ".safetensors":
            _match_tensors(tmp_path, [])
        elif ending == ".tar":
            next(AudioTable(str(file), "", TableOptions(), {}).batches())
        else:
            read(file)


@pytest.mark.parametrize(
    "cell", ["ü" * 999 + "/x", [0.1] * 10**5, {"a": [1] * 10**5}, "\x1b" * 999]
)
@pytest.mark.parametrize("column", ["path", "text", "id", "start", "speaker"])
def test_cell_of_any_size_is_shortened_and_is_no_path_of_a_part(
    cell: object, column: str, tmp_path: Path
) -> None:
    row = {"id": "u1", "path": "gone.wav", "text": "hi", "start": 0, "end": 1, column: cell}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(SbkitError) as error:
        prepare_manifest(read(tmp_path / "a.jsonl"))
    assert len(str(error.value)) <= 600


@pytest.mark.parametrize(
    ("column", "stated", "end"),
    [
        *(("duration", stated, None) for stated in ("", "2.98", "2.9", "3.0", "2.5", "2")),
        *(("duration_ms", "2000", None), ("end", "2", None), ("end", "1.2", 1.2)),
        *(("duration", "2.4", 2.4), ("duration", "1", 1.0)),
        ("offset,duration", '0","2', 2.0),
    ],
)
def test_duration_without_a_start_is_the_first_seconds(
    column: str, stated: str, end: float | None, tmp_path: Path
) -> None:
    """So are NeMo's rows; a rounded duration, such as int(2.98), cuts no word."""
    soundfile.write(tmp_path / "a.wav", np.full(round(2.98 * 16_000), 0.1), 16_000)
    (tmp_path / "t.csv").write_text(f'path,sentence,{column}\na.wav,one,"{stated}"\n')
    manifest = read(tmp_path / "t.csv")
    assert [span.end for span in manifest.spans] == [end and round(end * 1e6)]
    ends = [(row.id, row.reason, row.detail) for row in manifest.excluded]
    cut = (manifest.ids[0], CUT_SHORT, f"`{column}` is {stated} s")
    assert ends == ([cut] if end and "offset" not in column else [])
    assert len(prepare_manifest(manifest).excluded) == len(ends)  # and is not refused


@pytest.mark.parametrize("name", ["b.mp3", "b", "sub/b.mp3"])
def test_table_names_files_beside_it_or_in_clips(name: str, tmp_path: Path) -> None:
    """A TSV of Common Voice is also read as a table; the first clip may be lost."""
    file = tmp_path / "clips" / name
    file.parent.mkdir(parents=True)
    soundfile.write(file.with_suffix(".mp3"), np.full(8000, 0.1), 16_000)
    (tmp_path / "t.tsv").write_text(f"path\tsentence\nlost.mp3\tone\n{name}\ttwo\n")
    assert [clip.path for clip in read(tmp_path / "t.tsv")][1] == file.with_suffix(".mp3")
    (tmp_path / "t.tsv").write_text(f"path\tsentence\nclips/a\tone\nclips/{name}\ttwo\n")
    assert [clip.path for clip in read(tmp_path / "t.tsv")][1] == file


@pytest.mark.parametrize("name", ("für.wav", "Ä/ö.wav", "a\u1ea1\u0300.wav", "ガ.wav"))
@pytest.mark.parametrize("disk", ["NFC", "NFD"])
@pytest.mark.parametrize("table", ["NFC", "NFD"])
def test_name_is_found_in_another_form(name: str, disk: str, table: str, tmp_path: Path) -> None:
    """As macOS has it; `ls` shows the file that was called missing."""
    on_disk = normalize("NFD" if disk == "NFD" else "NFC", name).encode()
    path = os.fsencode(tmp_path) + b"/" + on_disk
    Path(os.fsdecode(path)).parent.mkdir(exist_ok=True)
    soundfile.write(tmp_path / "tone.wav", np.full(1600, 0.1), 16_000)
    Path(os.fsdecode(path)).write_bytes((tmp_path / "tone.wav").read_bytes())
    (tmp_path / "t.csv").write_text(f"path,sentence\n{normalize(table, name)},one\n")
    manifest = read(tmp_path / "t.csv")
    assert [os.fsencode(clip.path) for clip in manifest] == [path]
    assert not prepare_manifest(manifest).excluded
