"""A bundle's model in torch, on the requested device and in the requested precision.

Legend: B clips, S samples, U frames, V labels.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sbkit.audio.io import Samples
from sbkit.base.arrays import Array, Counts, Float32s, Float64s, Int64s, LogProbs
from sbkit.base.errors import BundleError, SbkitError, translate
from sbkit.base.libraries import place_of
from sbkit.base.torch_internals import (
    create_cuda_graph_store,
    keep_device_guard,
    meta_device,
    set_recompile_limit,
)
from sbkit.base.units import seconds_to_samples
from sbkit.base.workers import start_anew_in_forks
from sbkit.bundle.bundle import BundleContents
from sbkit.bundle.config import WEIGHTS_FILE, Plain
from sbkit.bundle.module_spec import build_from_spec
from sbkit.bundle.protocols import ChunkSizes, EffectiveRuntime, Encoded, StreamingModel
from sbkit.bundle.side_inputs import LENGTHS_SUFFIX, SideInputs, make_zeros, stack_side_inputs
from sbkit.checkpoint.rng import preserve_rng
from sbkit.checkpoint.weights import check_fits, limit_parameters, parameter_budget
from sbkit.distributed.device import DTYPES, ON_CPU, Placement
from sbkit.models.compiling import find_blocks
from sbkit.models.encoder import require_rate
from sbkit.models.streaming import State, split_state, stack_states, streaming_network
from sbkit.runtime.batch_shapes import BatchShapes, pad_clips, round_up
from sbkit.runtime.model_thread import (
    ClipsAndSides,
    StreamingUse,
    model_errors,
    require_as_requested,
    run_batches,
)

NUM_WARM_UPS = 3  # runs of each shape: CUDA graphs first run it, then record it, then replay it
PRECISION_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # outputs have the precision of the products
BatchRow = TypeVar("BatchRow")


class TorchModel(nn.ModuleList):
    """A model on its device; its methods take and return arrays, and calling it takes tensors.

    It is a `ClipModel`, and a `StreamingModel` if its encoder takes chunks. It lists the parts
    that own the parameters, so its state_dict has the names of the bundle's weights.

    network: the model of a task, such as an AsrModel.
    padded_lengths: the samples that clips are padded to, by default the length of the longest clip.
    """

    padded_lengths: Sequence[int] = ()

    def __init__(
        self,
        network: Any,
        *,
        parts: Iterable[nn.Module],
        sample_rate: int,
        placement: Placement = ON_CPU,
        side_shapes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Move the model to its device, run it, and read back where and how it ran.

        parts: all modules that the network calls.
        side_shapes: of an example of its side inputs, as a `BundleConfig` has them.
        """
        super().__init__(network.model)
        self._threads = set[int]()  # those that ran the model, and so have threads of OpenMP
        start_anew_in_forks(self)
        self.network = network
        self._stream = streaming_network(network)
        self._placement = placement
        self._rate = sample_rate
        for part in (network.model, *parts):
            part.to(placement.device)
        self.eval()
        with model_errors("a second of silence"):
            runs_on = self._read_back(make_zeros(side_shapes))
        self.runs_on = require_as_requested(
            runs_on, device=str(placement.device), precision=placement.precision
        )

    def start_anew(self) -> None:
        if threading.get_ident() in self._threads:  # it would wait for OpenMP's threads forever
            torch.set_num_threads(1)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._threads.add(threading.get_ident())
        with torch.inference_mode(), self._placement.autocast():
            yield

    @classmethod
    def load(
        cls,
        contents: BundleContents,
        folder: Path,
        *,
        user_modules: frozenset[str] = frozenset(),
        placement: Placement = ON_CPU,
        **options: Any,
    ) -> Self:
        """Build the model of a bundle, and load the weights that were read with it."""
        file = folder / WEIGHTS_FILE
        try:
            weights = safetensors.torch.load(contents.weights)
        except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise BundleError(
                f"{file} is not a valid safetensors file ({str(error)[:200]}). Export it again."
            ) from error
        if not user_modules:  # classes of users may not support the device meta
            _require_size(contents.config.parts.values(), weights)
        with preserve_rng(ON_CPU.device), limit_parameters(weights):  # parts draw weights
            network, parts = assemble(contents, user_modules)
        modules: nn.ModuleList = network.model
        check_fits(weights, modules, place=str(file))
        modules.load_state_dict(weights)
        config = contents.config
        options |= {"sample_rate": config.sample_rate, "side_shapes": config.side_shapes}
        return cls(network, parts=parts, placement=placement, **options)

    def __repr__(self) -> str:
        num_parameters = sum(parameter.numel() for parameter in self.parameters())
        return f"{super().__repr__()}\n{num_parameters:,} parameters; {self.runs_on}"

    def forward(self, audio: Tensor, audio_lengths: Tensor, **sides: Tensor) -> Any:
        """Return the predictions of the task's model: audio (B, S) in the scale of int16, (B,)."""
        return self.network.predict(audio, audio_lengths, **sides)

    @cached_property
    def samples_per_frame(self) -> int:
        return int(self.network.samples_per_frame)

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        batch_sides = self._batch_of_sides(sides)
        with self._running():
            states, frames = self.network.encode(*self._batch_of(clips), **batch_sides)
            log_probs: Tensor = self.network.frame_log_probs(states, **batch_sides).cpu()
        rows = zip(log_probs, states, frames.tolist(), strict=True)
        return [Encoded(row[:count].numpy(), state[:count]) for row, state, count in rows]

    def encode_batches(self, batches: Sequence[ClipsAndSides]) -> list[list[Encoded]]:
        """Run the encoder on batches of clips; on the CPU, in parallel threads."""
        on_cpu = self._placement.device.type == "cpu"
        threads = torch.get_num_threads() if on_cpu else 1
        prepare = partial(torch.set_num_threads, 1)
        try:
            return run_batches(self.encode, batches, threads=threads, prepare=prepare)
        finally:  # new threads start with the number that a thread set last, which was 1
            torch.set_num_threads(torch.get_num_threads())

    @property
    def streaming(self) -> StreamingModel | None:
        """The model itself, if it can run chunk by chunk."""
        return None if self._stream is None else self

    @property
    def chunks(self) -> ChunkSizes | None:
        stream = self._stream
        if stream is None:
            return None
        return ChunkSizes(stream.chunk_shift_samples, stream.chunk_samples, stream.min_samples)

    def start(self) -> State:
        assert self._stream is not None
        return self._stream.start()

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[State]
    ) -> list[tuple[LogProbs, State]]:
        assert self._stream is not None
        state = stack_states(states)
        samples = max(self._stream.chunk_samples, *map(len, chunks))
        batch = self._to_device(*pad_clips(chunks, samples))
        with self._running():
            log_probs, frames, after = self._stream.forward_chunk(*batch, state)
        rows = zip(log_probs.cpu(), frames.tolist(), split_state(after), strict=True)
        return [(row[:count].numpy(), row_state) for row, count, row_state in rows]

    @torch.inference_mode()
    def score_texts(self, states: Tensor, texts: Int64s) -> Float64s:
        self._threads.add(threading.get_ident())
        scores: Float64s = self.network.score_texts(states, texts)
        return scores

    @torch.inference_mode()
    def generate(self, states: Tensor) -> list[int]:
        self._threads.add(threading.get_ident())
        (text,) = self.network.generate(states.unsqueeze(0), torch.tensor([len(states)]))
        return [*text]

    def predict(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> Any:
        """Return the predictions of the task's model for clips (S,) in one batch."""
        return self.call("predict", *self._batch_of(clips), **self._batch_of_sides(sides))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the network, on tensors of its device."""
        with self._running():
            return getattr(self.network, method)(*arguments, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The plain data that callers of the task's graphs need."""
        settings: dict[str, Any] = self.network.settings
        return settings

    def run(self, graph: str, *arrays: Array) -> list[Array]:
        """Run a graph of the task by its name, and return its outputs."""
        tensors = (torch.from_numpy(array).to(self._placement.device) for array in arrays)
        output = self.call(graph, *tensors)
        outputs = (output,) if isinstance(output, Tensor) else output
        return [tensor.cpu().numpy() for tensor in outputs]

    def _batch_of(self, clips: Sequence[Samples]) -> tuple[Tensor, Tensor]:
        """Pad clips (S,) to one length, in the scale of int16: -> (B, S), (B,)."""
        samples = round_up(max(map(len, clips)), self.padded_lengths)
        return self._to_device(*pad_clips(clips, samples))

    def _batch_of_sides(self, sides: Sequence[SideInputs]) -> dict[str, Tensor]:
        """Pad side inputs to a batch on the device; lengths stay on the CPU, as of audio."""
        return to_tensors(stack_side_inputs(sides), self.device)

    def _to_device(self, audio: Float32s, lengths: Counts) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(audio).to(self.device), torch.from_numpy(lengths)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device  # a run may have moved a frozen helper

    def _read_back(self, side: SideInputs) -> EffectiveRuntime:
        """Run a second of silence; return the devices used and the types of the products."""
        types: set[torch.dtype] = set()

        def record_output(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                types.add(output.dtype)

        with ExitStack() as hooks:
            for module in self.network.model.modules():
                if isinstance(module, MATRIX_LAYERS):
                    hooks.enter_context(module.register_forward_hook(record_output))
            self.predict([np.zeros(self._rate, np.int16)], [side] if side else ())
        tensors = [*self.network.model.parameters(), *self.network.model.buffers()]
        used = {tensor.device for tensor in tensors}
        devices = sorted("mps" if device.type == "mps" else str(device) for device in used)
        precisions = sorted({PRECISION_NAMES.get(dtype, str(dtype)) for dtype in types})
        return EffectiveRuntime(
            runtime="torch",
            device=" and ".join(devices) or str(self._placement.device),
            precision=" and ".join(precisions) or self._placement.precision,
        )


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a model is compiled, and for all shapes of ``clips`` clips of a length in ``seconds``."""

    mode: str  # default or reduce-overhead
    clips: tuple[int, ...] = (1, 4)
    seconds: tuple[float, ...] = (5.0, 15.0, 30.0)
    backend: str = "inductor"  # of torch.compile
    streaming: StreamingUse = "no"  # whether to compile chunks, of ``clips`` sessions each


class CompiledModel(TorchModel):
    """A model in one thread whose repeated blocks are compiled for a closed grid of shapes.

    Compiling takes seconds per shape. So every shape is compiled while the model is loaded, clips
    are padded to the next larger shape, and torch raises an error instead of compiling more later.
    """

    def __init__(
        self, network: Any, *, compilation: Compilation, sample_rate: int, **options: Any
    ) -> None:
        """Make the model, compile its blocks, and run each shape of the grid."""
        self._mode = compilation.mode
        self._stance = "default"
        lengths = [seconds_to_samples(seconds, sample_rate) for seconds in compilation.seconds]
        self._shapes = BatchShapes(
            max_samples=sys.maxsize, batch_sizes=compilation.clips, padded_lengths=tuple(lengths)
        )
        super().__init__(network, sample_rate=sample_rate, **options)
        chunks = None if compilation.streaming == "no" else self.chunks
        compile_options: Any = {"backend": compilation.backend, "dynamic": False}
        if compilation.backend == "inductor":
            create_cuda_graph_store()
            compile_options["mode"] = compilation.mode
        keep_device_guard()
        set_recompile_limit(1000)  # per class of blocks; in effect, the grid is the limit
        block: Any
        for block in find_blocks([self.network.model]):
            block.compile(**compile_options)
            if chunks is not None and hasattr(block, "forward_chunk"):
                block.forward_chunk = torch.compile(block.forward_chunk, **compile_options)
        for _ in range(NUM_WARM_UPS):
            if chunks is not None:
                for sessions in self._shapes.batch_sizes:
                    silence = np.zeros(chunks.window, np.int16)
                    self.advance([silence] * sessions, [self.start()] * sessions)
            if chunks is None or compilation.streaming == "also":
                for clips, samples in self._shapes.all_shapes():
                    self.encode([np.zeros(samples, np.int16)] * clips)
        self._stance = "fail_on_recompile"
        self.runs_on = replace(self.runs_on, compiled=compilation.mode)

    def _batch_of(self, clips: Sequence[Samples]) -> tuple[Tensor, Tensor]:
        """Pad clips to a shape of the grid, with silent rows if there are fewer clips."""
        num_rows = round_up(len(clips), self._shapes.batch_sizes)
        samples = round_up(max(map(len, clips)), self._shapes.padded_lengths)
        return self._to_device(*pad_clips(clips, samples, num_rows))

    @contextmanager
    def _running_compiled(self) -> Iterator[None]:
        """Run compiled code, and compile nothing more once the model is warm."""
        if self._mode == "reduce-overhead":
            # Otherwise each block counts as a step, and its graph may overwrite its input.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.compiler.set_stance(self._stance):
            yield

    def encode(self, clips: Sequence[Samples], sides: Sequence[SideInputs] = ()) -> list[Encoded]:
        """Run the encoder on clips (S,) in batches of the grid; raise an error for longer clips."""
        outputs: list[Encoded] = []
        for batch in self._split(list(clips)):
            with self._running_compiled():
                encoded = super().encode(batch)[: len(batch)]
            # CUDA graphs write the states of the next batch to the same memory.
            outputs += [Encoded(clip.log_probs, clip.states.clone()) for clip in encoded]
        return outputs

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[State]
    ) -> list[tuple[LogProbs, State]]:
        """Run one chunk (S,) of each session, in batches of the grid."""
        outputs: list[tuple[LogProbs, State]] = []
        for batch in self._split(list(zip(chunks, states, strict=True))):
            num_added = round_up(len(batch), self._shapes.batch_sizes) - len(batch)
            padded = batch + batch[:1] * num_added
            with self._running_compiled():
                outputs += super().advance(*zip(*padded, strict=True))[: len(batch)]
        return outputs

    def _split(self, rows: list[BatchRow]) -> list[list[BatchRow]]:
        size = self._shapes.batch_sizes[-1]
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def encode_batches(self, batches: Sequence[ClipsAndSides]) -> list[list[Encoded]]:
        """Run the encoder on one batch after the other."""
        return [self.encode(*batch) for batch in batches]

    @cached_property
    def samples_per_frame(self) -> int:
        with torch.compiler.set_stance("force_eager"):  # its shapes are not in the grid
            return super().samples_per_frame

    def score_texts(self, states: Tensor, texts: Int64s) -> Float64s:
        with torch.compiler.set_stance("force_eager"):
            return super().score_texts(states, texts)

    def generate(self, states: Tensor) -> list[int]:
        with torch.compiler.set_stance("force_eager"):
            return super().generate(states)


def to_tensors(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a batch on a device, apart from lengths, which stay on the CPU."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    is_length = {name: name.endswith(LENGTHS_SUFFIX) for name in tensors}
    return {n: tensor if is_length[n] else tensor.to(device) for n, tensor in tensors.items()}


def _require_size(specs: Iterable[Plain], weights: Mapping[str, Tensor]) -> None:
    """Raise BundleError if parts are far larger than the weights, without allocating them."""
    budget = parameter_budget(weights)
    with limit_parameters(weights), meta_device():
        for spec in specs:
            try:
                part = build_from_spec(spec)
            except SbkitError:
                raise
            except Exception:  # a class may compute with values, and "meta" has none
                continue
            for module in part.modules() if isinstance(part, nn.Module) else ():
                tensors = [*vars(module).values(), *vars(module)["_buffers"].values()]
                budget -= sum(value.numel() for value in tensors if isinstance(value, Tensor))
    if budget < 0:
        raise BundleError("The buffers of the model are more than twice as large as its weights.")


def assemble(contents: BundleContents, user_modules: frozenset[str]) -> tuple[Any, list[nn.Module]]:
    """Build the parts and the task's model from them; return the model and the parts."""
    config, task = contents.config, contents.task
    model_class = task.model_class()
    with translate(
        Exception,  # the user's parts may not fit
        BundleError,
        lambda error: (
            f"The parts of this bundle do not fit {model_class.__name__}: "
            f"{type(error).__name__} ({str(error)[:200]}{place_of(error)})."
        ),
    ):
        parts = {
            name: build_from_spec(spec, user_modules=user_modules)
            for name, spec in config.parts.items()
        }
        model = nn.ModuleList(parts[name] for name in config.model).eval()
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        for module in modules:
            module.eval()
        require_rate(parts, config.sample_rate)
        network = model_class(model=model, **parts, **task.model_arguments(contents.labels))
        return network, modules
