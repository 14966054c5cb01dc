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
from codecs import BOM_UTF8
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from sbkit.base.arrays import Bools, Float32s, Float64s, Int64s
from sbkit.base.errors import DataError
from sbkit.base.files import iter_raw_lines, write_bytes_atomically
from sbkit.lm.ngram import BEGIN, END, SPECIAL, UNKNOWN, Grams, NgramModel

LN_10 = math.log(10)
LOG10_ZERO = -99.0  # by convention, the log10 of no probability
DATA_HEADER = b"\\data\\"  # tools may write anything above it
END_MARK = b"\\end\\"
KENLM_HEADER = b"mmap lm http://kheafield.com/code"
MAX_PREAMBLE_LINES = 1000  # above the data, such as IRSTLM's


def is_arpa(file: Path) -> bool:
    r"""Check whether a file is named like an ARPA file, or has its `\data\`."""
    if file.name.removesuffix(".gz").endswith(".arpa"):
        return True
    lines = iter_raw_lines(file, subject="The text of a language model")
    for line in islice(lines, MAX_PREAMBLE_LINES):
        if line.startswith(KENLM_HEADER):
            raise DataError(
                f"{file} is a binary file of KenLM. Name the ARPA file that it was made from.",
                file=str(file),
            )
        if line.removeprefix(BOM_UTF8).strip() == DATA_HEADER:
            return True
    return False


def read_arpa(path: Path | str) -> NgramModel:
    """Read a model from an ARPA file.

    If the file has no `<unk>`, unknown words have no probability: a log10 of -99, as is usual in
    ARPA files. Back-offs of the highest order have no effect and are dropped.
    """
    file = ArpaFile(Path(path))
    counts = file.read_counts()
    words, unigrams = _read_unigrams(file, counts[0])
    ids = {word.encode(): n for n, word in enumerate(words)}
    ids.setdefault(b"<UNK>", UNKNOWN)
    grams = [unigrams]
    for order, count in enumerate(counts[1:], start=2):
        grams.append(_read_grams(file, order, count, ids, grams))
    if file.next_line() != END_MARK:
        raise file.line_error(f"\\end\\ after {counts[-1]} {len(counts)}-grams")
    last = grams[-1]
    grams[-1] = Grams(last.keys, last.log_probs, np.zeros_like(last.backoffs))
    return NgramModel(words, tuple(grams))


