"""Train sbkit and SpeechBrain in alternating rounds, and compare their speed.

python -m tools.bench_train [--rounds 5] [--seconds 20] [--only-sbkit] [--yaml FILE]
    [--key=value of the YAML ...]

SpeechBrain's side is its CommonVoice transformer recipe. All sides have the same corpus (48 kHz
mp3; without --data_folder, the default corpus is converted), labels, precision, number of
parameters within 1 %, and maximum seconds of audio in an update.

`rtfx` is seconds of audio trained on per second, and the last column its ratio to the second side,
the faster of SpeechBrain's. `update` is the mean number of seconds of audio in an update. A small
corpus makes it low: SpeechBrain's 200 buckets fill only with many clips, and small batches are
slower. `memory` is the largest in GB. `tflops` counts matrix products, convolutions and attention,
padding included, as torch does. On a GPU listed in PEAKS, `mfu` is its share of the GPU's peak in
bfloat16.
"""

import argparse
import re
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.bench import Figures, Worker, answer, start_worker, take_turns

WAITING = "OMP_WAIT_POLICY"
YAML = "hparams/ctc.yaml"
# The sides, and the environment variables of each; sbkit itself chooses how its threads wait.
SIDES = {
    "sbkit": {},
    "speechbrain active": {WAITING: "active"},
    "speechbrain passive": {WAITING: "passive"},
}
DEFAULTS = (  # of YAML: CTC and attention, 2.8 million parameters; each clip is listed eight times
    *("--num_encoder_layers=4", "--num_decoder_layers=2", "--d_ffn=576", "--ctc_weight=0.3"),
    *("--token_type=bpe", "--vocab_size=100", "--batch_seconds=60.0", "--number_of_epochs=11"),
)
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}  # TFLOP/s, dense, by NVIDIA


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in a round")
    parser.add_argument("--yaml", default=YAML, help="train this model")
    parser.add_argument("--only-sbkit", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.side:
        run_side(options, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options, overrides, Path(folder))


def compare(options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Run all sides in turns, and print the results."""
    arguments = ["--yaml", options.yaml, "--folder", str(folder), f"--seconds={options.seconds}"]
    arguments += [*DEFAULTS * (options.yaml == YAML), *overrides]
    with ExitStack() as stack:
        sides: list[Worker] = []
        for name, variables in SIDES.items():
            start = start_worker("tools.bench_train", name, arguments, **variables)
            side = stack.enter_context(start)
            sides.append(side)
            print(f"{name}: {side.facts['parameters']:,} parameters, {side.facts['device']}")
            # On a GPU, waiting threads do not matter, and three models may not fit into its memory.
            if options.only_sbkit or (len(sides) == 2 and "cuda" in sides[0].facts["device"]):
                break
        base = sides[:2][-1].name
        take_turns({side.name: side.measure for side in sides}, options.rounds, base)


def run_side(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Train and answer for each line of standard input."""
    from sbkit.base.allocator import keep_freed_memory
    from sbkit.base.openmp import ThreadWaiting

    keep_freed_memory()
    with ThreadWaiting():
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from tools.bench_sides import SbkitSide, make_side

        kind: Any = SbkitSide
        if options.side != "sbkit":  # only its own toolkit is imported
            from tools.bench_speechbrain import SpeechBrainSide

            kind = SpeechBrainSide
        side = make_side(kind, Path(options.yaml), overrides, options.folder)
        parameters = sum(p.numel() for p in side.model.parameters())
        device = next(side.model.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        with FlopCounterMode(display=False) as counter, lengths_on_device():
            _, padded_seconds = side.step(next(side.batches))
        flops_per_second = counter.get_total_flops() / padded_seconds
        on_gpu = device.type == "cuda"
        train_round = partial(train, side, options.seconds, flops_per_second, on_gpu=on_gpu)
        facts = {"parameters": parameters, "device": str(device)}
        answer(facts, lambda: with_peak_share(train_round(), name))


def with_peak_share(figures: Figures, gpu: str) -> Figures:
    """Add the share of the peak of a GPU, if its name has it: "NVIDIA A100-SXM4-80GB"."""
    names = re.split(r"\W+", gpu)
    peak = next((flops for name, flops in PEAKS.items() if name in names), None)
    return figures if peak is None else {**figures, "mfu": figures["tflops"] / peak}


@contextmanager
def lengths_on_device() -> Iterator[None]:
    """Pass lengths on the device of the log-probabilities to PyTorch's CTC.

    On CUDA, it takes lengths on the CPU, as sbkit passes them, but not within FlopCounterMode.
    """
    from torch.nn.functional import ctc_loss

    def place_lengths(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
        device_lengths = (length.to(log_probs.device) for length in lengths)
        return ctc_loss(log_probs, targets, *device_lengths, **options)

    with patch("sbkit.models.loss.ctc_loss", place_lengths):
        yield


def train(side: Any, seconds: float, flops_per_second: float, *, on_gpu: bool) -> dict[str, float]:
    """Train for some seconds and return the figures; flops_per_second: of padded audio."""
    import torch

    audio = padded = waiting = 0.0
    updates = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        asked = time.perf_counter()
        batch = next(side.batches)
        waiting += time.perf_counter() - asked
        audio_seconds, padded_seconds = side.step(batch)
        audio += audio_seconds
        padded += padded_seconds
        updates += 1
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if on_gpu:
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() / 2**30
    duration = time.perf_counter() - start
    return {
        "rtfx": audio / duration,
        "update": audio / updates,
        "padding": 1 - audio / padded,
        "waiting": waiting / duration,
        "memory": memory,  # GB
        "tflops": flops_per_second * padded / duration / 1e12,
    }


if __name__ == "__main__":
    main()
