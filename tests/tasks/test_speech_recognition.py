"""Recognized texts and references, normalized once more."""

from types import SimpleNamespace

from sbkit.decoding.clips import Recognition
from sbkit.tasks.recognition.task import Recognition as Task
from sbkit.text.normalization import orthography
from sbkit.text.normalizers import Normalizer


def test_normalizer_is_given_the_sentence_of_the_corpus() -> None:
    """The text table has dropped the sign that a leaderboard's normalizer reads."""
    bundle = SimpleNamespace(
        config=SimpleNamespace(
            sample_rate=16_000, has_words=True, language="en", text_table=orthography("en")
        ),
        decoder=None,
        decoder_inputs=lambda clips: clips,
        decoder_pool=SimpleNamespace(decode=lambda *_, **__: [Recognition("five dollars")]),
    )
    normalizer = Normalizer("dollars", "0", lambda text: text.replace("$5", "five dollars"))
    row = {"id": "a", "text": "5", "sentence": "$5", "samples": 16_000}
    (scored,) = Task().score(bundle, [row], [], times=False, normalizer=normalizer)
    assert scored.normalized is not None
    assert (scored.errors.wer, scored.normalized.errors.wer) == (2.0, 0.0)
