"""A compiled model compiles everything before the first clip, in its own thread.

The fault that started this project was a compiled recognizer called from other threads.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from sbkit.audio.io import Samples
from sbkit.bundle.bundle import Bundle, read_bundle
from sbkit.export.export import export_run
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import Compilation, CompiledModel
from sbkit.tasks.asr.session import Session, StreamingRecognizer, advance_batch
from tests import processes
from tests.runtime.bundles import ROOT, louder, make_run
from tests.runtime.tones import finals, noise, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
TABLE: dict[str, Any] = {"clips": (1, 3), "seconds": (0.5, 1.0)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a streaming model with an attention decoder, and transcripts that are not empty."""
    folder, yaml = tmp_path_factory.mktemp("compiled"), ROOT / "hparams/ctc_streaming.yaml"
    sizes = {"encoder_module": "transformer"}  # half the kernels of a Conformer's
    export_run(make_run(folder / "run", yaml, louder, **sizes), folder / "bundle")
    return folder / "bundle"


def compiled_bundle(folder: Path, compilation: Compilation) -> Bundle[ModelThread]:
    contents = read_bundle(folder, with_weights=True)
    thread = ModelThread(partial(CompiledModel.load, contents, folder, compilation=compilation))
    return contents.with_model(thread)


def compiled(bundle: Path) -> ModelThread:
    """Load a model that is traced and guarded like compiled code, but not compiled."""
    return compiled_bundle(bundle, Compilation(mode="default", backend="eager", **TABLE)).model


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_compiled_model_compiles_nothing_after_warm_up_and_gives_equal_output(
    bundle: Path,
) -> None:
    before = graphs()
    model = compiled(bundle)
    warm = graphs()
    assert warm > before
    assert model.runs_on.compiled == "default"
    plain = load_bundle(bundle).model
    for clips in (noise(0.3), noise(1.0, 0.1), noise(0.2, 0.5, 0.7, 0.3, 0.9)):
        for clip, plain_clip in zip(model.encode(clips), plain.encode(clips), strict=True):
            np.testing.assert_allclose(clip.log_probs, plain_clip.log_probs, atol=1e-4)
    assert graphs() == warm


def test_compiled_model_refuses_a_clip_longer_than_its_table(bundle: Path) -> None:
    model = compiled(bundle)
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        model.encode(noise(1.7))
    assert len(model.encode(noise(0.7))) == 1


def test_compiled_batch_is_one_cuda_graph_step_and_compiles_only_blocks(bundle: Path) -> None:
    """In a step of its own, the graph of a block may overwrite its own input.

    Other shapes were once compiled beside the table: eleven computations of lengths, and the
    decoder for each utterance.
    """
    trees: Any = import_module("torch._inductor.cudagraph_trees")
    traced: list[Any] = []
    steps: list[int] = []

    def noting(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            steps.append(trees.CUDAGraphTreeManager.get_curr_generation())
            return graph(*arguments)

        traced.append(graph)
        return run

    register_backend(noting, name="noting")
    compilation = Compilation(mode="reduce-overhead", clips=(1,), seconds=(1.0,), backend="noting")
    contents = read_bundle(bundle, with_weights=True)
    model = CompiledModel.load(contents, bundle, compilation=compilation)
    steps.clear()
    one, other = (model.encode(noise(1.0))[0] for _ in range(2))
    first, second = steps[: len(traced)], steps[len(traced) :]
    assert len(first) == len(second) > 1
    assert len({*first}) == len({*second}) == 1 and first != second
    for count in (3, 4):
        model.score_texts(one.states, np.ones((count, count), np.int64))
    assert len(steps) == 2 * len(traced)
    assert one.states.untyped_storage().data_ptr() != other.states.untyped_storage().data_ptr()


TRACE_SCRIPT = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sbkit.runtime.torch_model import keep_device_guard

def trace():
    keep_device_guard()
    with FakeTensorMode():
        torch.empty(3)

thread = threading.Thread(target=trace)
thread.start()
thread.join()
filled = [torch.empty(1) for _ in range(10_000)]  # memory that was freed is used again
trace()
print("survived")
"""


def test_device_guard_survives_the_thread_that_traced() -> None:
    """Without the keeper this ended in a segmentation fault, three times out of three."""
    process = processes.run(["-c", TRACE_SCRIPT])
    assert (process.returncode, process.stdout) == (0, "survived\n"), process.stderr


def final_texts(recognizer: StreamingRecognizer, clip: Samples) -> list[str]:
    blocks = np.array_split(clip, 1 + len(clip) // 5000)
    return [final.text for final in finals(run(recognizer, blocks))]


def compare(bundle: Path, **options: Any) -> int:
    """Let three threads use a compiled recognizer; compare with one that is not compiled.

    It runs chunks and whole clips. Return how many graphs it compiled, all before the first clip.
    """
    clips = noise(0.5625, 1.95, 3.75)
    with StreamingRecognizer.load(bundle, device="cpu") as plain:
        expected = [final_texts(plain, clip) for clip in clips]
        (expected_clip,) = plain.model.encode([clips[1]])
    assert all(expected)
    before = graphs()
    compilation = Compilation(streaming="also", seconds=(2.0,), **options)
    with StreamingRecognizer(bundle=compiled_bundle(bundle, compilation)) as compiled:
        warm = graphs()
        assert compiled.runs_on.compiled == options["mode"]
        if "backend" not in options:  # the default uses CUDA graphs, which belong to a thread
            probe = import_module("torch._inductor.cudagraph_trees").get_container
            assert compiled.model.call(lambda _: probe(0)) is not None
        with ThreadPoolExecutor(len(clips)) as threads:
            assert [*threads.map(partial(final_texts, compiled), clips)] == expected
        (whole_clip,) = compiled.model.encode([clips[1]])
        np.testing.assert_allclose(whole_clip.log_probs, expected_clip.log_probs, atol=1e-4)
        sessions = [Session(compiled) for _ in range(5)]  # a full batch of the table, and a partial
        for session in sessions:
            session.feed(clips[1])
            session.is_finished = True
        for events in advance_batch(sessions):
            assert isinstance(events, list)
            assert [final.text for final in finals(events)] == expected[1]
    assert graphs() == warm
    return warm - before


def test_compiled_chunks_compile_nothing_for_new_shapes_and_give_equal_text(
    bundle: Path,
) -> None:
    assert compare(bundle, mode="default", backend="eager", clips=(1, 3)) > 0


INDUCTOR_SCRIPT = """
import sys
from pathlib import Path
from tests.models.test_compiling import write_no_vectors
from tests.runtime.test_compiled import compare

write_no_vectors()
for _ in range(2):  # one thread ends before the next begins
    compare(Path(sys.argv[1]), mode="reduce-overhead", clips=(3,))
print("the same", flush=True)
"""


@pytest.mark.slow
def test_inductor_gives_the_same_output(bundle: Path) -> None:
    process = processes.run(["-c", INDUCTOR_SCRIPT, bundle], timeout=500)
    assert "the same" in process.stdout, process.stderr
