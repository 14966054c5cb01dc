"""A transcript of an input, and of a call, whose speakers have a channel each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from sbkit.base.errors import DataError
from sbkit.bundle.protocols import EffectiveRuntime
from sbkit.decoding.pool import Alternative, RecognizedClip
from sbkit.tasks.asr.subtitles import channel_label
from sbkit.text.normalization import join_segments
from sbkit.text.recognized_word import Word


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The text of an input."""

    file: str | None  # the name of the input; None for an array or an open file
    text: str
    seconds: float  # of audio
    runs_on: EffectiveRuntime  # where and how the model ran
    spaces: bool = True  # whether words are separated, as in the transcripts of train
    words: tuple[Word, ...] = ()  # if their times were requested
    utterances: tuple[
        RecognizedClip, ...
    ] = ()  # the same text by segment, as a decoder returned it
    nbest: tuple[Alternative, ...] = ()  # on request, the most probable texts, the best first

    def __str__(self) -> str:
        return self.text

    def plain(self) -> dict[str, object]:
        return {
            "file": self.file,
            "text": self.text,
            "seconds": round(self.seconds, 3),
            "words": [word.plain() for word in self.words],
            "effective": asdict(self.runs_on),
        }


def merge_channels(transcripts: Sequence[Transcript]) -> Transcript | DataError:
    """Merge the transcripts of a file's channels; the text has a line for each turn.

    Returns an error if the words have no times, because they are merged by their times.
    """
    if any(transcript.text and not transcript.words for transcript in transcripts):
        return DataError("Channels are merged by the times of words, and this model has none.")
    words = [
        replace(word, channel=number)
        for number, transcript in enumerate(transcripts, start=1)
        for word in transcript.words
    ]
    words.sort(key=attrgetter("start"))
    labeled = ([channel_label(turn[0]), *(word.text for word in turn)] for turn in turns(words))
    first = transcripts[0]
    return replace(
        first,
        text="\n".join(join_segments(turn, spaces=first.spaces) for turn in labeled),
        seconds=max(transcript.seconds for transcript in transcripts),
        words=tuple(words),
        utterances=(),
        nbest=(),
    )


def _is_between(before: Word, word: Word, after: Word) -> bool:
    return before.end <= word.start and word.end <= after.start


def turns(words: Sequence[Word]) -> list[list[Word]]:
    """Cut words, sorted by their starts, into the turns of their speakers, by the turns' starts.

    A turn ends in a pause in which another speaker says a word: whoever only speaks over a word
    interrupts nobody.
    """
    result: list[list[Word]] = []
    open_turns: dict[int | None, list[Word]] = {}
    last_index: dict[int | None, int] = {}
    for index, word in enumerate(words):
        turn = open_turns.get(word.channel)
        words_between = words[last_index.get(word.channel, 0) + 1 : index]
        if turn is None or any(_is_between(turn[-1], other, word) for other in words_between):
            turn = open_turns[word.channel] = []
            result.append(turn)
        turn.append(word)
        last_index[word.channel] = index
    return result
