"""Language models and hotwords of a recognizer whose tokens have case and punctuation."""

from pathlib import Path

import pytest

from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.hotwords import HotwordScorer
from sbkit.decoding.word_times import Confidence, word_features
from sbkit.lm.arpa import write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import TOKENS, WORDS, describe_seen, load_language_models
from sbkit.lm.ngram import NgramModel
from sbkit.lm.training import LmText, LmTextEncoder, ensure_language_models
from sbkit.text.normalization import language_table, text_table
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.by_definition import steps_of
from tests.decoding.spoken import TEXTS, char_tokenizer, make_aligner, spoken, transcribe

TABLE = text_table("en", {"case": "keep", "punctuation": [".", ",", "?"]})
WRITTEN = [f"{text.capitalize()}." for text in TEXTS] + ["Cold, cold north?", "Is Bo in?"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path, WRITTEN)


def word_model(tokenizer: Tokenizer, arpa: Path | None = None) -> tuple[NgramModel, Path]:
    """Train the language models again, and return that of words with the file of both."""
    file = tokenizer.model_file.with_name("lm.safetensors")
    ensure_language_models(
        file,
        LmText(
            arpa=arpa,
            source=f"{arpa}",
            sentences=lambda: [*WRITTEN, "Press one."],
            held_out={"test": ["Press, one?"]},
        ),
        {WORDS: 2, TOKENS: 3},
        LmTextEncoder(tokenizer=tokenizer, table=TABLE),
    )
    model = load_language_models(file, tokenizer).words
    assert model is not None
    return model, file


def test_test_sentence_was_seen_however_it_is_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    _, file = word_model(tokenizer)
    models = load_language_models(file, tokenizer)
    [seen] = models.count_seen(["Cold cold, north.", "is Bo in?", "Press one.", ""], TABLE).values()
    assert describe_seen(seen) == "The language model has seen 2 of 3 test sentences (66.7 %)"
    arpa = tmp_path / "words.arpa"
    write_arpa(train([["cold", "north"]], order=2).model, arpa)
    _, file = word_model(tokenizer, arpa)
    assert load_language_models(file, tokenizer).count_seen(["cold north"], TABLE) == {}


def test_plain_and_written_arpa_files_are_told_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    arpa = tmp_path / "talks.arpa"
    for sentences, table in ((TEXTS, language_table("en")), (WRITTEN, None)):
        write_arpa(train([text.split() for text in sentences], order=2).model, arpa)
        model, _ = word_model(tokenizer, arpa)
        assert model.table == table
        arpa.unlink()
        arpa = tmp_path / "others.arpa"


def test_beam_uses_a_model_of_plain_words_for_words_with_marks(tokenizer: Tokenizer) -> None:
    """Letters that sound alike are chosen by the words, whatever their case and marks."""
    _, file = word_model(tokenizer)
    models = load_language_models(file, tokenizer)
    weights = {"word": 1.0, "unknown_word": -5.0, "token": 0.0}
    decoder = BeamDecoder(tokenizer=tokenizer, language_models=models, weights=weights)
    log_probs = spoken(tokenizer, "Cold, cold, office?", {13: "c", 2: "r"})
    assert transcribe(decoder, log_probs) == "Cold, cold, office?"
    log_probs, tokens = (
        spoken(tokenizer, "Cold, Zoo? office.", {}),
        tokenizer.encode("Cold, Zoo? office."),
    )
    words = make_aligner(tokenizer).find_frames(log_probs, tokens, is_decoded=True)
    assert [word.text for word in words] == ["Cold,", "oo?", "office."]
    cold, unknown, office = word_features(words, models.words)
    assert unknown.lm < min(cold.lm, office.lm)


def test_hotwords_are_words_beside_their_marks(tokenizer: Tokenizer) -> None:
    for phrase, text, is_found in (
        ("Bo", "Is Bo?", True),
        ("Bo", "Is bo.", False),  # the case is the phrase's
        ("Bo?", "Is Bo?", True),
        ("Bo?", "Is Bo.", False),
        ("Cold north", "Cold, north?", True),
        ("o", "Is Bo.", False),
    ):
        scorer = HotwordScorer(rewards={phrase: 3.0}, tokenizer=tokenizer)
        assert sum(steps_of(scorer, tokenizer.encode(text))) == pytest.approx(3.0 * is_found)


def test_hotword_with_a_mark_has_no_confidence(tokenizer: Tokenizer) -> None:
    confidence = Confidence(1.0, 0.0, 0.0, 0.0)
    aligner = make_aligner(tokenizer, confidence=confidence, hotwords=frozenset({"Bo"}))
    log_probs, tokens = spoken(tokenizer, "Is Bo?", {}), tokenizer.encode("Is Bo?")
    words = aligner.align(log_probs, tokens, samples=9999, is_decoded=True)
    assert {word.text: word.confidence is None for word in words} == {"Is": False, "Bo?": True}
