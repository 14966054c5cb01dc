"""One thread makes a model and runs it for any thread; shapes of batches; parallel batches."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sbkit.audio.io import Samples
from sbkit.base.errors import DeviceError, SbkitError
from sbkit.base.workers import ThreadPool
from sbkit.bundle.protocols import EffectiveRuntime, Encoded
from sbkit.runtime.batch_shapes import BatchShapes, round_up
from sbkit.runtime.model_thread import ModelThread, run_batches
from sbkit.runtime.runtimes import load_bundle, load_in_thread
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.asr.session import Session, StreamingRecognizer
from tests.processes import in_fork
from tests.runtime.tones import RATE, ToneModel, noise
from tests.shortage import NO_THREAD, refusing


def test_model_thread_makes_and_calls_the_model_in_one_thread_despite_errors() -> None:
    thread = ModelThread(lambda: SimpleNamespace(runs_on=None, made_in=threading.get_ident()))
    with ThreadPoolExecutor(8) as callers:
        get_thread = partial(thread.call, lambda _: threading.get_ident())
        called_in = {*callers.map(lambda _: get_thread(), range(50))}
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda _: 1 // 0)
    assert called_in == {thread.call(lambda model: model.made_in)} != {threading.get_ident()}
    thread.close()


def test_model_thread_ends_when_the_model_cannot_be_made() -> None:
    def fail() -> ToneModel:
        raise SbkitError("x must be y")

    before = threading.active_count()
    with pytest.raises(SbkitError, match="x must be y"):
        ModelThread(fail)
    with refusing("threading.Thread.start", NO_THREAD), pytest.raises(RuntimeError, match="start"):
        ModelThread(fail)
    assert threading.active_count() == before


def test_transcriber_gives_32_threads_the_texts_of_one(plain_bundle: Path) -> None:
    clips = noise(*np.random.default_rng(0).uniform(0.05, 0.75, 8))
    with Transcriber.load(plain_bundle, device="cpu") as transcriber:
        expected = [transcriber.transcribe(clip, RATE) for clip in clips]
        assert any(transcript.text for transcript in expected)

        def is_same(number: int) -> bool:
            order = np.random.default_rng(number).permutation(len(clips))
            return all(transcriber.transcribe(clips[n], RATE) == expected[n] for n in order)

        with ThreadPoolExecutor(32) as threads:
            assert all(threads.map(is_same, range(32)))


def test_forked_process_transcribes_and_goes_on_with_a_session(
    plain_bundle: Path, streaming: Path
) -> None:
    """As those of celery, or of gunicorn with --preload; once, the child waited forever."""
    (clip,) = noise(0.75)
    live = noise(2.0)[0]
    with (
        Transcriber.load(plain_bundle, device="cpu") as transcriber,
        StreamingRecognizer.load(streaming, device="cpu") as recognizer,
    ):
        expected = transcriber.transcribe(clip, RATE)
        begun, whole = Session(recognizer), Session(recognizer)
        first = whole.push(live[:RATE])
        assert begun.push(live[:RATE]) == first
        last = [*whole.push(live[RATE:]), *whole.finish()]
        assert in_fork(lambda: transcriber.transcribe(clip, RATE)) == expected
        assert in_fork(lambda: [*begun.push(live[RATE:]), *begun.finish()]) == last
        assert transcriber.transcribe(clip, RATE) == expected
        in_fork(transcriber.close)
        assert transcriber.transcribe(clip, RATE) == expected
    with pytest.raises(SbkitError, match="This model is closed"):
        in_fork(lambda: transcriber.transcribe(clip, RATE))


def test_forked_process_runs_a_bundle_of_the_calling_thread(plain_bundle: Path) -> None:
    """Once, it waited for threads of OpenMP that its parent has."""
    clips, before = noise(0.75, 0.5), torch.get_num_threads()
    bundle = load_bundle(plain_bundle)
    try:
        torch.set_num_threads(2)
        expected = bundle.transcribe(clips)
        assert in_fork(lambda: bundle.transcribe(clips)) == expected

        def fork_in_thread() -> None:
            results.append(bundle.transcribe(clips))  # this thread has threads of OpenMP, too
            results.append(in_fork(lambda: bundle.transcribe(clips)))

        results = list[object]()
        thread = threading.Thread(target=fork_in_thread)
        thread.start()
        thread.join()
        assert results == [expected, expected]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_forked_process_is_told_that_its_parent_has_the_gpu() -> None:
    runs_on = EffectiveRuntime(runtime="torch", device="cuda:0", precision="fp32")
    thread = ModelThread(lambda: SimpleNamespace(runs_on=runs_on))
    with pytest.raises(DeviceError, match=r"forked process cannot use a model on cuda:0 .* Load"):
        in_fork(lambda: thread.call(lambda model: model.runs_on))
    assert thread.call(lambda model: model.runs_on) == runs_on
    thread.close()


def test_batches_run_in_the_calling_thread_if_no_other_starts() -> None:
    idents = list[int]()

    def encode(batch: Sequence[Samples], sides: object) -> list[Encoded]:
        idents.append(threading.get_ident())
        return [Encoded(row[:, None]) for row in batch]

    with refusing("threading.Thread.start", NO_THREAD):
        one, two = run_batches(encode, [(noise(0.1), ()), (noise(0.1, 0.1), ())], threads=2)
        with pytest.raises(ZeroDivisionError):
            run_batches(lambda *_: [Encoded(np.zeros(1 // 0))], [([], ()), ([], ())], threads=2)
    assert (len(one), len(two)) == (1, 2)
    assert {*idents} == {threading.get_ident()}
    with refusing("threading.Thread.start", NO_THREAD, after=1):
        assert len(run_batches(encode, [(noise(0.1), ())] * 4, threads=2)) == 4
    assert len(idents) == 2 + 4  # each batch ran once
    assert threading.get_ident() not in idents[2:]


def test_closed_pool_of_threads_runs_nothing() -> None:
    pool = ThreadPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)


def test_run_batches_runs_two_in_parallel_and_keeps_their_order() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def encode(batch: Sequence[Samples], sides: object) -> list[Encoded]:
        barrier.wait()
        return [Encoded(row[:, None]) for row in batch]

    one, two = run_batches(encode, [(noise(0.1), ()), (noise(0.1, 0.1), ())], threads=2)
    assert (len(one), len(two)) == (1, 2)


def test_encode_batches_equals_encode_and_restores_torch_threads(
    plain_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_bundle(plain_bundle).model
    batches = [noise(1.0, 0.7), noise(0.3), noise(0.2, 0.5)]
    expected, thread_counts = [model.encode(batch) for batch in batches], set()
    encode = model.network.encode

    def noting(audio: torch.Tensor, lengths: torch.Tensor) -> Any:
        thread_counts.add(torch.get_num_threads())
        return encode(audio, lengths)

    monkeypatch.setattr(model.network, "encode", noting)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = model.encode_batches([(batch, ()) for batch in batches])
        assert thread_counts == {1} and torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)
    for clip, same_clip in zip(chain(*expected), chain(*together), strict=True):
        np.testing.assert_allclose(same_clip.log_probs, clip.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fewest", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_shapes_batches_fit_the_table(seed: int, fewest: int) -> None:
    table, random = BatchShapes.grid(RATE, batch_seconds=10.0), np.random.default_rng(seed)
    lengths = random.integers(1, 30 * RATE, random.integers(1, 60)).tolist()
    batches = list(table.batches(lengths, min_batches=fewest))
    assert sorted(index for batch in batches for index in batch) == [*range(len(lengths))]
    assert len(batches) >= min(fewest, len(lengths))
    pairs = table.all_shapes()
    for batch in batches:
        padded = {round_up(lengths[index], table.padded_lengths) for index in batch}
        assert len(padded) == 1
        assert (len(batch), *padded) in pairs


def test_padding_to_the_table_changes_no_output(plain_bundle: Path) -> None:
    thread = load_in_thread(plain_bundle, device="cpu").model
    clips = noise(0.5, 0.56)
    before = thread.encode(clips)
    thread.warm_up(BatchShapes.grid(RATE, batch_seconds=2.0, clips=(1, 2), seconds=(0.5, 1.0)))
    for clip, padded in zip(before, thread.encode(clips), strict=True):
        np.testing.assert_allclose(clip.log_probs, padded.log_probs, atol=1e-4)
    assert thread.call(lambda model: model.padded_lengths) == (8000, 16_000)
    thread.close()
