"""A conversation: speech in, text, an answer, speech out; each stage is a thread.

    source -> voice activity -> recognizer -> answer -> synthesizer -> player

The queues between them are bounded. A turn is what somebody said, and at most one is open. Whoever
speaks closes it: the queues forget it, and the player stops. A stage looks whether its turn is open
before it takes something and before it hands something on, under the lock that closing a turn
takes, so that nothing of an earlier turn is heard.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from time import monotonic
from typing import Any, NamedTuple, Protocol

from sbkit.audio.io import Samples, to_int16
from sbkit.audio.resample import Signal
from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.live.players import Player
from sbkit.live.recognizer import LiveRecognizer
from sbkit.live.session import Event, Final, Partial, Session
from sbkit.live.turn import Answer, Turn
from sbkit.runtime.voice_detector import VoiceDetector

QUEUED = 8  # items between two stages
AHEAD = 0.5  # seconds of sound that the player has in store

Item = tuple[Turn | None, Any]  # content None: the turn, or without one the source, is at its end
Items = Generator[Item]
Work = Callable[[Any, Any], Items]


class Synthesizer(Protocol):
    """What makes speech of text."""

    @property
    def sample_rate(self) -> int:
        """Return the rate of the speech in Hz."""

    def stream(self, text: str, /) -> Iterable[Signal]:
        """Return blocks (S,) between -1 and 1, which may be made as they are taken."""


class _Heard(NamedTuple):
    """A block, when it came by the clock, and whether speech stopped in it."""

    samples: Samples
    came: float
    is_end: bool = False


class Pipeline:
    """Listen, answer and speak, once; `run` does all of it."""

    def __init__(
        self,
        recognizer: LiveRecognizer,
        answer: Callable[[str], str | Iterable[str] | None],
        *,
        detector: VoiceDetector | None = None,
        synthesizer: Synthesizer | None = None,
        player: Callable[[int], Player] | None = None,
        on_event: Callable[[Event | Turn], object] = lambda event: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Take what the stages call.

        answer: given the final text of each turn, it returns a text, texts as they are known, or
        None; detector: ends turns and interrupts, sooner than the recognizer alone; player: opens
        what plays at the synthesizer's rate, which is closed in the end; on_event: called with all
        events of the recognizer, each Answer, and each Turn at its end, one at a time; clock:
        seconds, for the trace.

        Raises:
            SbkitError: the detector takes audio of another rate, or nothing can play.
        """
        self._recognizer, self._reply, self._on_event = recognizer, answer, on_event
        self._detector, self._synthesizer = detector, synthesizer
        if detector is not None:
            detector.require_rate(recognizer.sample_rate)
            self._voice = detector.start()
        self._player = player(synthesizer.sample_rate) if synthesizer and player else None
        self._session, self._received = Session(recognizer), 0  # samples
        self._clock, self._changed = clock, threading.Condition()
        self._turn: Turn | None = None  # that is open
        self._failure: SbkitError | None = None
        self._is_closed = False
        stages: dict[str, Work] = {} if detector is None else {"voice activity": self._detect}
        stages |= {"recognizer": self._recognize, "answer": self._answer}
        if synthesizer is not None:
            stages |= {"synthesizer": self._speak, "player": self._play}
        self._queues = [deque[Item]() for _ in stages]
        self._threads = [
            threading.Thread(target=self._run, args=(place, *each), name=each[0], daemon=True)
            for place, each in enumerate(stages.items())
        ]

    def run(self, source: Iterable[Samples]) -> None:
        """Take blocks (S,) of int16, at the recognizer's rate, until they end and all is heard.

        They are read in this thread, and may be what another one puts into a queue.

        Raises:
            SbkitError: a stage failed; the sentence names it.
        """
        for each in self._threads:
            each.start()
        try:
            for block in source:
                self._put(0, None, _Heard(block, self._clock()))
                if self._is_closed:
                    break
            self._put(0, None, None)
            for each in self._threads:
                each.join()
        finally:
            self.close()

    def interrupt(self) -> None:
        """Stop the answer, if there is one."""
        with self._changed:
            if self._turn is not None:
                if self._player is not None:
                    self._player.stop()
                self._end_turn(is_interrupted=True)

    def close(self) -> None:
        """Stop everything, and wait for the threads, and so for the user's code that they are in.

        Raises:
            SbkitError: a stage failed.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self.interrupt()
        if threading.current_thread() not in self._threads:  # `run` waits for that
            for each in self._threads:
                if each.is_alive():
                    each.join()
            if self._player is not None:
                self._player.close()
            if self._failure is not None:
                raise self._failure

    def _run(self, place: int, stage: str, work: Work) -> None:
        """Do the work of a stage, and then hand on that a turn, or the source, has ended."""
        try:
            while (item := self._get(place)) is not None:
                turn, content = item
                with closing(work(turn, content)) as results:
                    for each in results:
                        self._put(place + 1, *each)
                        if not self._is_open(turn):
                            break
                if content is None:
                    self._put(place + 1, turn, None)
                if item == (None, None):
                    break
        except BaseException as error:  # of what is the user's, too
            told = f"{type(error).__name__} ({str(error)[:200]})"
            failure = SbkitError(
                f"A stage of a pipeline must not fail, but the {stage} raised {told}. Correct it."
            )
            failure.__cause__ = error
            self._failure = self._failure or failure
            with suppress(Exception):  # what failed may fail again
                self.close()

    def _get(self, place: int) -> Item | None:
        """Wait for an item, whose turn is open; None where all is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues[place] or self._is_closed)
            self._changed.notify_all()
            return None if self._is_closed else self._queues[place].popleft()

    def _put(self, place: int, turn: Turn | None, content: Any) -> None:
        """Wait for room in a queue while the turn is open; after the last stage, it ends."""
        with self._changed:
            if place < len(self._queues):
                queue = self._queues[place]
                self._changed.wait_for(lambda: len(queue) < QUEUED or not self._is_open(turn))
                if self._is_open(turn):
                    queue.append((turn, content))
                    self._changed.notify_all()
            elif turn is not None and content is None and self._is_open(turn):
                self._end_turn(is_interrupted=False)

    def _is_open(self, turn: Turn | None) -> bool:
        return not self._is_closed and (turn is None or turn is self._turn)

    def _end_turn(self, *, is_interrupted: bool) -> None:
        """Close the turn, forget what waits of it, and deliver its trace."""
        assert self._turn is not None
        turn, self._turn = self._turn, None
        turn.is_interrupted = is_interrupted
        for queue in self._queues:
            others = [item for item in queue if item[0] is not turn]
            queue.clear()
            queue.extend(others)
        self._changed.notify_all()
        self._on_event(turn)

    def _detect(self, _: None, heard: _Heard | None) -> Items:
        """Interrupt where speech starts, and mark the block where it stops."""
        if heard is not None and self._detector is not None:
            events, self._voice = self._detector.push(heard.samples, self._voice)
            kinds = {each.kind for each in events}
            if "started" in kinds:
                self.interrupt()
            yield None, heard._replace(is_end="stopped" in kinds)

    def _recognize(self, _: None, heard: _Heard | None) -> Items:
        """Recognize a block, and open a turn with each final text."""
        came, events = self._clock(), list[Event]()
        if heard is not None:
            came, self._received = heard.came, self._received + len(heard.samples)
            events += self._session.push(heard.samples)
        if heard is None or heard.is_end:
            events += self._session.finish()
            self._session = Session(self._recognizer, start=self._received)
        for event in events:
            with self._changed:
                if isinstance(event, Partial | Final):  # somebody speaks
                    self.interrupt()
                self._on_event(event)
                if isinstance(event, Final):
                    spoken = came - (self._seconds - event.words[-1].end)
                    times = {"speech": spoken, "endpoint": came, "recognizer": self._clock()}
                    self._turn = turn = Turn(event.text, times)
            if isinstance(event, Final):
                yield turn, event.text

    @property
    def _seconds(self) -> float:
        return samples_to_seconds(self._received, self._recognizer.sample_rate)

    def _answer(self, turn: Turn | None, text: str | None) -> Items:
        """Call the user's callback, and hand on its texts as they come."""
        if turn is None or text is None:
            return
        answer = self._reply(text)
        for each in [answer] if isinstance(answer, str) else answer or ():
            with self._changed:
                if not self._is_open(turn):
                    return
                turn.times.setdefault("answer", self._clock())
                self._on_event(Answer(seconds=self._seconds, text=each))
            yield turn, each
        yield turn, None

    def _speak(self, turn: Turn | None, text: str | None) -> Items:
        """Make speech of a text, block by block, if there is anything in it to be spoken."""
        if self._synthesizer and text and any(map(str.isalnum, text)):
            for block in self._synthesizer.stream(text):
                yield turn, to_int16(block)

    def _play(self, turn: Turn | None, block: Samples | None) -> Items:
        """Hand a block to the player when it needs one, or wait until all is heard."""
        if self._player is not None:
            self._player.wait(0.0 if block is None else AHEAD)
            with self._changed:
                if turn is not None and block is not None and self._is_open(turn):
                    self._player.play(block)
                    turn.times.setdefault("sound", self._clock())
        yield from ()
