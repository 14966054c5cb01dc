"""Train and load language models of words and of tokens: of a run, and of any text (`sbkit lm`).

texts, normalized -> words -> model of words; tokens of the tokenizer -> model of tokens -> one file
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_lines, require_writable
from sbkit.lm.arpa import START, read_arpa, write_arpa
from sbkit.lm.kneser_ney import Trained, train
from sbkit.lm.ngram import SPECIAL, NgramModel
from sbkit.lm.storage import load, parse, save
from sbkit.text.normalize import NORMALIZER_VERSION, normalize
from sbkit.text.tokenizer import SPACE, Tokenizer

WORDS, TOKENS = "words", "tokens"
PREAMBLE = 1000  # lines at most that stand above an ARPA file's data, such as IRSTLM's
SPELLED_SHARE = 0.5  # of the letters of a text, or the words of an ARPA file


@dataclass(frozen=True)
class LanguageModels:
    """The language models of words and of tokens that a search uses; None for none."""

    words: NgramModel | None
    tokens: NgramModel | None


def ensure_language_models(
    file: Path,
    *,
    source: str,
    orders: Mapping[str, int],
    texts: Callable[[], Iterable[str]],
    tokenizer: Tokenizer,
    arpa: Path | None = None,
) -> list[str]:
    """Train the language models of a run, unless the file holds them; return messages about them.

    ``texts`` returns the normalized sentences to train them on, ``source`` identifies them;
    ``orders`` are those of the n-grams of ``WORDS`` and ``TOKENS``, 0 for no such model.
    ``arpa`` is an ARPA file that replaces one of them: of words, or of tokens where a word of it
    has a `▁`.
    Raises SbkitError where that cannot be read, has another order or another spelling.
    """
    about = {
        "made_of": f"{source} {orders[WORDS]} {orders[TOKENS]}",
        "tokenizer": digest_of(tokenizer),
        "normalizer": str(NORMALIZER_VERSION),
    }
    if file.exists() and about.items() <= _metadata(file).items():
        return []
    models, said = dict[str, NgramModel](), list[str]()
    if arpa is not None:
        models = _take_arpa(arpa, orders, tokenizer)
        said += [f"language model of {name}: {arpa}" for name in models]
    sentences = [text for text in texts() if text.strip()]
    unspelled = _check_spelled(Counter(" ".join(sentences).split()), tokenizer)
    to_tokens = partial(to_pieces, tokenizer=tokenizer)
    splits: dict[str, Callable[[str], list[str]]] = {WORDS: str.split, TOKENS: to_tokens}
    for name, split in splits.items():
        if orders[name] and name not in models:
            trained = train(map(split, sentences), order=orders[name])
            models[name] = trained.model
            said.append(describe_model(name, orders[name], trained))
    save(models, file, metadata=about)
    return said + unspelled


def replace_language_models(
    file: Path, text: Path, orders: Mapping[str, int], *, language: str, tokenizer: Tokenizer
) -> list[str]:
    """Make the language models of a file again, of a text; return messages about them.

    ``orders`` are those that change. An ARPA file takes the place of the one model that it is of.
    """
    models = load(file)[0] if file.exists() else {}
    wanted = {WORDS: 0, TOKENS: 0, **{name: each.order for name, each in models.items()}, **orders}
    file.unlink(missing_ok=True)
    if is_arpa(text):
        models |= _take_arpa(text, wanted, tokenizer)
        save(
            {name: each for name, each in models.items() if wanted[name]},
            file,
            metadata={"made_of": text.name, "tokenizer": digest_of(tokenizer)},
        )
        return [f"language model: {text}"]
    return ensure_language_models(
        file,
        source=text.name,
        orders=wanted,
        texts=partial(read_sentences, text, language),
        tokenizer=tokenizer,
    )


def _check_spelled(words: Counter[str], tokenizer: Tokenizer) -> list[str]:
    """Return the share of words that the tokens cannot spell, where there is any.

    Raises SbkitError where half of all letters are in no token: they are of another language.
    """
    known = {*"".join(tokenizer.texts)}
    missing = {word: sum(letter not in known for letter in word) for word in words}
    lost = sum(words[word] for word in missing if missing[word])
    said = f"{lost / max(1, words.total()):.1%} of its words have letters that no token spells"
    letters = sum(len(word) * count for word, count in words.items())
    if sum(missing[word] * words[word] for word in words) > SPELLED_SHARE * letters:
        raise SbkitError(
            "A language model must be of a text that the recognizer's tokens spell, but "
            f"{said}. Train it on a text in the letters of train."
        )
    return [said] if lost else []


def is_arpa(file: Path) -> bool:
    r"""Check whether a file is named as an ARPA file, or has its `\data\`."""
    lines = islice(read_lines(file, subject="The text of a language model"), PREAMBLE)
    return file.suffix == ".arpa" or any(line.strip() == START for line in lines)


def _take_arpa(
    file: Path, orders: Mapping[str, int], tokenizer: Tokenizer
) -> dict[str, NgramModel]:
    """Read the declared model of words or of tokens; raise SbkitError for any other."""
    model = read_arpa(file)
    words, pieces = model.words[len(SPECIAL) :], {*tokenizer.texts}
    if any(SPACE in word for word in words):
        name, known = TOKENS, len(pieces.intersection(words))
    else:
        name, known = WORDS, sum(map(bool, map(tokenizer.letters, words)))
    if model.order != orders[name]:
        raise SbkitError(
            f"`{name[:-1]}_lm_order` must be that of the ARPA file, but is {orders[name]}, and "
            f"{file} is a {model.order}-gram model of {name}. Pass --{name[:-1]}_lm_order="
            f"{model.order}."
        )
    if known <= SPELLED_SHARE * len(words):
        raise SbkitError(
            f"An ARPA file of {name} must be spelled as the model's tokens, but {known} of the "
            f"{len(words)} {name} of {file} are. Train it on text normalized as the transcripts."
        )
    return {name: model}


def to_pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a text as they are written, without unknown ones."""
    unknown = tokenizer.vocabulary.unk
    return [tokenizer.piece(token) for token in tokenizer.encode(text) if token != unknown]


def describe_model(name: str, order: int, trained: Trained) -> str:
    """Return a line about the text of a language model."""
    line = (
        f"language model of {name}: {order}-grams of {trained.tokens} {name} in "
        f"{trained.sentences} sentences, {len(trained.model.words) - len(SPECIAL)} different ones"
    )
    if trained.fallback_orders:
        orders = ", ".join(map(str, trained.fallback_orders))
        line += f" (too little text for the discounts of order {orders}: 0.5, 1 and 1.5 are taken)"
    return line


def _metadata(file: Path) -> dict[str, str]:
    try:
        return load(file)[1]
    except SbkitError:
        return {}


def digest_of(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer."""
    return hashlib.sha256(tokenizer.content).hexdigest()


def load_language_models(
    file: Path, tokenizer: Tokenizer, content: bytes | None = None
) -> LanguageModels:
    """Read the language models of a tokenizer; ``content``: of the file where it was read before.

    Raises SbkitError where it cannot be read, or is of another tokenizer.
    """
    models, about = load(file) if content is None else parse(content, of=file)
    if about.get("tokenizer") != digest_of(tokenizer):
        raise SbkitError(
            f"{file} must be of the model's own tokenizer, but is of another one "
            f"({str(about.get('tokenizer'))[:12]}...). Train the language models again."
        )
    return LanguageModels(models.get(WORDS), models.get(TOKENS))


def read_sentences(file: Path, language: str) -> Iterator[str]:
    """Yield the normalized sentences of a text; raise SbkitError where it is no UTF-8."""
    try:
        for line in read_lines(file, subject="The text of a language model"):
            if text := normalize(line.decode("utf-8-sig"), language):
                yield text
    except UnicodeDecodeError as error:
        raise SbkitError(
            f"The text of a language model must be UTF-8, but {file} is not ({error}). Name "
            "another text."
        ) from error


def train_texts(
    texts: Sequence[Path], *, order: int, language: str, tokenizer: Path | None, out: Path
) -> str:
    """Train a language model on texts, write it as an ARPA file, and return messages about it.

    order: of its n-grams; language: of the normalizer; tokenizer: a run, a bundle or a model
    file for a model of its tokens, None for one of words.
    Raises SbkitError where a text or the tokenizer cannot be read, the tokens do not spell the
    text, the order is out of range, or nothing can be written there.
    """
    if out.resolve() in map(Path.resolve, texts):
        raise SbkitError(f"`--out` must be a new file, but {out} is a text. Name another one.")
    for file in filter(is_arpa, texts):
        raise SbkitError(
            f"A language model must be made of text, but {file} is an ARPA file. Name a text."
        )
    require_writable(out.parent, option="--out")
    sentences = chain.from_iterable(read_sentences(file, language) for file in texts)
    if tokenizer is None:
        trained = train(map(str.split, sentences), order=order)
        said = [describe_model(WORDS, order, trained)]
    else:
        file = tokenizer / "tokenizer.model" if tokenizer.is_dir() else tokenizer
        spell, words = Tokenizer(model_file=file), Counter[str]()

        def pieces() -> Iterator[list[str]]:
            for text in sentences:
                words.update(text.split())
                yield to_pieces(text, spell)

        trained = train(pieces(), order=order)
        said = [describe_model(TOKENS, order, trained), *_check_spelled(words, spell)]
    write_arpa(trained.model, out)
    return "\n".join(said)
