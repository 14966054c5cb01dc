"""A conversation from speech to text, to an answer, to speech; each stage is a thread.

    source -> voice activity -> recognizer -> answer -> synthesizer -> player

The queues between the stages are bounded. A turn is an utterance of the speaker and its answer. At
most one turn is open; new speech closes it, so that the queues drop its items and the player stops.
Before a stage takes or passes on an item, it checks that the item's turn is open, under the lock
that closing a turn takes. So nothing of an earlier turn is heard.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any, NamedTuple, Protocol

from sbkit.audio.io import Samples, to_int16
from sbkit.audio.resample import Signal
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.runtime.voice_detector import VoiceDetector
from sbkit.streaming.session import Event, Final, Partial, Session, StreamingRecognizer
from tools.talk.players import Player

QUEUE_ITEMS = 8  # between two stages
PLAYER_SECONDS = 0.5  # of sound that the player holds in advance

Work = Callable[[Any, Any], Generator["QueueItem"]]


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    """A part of the answer, as it is passed to the synthesizer."""

    text: str


@dataclass(eq=False)
class Turn:
    """The words of a speaker and the trace of their answer, which an interruption ends.

    times: in seconds of a clock, ascending: the end of the speech, then when its endpoint, the
        final text, the first text of the answer and the first sound were available.
    """

    text: str
    times: dict[str, float]
    is_interrupted: bool = False

    @property
    def delays(self) -> dict[str, float]:
        """The seconds that each stage added."""
        return {stage: end - start for (_, start), (stage, end) in pairwise(self.times.items())}

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "event": "turn",
            "text": self.text,
            "interrupted": self.is_interrupted,
            "delays": {stage: round(seconds, 3) for stage, seconds in self.delays.items()},
        }

    def __str__(self) -> str:
        parts = [f"{stage} {1000 * seconds:.0f}" for stage, seconds in self.delays.items()]
        suffix = ", interrupted" if self.is_interrupted else ""
        return f"{' + '.join(parts)} = {1000 * sum(self.delays.values()):.0f} ms{suffix}"


class QueueItem(NamedTuple):
    """An item of a queue. Without content it is the end of its turn, or of the source."""

    turn: Turn | None
    content: Any


class _Block(NamedTuple):
    """A block of audio, its arrival by the clock, and whether speech stopped in it."""

    samples: Samples
    arrival: float
    is_end: bool = False


class TextToSpeech(Protocol):
    """Turns text into speech."""

    @property
    def sample_rate(self) -> int:
        """The rate of the speech in Hz."""

    def stream(self, text: str, /) -> Iterable[Signal]:
        """Return blocks (S,) between -1 and 1, which may be made one by one."""


class Pipeline:
    """Listen, answer and speak, by one call of `run`.

    >>> Pipeline(recognizer, lambda text: f"You said {text}", on_event=print).run(
    ...     audio_blocks("mic", recognizer.sample_rate)
    ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        recognizer: StreamingRecognizer,
        answer: Callable[[str], str | Iterable[str] | None],
        *,
        detector: VoiceDetector | None = None,
        synthesizer: TextToSpeech | None = None,
        player: Callable[[int], Player] | None = None,
        on_event: Callable[[Event | Turn], object] = lambda event: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Take the parts that the stages call.

        answer: takes the final text of each turn; returns a text, texts one by one, or None.
        detector: ends turns, and interrupts answers sooner than the recognizer would.
        synthesizer: speaks the answer.
        player: opens a player at the synthesizer's rate; the pipeline closes it in the end.
        on_event: called with all events of the recognizer, each Answer, and each Turn at its end;
            never by two threads at the same time.
        clock: returns seconds, for the trace.

        Raises:
            SbkitError: the detector takes audio of another rate, or no player can be opened.
        """
        self._recognizer = recognizer
        self._reply = answer
        self._on_event = on_event
        self._detector = detector
        self._synthesizer = synthesizer
        if detector is not None:
            detector.require_rate(recognizer.sample_rate)
            self._detector_state = detector.start()
        self._player = player(synthesizer.sample_rate) if synthesizer and player else None
        self._session, self._received = Session(recognizer), 0  # samples
        self._clock = clock
        self._changed = threading.Condition()
        self._open_turn: Turn | None = None
        self._failure: SbkitError | None = None
        self._is_closed = False
        stages: dict[str, Work] = {} if detector is None else {"voice activity": self._detect}
        stages |= {"recognizer": self._recognize, "answer": self._answer}
        if synthesizer is not None:
            stages |= {"synthesizer": self._speak, "player": self._play}
        self._queues = [deque[QueueItem]() for _ in stages]
        self._threads = [
            threading.Thread(target=self._run, args=(index, stage, work), name=stage, daemon=True)
            for index, (stage, work) in enumerate(stages.items())
        ]

    def run(self, source: Iterable[Samples]) -> None:
        """Take blocks (S,) of int16 at the recognizer's rate until they end and all sound is heard.

        This thread reads the source, which another thread may feed through a queue.

        Raises:
            SbkitError: a stage failed; the message names it.
        """
        for thread in self._threads:
            thread.start()
        try:
            for block in source:
                self._put(0, None, _Block(block, self._clock()))
                if self._is_closed:
                    break
            self._put(0, None, None)
            for thread in self._threads:
                thread.join()
        finally:
            self.close()

    def interrupt(self) -> None:
        """Stop the answer, if there is one."""
        with self._changed:
            if self._open_turn is not None:
                if self._player is not None:
                    self._player.stop()
                self._end_turn(is_interrupted=True)

    def close(self) -> None:
        """Stop all stages, and wait for their threads, even those that run the user's code.

        Raises:
            SbkitError: a stage failed.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self.interrupt()
        if threading.current_thread() not in self._threads:  # else `run` waits for them
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()
            if self._player is not None:
                self._player.close()
            if self._failure is not None:
                raise self._failure

    def _run(self, index: int, stage: str, work: Work) -> None:
        """Do the work of a stage, and pass on the ends of turns and of the source."""
        try:
            while (item := self._get(index)) is not None:
                with closing(work(*item)) as results:
                    for result in results:
                        self._put(index + 1, *result)
                        if not self._is_open(item.turn):
                            break
                if item.content is None:
                    self._put(index + 1, item.turn, None)
                if item == (None, None):
                    break
        except BaseException as error:  # also of the user's code
            failure = SbkitError(
                f"The pipeline stopped: its {stage} raised {type(error).__name__} "
                f"({str(error)[:200]}). Correct it."
            )
            failure.__cause__ = error
            self._failure = self._failure or failure
            with suppress(Exception):  # the failed part may fail again
                self.close()

    def _get(self, index: int) -> QueueItem | None:
        """Wait for an item whose turn is open; return None once the pipeline is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues[index] or self._is_closed)
            self._changed.notify_all()
            return None if self._is_closed else self._queues[index].popleft()

    def _put(self, index: int, turn: Turn | None, content: Any) -> None:
        """Append to a queue once it has room, if the turn is open; after the last stage, end it."""
        with self._changed:
            if index < len(self._queues):
                queue = self._queues[index]
                self._changed.wait_for(lambda: len(queue) < QUEUE_ITEMS or not self._is_open(turn))
                if self._is_open(turn):
                    queue.append(QueueItem(turn, content))
                    self._changed.notify_all()
            elif turn is not None and content is None and self._is_open(turn):
                self._end_turn(is_interrupted=False)

    def _is_open(self, turn: Turn | None) -> bool:
        return not self._is_closed and (turn is None or turn is self._open_turn)

    def _end_turn(self, *, is_interrupted: bool) -> None:
        """Close the turn, drop its items, and deliver its trace."""
        assert self._open_turn is not None
        turn = self._open_turn
        self._open_turn = None
        turn.is_interrupted = is_interrupted
        for queue in self._queues:
            remaining = [item for item in queue if item.turn is not turn]
            queue.clear()
            queue.extend(remaining)
        self._changed.notify_all()
        self._on_event(turn)

    def _detect(self, _: None, block: _Block | None) -> Generator[QueueItem]:
        """Interrupt when speech starts, and mark the block in which it stops."""
        if block is not None and self._detector is not None:
            events, self._detector_state = self._detector.push(block.samples, self._detector_state)
            kinds = {event.kind for event in events}
            if "started" in kinds:
                self.interrupt()
            yield QueueItem(None, _Block(block.samples, block.arrival, is_end="stopped" in kinds))

    def _recognize(self, _: None, block: _Block | None) -> Generator[QueueItem]:
        """Recognize a block, and open a turn with each final text."""
        arrival = self._clock()
        events: list[Event] = []
        if block is not None:
            arrival = block.arrival
            self._received = self._received + len(block.samples)
            events += self._session.push(block.samples)
        if block is None or block.is_end:
            events += self._session.finish()
            self._session = Session(self._recognizer, offset=self._received)
        for event in events:
            with self._changed:
                if isinstance(event, Partial | Final):  # new speech
                    self.interrupt()
                self._on_event(event)
                if isinstance(event, Final):
                    speech_end = arrival - (self._seconds - event.words[-1].end)
                    times = {"speech": speech_end, "endpoint": arrival, "recognizer": self._clock()}
                    self._open_turn = turn = Turn(event.text, times)
            if isinstance(event, Final):
                yield QueueItem(turn, event.text)

    @property
    def _seconds(self) -> float:
        return samples_to_seconds(self._received, self._recognizer.sample_rate)

    def _answer(self, turn: Turn | None, text: str | None) -> Generator[QueueItem]:
        """Call the user's callback, and pass on its texts as they arrive."""
        if turn is None or text is None:
            return
        answer = self._reply(text)
        for part in [answer] if isinstance(answer, str) else answer or ():
            with self._changed:
                if not self._is_open(turn):
                    return
                turn.times.setdefault("answer", self._clock())
                self._on_event(Answer(seconds=self._seconds, text=part))
            yield QueueItem(turn, part)
        yield QueueItem(turn, None)

    def _speak(self, turn: Turn | None, text: str | None) -> Generator[QueueItem]:
        """Synthesize a text block by block, unless it has only punctuation."""
        if self._synthesizer and text and any(map(str.isalnum, text)):
            for block in self._synthesizer.stream(text):
                yield QueueItem(turn, to_int16(block))

    def _play(self, turn: Turn | None, block: Samples | None) -> Generator[QueueItem]:
        """Pass a block to the player once it needs one; at the end, wait until all is heard."""
        if self._player is not None:
            self._player.wait(0.0 if block is None else PLAYER_SECONDS)
            with self._changed:
                if turn is not None and block is not None and self._is_open(turn):
                    self._player.play(block)
                    turn.times.setdefault("sound", self._clock())
        yield from ()
