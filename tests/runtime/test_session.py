"""The events of a session do not depend on how its samples arrive."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.decoding.word_times import WordOffsets
from sbkit.export.export import export_run
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.session import (
    Endpoint,
    EndpointRules,
    Event,
    Final,
    Partial,
    Session,
    StreamingRecognizer,
    advance_batch,
    agreement,
    forward_batch,
)
from sbkit.tasks.vad.predict import SpeechRules, VoiceDetector
from tests.runtime.bundles import make_live_run
from tests.runtime.scripted_speech import LoudSpeech
from tests.runtime.tones import (
    LETTER,
    RATE,
    STEP,
    StreamingToneModel,
    finals,
    run,
    silence,
    speak,
    streaming_tones,
    tone_bundle,
)

TEXTS = ("the quick brown fox", "jumps over a lazy dog", "the dog")
BEAM: dict[str, Any] = {"lm_texts": [*TEXTS, "a fox over the dog"]}


def cut(audio: Samples, seed: int) -> Iterator[Samples]:
    """Cut audio into random blocks of up to 30,000 samples, some empty."""
    random = np.random.default_rng(seed)
    while len(audio):
        size = int(random.choice([0, 1, 7, 500, 3000, 30_000]))
        yield audio[:size]
        audio = audio[size:]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> AsrBundle[TorchModel]:
    folder = tmp_path_factory.mktemp("recognizer")
    export_run(make_live_run(folder / "run"), folder / "bundle")
    return load_bundle(folder / "bundle")


@pytest.mark.parametrize("seed", range(4))
def test_forward_batch_computes_each_window_once(
    seed: int, bundle: AsrBundle[TorchModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, random = bundle.model, np.random.default_rng(seed)
    clip = (3000 * random.normal(size=int(random.integers(1, 90_000)))).astype(np.int16)
    extract = model.network.encoder.modules["compute_features"]
    audio = torch.from_numpy(np.append(clip, silence(0.2))).float().unsqueeze(0)
    samples = torch.tensor([audio.shape[1]])
    log_mels = extract.log_mels
    features, num_windows = log_mels(audio, samples)
    expected = model.encode([clip])[0].log_probs
    computed, chunks = [features[0, :0]], [expected[:0]]

    def record(audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        chunk, frames = log_mels(audio, lengths)
        computed.append(chunk[0, : frames[0]])
        return chunk, frames

    with StreamingRecognizer(bundle=replace(bundle, model=ModelThread(lambda: model))) as live:
        monkeypatch.setattr(extract, "log_mels", record)
        session = Session(live)
        for block in cut(clip, seed):
            session.feed(block)
            chunks += forward_batch([session])[0]
        session.is_finished = True
        chunks += forward_batch([session])[0]
    torch.testing.assert_close(torch.cat(computed), features[0, : num_windows[0]])
    np.testing.assert_allclose(np.concatenate(chunks), expected, rtol=0, atol=1e-4)
    assert (np.concatenate(chunks).argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("decoder", [{}, BEAM], ids=["greedy", "beam"])
def test_events_do_not_depend_on_block_size(decoder: dict[str, Any], tmp_path: Path) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path, **decoder)
    spoken = [audio for text in TEXTS for audio in (speak(tokenizer, text), silence(1.3))]
    audio = np.concatenate([*spoken, silence(2.6)])
    expected = run(recognizer, [audio])
    assert [final.text for final in finals(expected)] == [*TEXTS]
    for seed in range(5):
        assert run(recognizer, cut(audio, seed)) == expected
    rules = [event.rule for event in expected if isinstance(event, Endpoint)]
    assert rules == ["silence"] * 3 + ["nothing"]


@pytest.mark.parametrize("size", [1000, 100_000])
def test_session_takes_silence_from_a_detector(size: int, tmp_path: Path) -> None:
    """Humming after the words has no tokens but is not silence: the utterance ends after it."""
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    spoken, hum = speak(tokenizer, "the dog"), np.full(RATE, 300, np.int16)
    audio = np.concatenate([spoken, hum, silence(3.0)])
    end = len(spoken) / RATE + 1.0
    detector = VoiceDetector(LoudSpeech(), SpeechRules(hang_over=0.3))
    session, events = Session(recognizer, detector=detector), list[Event]()
    for first in range(0, len(audio), size):
        events += session.push(audio[None, first : first + size])  # (1, S)
    (endpoint,) = (
        event for event in events if isinstance(event, Endpoint) and event.rule == "silence"
    )
    assert [final.text for final in finals(events)] == ["the dog"]
    padded = end + detector.rules.padding
    assert finals(events)[0].end == pytest.approx(padded + 1.2, abs=0.05)  # not the hang-over, too
    assert endpoint.seconds >= finals(events)[0].end


@pytest.mark.parametrize("decoder", [{}, BEAM], ids=["greedy", "beam"])
@pytest.mark.parametrize("limit", [2.0, 3.3, 6.0, 9.0])
def test_speech_is_cut_between_words(limit: float, decoder: dict[str, Any], tmp_path: Path) -> None:
    """Four frames without a letter are between words, also where six are between letters."""
    recognizer, tokenizer, _ = streaming_tones(tmp_path, **decoder)
    text = " ".join(TEXTS * 2)
    slow = [i for i in range(4, len(text), 4) if " " not in text[i - 1 : i + 1]]
    parts = np.split(speak(tokenizer, text), np.array(slow) * LETTER * STEP)
    audio = np.concatenate([sound for part in parts for sound in (part, silence(0.2))])

    def run_limited(blocks: Any, limit: float) -> list[Event]:
        session = Session(recognizer, EndpointRules(max_utterance=limit))
        return [*(event for block in blocks for event in session.push(block)), *session.finish()]

    (whole,) = finals(run_limited([audio], 99.0))
    events = run_limited([audio], limit)
    pieces = finals(events)
    assert " ".join(piece.text for piece in pieces) == whole.text == text
    spans = np.array([(w.start, w.end) for piece in pieces for w in piece.words])
    expected = np.array([(word.start, word.end) for word in whole.words])
    assert np.abs(spans - expected).max() <= 0.08
    ends = [piece.end for piece in pieces]
    assert [piece.start for piece in pieces] == [0.0, *ends[:-1]]
    assert (np.diff([0.0, *ends])[:-1] >= limit - min(4, limit / 2) - 0.2).all()
    assert (np.diff([0.0, *ends]) <= limit).all()
    rules = [event.rule for event in events if isinstance(event, Endpoint)]
    assert rules == ["longest"] * (len(pieces) - 1) and rules
    for seed in range(2):
        assert run_limited(cut(audio, seed), limit) == events


class LateToneModel(StreamingToneModel):
    """Write each frame three frames late, which the state keeps."""

    def start(self) -> Any:
        return self._hear(np.zeros(3 * STEP, np.int16))

    def advance(self, chunks: Sequence[Samples], states: Sequence[Any]) -> list[Any]:
        heard = [np.concatenate([s, self._hear(c)]) for c, s in zip(chunks, states, strict=True)]
        return [(frames[:-3], frames[-3:]) for frames in heard]


@pytest.mark.parametrize("rest", [0.0, 0.3, 1.1])
@pytest.mark.parametrize("size", [700, 100_000])
def test_last_word_is_written_after_the_last_sound(rest: float, size: int, tmp_path: Path) -> None:
    """Zeros follow, which are no part of the utterance and no silence that ends it."""
    bundle, tokenizer, _ = tone_bundle(tmp_path, model_class=LateToneModel)
    recognizer = StreamingRecognizer(bundle=bundle)
    for text in TEXTS:
        audio = np.append(speak(tokenizer, text), silence(rest))
        events = run(recognizer, [audio[n : n + size] for n in range(0, len(audio), size)])
        (final,) = finals(events)
        assert (final.text, final.end) == (text, len(audio) / RATE)
        assert final.words[-1].end <= final.end
        assert max(event.seconds for event in events) == final.end
        assert not [event for event in events if isinstance(event, Endpoint)]


def test_session_events_have_times_of_the_stream(tmp_path: Path) -> None:
    """A chunk is 0.64 s, a letter 0.12 s, and a word may reach 9 frames past its last token."""
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    recognizer.aligner = replace(recognizer.aligner, offsets=WordOffsets(0.0, 9.0))
    audio = [speak(tokenizer, "the dog"), silence(1.4), speak(tokenizer, "a fox"), silence(0.2)]
    session = Session(recognizer, offset=10 * RATE)
    events = [*session.push(np.concatenate(audio)), *session.finish()]
    assert [(type(event), event.seconds) for event in events] == [
        *((Partial, 10.64), (Partial, 11.28)),
        *((Endpoint, 12.56), (Final, 12.56), (Partial, 12.56)),
        *((Partial, 13.04), (Final, 13.04)),
    ]
    first, second = finals(events)
    assert (first.start, first.end) == (10.0, 12.0)  # 1.2 s after the last tone
    assert (second.start, second.end) == (12.0, 13.04)
    for final, expected in (
        (first, [("the", 10.0, 10.4), ("dog", 10.4, 11.16)]),
        (second, [("a", 12.24, 12.4), ("fox", 12.4, 13.04)]),
    ):
        assert [word.text for word in final.words] == [text for text, *_ in expected]
        times = [time for word in final.words for time in (word.start, word.end)]
        assert times == pytest.approx([time for _, *span in expected for time in span])


def test_utterance_begins_after_silence_without_words(tmp_path: Path) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    events = run(recognizer, [silence(2.4), speak(tokenizer, "the dog"), silence(1.4)])
    assert finals(events)[0].start == 2.4


def test_partial_text_grows_and_marks_stable_words(tmp_path: Path) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path, **BEAM)
    events = run(recognizer, [speak(tokenizer, "the quick brown fox")])
    partials = [event for event in events if isinstance(event, Partial)]
    assert [event.seconds for event in partials] == sorted(event.seconds for event in partials)
    assert partials[-1].text == finals(events)[0].text == "the quick brown fox"
    for event, following in pairwise(partials):
        stable = event.text.split()[: event.stable]
        assert following.text.split()[: event.stable] == stable
        assert event.stable <= following.stable < len(following.text.split())
    assert max(event.stable for event in partials) == 3
    assert partials[0].plain().keys() == {"event", "seconds", "text", "stable"}


def test_agreement_is_the_share_of_the_beam_that_has_the_word() -> None:
    best = ["the", "north", "office"]
    beam = [best, ["the", "nor", "office"], ["a", "the", "north"], ["the", "nor", "office"]]
    for score in (0, -2000):  # as of a long clip
        shares = agreement(best, beam, (np.log([4, 2, 1, 1]) + score).tolist())
        assert shares.tolist() == pytest.approx([1, 5 / 8, 7 / 8])


def test_recognizer_refuses_what_takes_whole_clips(plain_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="which takes whole clips"):
        streaming_tones(tmp_path, **BEAM, attention_rescoring=True)
    with pytest.raises(SbkitError, match=r"has no onnx/streaming\.onnx"):
        StreamingRecognizer.load(plain_bundle, runtime="onnx")


def test_fault_of_a_decoder_spares_other_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recognizer, tokenizer, _ = streaming_tones(tmp_path)
    sessions = [Session(recognizer) for _ in range(3)]
    for session in sessions:
        session.feed(speak(tokenizer, "a fox"))
        session.is_finished = True
    monkeypatch.setattr(sessions[1], "decode_chunks", lambda _: 1 // 0)
    first, failed, last = advance_batch(sessions)
    assert isinstance(failed, ZeroDivisionError)
    for events in (first, last):
        assert isinstance(events, list)
        assert [final.text for final in finals(events)] == ["a fox"]
    recognizer.close()


def test_session_refuses_other_arrays_and_samples_after_its_end(tmp_path: Path) -> None:
    recognizer, _, _ = streaming_tones(tmp_path)
    session = Session(recognizer)
    with pytest.raises(SbkitError, match="int64"):
        session.push(np.zeros(3, np.int64))  # type: ignore[arg-type]
    assert session.finish() == []
    with pytest.raises(SbkitError, match="takes no more samples"):
        session.push(silence(0.1))
