"""``sbkit lm``: a language model of any text, as an ARPA file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import require_writable
from sbkit.decoding.language_models import describe_model, to_pieces
from sbkit.lm.arpa import write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.text.sentences import read_sentences
from sbkit.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class WantedModel:
    """What model is to be made of a text.

    order: of its n-grams; language: whose normalizer is taken; tokenizer: a run, a bundle or a
    model file, of whose tokens it is made, None for words; out: the ARPA file.
    """

    order: int
    language: str
    tokenizer: Path | None
    out: Path


def train_texts(texts: Sequence[Path], wanted: WantedModel) -> str:
    """Train a language model on texts, write it, and return what to say of it.

    Raises:
        SbkitError: a text or the tokenizer cannot be read, or the order is out of range, or
            nothing can be written there.
    """
    require_writable(wanted.out.parent, option="--out")
    tokenizer = None if wanted.tokenizer is None else _open_tokenizer(wanted.tokenizer)

    def sentences() -> Iterator[list[str]]:
        for file in texts:
            for text in read_sentences(file, wanted.language):
                yield text.split() if tokenizer is None else to_pieces(text, tokenizer)

    trained = train(sentences(), order=wanted.order)
    write_arpa(trained.model, wanted.out)
    return describe_model("words" if tokenizer is None else "tokens", wanted.order, trained)


def _open_tokenizer(named: Path) -> Tokenizer:
    file = named / "tokenizer.model" if named.is_dir() else named
    if not file.is_file():
        raise SbkitError(
            f"`--tokenizer` must be a run, a bundle or a sentencepiece model, but {named} has "
            "none. Name the folder that training or export printed."
        )
    return Tokenizer(model_file=file)
