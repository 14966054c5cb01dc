"""The fault that started this project: a compiled recognizer called from other threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo.utils import counters

from sbkit.audio.io import Samples
from sbkit.bundle.bundle import read_bundle
from sbkit.export.export import export_run
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import ThreadedBundle
from sbkit.runtime.torch_model import Compilation, CompiledModel
from sbkit.tasks.recognition.session import Session, StreamingRecognizer, advance_batch
from tests import processes
from tests.runtime.bundles import make_live_run
from tests.runtime.tones import finals, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    export_run(make_live_run(folder / "run", encoder_module="transformer"), folder / "bundle")
    return folder / "bundle"


def compiled_recognizer(folder: Path, compilation: Compilation) -> StreamingRecognizer:
    contents = read_bundle(folder, with_weights=True)
    thread = ModelThread(partial(CompiledModel.load, contents, folder, compilation=compilation))
    return StreamingRecognizer(bundle=ThreadedBundle.from_contents(contents, thread))


def noise(seed: int, samples: int) -> Samples:
    return (3000 * np.random.default_rng(seed).normal(size=samples)).astype(np.int16)


def final_texts(recognizer: StreamingRecognizer, clip: Samples) -> list[str]:
    """Run a clip through a session, block by block."""
    blocks = np.array_split(clip, 1 + len(clip) // 5000)
    return [final.text for final in finals(run(recognizer, blocks))]


def compare(bundle: Path, **options: Any) -> int:
    """Let three threads use a compiled recognizer; compare with one that is not compiled.

    It runs chunks and whole clips. Return how many graphs it compiled, all before the first clip.
    """
    clips = [noise(seed, size) for seed, size in enumerate((9_000, 31_234, 60_123))]
    with StreamingRecognizer.load(bundle, device="cpu") as plain:
        expected = [final_texts(plain, clip) for clip in clips]
        (expected_clip,) = plain.model.encode([clips[1]])
    assert all(expected)
    before = counters["stats"]["unique_graphs"]
    compilation = Compilation(streaming="also", seconds=(2.0,), **options)
    with compiled_recognizer(bundle, compilation) as compiled:
        warm = counters["stats"]["unique_graphs"]
        assert compiled.effective.compiled == options["mode"]
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
    assert counters["stats"]["unique_graphs"] == warm
    return int(warm - before)


def test_compiled_chunks_compile_nothing_for_new_shapes_and_give_the_same_text(
    bundle: Path,
) -> None:
    assert compare(bundle, mode="default", backend="eager", clips=(1, 3)) > 0


INDUCTOR_SCRIPT = """
import sys
from pathlib import Path
from tests.models.test_compiling import write_no_vectors
from tests.runtime.test_compiled_sessions import compare

write_no_vectors()
for _ in range(2):  # one thread ends before the next begins
    compare(Path(sys.argv[1]), mode="reduce-overhead", clips=(3,))
print("the same", flush=True)
"""


@pytest.mark.slow
def test_inductor_gives_the_same_output(bundle: Path) -> None:
    process = processes.run(["-c", INDUCTOR_SCRIPT, bundle], timeout=500)
    assert "the same" in process.stdout, process.stderr
