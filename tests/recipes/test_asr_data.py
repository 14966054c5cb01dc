"""Other data means other language models; weights that were fitted with the old are removed."""

import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.asr.data import prepare_language_models, prepare_tokenizer
from sbkit.base.errors import SbkitError
from sbkit.base.files import RUN_YAML
from sbkit.config.keys import with_defaults
from sbkit.data.sentences import read_sentences
from sbkit.data.splits import Splits
from sbkit.decoding.decoder import LANGUAGE_MODELS_FILE
from sbkit.lm.language_models import load_language_models
from sbkit.lm.ngram import SPECIAL
from sbkit.text.normalization import language_table
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer
from tests.stores import Utterance, make_store
from tests.test_golden import be_other_code


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path, ["call the office"])


def test_other_training_data_give_other_models(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Training splits may have any names, as those of LibriSpeech have."""
    settings: dict[str, object] = {"language": "en", "word_lm_order": 2, "token_lm_order": 0}
    settings |= {"output_folder": str(tmp_path)}
    texts = ["call", "the office"]
    train = make_store([Utterance(x, x, x, "ann", 0, b"") for x in texts])
    for rows, known in (
        ([0], {"call"}),
        ([0], {"call"}),
        ([1], {"the", "office"}),
        ([0, 1], {"call", "the", "office"}),
    ):  # as `max_seconds` leaves them
        splits = Splits(train.select(rows), {"dev-clean": train}, {})
        prepare_language_models(with_defaults(settings), splits, tokenizer)
        words = load_language_models(tmp_path / LANGUAGE_MODELS_FILE, tokenizer).words
        assert words is not None and {*words.words} == {*SPECIAL, *known}


def splits_of(train: str, dev: Sequence[str], test: str) -> Splits:
    named = {
        name: make_store([Utterance(x, x, x, "ann", 0, b"") for x in texts])
        for name, texts in (("train", [train]), ("dev", dev), ("test", [test]))
    }
    return Splits(named["train"], {"dev": named["dev"]}, {"test": named["test"]})


def test_sentences_of_dev_and_test_are_left_out_of_all_files_of_lm_text(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But not of the training transcripts. The layout of the TSV is that of Common Voice 25."""
    talks, sentences = tmp_path / "talks.txt", tmp_path / "validated_sentences.tsv"
    talks.write_text("Call the office!\nFill the face.\nFill the face\n")
    header = "sentence_id\tsentence\tvariant\tsentence_domain\tsource\tis_used\tclips_count"
    rows = ['a1\t"Ice call.\t\t\tme\t1\t3', "a2\tTell the chief.\t\tgeneral\tme\t1\t0"]
    sentences.write_text("\n".join([header, *rows]) + "\n")
    settings: dict[str, object] = {"language": "en", "word_lm_order": 2, "token_lm_order": 0}
    settings |= {"output_folder": str(tmp_path), "lm_text": [str(talks), str(sentences)]}
    caplog.set_level("INFO")

    def known_words(dev: Sequence[str], lm_text: object) -> set[str]:
        caplog.clear()
        splits = splits_of("fill the face", dev, "ice call")
        prepare_language_models(with_defaults(settings | {"lm_text": lm_text}), splits, tokenizer)
        words = load_language_models(tmp_path / LANGUAGE_MODELS_FILE, tokenizer).words
        assert words is not None
        return {*words.words} - {*SPECIAL}

    files = [str(talks), str(sentences)]
    assert known_words(["fill the face"], files) == {"call", "the", "office", "tell", "chief"}
    assert "lm_text: 3 sentences left out, because dev or test has the same" in caplog.text
    known_words(["fill the face"], files)
    assert "language model of words" not in caplog.text  # nothing has changed
    assert known_words(["tell the chief"], files) == {"call", "the", "office", "fill", "face"}
    assert "lm_text: 2 sentences left out" in caplog.text
    settings["columns"] = {"text": "source"}
    assert known_words(["tell the chief"], files) == {"call", "the", "office", "fill", "face", "me"}
    settings["language"] = "de"  # whose text table is another one
    known_words(["tell the chief"], files)
    assert "language model of words" in caplog.text
    with pytest.MonkeyPatch.context() as patches:
        be_other_code(patches)
        known_words(["tell the chief"], files)
    assert "language model of words" in caplog.text
    assert known_words(["fill the face"], None) == {"fill", "the", "face"}
    assert "left out" not in caplog.text


def parquet(columns: Mapping[str, Sequence[object]]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table(columns), content)
    return content.getvalue()


TEXT_FILES = {
    "a.txt": b"Call the office!\n",
    "b.txt.gz": gzip.compress("Call the office\n".encode("utf-16")),
    "c.csv": b"path,transcript\r\na.wav,Call the office.\r\n",
    "d.tsv.gz": gzip.compress(b"id\tsentence\n1\tCall the office.\n"),
    "e.jsonl": b'{"audio_filepath": "a.wav", "text": "Call the office."}\n{"text": null}\n',
    "f.json": b'{"a": {"wav": "a.wav", "wrd": "call the office"}}',
    "g.parquet": parquet({"audio": [b"RIFF\0"], "text": ["Call the office"]}),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_sentences_are_read_from_texts_and_from_all_tables(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(TEXT_FILES[name])
    table = language_table("en")
    assert [*read_sentences([tmp_path / name], table)] == ["call the office"]
    settings = {"columns": {"text": "said"}}  # of the manifests; other tables have usual names
    assert [*read_sentences([tmp_path / name], table, settings)] == ["call the office"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"a.arpa": "", "b.txt": "call"}, "names the ARPA file .*a.arpa and other files"),
        ({"a.csv": "id,said\n1,call\n"}, "a.csv .* sentence, .* id, said"),
        ({"a.jsonl": '{"text": "hi"}\n{"text": 7}\n'}, "row 2 .*'7'"),
        ({"a.txt": "call", "gone.txt": None}, "gone.txt"),
        ({"a.txt.gz": "call"}, "a.txt.gz .*Not a gzipped file"),
        ({"text": "u1-a hi\nu1-b yo\nu2-a\n"}, "each line begins with an id, such as u1-a, which"),
        ({"1.txt": "1\tHi yo.\n2\tSo.\n3\tNo.\n"}, "Remove the ids: awk .* > sentences.txt"),
        ({"a.txt": "Call!"}, r"no sentence to learn from \(1 sentence left out, because dev"),
    ],
)
def test_lm_text_that_cannot_be_used_is_named(
    tokenizer: Tokenizer, tmp_path: Path, content: dict[str, str | None], match: str
) -> None:
    for name, text in content.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    settings = {"language": "en", "word_lm_order": 2, "token_lm_order": 0}
    settings |= {"output_folder": str(tmp_path), "lm_text": [str(tmp_path / x) for x in content]}
    with pytest.raises(SbkitError, match=match):
        prepare_language_models(
            with_defaults(settings), splits_of("call", ["call"], "call"), tokenizer
        )


@pytest.mark.parametrize(
    ("sentence", "text", "is_kept"),
    [("of the call", None, True), ("jazz", None, False), ("of the call", {"case": "keep"}, False)],
)
def test_tokenizer_of_init_from_is_kept_if_it_fits(
    sentence: str, text: object, is_kept: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / RUN_YAML).write_text("language: en\n")
    settings = {"init_from": str(tmp_path), "language": "en", "text": text, "token_type": "char"}
    settings |= {"vocab_size": None, "output_folder": str(tmp_path / "run")}
    train = make_store([Utterance("a", sentence, sentence, "ann", 0, b"")])
    new = prepare_tokenizer(with_defaults(settings), Splits(train, {}, {}))
    assert (new.content == tokenizer.content) is is_kept
