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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_lines, write_bytes_atomically
from sbkit.lm.ngram import LARGEST_ORDER, SPECIAL, Floats, Grams, Ints, NgramModel

LN_10 = math.log(10)
ZERO = -99.0  # log10, by convention that of no probability
FARTHEST = 1e6  # log10, of anything that was ever estimated
LINES_AT_ONCE = 1 << 16
LONGEST_COUNT = 18  # digits; Python refuses to read thousands of them


def read_arpa(path: Path) -> NgramModel:
    r"""Read a model from an ARPA file.

    A file without `<unk>` gives unknown words no probability; theirs becomes a log10 of -99, which
    stands for that in ARPA files. Back-offs of the highest order say nothing and are dropped.
    Raises SbkitError for a file that cannot be read, is cut short, is not UTF-8, or holds: other
    numbers of n-grams than it says, a value that is no logarithm of a probability, a word that is
    no unigram, an n-gram twice, an n-gram whose first n - 1 words are no n-gram.
    """
    return _read(Lines(path, read_lines(path, what="An ARPA file")))


class Lines:
    """The lines of a file, counted, so that an error can name one."""

    def __init__(self, path: Path, lines: Iterator[bytes]) -> None:
        self.path, self.lines = path, lines
        self.number = 0  # of the line read last

    def take(self) -> bytes:
        """Return the next line that is not blank; raise SbkitError at the end of the file."""
        for line in self.lines:
            self.number += 1
            if stripped := line.strip():
                return stripped
        raise self.fault("must go on until \\end\\", "is cut short")

    def take_rows(self, count: int) -> Iterator[list[list[bytes]]]:
        """Yield the fields of so many lines, or fewer at the file's end, a block at a time."""
        while rows := [each.split() for each in islice(self.lines, min(count, LINES_AT_ONCE))]:
            yield rows
            self.number += len(rows)
            count -= len(rows)

    def fault(self, must: str, but: str, *, line: int | None = None) -> SbkitError:
        """Return the error of a line, by default the one read last."""
        number = self.number if line is None else line
        return SbkitError(
            f"An ARPA file {must}, but {self.path} {but} (line {number}). Make or fetch the file "
            "again."
        )


@dataclass(frozen=True, eq=False)
class Section:
    """The n-grams of one order as they stand in a file.

    words: one after the other, as many as the order for each n-gram; log_probs, backoffs: natural
    logarithms; first: the number of the line of the first.
    """

    words: list[bytes]
    log_probs: Floats
    backoffs: Floats
    first: int


def _read(lines: Lines) -> NgramModel:
    counts = _read_counts(lines)
    words, unigrams = _read_unigrams(lines, counts[0])
    ids = {word.encode(): number for number, word in enumerate(words)}
    ids.setdefault(b"<UNK>", ids[b"<unk>"])
    grams = [unigrams]
    for order, count in enumerate(counts[1:], start=2):
        _expect(lines, b"\\%d-grams:" % order)
        grams.append(_read_grams(lines, order, count, ids, grams))
    last = grams[-1]
    grams[-1] = Grams(last.keys, last.log_probs, np.zeros_like(last.backoffs))
    _expect(lines, b"\\end\\")
    return NgramModel(words, tuple(grams))


def is_start(line: bytes) -> bool:
    r"""Check whether a line is `\data\`, above which tools may write what they like."""
    return line.strip().removeprefix(BOM_UTF8) == b"\\data\\"


def _read_counts(lines: Lines) -> list[int]:
    r"""Read what follows \data\: the number of n-grams of each order."""
    while not is_start(lines.take()):
        pass
    counts = list[int]()
    while (line := lines.take()).startswith(b"ngram "):
        order, _, count = line.removeprefix(b"ngram ").partition(b"=")
        is_count = count.strip().isdigit() and len(count) < LONGEST_COUNT
        if order.strip() != b"%d" % (len(counts) + 1) or not is_count:
            raise lines.fault('must count its n-grams as in "ngram 1=20"', f"says {_show(line)}")
        counts.append(int(count))
    if not 1 <= len(counts) <= LARGEST_ORDER:
        raise lines.fault(f"must count 1 to {LARGEST_ORDER} orders", f"counts {len(counts)}")
    if line != b"\\1-grams:":
        raise lines.fault(r"must go on with \1-grams:", f"goes on with {_show(line)}")
    return counts


def _expect(lines: Lines, heading: bytes) -> None:
    if (line := lines.take()) != heading:
        raise lines.fault(
            f"must go on with {heading.decode()} after as many n-grams as it says",
            f"goes on with {_show(line)}",
        )


def _read_section(lines: Lines, order: int, count: int) -> Section:
    words = list[bytes]()
    log_probs, backoffs = array("d"), array("d")
    first = lines.number + 1
    for rows in lines.take_rows(count):
        try:
            backoffs.extend(_backoff(row, order) for row in rows)
            log_probs.extend(float(row[0]) for row in rows)
        except (ValueError, IndexError):
            raise _malformed(lines, rows, order) from None
        words += chain.from_iterable(row[1 : order + 1] for row in rows)
    if len(log_probs) != count:
        raise lines.fault("must go on until \\end\\", "is cut short")
    values = np.array([log_probs, backoffs]) * LN_10  # (2, N)
    right = (np.abs(values) <= FARTHEST).all(0) & (values[0] <= 0)
    if not right.all():
        raise lines.fault(
            "must hold log10 probabilities of at most 0 and finite back-offs",
            "does not",
            line=first + int(np.argmin(right)),
        )
    log_probs_32, backoffs_32 = values.astype(np.float32)
    return Section(words, log_probs_32, backoffs_32, first)


