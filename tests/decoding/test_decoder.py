"""A decoder's weights are chosen on what was heard, its models kept and refused with a reason."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding import tune as tuning
from sbkit.decoding.attention import AttentionDecoder
from sbkit.decoding.decoder import MOST_TOKENS, BeamDecoder, Weights
from sbkit.decoding.greedy import GreedySearch
from sbkit.decoding.hotwords import read_hotwords
from sbkit.decoding.language_models import (
    is_arpa,
    load_language_models,
)
from sbkit.decoding.tune import (
    Tuned,
    TuningUtterance,
    fit_weights,
    limit_tokens,
    tune,
    used_weights,
)
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.lm.arpa import write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer, heard, spoken, train_models

TEXTS = [
    "call the north office",
    "send it to the office",
    "the north is cold",
    "call me in the north",
    "it is cold in the office",
    "send me to the north office",
] * 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS)


def trained(folder: Path, tokenizer: Tokenizer, *, words: int = 2, tokens: int = 3) -> Path:
    train_models(folder / "lm.safetensors", tokenizer, TEXTS, words=words, tokens=tokens)
    return folder / "lm.safetensors"


def misheard(
    tokenizer: Tokenizer, count: int = 6, texts: Sequence[str] = TEXTS
) -> list[TuningUtterance]:
    """Say the texts with two letters in each that sound more like another."""
    random = np.random.default_rng(0)
    letters = "acdefhilmnorst"
    found = []
    for text in texts[:count]:
        places = [place for place, letter in enumerate(text) if letter != " "]
        other = {int(p): str(random.choice(list(letters))) for p in random.choice(places, 2)}
        found.append(TuningUtterance(spoken(tokenizer, text, other), text))
    return found


def errors(decoder: BeamDecoder, heard: list[TuningUtterance]) -> Scores:
    best = (decoder.nbest(each.log_probs)[0].tokens for each in heard)
    pairs = zip(heard, map(decoder.tokenizer.decode, best), strict=True)
    return sum((count_errors(each.text, text) for each, text in pairs), Scores())


Tuning = tuple[BeamDecoder, list[TuningUtterance], Tuned]


@pytest.fixture(scope="module")
def tuning_of_all(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """Choose weights: the decoder, what it heard, and the outcome."""
    models = trained(tmp_path_factory.mktemp("tuned"), tokenizer)
    decoder = BeamDecoder(tokenizer=tokenizer, language_models=models)
    heard = misheard(tokenizer)
    return decoder, heard, tune(decoder, heard)


def test_chosen_weights_make_fewer_errors_than_none(tuning_of_all: Tuning) -> None:
    decoder, heard, tuned = tuning_of_all
    without = errors(decoder.with_weights(Weights(word=0, token=0, unknown=0)), heard)
    assert tuned.scores.wer < 0.5 * without.wer
    assert tuned.scores == errors(decoder.with_weights(tuned.weights), heard)
    pings = list[None]()
    assert tune(decoder, heard, ping=lambda: pings.append(None)) == tuned
    assert tuned.plain()["utterances"] == 6
    assert len(pings) >= 64 * 6  # at each utterance: all of them may take longer than a hang may


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_of_a_large_set_any_number_of_ranks_keeps_the_same_sample(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    (each,) = misheard(tokenizer, 1)
    tokens = int((each.log_probs > tuning.LIKELY).sum())
    every = [each._replace(id=str(number)) for number in range(100)]
    shares = [every[rank::ranks] for rank in range(ranks)]
    counts = [[(each.order, tokens) for each in share] for share in shares]
    monkeypatch.setattr(tuning, "gather_over_ranks", lambda own: counts)
    for most, few in ((8, 8), (8.5, 8), (100, 100)):
        kept = [limit_tokens(share, int(most * tokens)) for share in shares]
        found = {one.id for share in kept for one in share}
        assert found == {one.id for one in sorted(every, key=lambda one: one.order)[:few]}


def test_fitting_takes_a_tenth_of_the_training_time_whatever_the_set() -> None:
    """The default run trains on 67,234 s of audio, and its 8,630 tokens of dev are all tried."""
    found = [tuning.tokens_to_try(seconds) for seconds in (0, 2 * 67_234, 1e9)]
    assert found == [tuning.MIN_TOKENS, 26_894, tuning.ENOUGH]


@pytest.mark.parametrize(
    ("count", "seconds", "total", "is_fitted"),
    [
        (2, 3.0, 2, True),  # all there is
        (19, 300.0, 55, False),
        (38, 67.0, 55, False),  # 38 of 55 flat utterances: a model that wrote nothing
        (20, 180.0, 55, True),
    ],
)
def test_weights_are_fitted_to_enough_speech_or_stay_at_their_defaults(
    tuning_of_all: Tuning,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    seconds: float,
    total: int,
    is_fitted: bool,
) -> None:
    decoder, (clip, *_), _ = tuning_of_all
    heard = [clip._replace(seconds=seconds / count)] * count
    monkeypatch.setattr(tuning, "POINTS", 2)
    fitted, tuned = fit_weights(decoder, heard, sets=["dev"], total=total, by_words=True)
    assert (fitted.weights != Weights()) == is_fitted
    assert fitted.weights == tuned.weights
    assert tuned.scores.utterances == count
    assert f"on {count} of {total} utterances only ({seconds:.0f} s)" in tuned.kept or is_fitted


def test_a_flat_frame_counts_as_the_tokens_that_are_tried(tokenizer: Tokenizer) -> None:
    flat = np.full((10, tokenizer.vocab_size), -3.0)
    clips = [TuningUtterance(flat, "a", id=str(number)) for number in range(9)]
    assert len(limit_tokens(clips, 5 * 10 * MOST_TOKENS)) == 5


def test_without_spaces_between_words_their_model_takes_no_part(tuning_of_all: Tuning) -> None:
    decoder, heard, _ = tuning_of_all
    tuned = tune(decoder, heard[:2], by_words=False)
    assert "WER" not in tuned.plain()
    assert tuned.weights.word == 0
    assert set(used_weights(decoder.with_weights(tuned.weights))) == {"token", "token_bonus"}


def test_ranks_that_share_a_set_choose_alike(tuning_of_all: Tuning) -> None:
    """What one rank would find of all, two find of their halves, with the sums of both."""
    decoder, heard, every = tuning_of_all
    other: list[Scores] = []

    def note(scores: Sequence[Scores]) -> list[Scores]:
        """Keep what the other rank has found with the weights that are tried."""
        other[:] = scores if len(scores) > 1 else other
        return list(scores)

    def add(own: Sequence[Scores]) -> list[Scores]:
        if len(own) == 1:  # the errors with the weights that were chosen
            return list(own)
        return [a + b for a, b in zip(own, other, strict=True)]

    tune(decoder, heard[1::2], add=note)
    assert tune(decoder, heard[::2], add=add).weights == every.weights


def test_models_are_trained_once_and_again_for_another_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = tmp_path / "lm.safetensors"
    said = train_models(file, tokenizer, TEXTS)
    assert said[0].startswith("language model of words: 2-grams of 60 words in 12 sentences, 11 ")
    assert "too little text" in said[0]
    assert train_models(file, tokenizer, []) == []
    assert train_models(file, tokenizer, TEXTS, source="others")


def test_a_text_in_other_letters_does_not_replace_the_models_of_a_run(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = trained(tmp_path, tokenizer)
    before = file.read_bytes()
    with pytest.raises(SbkitError, match="tokens spell, but 100.0% of its words have letters"):
        train_models(file, tokenizer, ["птица поёт"], source="others")
    assert file.read_bytes() == before
    said = train_models(file, tokenizer, [*TEXTS, "птица"], source="both")
    assert said[-1] == "1.6% of its words have letters that no token spells"


def test_an_arpa_file_replaces_the_model_that_it_is_of(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Of words or of tokens; the other model is made of the transcripts."""
    file = trained(tmp_path, tokenizer)
    arpa, models = tmp_path / "talks.arpa", load_language_models(file, tokenizer)
    for name, theirs in (("words", models.words), ("tokens", models.tokens)):
        assert theirs is not None
        write_arpa(theirs, arpa)
        said = train_models(file, tokenizer, TEXTS, source=name, arpa=arpa)
        assert said[0] == f"language model of {name}: {arpa}"
        taken = getattr(load_language_models(file, tokenizer), name)
        assert (taken.words, taken.order) == (theirs.words, theirs.order)


