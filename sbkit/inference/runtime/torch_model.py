"""A bundle's model in torch, on the device and in the precision that were asked for.

Legend: B clips, S samples, U frames, V tokens or labels.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
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
from sbkit.checkpoint.comparison import check_finite, check_same_model
from sbkit.decoding.attention import Counts, Floats
from sbkit.distributed.device import DTYPES, Placement
from sbkit.inference.bundle.bundle import WEIGHTS, Bundle, ReadBundle, read_bundle
from sbkit.inference.bundle.module_spec import build
from sbkit.inference.runtime.compiled import Compilation, CompiledBlocks
from sbkit.inference.runtime.model import (
    Batch,
    Effective,
    Encoded,
    naming_audio,
    require_effective,
    run_batches,
)
from sbkit.models.encoder import require_rate

CPU = Placement(torch.device("cpu"), "fp32")
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d)  # whose outputs have the precision of the products


class TorchModel:
    """A model on its device, which is given clips and gives arrays.

    network: the model of a task, such as an AsrModel; parts: all modules that it calls.
    """

    def __init__(
        self,
        network: Any,
        *,
        parts: Iterable[nn.Module],
        sample_rate: int,
        placement: Placement = CPU,
        compilation: Compilation | None = None,
    ) -> None:
        """Move the model to its device, run it, and read back where and how it ran.

        With a ``compilation`` it is compiled, and warmed up.

        Raises:
            SbkitError: that is not what was asked for.
        """
        self.network = network
        self._placement, self._rate = placement, sample_rate
        for part in (network.model, *parts):
            part.to(placement.device)
        self._blocks: CompiledBlocks | None = None
        with naming_audio("a second of silence"):
            found = self._read_back()
            if compilation is not None:
                self._blocks = CompiledBlocks(network.model, compilation, placement.device)
                self._blocks.warm_up(self._run_silence)
                found = replace(found, compiled=compilation.mode)
        self.effective = require_effective(
            found, device=str(placement.device), precision=placement.precision
        )

    @cached_property
    def samples_per_frame(self) -> int:
        """How many samples go by from one frame of CTC to the next."""
        with self._uncompiled():
            count: int = self.network.samples_per_frame
        return count

    def encode(self, clips: Sequence[Samples]) -> list[Encoded]:
        """Run the encoder on clips in one batch; where it is compiled, in batches of its table."""
        blocks = self._blocks
        if blocks is None:
            return self._score(*self._as_batch(clips))
        found: list[Encoded] = []
        for start in range(0, len(clips), blocks.most_clips):
            few = clips[start : start + blocks.most_clips]
            batch = self._as_batch(few, blocks)
            found += blocks.call(partial(self._score, *batch))[: len(few)]
        return found

    def encode_batches(self, batches: Sequence[Batch]) -> list[list[Encoded]]:
        """Run the encoder on several batches; on the CPU at once, each in a thread.

        Not where it is compiled, which one thread has to run.
        """
        on_cpu = self._placement.device.type == "cpu"
        threads = torch.get_num_threads() if on_cpu and self._blocks is None else 1
        prepare = partial(torch.set_num_threads, 1)
        try:
            return run_batches(self.encode, batches, threads=threads, prepare=prepare)
        finally:  # threads to come begin with what was set last in any
            torch.set_num_threads(torch.get_num_threads())

    @torch.inference_mode()
    def _score(self, audio: Tensor, audio_lengths: Tensor) -> list[Encoded]:
        """Run the encoder on a padded batch: (B, S), (B,)."""
        with self._placement.autocast():
            states, frames = self.network.encode(audio, audio_lengths)
            rows: Tensor = self.network.ctc_log_probs(states).cpu()
        if self._blocks is not None:
            states = states.clone()  # CUDA graphs write the next batch's to the same place
        found = zip(rows, states, frames.tolist(), strict=True)
        return [Encoded(row[:count].numpy(), state[:count]) for row, state, count in found]

    @torch.inference_mode()
    def decoder_log_probs(self, states: Tensor, tokens: Counts) -> Floats:
        """Ask the attention decoder about tokens: (U, D), (N, L) -> (N, L + 1, V)."""
        with self._uncompiled():
            scores: Floats = self.network.score_tokens(states, tokens)
            return scores

    def _uncompiled(self) -> AbstractContextManager[object]:
        """Run compiled blocks as they are, for shapes that a batch does not have."""
        return nullcontext() if self._blocks is None else torch.compiler.set_stance("force_eager")

    def _run_silence(self, clips: int, seconds: float) -> None:
        self.encode([np.zeros(round(seconds * self._rate), np.int16)] * clips)

    @torch.inference_mode()
    def predict(self, clips: Sequence[Samples]) -> Any:
        """Return what the task's model predicts of clips in one batch: (S,) of int16 each."""
        with self._placement.autocast():
            return self.network.predict(*self._as_batch(clips))

    def probabilities(self, clips: Sequence[Samples]) -> npt.NDArray[np.float32]:
        """Compute the probability of each label: (S,) of int16 each -> (B, V)."""
        log_probs: Tensor = self.predict(clips)
        return log_probs.float().exp().cpu().numpy()

    def _as_batch(
        self, clips: Sequence[Samples], blocks: CompiledBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pad clips to one length, in the scale of int16: (S,) each -> (B, S), (B,).

        For compiled blocks to a shape of theirs: rows that are added are silent.
        """
        shape = (len(clips), max(map(len, clips)))
        if blocks is not None:
            shape = blocks.padded(*shape, self._rate)
        audio, lengths = torch.zeros(shape), torch.full(shape[:1], shape[1])
        for place, clip in enumerate(clips):
            audio[place, : len(clip)] = torch.from_numpy(np.asarray(clip, np.float32))
            lengths[place] = len(clip)
        return audio.to(self._placement.device), lengths

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


def load_bundle(folder: Path, *, own: frozenset[str] = frozenset()) -> Bundle:
    """Load a bundle with its model in torch, on the CPU; ``own`` names modules of the user's.

    Raises SbkitError when a file is missing, damaged, of another model, or not what it should be.
    """
    read = read_bundle(folder, WEIGHTS, own=own)
    return replace(read.bundle, model=load_torch(read, folder, own=own))


def load_torch(
    read: ReadBundle,
    folder: Path,
    *,
    own: frozenset[str] = frozenset(),
    placement: Placement = CPU,
    compilation: Compilation | None = None,
) -> TorchModel:
    """Build the model of a bundle, and load the weights that were read with it.

    Raises:
        SbkitError: a part is not on the list, or the weights are damaged or of another model.
    """
    file, bundle = folder / WEIGHTS, read.bundle
    weights = _parse_weights(read.weights, file)
    model, parts = _assemble(bundle, own)
    modules: nn.ModuleList = model.model
    check_same_model(weights, modules.state_dict(), of=str(file))
    names = {name for name, _ in modules.named_parameters()}
    check_finite(weights, of=str(file), parameters=names)
    modules.load_state_dict(weights)
    return TorchModel(
        model,
        parts=parts,
        sample_rate=bundle.config.sample_rate,
        placement=placement,
        compilation=compilation,
    )


def _assemble(bundle: Bundle, own: frozenset[str]) -> tuple[Any, list[nn.Module]]:
    """Build the parts, and give them to the task's class with what it takes of the labels."""
    config, task = bundle.config, bundle.task
    more = {} if task.labels is None else task.labels.arguments(bundle.labels)
    try:
        parts = {name: build(each, own=own) for name, each in config.parts.items()}
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
