"""Train sbkit and other toolkits in alternating rounds, and compare their speed.

python -m tools.bench_train [--rounds 5] [--seconds 20] [--to-cer 0.5] [--only-sbkit] [--yaml FILE]
    [--key=value of the YAML ...]

By default, sbkit is compared with SpeechBrain's CommonVoice transformer recipe. With
--yaml hparams/ctc_pretrained.yaml, it is compared with SpeechBrain's CTC recipe and Hugging Face's
script: all fine-tune a wav2vec 2.0 `base` of random weights (--pretrained names another, or a
Whisper) on clips of at most 10 s.

All sides have the same corpus (48 kHz mp3; without --data_folder, the default corpus is converted),
labels, precision, number of parameters within 1 % (4 % beside the CTC recipe, because of its linear
layers), and maximum seconds of audio in an update (mean seconds when fine-tuning: there the others
count clips). Each side is a process, suspended until its turn so that none of its threads spins.

Prints RTFx (seconds of audio trained on per second) by round, the medians and their ratio. `update`
is the mean number of seconds of audio in an update. A small corpus makes it low: SpeechBrain's 200
buckets fill only with many clips, and small batches are slower. `tflops` counts matrix products,
convolutions and attention, padding included, as torch does. On a GPU listed in PEAKS, `mfu` is its
share of the GPU's peak in bfloat16.
"""

import argparse
import json
import math
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

WAITING = "OMP_WAIT_POLICY"
YAML, FINE_TUNING = "hparams/ctc.yaml", "hparams/ctc_pretrained.yaml"
# The sides, and the environment variables of each; sbkit itself chooses how its threads wait.
SIDES = {
    "sbkit": {},
    "speechbrain active": {WAITING: "active"},
    "speechbrain passive": {WAITING: "passive"},
}
FINE_TUNING_SIDES = {
    "sbkit": {},
    "speechbrain": {WAITING: "active"},
    "huggingface": {WAITING: "active"},
}
DEFAULTS = {  # for the knobs of a YAML
    YAML: (  # CTC and attention, 2.8 million parameters; the corpus lists every clip eight times
        *("--num_encoder_layers=4", "--num_decoder_layers=2", "--d_ffn=576", "--ctc_weight=0.3"),
        *("--token_type=bpe", "--vocab_size=100", "--batch_seconds=60.0", "--number_of_epochs=11"),
    ),
    # All sides compute all layers, and have the dropout of Hugging Face's script. With batches of
    # 32 s, SpeechBrain ran out of 24 GiB.
    FINE_TUNING: (
        *("--layerdrop=0.0", "--dropout=0.0", "--activation_dropout=0.0"),
        *("--batch_seconds=16.0", "--max_seconds=10.0", "--number_of_epochs=11"),
    ),
}
MAX_TIME_FACTOR = 6  # the race ends when the other side has taken this many times as long
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}  # TFLOP/s, dense, by NVIDIA


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in a round")
    parser.add_argument("--to-cer", type=float, help="then train until dev CER is below this")
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


class Side:
    """A process that works on request, and is suspended otherwise."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        variables: dict[str, str],
        module: str = "tools.bench_train",
    ) -> None:
        self.name = name
        self.rounds: list[dict[str, float]] = []
        toolkit = name.split()[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--side", toolkit, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self.facts = self._read()

    def ask(self, **question: float) -> dict[str, Any]:
        """Resume the process until it answers."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def median(self, figure: str) -> float:
        """Return the median of a figure over the rounds."""
        return statistics.median(measured[figure] for measured in self.rounds)

    def close(self) -> None:
        """Kill the process, and close its pipes."""
        with self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        """Read the next answer of the process, and suspend it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._process.send_signal(signal.SIGSTOP)
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"The process of {self.name} has ended. Its error is above.")


def take_turns(sides: Sequence[Side], rounds: int, **question: float) -> None:
    """Ask the sides in turns; store and print their answers, after a round that warms up."""
    for number in range(rounds + 1):
        for side in sides:
            answer = side.ask(**question)
            if number:
                side.rounds.append(answer)
                print(f"round {number} {side.name}: {answer['rtfx']:.3g} RTFx", flush=True)


def compare(options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Run all sides in turns, and print the results."""
    arguments = ["--yaml", options.yaml, "--folder", str(folder)]
    arguments += [*DEFAULTS.get(options.yaml, ()), *overrides]
    variables_of_sides = SIDES
    if options.yaml == FINE_TUNING:
        variables_of_sides = FINE_TUNING_SIDES
        names = {option.partition("=")[0] for option in overrides}
        if names.isdisjoint(("--pretrained", "--encoder_config")):
            from tools.bench_pretrained import save_base

            arguments.append(f"--pretrained={save_base(folder / 'base')}")
    with ExitStack() as stack:
        sides: list[Side] = []
        for name, variables in variables_of_sides.items():
            side = stack.enter_context(closing(Side(name, arguments, variables)))
            sides.append(side)
            print(f"{name}: {side.facts['parameters']:,} parameters, {side.facts['device']}")
            # On a GPU, waiting threads do not matter, and three models may not fit into its memory.
            if options.only_sbkit or (len(sides) == 2 and "cuda" in sides[0].facts["device"]):
                break
        take_turns(sides, options.rounds, seconds=options.seconds)
        print(table(sides))
        if options.to_cer is not None:
            race(sides, options.to_cer, options.seconds)


