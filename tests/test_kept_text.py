"""A recognizer that keeps case and punctuation, from transcripts to subtitles and scores."""

from pathlib import Path
from unittest.mock import patch

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.decoding import fit
from sbkit.evaluate.wer import ErrorCounts, count_errors
from sbkit.evaluate.wer_report import read_utterances
from sbkit.lm.arpa import read_arpa
from sbkit.lm.language_models import describe_seen
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.normalization import normalize, text_table
from sbkit.text.tokenizer import ensure_tokenizer
from sbkit.train.initialize import text_table_of
from tests.runs import read_json, rows_of, train_overfitted

KEPT = '--text={case: keep, punctuation: [., ",", "?", "!"]}'
TABLE = text_table("en", {"case": "keep", "punctuation": [".", ",", "?", "!"]})


@pytest.fixture(scope="module")
def overfitted(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and test on the same eight prompts as written; return the folder."""
    folder = tmp_path_factory.mktemp("kept")
    models = ("--word_lm_order=2", "--token_lm_order=3")
    with patch.object(fit, "NUM_TRIALS", 16):
        train_overfitted(asterisk_english, folder, *models, "--ctc_weight=1.0", KEPT)
    assert sbkit(["export", str(folder / "run"), "--out", str(folder / "bundle")]) == 0
    return folder


@pytest.mark.slow(60)
def test_bundle_writes_and_scores_texts_as_written(
    overfitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The normalized WER is the plain table's."""
    run, bundle = overfitted / "run", overfitted / "bundle"
    assert text_table_of(bundle) == text_table_of(run) == TABLE
    assert load_bundle(bundle).normalizer()("Hello , world !") == "Hello, world!"
    test = str(overfitted / "release/test.tsv")
    figures = read_json(run / "summary.json")["test"]["test"]
    assert figures["CER"] < 0.05
    sentences = {Path(row["path"]).stem: row["sentence"] for row in rows_of(Path(test))}
    words = ErrorCounts()
    for utterance in read_utterances(run / "utterances_test.jsonl"):
        sentence = sentences[utterance.id]
        assert utterance.reference == normalize(sentence, "en", TABLE)
        assert [word.text for word in utterance.words] == utterance.hypothesis.split()
        plain = normalize(utterance.hypothesis, "en")
        words += count_errors(normalize(sentence, "en"), plain).words
    assert figures["normalized"]["WER"] == words.rate
    assert sbkit(["score", str(bundle), test, "--out", str(tmp_path / "scores")]) == 0
    scored = read_json(tmp_path / "scores/summary.json")["test"]["test"]
    assert scored["normalized"] == figures["normalized"]
    page = (tmp_path / "scores/report.html").read_text("utf-8")
    assert f"normalized by {scored['normalized']['normalizer']}" in page
    seen = f"test: {describe_seen({'seen': 8, 'of': 8})}"
    assert seen in capsys.readouterr().out and seen in page
    assert seen in (run / "report.html").read_text("utf-8")
    card = (bundle / "README.md").read_text("utf-8")
    assert f"beam, {scored['normalized']['normalizer']} | WER" in card
    clip = str(min((overfitted / "release/clips").iterdir()))
    capsys.readouterr()
    assert sbkit(["transcribe", str(bundle), clip, "--format", "srt"]) == 0
    subtitles = capsys.readouterr().out.partition("1\n00:")[2]
    assert "." in subtitles and subtitles != subtitles.lower()


@pytest.mark.slow(20)
def test_other_normalizers_and_models(overfitted: Path, tmp_path: Path) -> None:
    run, test = str(overfitted / "run"), str(overfitted / "release/test.tsv")
    out = ["--out", str(tmp_path / "basic")]
    command = ["score", run, test, "--decoder", "greedy"]
    assert sbkit([*command, *out, "--normalizer", "whisper-basic", "--report-by", "length"]) == 0
    figures = read_json(tmp_path / "basic/summary.json")["test"]["test"]
    assert figures["normalized"]["normalizer"].startswith("whisper-basic ")
    assert "normalized_WER" in (tmp_path / "basic/report_by_test.tsv").read_text()
    with pytest.raises(SbkitError, match="`normalizer` must be whisper-english, whisper-basic or"):
        sbkit([*command, "--normalizer", "whisper"])
    text = tmp_path / "talks.txt"
    text.write_text("You have been added .\nThank you!\n")
    arpa = tmp_path / "tokens.arpa"
    assert sbkit(["lm", str(text), "--tokenizer", run, "--order=2", "--out", str(arpa)]) == 0
    assert {"T", "."} <= {*read_arpa(arpa).words}


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram"])
def test_tokens_spell_case_and_marks(asterisk_english: Path, tmp_path: Path, kind: str) -> None:
    sentences = [row["sentence"] for row in rows_of(asterisk_english / "validated.tsv")]
    texts = [normalize(sentence, "en", TABLE) for sentence in sentences]
    tokenizer = ensure_tokenizer(
        model_file=tmp_path / "tokenizer.model",
        token_type=kind,
        vocab_size=None if kind == "char" else 200,
        texts=lambda: texts,
    )
    assert {".", ",", "?", "!"} == tokenizer.marks
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
