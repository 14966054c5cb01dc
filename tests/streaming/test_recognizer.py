"""Samples in blocks of any size give the features and log-probabilities of the whole clip."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sbkit.bundle.bundle import Bundle
from sbkit.export.export import export_run
from sbkit.runtime.model import ModelThread
from sbkit.runtime.torch_model import load_bundle
from sbkit.streaming.recognizer import StreamingRecognizer
from tests.runtime.bundles import make_live_run
from tests.streaming.test_session import cut


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("recognizer")
    export_run(make_live_run(folder / "run"), folder / "bundle")
    return load_bundle(folder / "bundle")


@pytest.mark.parametrize("seed", range(4))
def test_forward_chunks_computes_each_window_once(seed: int, bundle: Bundle) -> None:
    model, random = bundle.model, np.random.default_rng(seed)
    clip = (3000 * random.normal(size=int(random.integers(1, 90_000)))).astype(np.int16)
    extract = model.network.encoder.modules["compute_features"]
    audio, samples = torch.from_numpy(clip).float().unsqueeze(0), torch.tensor([len(clip)])
    clip_model, frames = extract(audio, samples)
    expected = model.encode([clip])[0].log_probs
    computed = list[torch.Tensor]()
    with StreamingRecognizer(bundle=replace(bundle, model=ModelThread(lambda: model))) as live:
        hook = extract.register_forward_hook(
            lambda *call: computed.append(call[2][0][0, : call[2][1][0]])
        )
        results, state = [expected[:0]], live.start()
        blocks = [*cut(clip, seed), clip[:0]]
        for number, block in enumerate(blocks, 1):
            ((chunks, state),) = live.forward_chunks([block], [state], [number == len(blocks)])
            results += chunks
    hook.remove()
    torch.testing.assert_close(
        torch.cat(computed or [clip_model[0, :0]]), clip_model[0, : frames[0]]
    )
    np.testing.assert_allclose(np.concatenate(results), expected, rtol=0, atol=1e-4)
    assert (np.concatenate(results).argmax(1) == expected.argmax(1)).all()
