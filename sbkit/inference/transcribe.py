"""From audio files to text, with an exported bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.units import samples_to_seconds
from sbkit.inference.bundle import Bundle, load_bundle
from sbkit.inference.pieces import batches, read_pieces
from sbkit.inference.running import fitting


@dataclass(frozen=True)
class Transcript:
    """What is said in one file."""

    file: Path
    text: str
    seconds: float

    def __str__(self) -> str:
        """Write what is said."""
        return self.text


def transcribe_files(
    bundle: Path,
    files: Sequence[Path],
    *,
    decoder: str | None = None,
    hotwords: str | None = None,
    own: frozenset[str] = frozenset(),
) -> Iterator[Transcript | SbkitError]:
    """Transcribe one file after the other; one that is no audio gives its error and no more."""
    loaded = load_bundle(bundle, own=own).with_decoder(decoder).with_hotwords(hotwords)
    loaded.require_asr()
    for file in files:
        try:
            yield _transcribe(loaded, file)
        except SbkitError as error:
            yield error


def _transcribe(bundle: Bundle, file: Path) -> Transcript:
    rate = bundle.config.sample_rate
    count, pieces = read_pieces(file, rate)
    texts: list[str] = []
    for batch in batches(pieces):
        with fitting(file):
            texts += bundle.transcribe(batch)
    text = printable(" ".join(text for text in texts if text))
    return Transcript(file, text, samples_to_seconds(count, rate))
