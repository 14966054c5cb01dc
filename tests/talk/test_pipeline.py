"""A conversation through the pipeline: answers are heard, and stop when somebody speaks."""

import threading
from collections.abc import Callable, Iterator
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
from tests.runtime.tones import RATE, silence, speak
from tests.streaming.streaming_tones import streaming_tones
from tools.talk.pipeline import Answer, Pipeline, Turn

WITHIN = 60.0  # seconds: who waits longer has failed


class Voice:
    """Say each word of a text in a block: its letters' codes."""

    sample_rate = 8

    def stream(self, text: str) -> Iterator[Signal]:
        for word in text.split():
            yield np.frombuffer(word.encode(), np.uint8).astype(np.float32) / FULL_SCALE


class Loudspeaker:
    """Play without a clock: words are heard at once, or the one with `until` never ends."""

    def __init__(self, until: str | None = None) -> None:
        self.heard, self._until, self._is_playing = list[str](), until, False
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
            self._is_playing = self._until == self.heard[-1]
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        with self.changed:
            assert self.changed.wait_for(lambda: not self._is_playing, WITHIN)

    def stop(self) -> None:
        with self.changed:
            self._is_playing = False
            self.changed.notify_all()

    def await_word(self, word: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: word in self.heard, WITHIN)


class Events(list[Any]):
    """What was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._changed:
            self.append(event)
            self._changed.notify_all()

    def await_turns(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(Turn)) == count, WITHIN)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    def texts(self, kind: type[Any]) -> list[str]:
        return [event.text for event in self.of(kind)]


@pytest.fixture
def tones(tmp_path: Path) -> Iterator[tuple[StreamingRecognizer, Tokenizer]]:
    before = threading.active_count()
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    with recognizer:
        yield recognizer, tokenizer
    assert threading.active_count() == before


def blocks(*audio: Samples) -> Iterator[Samples]:
    """Cut audio into blocks of a tenth of a second."""
    joined = np.concatenate(audio)
    yield from np.split(joined, range(RATE // 10, len(joined), RATE // 10))


def say(tokenizer: Tokenizer, *texts: str) -> Iterator[Samples]:
    """Say texts, each with a pause that ends it, and the chunk that it is in."""
    return blocks(*(event for text in texts for event in (speak(tokenizer, text), silence(2.0))))


def test_pipeline_answers_and_speaks(tones: Any) -> None:
    recognizer, tokenizer = tones
    events, player = Events(), Loudspeaker()
    Pipeline(
        recognizer,
        lambda text: [f"you said {text}", " ..."],
        synthesizer=Voice(),
        player=player,
        on_event=events,
    ).run(say(tokenizer, "the dog"))
    assert player.heard == ["you", "said", "the", "dog"]
    assert player.waits == [0.5] * 4 + [0.0] * 2  # at the end of the turn, and of the source
    assert player.is_closed
    assert [type(event).__name__ for event in events if not isinstance(event, Partial)] == [
        *("Endpoint", "Final", "Answer", "Answer", "Turn")
    ]
    assert events.of(Answer)[0].plain().keys() == {"event", "seconds", "text"}


@pytest.mark.parametrize("answer", [lambda text: None, lambda text: iter(()), lambda text: "fine"])
def test_pipeline_allows_no_answer_and_no_sound(answer: Callable[[str], Any], tones: Any) -> None:
    recognizer, tokenizer = tones
    events = Events()

    def source() -> Iterator[Samples]:
        for number, text in enumerate(("the dog", "a fox"), 1):
            yield from say(tokenizer, text)
            events.await_turns(number)

    Pipeline(recognizer, answer, on_event=events).run(source())
    assert events.texts(Final) == events.texts(Turn) == ["the dog", "a fox"]
    assert len(events.of(Answer)) == (2 if answer("") == "fine" else 0)


def test_turn_trace_has_the_delay_of_each_stage(tones: Any) -> None:
    recognizer, tokenizer = tones
    now, events = [100.0], Events()

    def answer(text: str) -> Iterator[str]:
        now[0] += 2.0
        yield "one"
        yield "more"

    class SlowVoice(Voice):
        def stream(self, text: str) -> Iterator[Signal]:
            now[0] += 0.5 if text == "one" else 0.0
            return super().stream(text)

    Pipeline(
        recognizer,
        answer,
        synthesizer=SlowVoice(),
        player=Loudspeaker(),
        on_event=events,
        clock=lambda: now[0],
    ).run(say(tokenizer, "the dog"))
    (turn,), (final,) = events.of(Turn), events.of(Final)
    waited = turn.delays["endpoint"]
    assert 1.2 <= waited < 1.2 + 0.7  # the rule, the rest of the chunk and of the block
    assert final.end - final.words[-1].end <= waited
    assert turn.delays == {"endpoint": waited, "recognizer": 0.0, "answer": 2.0, "sound": 0.5}
    assert str(
        turn
    ) == f"endpoint {1000 * waited:.0f} + recognizer 0 + answer 2000 + sound 500 = " + (
        f"{1000 * (waited + 2.5):.0f} ms"
    )
    delays = {**turn.delays, "endpoint": round(waited, 3)}
    assert turn.plain() == {
        "event": "turn",
        "text": "the dog",
        "interrupted": False,
        "delays": delays,
    }


class Told:
    """A model of frames that hears what is loud."""

    sample_rate, step, overlap, delay = RATE, RATE // 100, 0, 0

    def start(self) -> None:
        return None

    def advance(self, samples: Samples, state: None) -> tuple[Any, None]:
        return np.abs(samples.reshape(-1, self.step)).max(1) > 100, None


def test_pipeline_detector_ends_turns_sooner(tones: Any) -> None:
    recognizer, tokenizer = tones
    detector = VoiceDetector(Told(), SpeechRules(hang_over=0.3))
    events, pause = Events(), silence(0.6)
    audio = [speak(tokenizer, "the dog"), pause, speak(tokenizer, "a fox"), pause]
    Pipeline(recognizer, lambda text: None, detector=detector, on_event=events).run(blocks(*audio))
    assert events.texts(Turn) == ["the dog", "a fox"]
    assert max(turn.delays["endpoint"] for turn in events.of(Turn)) < 0.6
    detector.model.sample_rate = 8000
    with pytest.raises(
        SbkitError, match="takes audio at 8000 Hz, but the recognizer's is at 16000 Hz"
    ):
        Pipeline(recognizer, str.upper, detector=detector)
    second = events.of(Final)[1].words[0]
    assert second.start == pytest.approx(sum(map(len, audio[:2])) / RATE, abs=0.1)


@pytest.mark.parametrize("detector", [None, VoiceDetector(Told())])
def test_speech_interrupts_the_answer(detector: VoiceDetector | None, tones: Any) -> None:
    recognizer, tokenizer = tones
    events, player, was_closed = Events(), Loudspeaker(until="one"), threading.Event()

    def answer(text: str) -> Iterator[str]:
        try:
            while text == "the dog":
                yield "zero one two"
        finally:
            was_closed.set()
        yield "bye"

    def source() -> Iterator[Samples]:
        yield from say(tokenizer, "the dog")
        player.await_word("one")
        yield from blocks(speak(tokenizer, "a quick fox"))
        assert was_closed.wait(WITHIN)  # while it goes on
        yield silence(2.0)

    Pipeline(
        recognizer,
        answer,
        detector=detector,
        synthesizer=Voice(),
        player=player,
        on_event=events,
    ).run(source())
    assert player.heard == ["zero", "one", "bye"]
    assert [(turn.text, turn.is_interrupted) for turn in events.of(Turn)] == [
        ("the dog", True),
        ("a quick fox", False),
    ]
    assert str(events.of(Turn)[0]).endswith(" ms, interrupted")
    first = next(place for place, event in enumerate(events) if isinstance(event, Turn))
    assert [event.text for event in events[first:] if isinstance(event, Answer)] == ["bye"]


def test_detected_speech_without_words_interrupts_the_answer(tones: Any) -> None:
    recognizer, tokenizer = tones
    events, player = Events(), Loudspeaker(until="one")

    def source() -> Iterator[Samples]:
        yield from say(tokenizer, "the dog")
        player.await_word("one")
        yield np.full(RATE // 2, 200, np.int16)
        events.await_turns(1)

    Pipeline(
        recognizer,
        lambda text: "zero one two",
        detector=VoiceDetector(Told()),
        synthesizer=Voice(),
        player=player,
        on_event=events,
    ).run(source())
    assert player.heard == ["zero", "one"]
    assert [turn.is_interrupted for turn in events.of(Turn)] == [True]


def test_interruption_drops_queued_and_running_work(
    tones: Any,
) -> None:
    recognizer, tokenizer = tones
    events, player, questions, threads_made = Events(), Loudspeaker(), list[str](), list[str]()
    making, go_on = threading.Event(), threading.Event()

    def answer(text: str) -> Iterator[str]:
        questions.append(text)
        yield "early"
        if text == "the dog":
            assert go_on.wait(WITHIN)
            yield "late"

    class SlowVoice(Voice):
        def stream(self, text: str) -> Iterator[Signal]:
            question = questions[-1]
            for block in super().stream(f"{text} 1 2 3"):
                making.set()
                assert go_on.wait(WITHIN)
                threads_made.append(question)
                yield block

    def source() -> Iterator[Samples]:
        yield from say(tokenizer, "the dog")
        assert making.wait(WITHIN)
        for count, text in enumerate(("a fox", "jumps"), 1):  # one waits for the other
            yield from say(tokenizer, text)
            events.await_turns(count)
        go_on.set()

    Pipeline(recognizer, answer, synthesizer=SlowVoice(), player=player, on_event=events).run(
        source()
    )
    assert questions == ["the dog", "jumps"]
    assert events.texts(Answer) == ["early", "early"]
    assert threads_made == ["the dog", *["jumps"] * 4]
    assert player.heard == ["early", "1", "2", "3"]


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_turn_is_neither_played_nor_delivered(seed: int, tones: Any) -> None:
    """However the threads are scheduled: every word of an answer names its turn."""
    recognizer, tokenizer = tones
    random, ended, player = np.random.default_rng(seed), set[str](), Loudspeaker()
    wrong, names = list[str](), (f"{number:03d}" for number in range(1000))
    of_turn = dict[int, str]()

    def answer(text: str) -> Iterator[str]:
        name = next(names)
        of_turn[id(pipeline._open_turn)] = name
        yield from [f"{name} {name}"] * 30

    class Checked(Loudspeaker):
        def play(self, samples: Samples) -> None:
            super().play(samples)
            check(self.heard[-1])

    def check(word: str) -> None:
        wrong.extend([word] if word in ended else [])

    def on_event(event: Any) -> None:
        if isinstance(event, Answer):
            check(event.text.split()[0])
        if isinstance(event, Turn):
            ended.add(of_turn.pop(id(event), ""))

    def source() -> Iterator[Samples]:
        for block in say(tokenizer, *("the dog", "a fox") * 5):
            yield block
            if random.random() < 0.1:
                pipeline.interrupt()

    player = Checked()
    pipeline = Pipeline(recognizer, answer, synthesizer=Voice(), player=player, on_event=on_event)
    pipeline.run(source())
    assert player.heard
    assert not wrong


class Broken(Loudspeaker):
    def play(self, samples: Samples) -> None:
        raise OSError("no device")


class Mute(Voice):
    def stream(self, text: str) -> Iterator[Signal]:
        raise ValueError("no voice")


class Deaf(Told):
    def advance(self, samples: Samples, state: None) -> tuple[Any, None]:
        raise ValueError("no frames")


def fail(text: object) -> str:
    raise ValueError(text)


def endless(tokenizer: Tokenizer) -> Iterator[Samples]:
    """Say something again and again."""
    while True:
        yield from say(tokenizer, "the dog")


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ({"detector": VoiceDetector(Deaf())}, r"its voice activity raised ValueError \(no frames"),
        ({"answer": fail}, r"its answer raised ValueError \(the dog\)"),
        ({"synthesizer": Mute()}, "its synthesizer raised ValueError"),
        ({"player": Broken()}, r"its player raised OSError \(no device\)"),
        ({"on_event": fail}, "its recognizer raised ValueError"),
    ],
)
def test_failing_stage_ends_the_pipeline_and_is_named(
    stages: dict[str, Any], match: str, tones: Any
) -> None:
    recognizer, tokenizer = tones
    parts = {"answer": str.upper, "synthesizer": Voice(), "player": Loudspeaker(), **stages}
    pipeline = Pipeline(recognizer, **parts)
    with pytest.raises(SbkitError, match=match) as raised:
        pipeline.run(endless(tokenizer))
    assert isinstance(raised.value.__cause__, ValueError | OSError)
    with pytest.raises(SbkitError, match=match):
        pipeline.close()


@pytest.mark.parametrize("state", ["begun", "answering", "playing", "full", "of itself"])
def test_pipeline_closes_in_any_state(state: str, tones: Any) -> None:
    recognizer, tokenizer = tones
    reached, go_on = threading.Event(), threading.Event()
    player = Loudspeaker(until="zero" if state in ("playing", "full") else None)

    def answer(text: str) -> Iterator[str]:
        if state == "answering":
            reached.set()
            assert go_on.wait(WITHIN)
        yield from ["zero one two"] * (1 if state == "playing" else 40)

    def on_event(event: object) -> None:
        if state == "of itself" and isinstance(event, Answer):
            pipeline.close()
            pipeline.close()

    def source() -> Iterator[Samples]:
        if state in ("playing", "full"):
            yield from say(tokenizer, "the dog")
            player.await_word("zero")
            reached.set()
            while True:
                yield silence(0.1)
        if state == "begun":
            reached.set()
        yield from endless(tokenizer)

    pipeline = Pipeline(recognizer, answer, synthesizer=Voice(), player=player, on_event=on_event)
    runner = threading.Thread(target=pipeline.run, args=[source()])
    runner.start()
    if state != "of itself":
        assert reached.wait(WITHIN)
        closer = threading.Thread(target=pipeline.close)
        closer.start()
        go_on.set()
        closer.join(WITHIN)
    runner.join(WITHIN)
    assert not runner.is_alive()
    pipeline.close()


def test_pipeline_raises_errors_of_its_source(tones: Any) -> None:
    recognizer, tokenizer = tones

    def source() -> Iterator[Samples]:
        yield from say(tokenizer, "the dog")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pipeline(recognizer, str.upper).run(source())
    Pipeline(recognizer, str.upper).close()  # which was never run
