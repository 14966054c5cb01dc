"""Compiled blocks train like plain ones, and are compiled once."""

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import speechbrain as sb
import torch
from torch import Tensor, nn

from sbkit.models import compiling
from sbkit.models.transformer import Transformer
from sbkit.train.brain import Brain
from tests.processes import CONTEXT
from tests.train import fine_tuning

# Utterances and frames; a single utterance would have a graph of its own.
SHAPES = [(3, 31), (2, 40), (5, 9), (4, 26)]
SIZES = {"d_model": 8, "nhead": 2, "d_ffn": 16}


class StateBrain(Brain):
    """Train an encoder to return zeros."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> Tensor:
        frames, lengths = batch
        return self.modules["model"][0](frames, lengths)[0]

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: sb.Stage) -> Tensor:
        return predictions.square().sum(-1).mean()


def train(**options: Any) -> tuple[list[float], list[int]]:
    """Take 50 steps of many shapes; return the loss and the number of graphs after each."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    encoder = Transformer(**SIZES, num_encoder_layers=1, dropout=0.2)
    brain = StateBrain(
        {"model": nn.ModuleList([encoder])},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"device": "cpu", **options},
    )
    brain.on_fit_start()
    brain.modules.train()
    losses, graphs = [], []
    for step in range(50):
        utterances, frames = SHAPES[step % len(SHAPES)]
        batch = torch.randn(utterances, frames, 8), torch.randint(1, frames + 1, (utterances,))
        brain.step += 1
        losses.append(float(brain.fit_batch(batch)))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return losses, graphs


def write_no_vectors() -> None:
    """Make the compiler write code without vector instructions.

    Otherwise it tries each kind in a process that imports torch, and takes twice as long.
    """
    config: Any = import_module("torch._inductor.config")
    config.cpp.vec_isa_ok = False


@pytest.mark.slow(30)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_training_has_the_losses_of_plain_training() -> None:
    plain, before = train()
    assert before[-1] == 0
    # In its own process: processes forked after it, as in tests/attacks, could not train.
    with ProcessPoolExecutor(1, CONTEXT, initializer=write_no_vectors) as pool:
        compiled, graphs = pool.submit(train, compile=True).result()
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}  # no other shape is compiled again


@pytest.mark.slow(20)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_training_continues_when_freezing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers run as in inference; then with gradients, dropout and checkpointing."""
    plain = fine_tuning.train_one("wavlm", fine_tuning.FREEZE, num_layers=1)
    compile_block, requires_grad = nn.Module.compile, set[bool]()

    def without_kernels(module: nn.Module, *, dynamic: bool, options: Any) -> None:
        compile_block(module, backend=recording, dynamic=dynamic)

    def recording(graph: Any, inputs: Any) -> Any:
        requires_grad.add(any(getattr(x, "requires_grad", False) for x in inputs))
        return import_module("torch._dynamo.backends.debugging").aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", without_kernels)
    compiled = fine_tuning.train_one("wavlm", fine_tuning.FREEZE, num_layers=1, compile=True)
    assert requires_grad == {False, True}
    for name, values in plain.items():
        assert compiled[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


class UserModule(nn.Linear):
    """A module of the user's: torch compiles none of its own, such as nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_variants_of_a_block_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's limit of 8 the last of these silently ran uncompiled."""
    calls = 0

    def counting(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph(*arguments)

        return run

    def compile_counting(module: nn.Module, *, dynamic: bool, options: Any) -> None:
        plain(module, backend=counting, dynamic=dynamic)

    plain, module = nn.Module.compile, UserModule(3, 3)
    monkeypatch.setattr(import_module("torch._dynamo.config"), "recompile_limit", 8)
    monkeypatch.setattr(nn.Module, "compile", compile_counting)
    compiling.compile_blocks([module])
    variants = list(product((1, 4), (1, 7), (True, False), (True, False)))
    for clips, frames, with_grad, is_bf16 in variants:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_bf16)
        with torch.set_grad_enabled(with_grad), autocast:
            module(torch.ones(clips, frames, 3))
    assert calls == len(variants)
