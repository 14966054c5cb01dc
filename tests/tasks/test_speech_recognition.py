"""Recognized texts and references, normalized once more."""

from sbkit.decoding.clips import Recognition
from sbkit.tasks.speech_recognition import score_texts
from sbkit.text.normalization import orthography
from sbkit.text.normalizers import Normalizer


def test_normalizer_is_given_the_sentence_of_the_corpus() -> None:
    """The text table has dropped the sign that a leaderboard's normalizer reads."""
    normalizer = Normalizer("dollars", "0", lambda text: text.replace("$5", "five dollars"))
    (scored,) = score_texts(
        [Recognition("five dollars")],
        ids=["a"],
        texts=["5"],
        sentences=["$5"],
        speakers=[""],
        samples=[16_000],
        sample_rate=16_000,
        by_words=True,
        language="en",
        table=orthography("en"),
        normalizer=normalizer,
    )
    assert scored.normalized is not None
    assert (scored.errors.wer, scored.normalized.errors.wer) == (2.0, 0.0)
