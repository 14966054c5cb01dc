"""Format text for people: counts, lists of names, and escaped control characters."""

import json
import logging
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

MAX_LISTED_NAMES = 3
MAX_VALUE_CHARACTERS = 60
MAX_MESSAGE_CHARACTERS = 600
MIN_SPELLING = 0.75  # the share of letters that two words have in common
JOINERS = "\u200c\u200d"  # invisible parts of words in Persian and Hindi
# Keys of Hugging Face's Trainer, SpeechBrain's recipes and ESPnet, by ours.
FOREIGN_NAMES = {
    "lr": "learning_rate lr_adam optim_conf",
    "number_of_epochs": "epochs n_epochs num_epochs max_epoch max_epochs num_train_epochs",
    "batch_seconds": "batch_size batch_bins max_batch_length per_device_train_batch_size",
    "eval_batch_seconds": "valid_batch_size test_batch_size per_device_eval_batch_size",
    "grad_accumulation_factor": "accum_grad gradient_accumulation_steps",
    "warmup_fraction": "warmup_steps n_warmup_steps warmup_ratio scheduler_conf",
    "max_grad_norm": "grad_clip",
    "precision": "fp16 bf16 use_amp auto_mix_prec",
    "early_stopping": "patience",
    "average_checkpoints": "avg_checkpoints keep_nbest_models",
}
HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")

logger = logging.getLogger(__name__)
logged_notes: set[str] = set()  # their keys


def plural(count: int, word: str, words: str = "") -> str:
    """Write a count with its noun; `words` is an irregular plural.

    >>> plural(1, "row"), plural(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {word if count == 1 else words or f'{word}s'}"


def listed(
    names: Iterable[object], *, max_names: int = MAX_LISTED_NAMES, separator: str = ", "
) -> str:
    """Write the first names of a list, and how many more there are.

    >>> listed("abcde")
    'a, b, c and 2 more'
    """
    texts = list(map(str, names))
    more = f" and {len(texts) - max_names:,} more" if len(texts) > max_names else ""
    return separator.join(texts[:max_names]) + more


def align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield each row of a table as an indented line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def short_value(value: object) -> str:
    """Write a value of a YAML in a few characters.

    >>> short_value({"case": "keep"}), short_value(None)
    ('{"case": "keep"}', 'null')
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def shorten(text: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Cut the middle out of a long text: a message ends with its advice."""
    half = max_characters // 2 - 3
    return text if len(text) <= max_characters else f"{text[:half]} ... {text[-half:]}"


def note_once(note: str, *, key: str = "", level: int = logging.INFO) -> None:
    """Log a note unless a note with the same key was logged; the key is by default the note."""
    if (key or note) not in logged_notes:
        logged_notes.add(key or note)
        logger.log(level, note)


def printable(text: str) -> str:
    r"""Escape control characters, line ends and changes of direction: ESC becomes ``\x1b``.

    Names and transcripts come from other people: an escape sequence could clear the screen.
    """
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape", "backslashreplace").decode("ascii") if _is_hidden(c) else c
        for c in text
    )


def printable_json(text: str) -> str:
    r"""Escape hidden characters in JSON, but not its line ends: ESC becomes ``\u001b``."""
    return "".join(json.dumps(c)[1:-1] if c != "\n" and _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN_CATEGORIES and character not in JOINERS


def nearest(word: str, words: Iterable[object]) -> str | None:
    """Return the key that was probably meant, or None.

    The key for a name of other toolkits comes first, then one of nearly the same spelling, then
    one with all parts of the word (`layers`: `num_encoder_layers`). A common last part is not
    enough: `beam_size` does not mean `vocab_size`.
    """
    candidates = [str(candidate) for candidate in words]
    word = word.replace("-", "_")  # as options are often spelled
    parts = word.split("_")
    longer = [key for key in candidates if {*parts} <= {*key.split("_")}]
    matches = [
        *(key for key in candidates if word in FOREIGN_NAMES.get(key, "").split()),
        *get_close_matches(word, candidates, n=1, cutoff=MIN_SPELLING),
        *sorted(longer, key=len),
    ]
    return matches[0] if matches else None


def did_you_mean(word: str, words: Iterable[object]) -> str:
    """Return a question that offers the word that was probably meant, or an empty string."""
    candidate = nearest(word, words)
    return f" Did you mean `{candidate}`?" if candidate else ""
