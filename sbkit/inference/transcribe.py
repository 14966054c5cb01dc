"""From audio files to text, with an exported bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.units import samples_to_seconds
from sbkit.inference.bundle import Bundle, Recognized, load_bundle
from sbkit.inference.pieces import batches, read_pieces
from sbkit.inference.running import fitting
from sbkit.text.word import Word


@dataclass(frozen=True)
class Transcript:
    """What is said in one file, and its words where their times were asked for."""

    file: Path
    text: str
    seconds: float
    words: tuple[Word, ...] = ()

    def __str__(self) -> str:
        """Write what is said."""
        return self.text


def transcribe_files(
    bundle: Path,
    files: Sequence[Path],
    *,
    decoder: str | None = None,
    hotwords: str | None = None,
    times: bool = False,
    own: frozenset[str] = frozenset(),
) -> Iterator[Transcript | SbkitError]:
    """Transcribe one file after the other; one that is no audio gives its error and no more."""
    loaded = load_bundle(bundle, own=own).with_decoder(decoder).with_hotwords(hotwords)
    loaded.require_asr()
    for file in files:
        try:
            yield _transcribe(loaded, file, times=times)
        except SbkitError as error:
            yield error


def _transcribe(bundle: Bundle, file: Path, *, times: bool) -> Transcript:
    rate = bundle.config.sample_rate
    count, pieces = read_pieces(file, rate)
    found: list[Recognized] = []
    for batch in batches(pieces):
        with fitting(file):
            found += bundle.recognize(batch, times=times)
    text = printable(" ".join(each.text for each in found if each.text))
    begins = accumulate((len(piece) for piece in pieces), initial=0)
    words = (
        replace(word.later(samples_to_seconds(begin, rate)), text=printable(word.text))
        for begin, each in zip(begins, found, strict=False)
        for word in each.words
    )
    return Transcript(file, text, samples_to_seconds(count, rate), tuple(words))
