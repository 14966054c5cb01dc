"""A conversation through the pipeline: answers are heard, and stop at new speech."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from sbkit.audio.io import FULL_SCALE, Samples
from sbkit.audio.resample import Signal
from sbkit.base.errors import SbkitError
from sbkit.runtime.voice_detector import SpeechRules, VoiceDetector
from sbkit.streaming.session import Final, Partial, StreamingRecognizer
from sbkit.text.tokenizer import Tokenizer
from tests.runtime.scripted_speech import LoudSpeech
from tests.runtime.tones import RATE, silence, speak
from tests.streaming.streaming_tones import streaming_tones
from tools.talk.pipeline import Answer, Pipeline, Turn

TIMEOUT = 60.0  # seconds, for anything that must happen


class Voice:
    """Say each word of a text as a block of its letters' codes."""

    sample_rate = 8

    def stream(self, text: str) -> Iterator[Signal]:
        for word in text.split():
            yield np.frombuffer(word.encode(), np.uint8).astype(np.float32) / FULL_SCALE


class Loudspeaker:
    """Play words at once, without a clock; the word ``endless`` only ends by `stop`."""

    def __init__(self, endless: str | None = None) -> None:
        self.heard, self._endless, self._is_playing = list[str](), endless, False
        self.changed, self.is_closed = threading.Condition(), False
        self.waits = list[float]()

    def __call__(self, sample_rate: int) -> Self:
        assert sample_rate == Voice.sample_rate
        return self

    def close(self) -> None:
        self.is_closed = True

    def play(self, samples: Samples) -> None:
        with self.changed:
            self.heard.append(bytes(samples.astype(np.uint8)).decode())
            self._is_playing = self._endless == self.heard[-1]
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        with self.changed:
            assert self.changed.wait_for(lambda: not self._is_playing, TIMEOUT)

    def stop(self) -> None:
        with self.changed:
            self._is_playing = False
            self.changed.notify_all()

    def await_word(self, word: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: word in self.heard, TIMEOUT)


