"""One space of ids: what lies outside is refused before a kernel could read it."""

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.vocabulary import Vocabulary

SPACES = [
    ({"size": 3}, "from 0 to 2"),  # eos is 3
    ({"size": 9, "unk": 0}, "'unk': 0"),  # the blank's
    ({"size": 9, "blank": -1}, "'blank': -1"),  # sentencepiece's default: no padding
]


@pytest.mark.parametrize(("ids", "words"), SPACES)
def test_special_ids_must_be_different_and_inside(ids: dict[str, int], words: str) -> None:
    with pytest.raises(SbkitError, match="four different ids") as caught:
        Vocabulary(**ids)
    assert words in str(caught.value)


@pytest.mark.parametrize("label", [-1, 0, 10, 1 << 40])
def test_a_target_that_no_loss_may_see_is_refused(label: int) -> None:
    with pytest.raises(SbkitError, match=f"clip7 holds {label}\\."):
        Vocabulary(size=10).check_targets([4, label, 5], of="clip7")


def test_a_size_that_disagrees_is_named_with_both_numbers() -> None:
    vocabulary = Vocabulary(size=30)
    vocabulary.check_head(name="ctc_lin", outputs=30)
    vocabulary.check_embedding(name="Transformer", rows=30)
    with pytest.raises(SbkitError, match=r"`ctc_lin` .* \(30\), but has 29"):
        vocabulary.check_head(name="ctc_lin", outputs=29)
    with pytest.raises(SbkitError, match=r"`Transformer` .* \(30\), but has 31"):
        vocabulary.check_embedding(name="Transformer", rows=31)
