r"""Read and write ARPA files: n-grams with log10 probabilities and back-offs, as text.

    \data\
    ngram 1=3
    ...
    \1-grams:
    -0.7<tab>word<tab>-0.3
    ...
    \end\

Words are UTF-8 without white space. SRILM's manual, ngram-format(5), describes the format.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sbkit.base.arrays import Float32s, Float64s, Int64s
from sbkit.base.errors import DataError
from sbkit.base.files import read_lines, write_bytes_atomically
from sbkit.lm.ngram import MAX_ORDER, SPECIAL, Grams, NgramModel

LN_10 = math.log(10)
LOG10_ZERO = -99.0  # by convention, the log10 of no probability
START = b"\\data\\"  # tools may write anything above it


def read_arpa(path: Path) -> NgramModel:
    """Read a model from an ARPA file; raise DataError if it is truncated or inconsistent.

    If the file has no `<unk>`, unknown words have no probability: a log10 of -99, as is usual in
    ARPA files. Back-offs of the highest order have no effect and are dropped.
    """
    file = ArpaFile(path)
    counts = file.read_counts()
    words, unigrams = _read_unigrams(file, counts[0])
    ids = {word.encode(): n for n, word in enumerate(words)}
    ids.setdefault(b"<UNK>", ids[b"<unk>"])
    grams = [unigrams]
    for order, count in enumerate(counts[1:], start=2):
        grams.append(_read_grams(file, order, count, ids, grams))
    if file.take() != b"\\end\\":
        raise file.error(f"end with \\end\\ after {counts[-1]} {len(counts)}-grams")
    last = grams[-1]
    grams[-1] = Grams(last.keys, last.log_probs, np.zeros_like(last.backoffs))
    return NgramModel(words, tuple(grams))


class ArpaFile:
    """A file that is read line by line, and remembers the latest line for errors."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, read_lines(path, subject="An ARPA file")
        self._number, self._line = 0, b""

    def take(self) -> bytes:
        """Return the next line that is not blank, b"" at the end of the file."""
        for line in self._lines:
            self._number += 1
            if stripped := line.strip():
                self._line = stripped
                return stripped
        self._line = b""
        return b""

    def error(self, rule: str, fault: str = "") -> DataError:
        """Return an error; ``rule``: what an ARPA file must do; ``fault``: by default, the line."""
        line = self._line[:80].decode(errors="backslashreplace")
        fault = fault or (f"has {line!r} in line {self._number}" if line else "is truncated")
        return DataError(
            f"An ARPA file must {rule}, but {self._path} {fault}. Make or fetch the file again."
        )

    def read_counts(self) -> list[int]:
        r"""Read the number of n-grams of each order, after \data\."""
        while self.take() not in (START, b""):
            pass
        counts: list[int] = []
        while self.take().startswith(b"ngram "):
            count = self._line.partition(b"=")[2].strip()
            counts.append(int(count) if count.isdigit() else 0)
        if not 1 <= len(counts) <= MAX_ORDER or self._line != b"\\1-grams:":
            raise self.error(f"count the n-grams of 1 to {MAX_ORDER} orders before \\1-grams:")
        return counts

    def read_rows(self, order: int, count: int) -> Iterator[tuple[float, list[bytes], float]]:
        """Yield the log10 probability, the words and the back-off of each n-gram of an order."""
        for _ in range(count):
            fields = self.take().split()
            try:
                log_prob = float(fields[0])
                backoff = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
                is_valid = log_prob <= 0 and math.isfinite(log_prob) and math.isfinite(backoff)
            except (ValueError, IndexError):
                is_valid = False
            if not is_valid or not order + 1 <= len(fields) <= order + 2:
                raise self.error(
                    f"hold {count} {order}-grams, each a log10 probability, {order} "
                    f"word{'s' * (order > 1)} and perhaps a back-off"
                )
            yield log_prob, fields[1 : order + 1], backoff