class Events(list[Any]):
    """Delivered events."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._changed:
            self.append(event)
            self._changed.notify_all()

    def await_turns(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(Turn)) == count, TIMEOUT)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    def texts(self, kind: type[Any]) -> list[str]:
        return [event.text for event in self.of(kind)]


def blocks(*audio: Samples) -> Iterator[Samples]:
    """Cut audio into blocks of a tenth of a second."""
    joined = np.concatenate(audio)
    yield from np.split(joined, range(RATE // 10, len(joined), RATE // 10))


@dataclass
class Talk:
    """The parts of a conversation."""

    recognizer: StreamingRecognizer
    tokenizer: Tokenizer
    events: Events = field(default_factory=Events)
    player: Loudspeaker = field(default_factory=Loudspeaker)

    def pipeline(self, answer: Any, **parts: Any) -> Pipeline:
        """Make a pipeline with a voice."""
        spoken = {"synthesizer": Voice(), "player": self.player, "on_event": self.events}
        return Pipeline(self.recognizer, answer, **{**spoken, **parts})

    def speak(self, text: str) -> Samples:
        return speak(self.tokenizer, text)

    def say(self, *texts: str) -> Iterator[Samples]:
        """Say texts, each with a pause that ends it and its last chunk."""
        return blocks(*(part for text in texts for part in (self.speak(text), silence(2.0))))


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    threads = {*threading.enumerate()}
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    with recognizer:
        yield Talk(recognizer, tokenizer)
    assert {*threading.enumerate()} <= threads


def test_pipeline_answers_and_speaks(talk: Talk) -> None:
    talk.pipeline(lambda text: [f"you said {text}", " ..."]).run(talk.say("the dog"))
    assert talk.player.heard == ["you", "said", "the", "dog"]
    assert talk.player.waits == [0.5] * 4 + [0.0] * 2  # at the ends of the turn and of the source
    assert talk.player.is_closed
    assert [type(event).__name__ for event in talk.events if not isinstance(event, Partial)] == [
        *("Endpoint", "Final", "Answer", "Answer", "Turn")
    ]
    assert talk.events.of(Answer)[0].plain().keys() == {"event", "seconds", "text"}


@pytest.mark.parametrize("answer", [lambda text: None, lambda text: iter(()), lambda text: "fine"])
def test_pipeline_allows_no_answer_and_no_sound(answer: Callable[[str], Any], talk: Talk) -> None:
    events = talk.events

    def source() -> Iterator[Samples]:
        for number, text in enumerate(("the dog", "a fox"), 1):
            yield from talk.say(text)
            events.await_turns(number)

    Pipeline(talk.recognizer, answer, on_event=events).run(source())
    assert events.texts(Final) == events.texts(Turn) == ["the dog", "a fox"]
    assert len(events.of(Answer)) == (2 if answer("") == "fine" else 0)


def test_turn_trace_has_the_delay_of_each_stage(talk: Talk) -> None:
    now = [100.0]

    def answer(text: str) -> Iterator[str]:
        now[0] += 2.0
        yield "one"
        yield "more"

    class SlowVoice(Voice):
        def stream(self, text: str) -> Iterator[Signal]:
            now[0] += 0.5 if text == "one" else 0.0
            return super().stream(text)

    talk.pipeline(answer, synthesizer=SlowVoice(), clock=lambda: now[0]).run(talk.say("the dog"))
    (turn,), (final,) = talk.events.of(Turn), talk.events.of(Final)
    wait = turn.delays["endpoint"]
    assert 1.2 <= wait < 1.2 + 0.7  # the rule, the rest of the chunk and of the block
    assert final.end - final.words[-1].end <= wait
    assert turn.delays == {"endpoint": wait, "recognizer": 0.0, "answer": 2.0, "sound": 0.5}
    stages = f"endpoint {1000 * wait:.0f} + recognizer 0 + answer 2000 + sound 500"
    assert str(turn) == f"{stages} = {1000 * (wait + 2.5):.0f} ms"
    plain = {"event": "turn", "text": "the dog", "interrupted": False}
    assert turn.plain() == {**plain, "delays": {**turn.delays, "endpoint": round(wait, 3)}}


def test_pipeline_detector_ends_turns_sooner(talk: Talk) -> None:
    detector = VoiceDetector(LoudSpeech(), SpeechRules(hang_over=0.3))
    events, pause = talk.events, silence(0.6)
    audio = [talk.speak("the dog"), pause, talk.speak("a fox"), pause]
    talk.pipeline(lambda text: None, detector=detector).run(blocks(*audio))
    assert events.texts(Turn) == ["the dog", "a fox"]
    assert max(turn.delays["endpoint"] for turn in events.of(Turn)) < 0.6
    second = events.of(Final)[1].words[0]
    assert second.start == pytest.approx(sum(map(len, audio[:2])) / RATE, abs=0.1)


def test_pipeline_refuses_a_detector_at_another_rate(talk: Talk) -> None:
    model = LoudSpeech()
    model.sample_rate = 8000
    with pytest.raises(SbkitError, match="at 8000 Hz, but the recognizer's is at 16000 Hz"):
        Pipeline(talk.recognizer, str.upper, detector=VoiceDetector(model))


@pytest.mark.parametrize("detector", [None, VoiceDetector(LoudSpeech())])
def test_speech_interrupts_the_answer(detector: VoiceDetector | None, talk: Talk) -> None:
    talk.player = player = Loudspeaker(endless="one")
    events, was_closed = talk.events, threading.Event()

    def answer(text: str) -> Iterator[str]:
        try:
            while text == "the dog":
                yield "zero one two"
        finally:
            was_closed.set()
        yield "bye"

    def source() -> Iterator[Samples]:
        yield from talk.say("the dog")
        player.await_word("one")
        yield from blocks(talk.speak("a quick fox"))
        assert was_closed.wait(TIMEOUT)  # before the speech ends
        yield silence(2.0)

    talk.pipeline(answer, detector=detector).run(source())
    assert player.heard == ["zero", "one", "bye"]
    first, second = events.of(Turn)
    assert (first.text, first.is_interrupted) == ("the dog", True)
    assert (second.text, second.is_interrupted) == ("a quick fox", False)
    assert str(first).endswith(" ms, interrupted")
    later = events[events.index(first) :]
    assert [event.text for event in later if isinstance(event, Answer)] == ["bye"]


def test_detected_speech_without_words_interrupts_the_answer(talk: Talk) -> None:
    talk.player = player = Loudspeaker(endless="one")

    def source() -> Iterator[Samples]:
        yield from talk.say("the dog")
        player.await_word("one")
        yield np.full(RATE // 2, 200, np.int16)
        talk.events.await_turns(1)

    detector = VoiceDetector(LoudSpeech())
    talk.pipeline(lambda text: "zero one two", detector=detector).run(source())
    assert player.heard == ["zero", "one"]
    assert [turn.is_interrupted for turn in talk.events.of(Turn)] == [True]


def test_interruption_drops_queued_and_running_work(talk: Talk) -> None:
    questions, synthesized = list[str](), list[str]()  # the second: the question of each block
    is_synthesizing, go_on = threading.Event(), threading.Event()

    def answer(text: str) -> Iterator[str]:
        questions.append(text)
        yield "early"
        if text == "the dog":
            assert go_on.wait(TIMEOUT)
            yield "late"

    class SlowVoice(Voice):
        def stream(self, text: str) -> Iterator[Signal]:
            question = questions[-1]
            for block in super().stream(f"{text} 1 2 3"):
                is_synthesizing.set()
                assert go_on.wait(TIMEOUT)
                synthesized.append(question)
                yield block

    def source() -> Iterator[Samples]:
        yield from talk.say("the dog")
        assert is_synthesizing.wait(TIMEOUT)
        for count, text in enumerate(("a fox", "jumps"), 1):  # each interrupts the one before
            yield from talk.say(text)
            talk.events.await_turns(count)
        go_on.set()

    talk.pipeline(answer, synthesizer=SlowVoice()).run(source())
    assert questions == ["the dog", "jumps"]
    assert talk.events.texts(Answer) == ["early", "early"]
    assert synthesized == ["the dog", *["jumps"] * 4]
    assert talk.player.heard == ["early", "1", "2", "3"]


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_turn_is_neither_played_nor_delivered(seed: int, talk: Talk) -> None:
    """This holds however the threads are scheduled; every word of an answer names its turn."""
    random, ended, too_late = np.random.default_rng(seed), set[str](), list[str]()
    names = (f"{number:03d}" for number in range(1000))
    name_of_turn = dict[int, str]()

    def answer(text: str) -> Iterator[str]:
        name = next(names)
        name_of_turn[id(pipeline._open_turn)] = name
        yield from [f"{name} {name}"] * 30

    class CheckedLoudspeaker(Loudspeaker):
        def play(self, samples: Samples) -> None:
            super().play(samples)
            check(self.heard[-1])

    def check(word: str) -> None:
        too_late.extend([word] if word in ended else [])

    def on_event(event: Any) -> None:
        if isinstance(event, Answer):
            check(event.text.split()[0])
        if isinstance(event, Turn):
            ended.add(name_of_turn.pop(id(event), ""))

    def source() -> Iterator[Samples]:
        for block in talk.say(*("the dog", "a fox") * 5):
            yield block
            if random.random() < 0.1:
                pipeline.interrupt()

    player = CheckedLoudspeaker()
    pipeline = talk.pipeline(answer, player=player, on_event=on_event)
    pipeline.run(source())
    assert player.heard
    assert not too_late


class BrokenLoudspeaker(Loudspeaker):
    def play(self, samples: Samples) -> None:
        raise OSError("no device")


class BrokenVoice(Voice):
    def stream(self, text: str) -> Iterator[Signal]:
        raise ValueError("no voice")


class BrokenDetector(LoudSpeech):
    def advance(self, samples: Samples, state: None) -> tuple[Any, None]:
        raise ValueError("no frames")


def fail(text: object) -> str:
    raise ValueError(text)


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        (
            {"detector": VoiceDetector(BrokenDetector())},
            r"its voice activity raised ValueError \(no frames",
        ),
        ({"answer": fail}, r"its answer raised ValueError \(the dog\)"),
        ({"synthesizer": BrokenVoice()}, "its synthesizer raised ValueError"),
        ({"player": BrokenLoudspeaker()}, r"its player raised OSError \(no device\)"),
        ({"on_event": fail}, "its recognizer raised ValueError"),
    ],
)
def test_failing_stage_ends_the_pipeline_and_is_named(
    stages: dict[str, Any], match: str, talk: Talk
) -> None:
    pipeline = talk.pipeline(**{"answer": str.upper, **stages})
    with pytest.raises(SbkitError, match=match) as raised:
        pipeline.run(talk.say(*["the dog"] * 100))
    assert isinstance(raised.value.__cause__, ValueError | OSError)
    with pytest.raises(SbkitError, match=match):
        pipeline.close()


@pytest.mark.parametrize("state", ["begun", "answering", "playing", "full", "of itself"])
def test_pipeline_closes_in_any_state(state: str, talk: Talk) -> None:
    is_reached, go_on = threading.Event(), threading.Event()
    player = Loudspeaker(endless="zero" if state in ("playing", "full") else None)

    def answer(text: str) -> Iterator[str]:
        if state == "answering":
            is_reached.set()
            assert go_on.wait(TIMEOUT)
        yield from ["zero one two"] * (1 if state == "playing" else 40)

    def on_event(event: object) -> None:
        if state == "of itself" and isinstance(event, Answer):
            pipeline.close()
            pipeline.close()

    def source() -> Iterator[Samples]:
        if state in ("playing", "full"):
            yield from talk.say("the dog")
            player.await_word("zero")
            is_reached.set()
            while True:
                yield silence(0.1)
        if state == "begun":
            is_reached.set()
        while True:
            yield from talk.say("the dog")

    pipeline = talk.pipeline(answer, player=player, on_event=on_event)
    runner = threading.Thread(target=pipeline.run, args=[source()])
    runner.start()
    if state != "of itself":
        assert is_reached.wait(TIMEOUT)
        closer = threading.Thread(target=pipeline.close)
        closer.start()
        go_on.set()
        closer.join(TIMEOUT)
    runner.join(TIMEOUT)
    assert not runner.is_alive()
    pipeline.close()


def test_pipeline_raises_errors_of_its_source(talk: Talk) -> None:
    def source() -> Iterator[Samples]:
        yield from talk.say("the dog")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.pipeline(str.upper).run(source())
    talk.pipeline(str.upper).close()  # without a run
