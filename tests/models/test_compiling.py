"""Compiled blocks train as the others do, and are compiled once."""

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

CPU = torch.device("cpu")
# Of utterances and frames; a single utterance would have a graph of its own.
SHAPES = [(3, 31), (2, 40), (5, 9), (4, 26)]


class Encoding(Brain):
    """Bring the mean of an encoder's states to zero."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> Tensor:
        frames, lengths = batch
        states: Tensor = self.modules["model"][0].encode(frames, lengths)
        return states

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: sb.Stage) -> Tensor:
        return predictions.square().sum(-1).mean()


def train(**options: Any) -> tuple[list[float], list[int]]:
    """Take 50 steps of many shapes; return the losses, and how many graphs there were by then."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    encoder = Transformer(
        d_model=8,
        nhead=2,
        d_ffn=16,
        num_encoder_layers=1,
        dropout=0.2,
        encoder_module="transformer",  # half the kernels of a Conformer's
    )
    brain = Encoding(
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
    """Let the compiler write code without vector instructions.

    It would try each kind of them in a process that imports torch, and compile for twice as long.
    """
    config: Any = import_module("torch._inductor.config")
    config.cpp.vec_isa_ok = False


@pytest.mark.slow(30)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the compiler
def test_a_compiled_run_has_the_losses_of_one_that_is_not() -> None:
    plain, before = train()
    assert before[-1] == 0
    # In a process of its own: what is forked after it, as by tests/attacks, cannot train.
    with ProcessPoolExecutor(1, CONTEXT, initializer=write_no_vectors) as fresh:
        compiled, graphs = fresh.submit(train, compile=True).result()
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]
    assert graphs[0] > 0
    assert graphs[len(SHAPES) - 1] == graphs[-1]  # nothing is compiled again


@pytest.mark.slow(20)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the compiler
def test_a_compiled_run_goes_on_where_freezing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computed as for inference then has gradients, dropout, LayerDrop and checkpointing."""
    plain = fine_tuning.train_one("wavlm", fine_tuning.FREEZE)
    compile_block, learns = nn.Module.compile, set[bool]()

    def without_kernels(module: nn.Module, *, dynamic: bool, options: Any) -> None:
        compile_block(module, backend=recording, dynamic=dynamic)

    def recording(graph: Any, inputs: Any) -> Any:
        learns.add(any(getattr(each, "requires_grad", False) for each in inputs))
        return import_module("torch._dynamo.backends.debugging").aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", without_kernels)
    compiled = fine_tuning.train_one("wavlm", fine_tuning.FREEZE, compile=True)
    assert learns == {False, True}
    for name, values in plain.items():
        assert compiled[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


class Own(nn.Module):
    """What torch compiles, unlike a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def test_all_forms_of_a_block_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's limit of 8 the last of these ran as they are written, and nothing said so."""
    ran = list[int]()

    def counting(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append(1)
            return graph(*arguments)

        return run

    def compile_counting(module: nn.Module, *, dynamic: bool, options: Any) -> None:
        plain(module, backend=counting, dynamic=dynamic)

    plain, own = nn.Module.compile, Own()
    torchs = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    monkeypatch.setattr(import_module("torch._dynamo.config"), "recompile_limit", 8)
    monkeypatch.setattr(nn.Module, "compile", compile_counting)
    assert compiling.compile_blocks([own, torchs, nn.Linear(3, 3)], CPU) == {"Own": 1}
    torchs(torch.ones(1, 3))
    assert not ran
    forms = list(product((1, 4), (1, 7), (True, False), (True, False)))
    for clips, frames, learns, is_bf16 in forms:
        with (
            torch.set_grad_enabled(learns),
            torch.autocast("cpu", torch.bfloat16, enabled=is_bf16),
        ):
            own(torch.ones(clips, frames, 3))
    assert len(ran) == len(forms)


def test_what_is_compiled() -> None:
    encoder = Transformer(d_model=8, nhead=2, d_ffn=16, num_encoder_layers=3)
    assert list(compiling.find_blocks(encoder)) == list(encoder.encoder)
    nested = nn.Sequential(encoder)
    assert list(compiling.find_blocks(nested)) == list(encoder.encoder)
    alone = nn.Linear(2, 2)
    assert list(compiling.find_blocks(alone)) == [alone]
