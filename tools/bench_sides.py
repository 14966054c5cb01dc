"""The sides of `tools/bench_train`: their corpus, rounds and profile, and sbkit's own side."""

import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import attrgetter
from pathlib import Path
from timeit import repeat
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from recipes.AsteriskPrompts.corpus import AsteriskPrompts
from sbkit.audio.io import read_audio
from sbkit.base.units import at_speed
from sbkit.config.overrides import parse_command
from sbkit.run.run import Run
from sbkit.train.setup import PreparedRun, make_brain
from tools.bench import Figures
from tools.bench_gpu import COPIES, write_split

MP3_RATE = 48_000
MIN_UPDATES = 8  # in each round; the warm-up round compiles blocks for some shapes
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}  # TFLOP/s, dense, by NVIDIA
NUM_STEPS = 6  # steps that are profiled
NUM_LISTED = 15  # kernels and host operations


def make_side(name: str, yaml: Path, arguments: Sequence[str], folder: Path) -> Any:
    """Prepare the corpus and the labels of all sides, and make one of them: sbkit, or SpeechBrain.

    A side has a ``model``, endless ``batches``, epoch by epoch, and a method ``step``.
    """
    _, overrides = parse_command([str(yaml), *arguments])
    if not overrides.get("data_folder"):
        overrides["data_folder"] = str(convert(folder / "release"))
    overrides = {"check": False, "output_folder": str(folder / name), **overrides}
    setup = Run(yaml, overrides).prepare()
    if name == "sbkit":
        return SbkitSide(setup)
    from tools.bench_speechbrain import SpeechBrainSide  # only its own toolkit is imported

    return SpeechBrainSide(setup)


def convert(release: Path) -> Path:
    """Write the default corpus as 48 kHz mp3, the format of Common Voice, unless it exists.

    Each training clip is listed several times: 419 clips are too few to fill batches with clips of
    similar lengths, as a corpus of many hours does.
    """
    corpus = AsteriskPrompts({"language": "en"})

    def read_clips(split: str) -> Iterator[tuple[Any, list[str]]]:
        for clip in corpus.clips(split):
            copies = COPIES if split == "train" else 1
            yield read_audio(clip.path, MP3_RATE), [clip.sentence] * copies

    for split in ("train", "dev", "test"):
        if not (release / f"{split}.tsv").exists():
            write_split(release, split, read_clips(split), MP3_RATE, "mp3")
    return release


class SbkitSide:
    """Train as `Brain.fit` does, without writing files."""

    def __init__(self, setup: PreparedRun) -> None:
        self._setup = setup
        self.brain = make_brain(setup)
        self.brain.on_fit_start()
        self.brain.training_step.train_mode()
        self.model = self.brain.modules
        self.batches = self._batches()

    def _batches(self) -> Iterator[Any]:
        loader: Any = self._setup.loaders.train
        for epoch in count(1):
            self._setup.hparams["epoch_counter"].current = epoch
            self.brain.step = 0
            loader.batch_sampler.set_epoch(epoch)
            for batch in loader:  # the share determines the learning rate
                self.brain.epoch_share = self.brain.step / len(loader)
                yield batch

    def step(self, batch: Any) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        self.brain.step += 1
        self.brain.fit_batch(batch)
        percents = [g.speed_percent for g in batch.speed_groups for _ in range(g.num_utterances)]
        lengths = [*map(at_speed, batch.audio_lengths.tolist(), percents)]
        return batch.seconds, batch.seconds * max(lengths) * len(lengths) / sum(lengths)


def iterate_rounds(make: Callable[[str], Any], switch: str, seconds: float) -> Iterator[Figures]:
    """Make a side, count the operations of its first step, and yield the figures of each round."""
    side = make(switch)
    device = next(side.model.parameters()).device
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_name(device) if on_gpu else ""
    # Within FlopCounterMode, torch would mark the blocks as not to be compiled, for good.
    eager = torch.compiler.set_stance("force_eager")
    counter = FlopCounterMode(display=False)
    with eager, counter, patch("sbkit.models.loss.ctc_loss", ctc_loss_of_lengths_on_device):
        _, padded_seconds = side.step(next(side.batches))
    flops_per_second = counter.get_total_flops() / padded_seconds  # of padded audio
    while True:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        audio = padded = waiting = 0.0
        updates = 0
        start = time.perf_counter()
        while updates < MIN_UPDATES or time.perf_counter() - start < seconds:
            request_time = time.perf_counter()
            batch = next(side.batches)
            waiting += time.perf_counter() - request_time
            audio_seconds, padded_seconds = side.step(batch)
            audio += audio_seconds
            padded += padded_seconds
            updates += 1
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if on_gpu:
            torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated() / 2**30
        duration = time.perf_counter() - start
        figures = {
            "rtfx": audio / duration,
            "update": audio / updates,
            "padding": 1 - audio / padded,
            "waiting": waiting / duration,
            "memory": memory,  # GB
            "tflops": flops_per_second * padded / duration / 1e12,
        }
        yield with_peak_share(figures, gpu)


def ctc_loss_of_lengths_on_device(log_probs: Tensor, *targets: Any, **options: Any) -> Tensor:
    """Compute CTC: on CUDA it takes sbkit's lengths on the CPU, except in FlopCounterMode."""
    return ctc_loss(log_probs, *(tensor.to(log_probs.device) for tensor in targets), **options)


def with_peak_share(figures: Figures, gpu: str) -> Figures:
    """Add the share of a GPU's peak if PEAKS has it; gpu: such as "NVIDIA A100-SXM4-80GB"."""
    names = re.split(r"\W+", gpu)
    peak = next((flops for name, flops in PEAKS.items() if name in names), None)
    return figures if peak is None else {**figures, "mfu": figures["tflops"] / peak}


def profile_steps(side: Any) -> Figures:
    """Print the slowest kernels and host operations, and return figures of a step.

    `host ms` is the time until a step is launched on an idle GPU, without the profiler. `GPU ms` is
    the time of the kernels. `operations` counts calls of ATen, nested ones included.
    """
    batches = iter([next(side.batches) for _ in range(2 * NUM_STEPS)])
    wait = torch.cuda.synchronize if torch.cuda.is_available() else "pass"
    seconds = repeat(lambda: side.step(next(batches)), wait, number=1, repeat=NUM_STEPS)
    with profile(acc_events=True) as profiler:
        for batch in batches:
            side.step(batch)
    events = [event for event in profiler.key_averages() if not event.is_user_annotation]
    kernels = [event for event in events if event.device_type.name != "CPU"]
    on_host = [event for event in events if event.device_type.name == "CPU"]
    for field, group in (("self_device_time_total", kernels), ("self_cpu_time_total", on_host)):
        print(f"| {field} | ms of a step | calls |\n| --- | --- | --- |")
        for event in sorted(group, key=attrgetter(field), reverse=True)[:NUM_LISTED]:
            ms = getattr(event, field) / 1e3 / NUM_STEPS
            print(f"| {event.key:.100} | {ms:.3f} | {event.count / NUM_STEPS:.1f} |")
    calls = sum(event.count for event in on_host if event.key.startswith("aten::"))
    gpu_ms = sum(event.self_device_time_total for event in kernels) / 1e3 / NUM_STEPS
    return {
        "host ms": sum(seconds) * 1e3 / NUM_STEPS,
        "GPU ms": gpu_ms if kernels else "-",
        "operations": calls / NUM_STEPS,
    }
