"""A bundle's model in torch, on the device and in the precision that were asked for.

Legend: B clips, S samples, U frames, V tokens or labels.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.bundle import WEIGHTS, Bundle, ReadBundle, read_bundle
from sbkit.bundle.module_spec import build
from sbkit.bundle.protocols import ChunkSizes, Effective, Encoded
from sbkit.checkpoint.weights import check_finite, check_same_model, limit_parameters
from sbkit.decoding.attention import Counts, Floats
from sbkit.decoding.frames import LogProbs
from sbkit.distributed.device import DTYPES, Placement
from sbkit.models.chunks import ChunkState
from sbkit.models.compiling import find_blocks
from sbkit.models.encoder import require_rate
from sbkit.models.streaming import ChunkedModel, streaming_model
from sbkit.runtime.model import Batch, naming_audio, require_effective, run_batches
from sbkit.runtime.shapes import Compilation, keep_device_guard, own_cuda_graphs, padded_length

WARM_UPS = 3  # of a shape: CUDA graphs run once as they are, are recorded, and are replayed
CPU = Placement(torch.device("cpu"), "fp32")
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # whose outputs have the precision of the products


class TorchModel:
    """A model on its device, which is given clips and gives arrays.

    network: the model of a task, such as an AsrModel; parts: all modules that it calls; lengths:
    samples that batches are padded to, none for their longest clip.
    """

    lengths: Sequence[int] = ()

    def __init__(
        self,
        network: Any,
        *,
        parts: Iterable[nn.Module],
        sample_rate: int,
        placement: Placement = CPU,
    ) -> None:
        """Move the model to its device, run it, and read back where and how it ran.

        Raises:
            SbkitError: that is not what was asked for.
        """
        self.network = network
        self._placement, self._rate = placement, sample_rate
        for part in (network.model, *parts):
            part.to(placement.device)
        with naming_audio("a second of silence"):
            found = self._read_back()
        self.effective = require_effective(
            found, device=str(placement.device), precision=placement.precision
        )

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        return int(self.network.samples_per_frame)

    @torch.inference_mode()
    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips in one batch: (S,) of int16 each."""
        with self._placement.autocast():
            states, frames = self.network.encode(*self._as_batch(clips, self._shape_of(clips)))
            rows: Tensor = self.network.ctc_log_probs(states).cpu()
        found = zip(rows, states, frames.tolist(), strict=True)
        return [Encoded(row[:count].numpy(), state[:count]) for row, state, count in found]

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on several batches; on the CPU at once, each in a thread."""
        on_cpu = self._placement.device.type == "cpu"
        threads = torch.get_num_threads() if on_cpu else 1
        prepare = partial(torch.set_num_threads, 1)
        try:
            return run_batches(self.encode, batches, threads=threads, prepare=prepare)
        finally:  # threads to come begin with what was set last in any
            torch.set_num_threads(torch.get_num_threads())

    @property
    def _streaming(self) -> ChunkedModel | None:
        return streaming_model(self.network)

    @property
    def chunks(self) -> ChunkSizes | None:
        """The samples of a chunk; None for a model that takes whole clips alone."""
        found = self._streaming
        return None if found is None else ChunkSizes(found.step, found.window, found.shortest)

    def start(self) -> ChunkState:
        """Return the state of one session before its first sample."""
        assert self._streaming is not None
        return self._streaming.start()

    @torch.inference_mode()
    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ChunkState]
    ) -> list[tuple[LogProbs, ChunkState]]:
        """Run one chunk of each session in one batch: (S,) of int16 each -> (U, V), its state."""
        assert self._streaming is not None
        state: Any = type(states[0]).stack(states)
        shape = (len(chunks), max(self._streaming.window, *map(len, chunks)))
        with self._placement.autocast():
            batch = self._as_batch(chunks, shape)
            rows, frames, after = self._streaming.forward_chunk(*batch, state)
        found = zip(rows.cpu(), frames.tolist(), after.rows(), strict=True)
        return [(row[:count].numpy(), each) for row, count, each in found]

    @torch.inference_mode()
    def decoder_log_probs(self, states: Tensor, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""
        scores: Floats = self.network.score_tokens(states, tokens)
        return scores

    @torch.inference_mode()
    def predict(self, clips: Sequence[Samples]) -> Any:
        """Return what the task's model predicts of clips in one batch: (S,) of int16 each."""
        with self._placement.autocast():
            return self.network.predict(*self._as_batch(clips, self._shape_of(clips)))

    @property
    def settings(self) -> Any:
        """The plain data that callers of the graphs need."""
        return self.network.settings

    @torch.inference_mode()
    def run(self, graph: str, *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Run a graph of the task: arrays in, arrays out."""
        tensors = (torch.from_numpy(each).to(self._placement.device) for each in arrays)
        with self._placement.autocast():
            found = getattr(self.network, graph)(*tensors)
        return [each.cpu().numpy() for each in found]

    def probabilities(self, clips: Sequence[Samples]) -> npt.NDArray[np.float32]:
        """Compute the probability of each label: (S,) of int16 each -> (B, V)."""
        log_probs: Tensor = self.predict(clips)
        return log_probs.float().exp().cpu().numpy()

    def _shape_of(self, clips: Sequence[Samples]) -> tuple[int, int]:
        return self._padded_shape(len(clips), max(map(len, clips)))

    def _as_batch(self, clips: Sequence[Samples], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Pad clips to one length, in the scale of int16: (S,) each -> (B, S), (B,)."""
        audio, lengths = torch.zeros(shape), torch.full(shape[:1], shape[1])
        for place, clip in enumerate(clips):
            audio[place, : len(clip)] = torch.from_numpy(np.asarray(clip, np.float32))
            lengths[place] = len(clip)
        return audio.to(self._placement.device), lengths

    def _padded_shape(self, clips: int, samples: int) -> tuple[int, int]:
        return clips, padded_length(samples, self.lengths)

    def _read_back(self) -> Effective:
        """Run a second of silence, and note on what and in which types it is computed."""
        types: set[torch.dtype] = set()

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                types.add(output.dtype)

        silence = [np.zeros(self._rate, np.int16)]
        with ExitStack() as hooks:
            for each in self.network.model.modules():
                if isinstance(each, MATRICES):
                    hooks.enter_context(each.register_forward_hook(note))
            self.predict(silence)
        tensors = [*self.network.model.parameters(), *self.network.model.buffers()]
        places = {each.device for each in tensors}
        devices = sorted("mps" if each.type == "mps" else str(each) for each in places)
        precisions = sorted({PRECISIONS.get(each, str(each)) for each in types})
        return Effective(
            runtime="torch",
            device=" and ".join(devices) or str(self._placement.device),
            precision=" and ".join(precisions) or self._placement.precision,
        )


class CompiledModel(TorchModel):
    """A model whose repeated blocks are compiled for a closed table of shapes; it has one thread.

    Compiling takes seconds a shape. So every shape is compiled while the model is loaded, clips are
    padded to the next one, and what would be compiled later is an error of torch.
    """

    def __init__(self, network: Any, *, compilation: Compilation, **options: Any) -> None:
        """Make a model as its base does, compile its blocks, and run each shape of the table."""
        self._compilation, self._stance = compilation, "default"
        super().__init__(network, **options)
        mode = {}
        if compilation.backend == "inductor":
            own_cuda_graphs()
            mode["mode"] = compilation.mode
        keep_device_guard()
        dynamo: Any = import_module("torch._dynamo")
        dynamo.config.recompile_limit = 1000  # of a class of blocks; here the table limits it
        compile: Any = {"backend": compilation.backend, "dynamic": False, **mode}
        is_live = compilation.live is not False and self._streaming is not None
        block: Any
        for block in chain.from_iterable(map(find_blocks, network.model)):
            block.compile(**compile)
            if is_live and hasattr(block, "forward_chunk"):
                block.forward_chunk = torch.compile(block.forward_chunk, **compile)
        for _ in range(WARM_UPS):
            if is_live:
                self._warm_up_chunks()
            if not (is_live and compilation.live):
                self._warm_up_clips()
        self._stance = "fail_on_recompile"
        self.effective = replace(self.effective, compiled=compilation.mode)

    def _warm_up_clips(self) -> None:
        for clips, seconds in product(self._compilation.clips, self._compilation.seconds):
            self.encode([np.zeros(round(seconds * self._rate), np.int16)] * clips)

    def _warm_up_chunks(self) -> None:
        assert self.chunks is not None
        for sessions in self._compilation.clips:
            self.advance(
                [np.zeros(self.chunks.window, np.int16)] * sessions, [self.start()] * sessions
            )

    def _rows(self, clips: int) -> int:
        return next(each for each in sorted(self._compilation.clips) if each >= clips)

    def _padded_shape(self, clips: int, samples: int) -> tuple[int, int]:
        """Return the shape of the table that holds a batch; rows that are added are silent."""
        lengths = sorted(round(each * self._rate) for each in self._compilation.seconds)
        return self._rows(clips), padded_length(samples, lengths)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Run what was compiled, and compile nothing more once it is warm."""
        if self._compilation.mode == "reduce-overhead":
            # Else each block is a step of its own, whose graph may overwrite its own input.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.compiler.set_stance(self._stance):
            yield

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips, in batches of the table.

        Raises:
            RuntimeError: a clip is longer than what was compiled.
        """
        found, most = list[Encoded](), max(self._compilation.clips)
        for start in range(0, len(clips), most):
            few = clips[start : start + most]
            with self._step():
                encoded = super().encode(few)[: len(few)]
            # CUDA graphs write the states of the next batch to the same place.
            found += [Encoded(each.log_probs, each.states.clone()) for each in encoded]
        return found

    def advance(
        self, chunks: Sequence[Samples], states: Sequence[ChunkState]
    ) -> list[tuple[LogProbs, ChunkState]]:
        """Run one chunk of each session, in batches of the table, as its base does."""
        found, most = list[tuple[LogProbs, ChunkState]](), max(self._compilation.clips)
        for start in range(0, len(chunks), most):
            few = list(zip(chunks, states, strict=True))[start : start + most]
            padded = few + few[:1] * (self._rows(len(few)) - len(few))
            with self._step():
                found += super().advance(*zip(*padded, strict=True))[: len(few)]
        return found

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on one batch after the other."""
        return [self.encode(batch) for batch in batches]

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        with torch.compiler.set_stance("force_eager"):  # its shapes are no batch's
            return super().samples_per_frame

    def decoder_log_probs(self, states: Tensor, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""
        with torch.compiler.set_stance("force_eager"):
            return super().decoder_log_probs(states, tokens)


def load_bundle(folder: Path, *, user_modules: frozenset[str] = frozenset()) -> Bundle:
    """Load a bundle with its model in torch, on the CPU; ``user_modules``: what `--import` names.

    Raises SbkitError when a file is missing, damaged, of another model, or not what it should be.
    """
    read = read_bundle(folder, WEIGHTS, user_modules=user_modules)
    return replace(read.bundle, model=load_torch(read, folder, user_modules=user_modules))


def load_torch(
    read: ReadBundle,
    folder: Path,
    *,
    user_modules: frozenset[str] = frozenset(),
    placement: Placement = CPU,
    compilation: Compilation | None = None,
) -> TorchModel:
    """Build the model of a bundle, and load the weights that were read with it.

    Raises:
        SbkitError: a part is not on the list, or the weights are damaged or of another model.
    """
    file, bundle = folder / WEIGHTS, read.bundle
    weights = _parse_weights(read.weights, file)
    with limit_parameters(weights):
        model, parts = _assemble(bundle, user_modules)
    modules: nn.ModuleList = model.model
    check_same_model(weights, modules.state_dict(), of=str(file))
    names = {name for name, _ in modules.named_parameters()}
    check_finite(weights, of=str(file), parameters=names)
    modules.load_state_dict(weights)
    make = TorchModel if compilation is None else partial(CompiledModel, compilation=compilation)
    return make(model, parts=parts, sample_rate=bundle.config.sample_rate, placement=placement)


def _assemble(bundle: Bundle, user_modules: frozenset[str]) -> tuple[Any, list[nn.Module]]:
    """Build the parts, and give them to the task's class with what it takes of the labels."""
    config, task = bundle.config, bundle.task
    more = {} if task.labels is None else task.labels.arguments(bundle.labels)
    try:
        parts = {
            name: build(each, user_modules=user_modules) for name, each in config.parts.items()
        }
        model = nn.ModuleList(parts[name] for name in config.model)
        for part in parts.values():
            part.eval()
        require_rate(parts, config.sample_rate)
        return task.import_model()(model=model, **parts, **more), [*parts.values()]
    except SbkitError:
        raise
    except Exception as error:  # parts of others, which fit no other part
        raise SbkitError(
            f"The parts must fit {task.model_class}, but it raised {type(error).__name__} "
            f"({str(error)[:200]}). Export it again."
        ) from error


def _parse_weights(content: bytes, file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise SbkitError(
            f"{file} must be a safetensors file, but cannot be read ({str(error)[:200]}). Export "
            "it again."
        ) from error