class ArpaFile:
    """An ARPA file that is read line by line. Its errors quote the line that was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = iter_raw_lines(path, subject="An ARPA file")
        self._line = b""
        self._line_number = 0

    def next_line(self) -> bytes:
        """Return the next line that is not blank, or b"" at the end of the file."""
        for line in self._lines:
            self._line_number += 1
            self._line = line.removeprefix(BOM_UTF8).strip()
            if self._line:
                return self._line
        self._line = b""
        return b""

    def error(self, fault: str) -> DataError:
        """Return an error about the file; ``fault`` is a sentence without its period."""
        return DataError(f"{self._path} is not a valid ARPA file: {fault}.")

    def line_error(self, expected: str) -> DataError:
        """Return an error about the last line, where the format has ``expected``."""
        if not self._line:
            return self.error(f"it is truncated, expected {expected}")
        line = self._line[:80].decode(errors="backslashreplace")
        return self.error(f"expected {expected} in line {self._line_number}, found {line!r}")

    def read_counts(self) -> list[int]:
        r"""Read the number of n-grams of each order, after \data\."""
        line = self.next_line()
        while line != DATA_HEADER:
            if not line:
                raise self.error(r"it has no \data\ line")
            line = self.next_line()
        counts: list[int] = []
        while self.next_line().startswith(b"ngram "):
            order = len(counts) + 1
            name, _, count = self._line.partition(b"=")
            if name.split() != [b"ngram", b"%d" % order] or not count.strip().isdigit():
                raise self.line_error(f"'ngram {order}=COUNT'")
            counts.append(int(count))
        if not counts:
            raise self.line_error("'ngram 1=COUNT'")
        if self._line != b"\\1-grams:":
            raise self.line_error("\\1-grams:")
        return counts

    def read_row(self, order: int, count: int) -> tuple[float, list[bytes], float]:
        """Return the log10 probability, the words and the log10 back-off of the next n-gram."""
        fields = self.next_line().split()
        try:
            log10_prob = max(float(fields[0]), LOG10_ZERO)  # tools also write -inf
            has_backoff = len(fields) > order + 1
            log10_backoff = max(float(fields[order + 1]), LOG10_ZERO) if has_backoff else 0.0
        except (ValueError, IndexError):
            log10_prob = log10_backoff = math.nan
        is_valid = log10_prob <= 0 and math.isfinite(log10_prob) and math.isfinite(log10_backoff)
        if not is_valid or len(fields) not in (order + 1, order + 2):
            raise self.line_error(f"one of {count} {order}-grams")
        return log10_prob, fields[1 : order + 1], log10_backoff


def _read_unigrams(file: ArpaFile, count: int) -> tuple[tuple[str, ...], Grams]:
    log10_by_word: dict[str, tuple[float, float]] = {}  # probability and back-off
    for _ in range(count):
        log10_prob, (content,), log10_backoff = file.read_row(1, count)
        try:
            word = content.decode()
        except UnicodeDecodeError:
            raise file.line_error("a word in UTF-8") from None
        if word == "<UNK>":
            word = SPECIAL[UNKNOWN]
        if word in log10_by_word:
            raise file.line_error(f"{word!r} only once among the unigrams")
        log10_by_word[word] = log10_prob, log10_backoff
    log10_by_word.setdefault(SPECIAL[UNKNOWN], (LOG10_ZERO, 0.0))
    for word in (SPECIAL[BEGIN], SPECIAL[END]):
        if word not in log10_by_word:
            raise file.error(f"{word} is missing from its unigrams")
    words = (*SPECIAL, *sorted(log10_by_word.keys() - {*SPECIAL}))
    log_probs, backoffs = _to_columns(np.array([log10_by_word[word] for word in words]))
    return words, Grams(np.arange(len(words)), log_probs, backoffs)


def _to_columns(log10_rows: Float64s) -> tuple[Float32s, Float32s]:
    """Convert (N, 2) log10 values to two columns of natural logarithms."""
    rows = (LN_10 * log10_rows).astype(np.float32)
    return rows[:, 0].copy(), rows[:, 1].copy()


def _read_grams(
    file: ArpaFile, order: int, count: int, ids: dict[bytes, int], lower_orders: Sequence[Grams]
) -> Grams:
    if file.next_line() != b"\\%d-grams:" % order:
        raise file.line_error(f"\\{order}-grams: after as many {order - 1}-grams as declared")
    word_ids = array("q")
    log10_values = array("d")  # a probability and a back-off for each n-gram
    for _ in range(count):
        log10_prob, words, log10_backoff = file.read_row(order, count)
        try:
            word_ids.extend([ids[word] for word in words])
        except KeyError:
            raise file.line_error("only words that are listed as unigrams") from None
        log10_values.extend((log10_prob, log10_backoff))
    keys, has_prefix = _find_keys(np.array(word_ids, np.int64).reshape(-1, order), lower_orders)
    if not has_prefix.all():
        raise file.error(f"some {order}-grams begin with a {order - 1}-gram that it does not list")
    order_by_key = np.argsort(keys)
    keys = keys[order_by_key]
    if (np.diff(keys) == 0).any():
        raise file.error(f"it lists some {order}-grams more than once")
    log_probs, backoffs = _to_columns(np.array(log10_values).reshape(-1, 2)[order_by_key])
    return Grams(keys, log_probs, backoffs)


def _find_keys(words: Int64s, lower_orders: Sequence[Grams]) -> tuple[Int64s, Bools]:
    """Return the keys of n-grams, and whether all their prefixes exist: (N, order) -> 2 x (N,)."""
    num_words = len(lower_orders[0])
    is_found = np.ones(len(words), bool)
    indices = words[:, 0]  # of the prefix among the n-grams of its order
    for position, grams in enumerate(lower_orders[1:], start=1):
        prefix_keys = indices * num_words + words[:, position]
        indices = np.searchsorted(grams.keys, prefix_keys)
        # A missing key may sort after the last one; then no n-gram is left to compare it with.
        is_inside = indices < len(grams)
        is_found &= is_inside
        is_found[is_inside] &= grams.keys[indices[is_inside]] == prefix_keys[is_inside]
    return indices * num_words + words[:, -1], is_found


def write_arpa(model: NgramModel, path: Path | str) -> None:
    """Write a model as an ARPA file atomically, with nine digits, which are exact for a float32."""
    counts = [f"ngram {order}={len(grams)}" for order, grams in enumerate(model.grams, start=1)]
    sections = ["\\data\\\n" + "\n".join(counts) + "\n"]
    prefixes = [""]  # by index in the order below
    for order, grams in enumerate(model.grams, start=1):
        indices, ids = np.divmod(grams.keys, len(model.words))
        pairs = zip(indices.tolist(), ids.tolist(), strict=True)
        texts = [prefixes[index] + model.words[word] for index, word in pairs]
        log10_probs = (grams.log_probs.astype(np.float64) / LN_10).tolist()
        log10_backoffs = (grams.backoffs.astype(np.float64) / LN_10).tolist()
        sections.append(f"\n\\{order}-grams:\n")
        for log10_prob, text, backoff in zip(log10_probs, texts, log10_backoffs, strict=True):
            suffix = f"\t{backoff:.9g}" if order < model.order else ""
            sections.append(f"{log10_prob:.9g}\t{text}{suffix}\n")
        prefixes = [f"{text} " for text in texts]
    sections.append("\n\\end\\\n")
    write_bytes_atomically(Path(path), "".join(sections).encode())