def _backoff(row: list[bytes], order: int) -> float:
    if len(row) == order + 2:
        return float(row[-1])
    if len(row) == order + 1 and not row[0].startswith(b"\\"):
        return 0.0
    raise ValueError


def _malformed(lines: Lines, rows: list[list[bytes]], order: int) -> SbkitError:
    """Return the error of the first row that is no n-gram."""
    for line, row in enumerate(rows, start=lines.number + 1):
        try:
            _backoff(row, order), float(row[0])
        except (ValueError, IndexError):
            early = not row or row[0].startswith(b"\\")
            return lines.fault(
                f"must hold as many {order}-grams as it says, each a log10 probability, {order} "
                f"word{'s' * (order > 1)} and perhaps a back-off",
                "ends them early" if early else f"says {_show(b' '.join(row))}",
                line=line,
            )
    raise AssertionError("no row is malformed")


def _read_unigrams(lines: Lines, count: int) -> tuple[tuple[str, ...], Grams]:
    section = _read_section(lines, 1, count)
    rows: dict[str, int] = {}
    for row, field in enumerate(section.words):
        word = _decode(lines, field, line=section.first + row)
        if rows.setdefault(word, row) != row:
            raise lines.fault(
                "must hold each n-gram once",
                f"holds {_show(field)} twice",
                line=section.first + row,
            )
    rows.setdefault(SPECIAL[0], len(rows))
    for word in SPECIAL:
        if word not in rows:
            raise lines.fault(f"must have {word} among its unigrams", "has not")
    words = (*SPECIAL, *sorted(set(rows).difference(SPECIAL)))
    log_probs = np.append(section.log_probs, np.float32(ZERO * LN_10))
    backoffs = np.append(section.backoffs, np.float32(0))
    by_word = [rows[word] for word in words]
    return words, Grams(np.arange(len(words)), log_probs[by_word], backoffs[by_word])


def _read_grams(
    lines: Lines, order: int, count: int, ids: Mapping[bytes, int], lower: Sequence[Grams]
) -> Grams:
    section = _read_section(lines, order, count)
    try:
        numbers = np.fromiter(map(ids.__getitem__, section.words), np.int64, len(section.words))
    except KeyError as error:
        line = section.first + section.words.index(error.args[0]) // order
        raise lines.fault(
            "must list every word as a unigram", f"does not {_show(error.args[0])}", line=line
        ) from None
    keys = _find_keys(numbers.reshape(-1, order), lower)
    if (lost := np.flatnonzero(keys < 0)).size:
        raise lines.fault(
            f"must hold the first words of each {order}-gram as an n-gram of their own",
            "does not",
            line=section.first + int(lost[0]),
        )
    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    if (again := by_key[1:][keys[1:] == keys[:-1]]).size:
        line = section.first + int(again.min())
        raise lines.fault("must hold each n-gram once", "holds one twice", line=line)
    return Grams(keys, section.log_probs[by_key], section.backoffs[by_key])


def _find_keys(words: Ints, lower: Sequence[Grams]) -> Ints:
    """Compute the keys of n-grams, (N, order) ids -> (N,); -1 where the first words are none."""
    size = len(lower[0])
    rows = words[:, 0]
    for grams, word in zip(lower[1:], words.T[1:], strict=False):
        keys = rows * size + word
        rows = np.searchsorted(grams.keys, keys)
        found = grams.keys[np.minimum(rows, len(grams) - 1)] == keys if len(grams) else False
        rows = np.where(found & (keys >= 0), rows, -size)
    found_keys: Ints = np.where(rows >= 0, rows * size + words[:, -1], -1)
    return found_keys


def _decode(lines: Lines, field: bytes, *, line: int) -> str:
    try:
        word = field.decode()
    except UnicodeDecodeError:
        raise lines.fault("must be UTF-8", f"holds {_show(field)}", line=line) from None
    return SPECIAL[0] if word == "<UNK>" else word


def _show(field: bytes) -> str:
    return f'"{field[:80].decode(errors="backslashreplace")}"'


def write_arpa(model: NgramModel, path: Path) -> None:
    """Write a model as an ARPA file, whole or not at all, in the order of its ids.

    Numbers have nine digits, which float32 comes back from as it was, but for a rounding of log10.
    """
    counts = [f"ngram {order}={len(each)}" for order, each in enumerate(model.grams, start=1)]
    parts = ["\\data\\\n" + "\n".join(counts) + "\n"]
    texts = [""]  # by row, the words of the order below
    for order, grams in enumerate(model.grams, start=1):
        rows, words = np.divmod(grams.keys, len(model.words))
        before = map(texts.__getitem__, rows.tolist())
        after = map(model.words.__getitem__, words.tolist())
        texts = list(map(str.__add__, before, after))
        parts.append(f"\n\\{order}-grams:\n")
        parts += _write_lines(texts, grams, last=order == model.order)
        texts = [f"{each} " for each in texts]
    parts.append("\n\\end\\\n")
    write_bytes_atomically(path, "".join(parts).encode())


def _write_lines(texts: list[str], grams: Grams, *, last: bool) -> Iterator[str]:
    log_probs = (grams.log_probs.astype(np.float64) / LN_10).tolist()
    if last:
        pairs = zip(log_probs, texts, strict=True)
        yield from (f"{log_prob:.9g}\t{text}\n" for log_prob, text in pairs)
        return
    backoffs = (grams.backoffs.astype(np.float64) / LN_10).tolist()
    for log_prob, text, backoff in zip(log_probs, texts, backoffs, strict=True):
        yield f"{log_prob:.9g}\t{text}\t{backoff:.9g}\n"