def _read_unigrams(file: ArpaFile, count: int) -> tuple[tuple[str, ...], Grams]:
    values: dict[str, tuple[float, float]] = {SPECIAL[0]: (LOG10_ZERO, 0.0)}
    for log_prob, (field,), backoff in file.read_rows(1, count):
        try:
            word = field.decode()
        except UnicodeDecodeError:
            raise file.error("be UTF-8") from None
        values[SPECIAL[0] if word == "<UNK>" else word] = log_prob, backoff
    if not values.keys() >= {*SPECIAL}:
        raise file.error(f"have {' and '.join(SPECIAL[1:])} among its unigrams")
    words = (*SPECIAL, *sorted(values.keys() - {*SPECIAL}))
    columns = _to_columns(np.array([values[word] for word in words]))
    return words, Grams(np.arange(len(words)), *columns)


def _to_columns(values: Float64s) -> Iterator[Float32s]:
    """Convert log10 probabilities and back-offs, (N, 2), to two columns of natural logarithms."""
    return (column.astype(np.float32) for column in LN_10 * values.T)


def _read_grams(
    file: ArpaFile, order: int, count: int, ids: dict[bytes, int], lower: Sequence[Grams]
) -> Grams:
    if file.take() != b"\\%d-grams:" % order:
        raise file.error(f"continue with \\{order}-grams: after as many n-grams as it declares")
    word_ids, values = array("q"), array("d")
    for log_prob, fields, backoff in file.read_rows(order, count):
        try:
            word_ids.extend([ids[field] for field in fields])
        except KeyError:
            raise file.error("list every word as a unigram") from None
        values.extend((log_prob, backoff))
    keys = _find_keys(np.array(word_ids, np.int64).reshape(-1, order), lower)
    if (keys < 0).any():
        raise file.error(f"contain the prefix of each {order}-gram as an n-gram", "lacks some")
    by_key = np.argsort(keys)
    if (np.diff(keys[by_key]) == 0).any():
        raise file.error(f"contain each {order}-gram once", "repeats some")
    return Grams(keys[by_key], *_to_columns(np.array(values).reshape(-1, 2)[by_key]))


def _find_keys(words: Int64s, lower: Sequence[Grams]) -> Int64s:
    """Compute the keys of n-grams, (N, order) ids -> (N,); -1 if the prefix is not an n-gram."""
    size = len(lower[0])
    rows = words[:, 0]
    for grams, word in zip(lower[1:], words.T[1:], strict=False):
        keys = rows * size + word
        rows = np.searchsorted(grams.keys, keys)
        exists = grams.keys[np.minimum(rows, len(grams) - 1)] == keys if len(grams) else False
        rows = np.where(exists & (keys >= 0), rows, -size)
    all_keys: Int64s = np.where(rows >= 0, rows * size + words[:, -1], -1)
    return all_keys


def write_arpa(model: NgramModel, path: Path) -> None:
    """Write a model as an ARPA file atomically, in the order of its ids.

    Numbers have nine digits, so a float32 is read back exactly, except for rounding by log10.
    """
    counts = [f"ngram {order}={len(grams)}" for order, grams in enumerate(model.grams, start=1)]
    parts = ["\\data\\\n" + "\n".join(counts) + "\n"]
    prefixes = [""]  # by row in the order below
    for order, grams in enumerate(model.grams, start=1):
        rows, ids = np.divmod(grams.keys, len(model.words))
        pairs = zip(rows.tolist(), ids.tolist(), strict=True)
        texts = [prefixes[row] + model.words[word] for row, word in pairs]
        parts.append(f"\n\\{order}-grams:\n")
        log_probs, backoffs = (
            (column.astype(np.float64) / LN_10).tolist()
            for column in (grams.log_probs, grams.backoffs)
        )
        for log_prob, text, backoff in zip(log_probs, texts, backoffs, strict=True):
            suffix = f"\t{backoff:.9g}" if order < model.order else ""
            parts.append(f"{log_prob:.9g}\t{text}{suffix}\n")
        prefixes = [f"{text} " for text in texts]
    parts.append("\n\\end\\\n")
    write_bytes_atomically(path, "".join(parts).encode())