def table(sides: Sequence[Side]) -> str:
    """Write the medians, and the speed of the first side relative to the best other side."""
    gpu_name = re.split(r"\W+", sides[0].facts["name"])  # "NVIDIA A100-SXM4-80GB"
    peak = next((flops for name, flops in PEAKS.items() if name in gpu_name), None)
    columns = [name for name in sides[0].rounds[0] if name != "seconds"]
    header = [*columns, "mfu"] if peak else columns
    lines = [f"{'':20}" + "".join(f"{name:>12}" for name in header)]
    for side in sides:
        figures = [side.median(name) for name in columns]
        if peak:
            figures.append(side.median("tflops") / peak)
        lines.append(f"{side.name:20}" + "".join(f"{figure:12.3g}" for figure in figures))
    if len(sides) > 1:
        ratio = sides[0].median("rtfx") / max(side.median("rtfx") for side in sides[1:])
        lines.append(f"sbkit to the best of the others: {ratio:.2f}")
    return "\n".join(lines)


def race(sides: Sequence[Side], target_cer: float, seconds: float) -> None:
    """Train the first side, and then the fastest other one, until its dev CER is below the target.

    The other one may take MAX_TIME_FACTOR times as long.
    """
    durations: list[float] = []
    for side in [sides[0], *sorted(sides[1:], key=lambda side: -side.median("rtfx"))[:1]]:
        cer = math.inf
        duration = sum(measured["seconds"] for measured in side.rounds)
        max_duration = MAX_TIME_FACTOR * durations[0] if durations else math.inf
        while cer >= target_cer and duration < max_duration:
            duration += side.ask(seconds=seconds)["seconds"]
            cer = side.ask(evaluate=1)["cer"]
            print(f"{side.name}: dev CER {cer:.3f} after {duration:.0f} s", flush=True)
        durations.append(duration)
    if len(durations) > 1:
        more_than = "more than " if cer >= target_cer else ""
        ratio = durations[1] / durations[0]
        print(f"to dev CER {target_cer}: {more_than}{ratio:.1f} times as fast", flush=True)


def make_side(options: argparse.Namespace, overrides: Sequence[str]) -> Any:
    """Make a side; only its own toolkit is imported."""
    from tools import bench_sides

    if options.side == "sbkit":
        make: Any = bench_sides.SbkitSide
    elif options.yaml == FINE_TUNING:
        from tools import bench_pretrained

        make = bench_pretrained.SIDES[options.side]
    else:
        from tools import bench_speechbrain

        make = bench_speechbrain.SpeechBrainSide
    return bench_sides.make_side(make, Path(options.yaml), overrides, options.folder)


def run_side(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Train and answer for each line of standard input."""
    from sbkit.base.allocator import keep_freed_memory
    from sbkit.base.openmp import ThreadWaiting

    keep_freed_memory()
    with ThreadWaiting():
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        side: Any = make_side(options, overrides)
        parameters = sum(p.numel() for p in side.model.parameters())
        device = next(side.model.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = {"parameters": parameters, "device": str(device), "name": name}
        print(json.dumps(facts), flush=True)
        with FlopCounterMode(display=False) as counter, lengths_on_device():
            _, padded_seconds = side.step(next(side.batches))
        flops_per_second = counter.get_total_flops() / padded_seconds
        for line in sys.stdin:
            question = json.loads(line)
            if "evaluate" in question:
                answer = {"cer": side.cer()}
            else:
                on_gpu = device.type == "cuda"
                answer = train(side, question["seconds"], flops_per_second, on_gpu=on_gpu)
            print(json.dumps(answer), flush=True)


@contextmanager
def lengths_on_device() -> Iterator[None]:
    """Pass lengths on the device of the log-probabilities to PyTorch's CTC.

    On CUDA, it takes lengths on the CPU, as sbkit passes them, but not within FlopCounterMode.
    """
    from torch.nn.functional import ctc_loss

    def place_lengths(log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
        placed = (length.to(log_probs.device) for length in lengths)
        return ctc_loss(log_probs, targets, *placed, **options)

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
        "seconds": duration,
        "rtfx": audio / duration,
        "update": audio / updates,
        "padding": 1 - audio / padded,
        "waiting": waiting / duration,
        "memory": memory,  # GB
        "tflops": flops_per_second * padded / duration / 1e12,
    }


if __name__ == "__main__":
    main()