def test_an_arpa_file_of_another_order_or_spelling_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    arpa, file = tmp_path / "talks.arpa", tmp_path / "lm.safetensors"
    write_arpa(train([text.split() for text in TEXTS], order=2).model, arpa)
    with pytest.raises(SbkitError, match="is 3, and .* is a 2-gram model of words. Pass --word_lm"):
        train_models(file, tokenizer, [], words=3, arpa=arpa)
    write_arpa(train([text.upper().split() for text in TEXTS], order=2).model, arpa)
    with pytest.raises(SbkitError, match="but 0 of the 11 words of .* are. Train it on text"):
        train_models(file, tokenizer, [], arpa=arpa)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("a.arpa", "any", True), ("irst.lm", "iARPA\n\n\\data\\\n", True), ("a.txt", "data\n", False)],
)
def test_an_arpa_file_is_known_by_its_name_or_its_data(
    tmp_path: Path, name: str, text: str, expected: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert is_arpa(tmp_path / name) is expected


def test_a_hotword_that_no_text_had_is_heard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """What was said is "call sam"; the s sounds a little more like an h."""
    file = trained(tmp_path, tokenizer, tokens=0)
    plain = BeamDecoder(tokenizer=tokenizer, language_models=file, weights={"token": 0})
    log_probs = spoken(tokenizer, "call lam", {5: "t"})
    assert heard(plain.with_hotwords(["lam"]), log_probs) == "call lam"
    assert heard(plain, log_probs) != "call lam"


@pytest.mark.parametrize("kind", ["greedy", "hotwords", "rescore"])
def test_frames_in_pieces_are_decoded_as_the_whole_clip(
    tmp_path: Path, tokenizer: Tokenizer, kind: str
) -> None:
    file = trained(tmp_path, tokenizer)
    search: BeamDecoder | GreedySearch = BeamDecoder(
        tokenizer=tokenizer,
        language_models=file,
        attention="rescore" if kind == "rescore" else None,
    )
    attention = None
    if kind == "rescore":
        attention = AttentionDecoder(
            log_probs=lambda tokens: -np.ones((len(tokens), tokens.shape[1] + 1, 99)), eos=2
        )
    elif kind == "hotwords":
        search = search.with_hotwords(["lam", "north"])
    elif kind == "greedy":
        search = GreedySearch(vocab_size=tokenizer.vocab_size, blank=tokenizer.vocabulary.blank)
    drawn = np.random.default_rng(3)
    for each in misheard(tokenizer):
        state = search.start()
        for piece in np.split(each.log_probs, np.sort(drawn.integers(0, len(each.log_probs), 9))):
            state = search.advance(state, piece)
        (best, *_), (whole, *_) = (
            search.finish(state, attention),
            search.nbest(each.log_probs, attention),
        )
        assert best.tokens == whole.tokens
        assert best.score == pytest.approx(whole.score, abs=1e-9)


def test_a_search_of_whole_clips_takes_no_pieces(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = trained(tmp_path, tokenizer)
    joint = BeamDecoder(tokenizer=tokenizer, language_models=file, attention="joint")
    with pytest.raises(SbkitError, match="in pieces must be decoded by prefix beam .* is joint"):
        joint.start()


def test_a_list_is_a_file_or_words_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("new york\n\nsan francisco bay\n", encoding="utf-8")
    assert read_hotwords(str(file)) == ["new york", "", "san francisco bay"]
    many = [f"word {number}" for number in range(100)]  # longer than the name of a file may be
    assert read_hotwords(",".join(many)) == many
    assert read_hotwords("node.js") == ["node.js"]
    with pytest.raises(SbkitError, match="`--hotwords` must be readable"):
        read_hotwords(str(tmp_path / "gone.txt"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SbkitError, match="`--hotwords` must be UTF-8"):
        read_hotwords(str(file))
