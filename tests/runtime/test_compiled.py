"""A compiled model compiles everything before the first clip, in its own thread."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from sbkit.bundle.bundle import read_bundle
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import Compilation, CompiledModel
from tests import processes
from tests.runtime.bundles import make_bundle
from tests.runtime.tones import noise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
TABLE: dict[str, Any] = {"clips": (1, 3), "seconds": (0.5, 1.0)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    return make_bundle(folder, encoder_module="transformer")  # half the kernels of a Conformer's


def compiled(bundle: Path) -> ModelThread:
    """Load a model that is traced and guarded like compiled code, but not compiled."""
    compilation = Compilation(mode="default", backend="eager", **TABLE)
    contents = read_bundle(bundle, with_weights=True)
    return ModelThread(partial(CompiledModel.load, contents, bundle, compilation=compilation))


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_compiled_model_compiles_nothing_after_its_warm_up_and_gives_the_same_output(
    bundle: Path,
) -> None:
    before = graphs()
    model = compiled(bundle)
    warm = graphs()
    assert warm > before
    assert model.effective.compiled == "default"
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
        model.decoder_log_probs(one.states, np.ones((count, count), np.int64))
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
