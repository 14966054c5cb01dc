"""Train sbkit and others in alternating rounds, and compare them.

python -m tools.bench_train [--rounds 5] [--seconds 20] [--to-cer 0.5] [--alone] [--yaml FILE]
    [--key=value of the YAML ...]

The others are SpeechBrain's CommonVoice transformer recipe, or, of hparams/ctc_pretrained.yaml, its
CTC recipe and Hugging Face's script, all with a wav2vec 2.0 `base` of random weights (--pretrained
names another) and clips of at most 10 s. The same corpus (48 kHz mp3; without --data_folder the
default corpus is converted), labels, precision, number of parameters within 1 % (4 % beside the CTC
recipe, for its linear layers), and greatest seconds of audio in an update (mean ones of these two,
which count clips). All sides are processes of this one; a side that has not its turn is stopped, so
that none of its threads spins.
Prints RTFx (seconds of audio trained on per second) by round, the medians and their ratio; update
is the mean of the seconds of audio in one, which are fewer where a corpus is small: SpeechBrain's
200 buckets fill only with many clips, and small batches are slower. TFLOP/s are those of
the products of matrices, convolutions and attention, padding included, as torch counts them; on a
GPU of the table below, MFU is their share of what it could do in bfloat16.
"""

import argparse
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAITING = "OMP_WAIT_POLICY"
SIDES = {  # what is compared, and the variables that each needs: sbkit chooses how threads wait
    "sbkit": {},
    "speechbrain active": {WAITING: "active"},
    "speechbrain passive": {WAITING: "passive"},
}
YAML, FINE_TUNING = "hparams/ctc.yaml", "hparams/ctc_pretrained.yaml"
FINE_TUNING_SIDES = {
    "sbkit": {},
    "speechbrain": {WAITING: "active"},
    "huggingface": {WAITING: "active"},
}
JOINT = {  # of that YAML: the joint model of 2.8 million parameters
    "num_encoder_layers": 4,
    "num_decoder_layers": 2,
    "d_ffn": 576,
    "ctc_weight": 0.3,
    "token_type": "bpe",
    "vocab_size": 100,
    "batch_seconds": 60.0,
    "number_of_epochs": 11,  # of a corpus that lists every clip eight times
}
BASE = {  # of the other YAML: all compute all layers, and drop what Hugging Face's script drops
    "layerdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "batch_seconds": 16.0,  # with 32 SpeechBrain's side ended early on 24 GiB
    "max_seconds": 10.0,
    "number_of_epochs": 11,
}
KNOBS: dict[str, dict[str, Any]] = {YAML: JOINT, FINE_TUNING: BASE}
MAX_TIME_FACTOR = 6  # the other side may take this many times as long to the dev CER
PEAKS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}  # TFLOP/s, dense, by NVIDIA


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in a round")
    parser.add_argument("--to-cer", type=float, help="train on until dev CER is below this")
    parser.add_argument("--yaml", default=YAML, help="another one is trained as it stands")
    parser.add_argument("--alone", action="store_true", help="without the others")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.side:
        serve(options, more)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options, more, Path(folder))


# -- the two sides, in turns -------------------------------------------------------------------


class Side:
    """A process that trains when it is its turn, and is suspended otherwise."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        variables: dict[str, str],
        module: str = "tools.bench_train",
    ) -> None:
        self.name, self.rounds = name, list[dict[str, float]]()
        side = name.split()[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--side", side, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self.facts = self._read()

    def ask(self, **question: float) -> dict[str, Any]:
        """Resume the process until it has answered."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def median(self, figure: str) -> float:
        """Return the median of a figure over the rounds."""
        return statistics.median(measured[figure] for measured in self.rounds)

    def close(self) -> None:
        """End it."""
        with self._process:  # which closes its pipes, too
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        """Read its next answer, and stop it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._process.send_signal(signal.SIGSTOP)
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"The side {self.name} must answer, but ended. Its error stands above.")


def take_turns(sides: Sequence[Side], rounds: int, **question: float) -> None:
    """Ask the sides in turns; store and print their answers."""
    for number in range(rounds + 1):  # the first one warms up
        for side in sides:
            answer = side.ask(**question)
            if number:
                side.rounds.append(answer)
                print(f"round {number} {side.name}: {answer['rtfx']:.3g} RTFx", flush=True)


def compare(options: argparse.Namespace, more: Sequence[str], folder: Path) -> None:
    """Run all sides in turns, and print the results."""
    arguments = ["--yaml", options.yaml, "--folder", str(folder), *more]
    compared = SIDES
    if options.yaml == FINE_TUNING:
        compared = FINE_TUNING_SIDES
        if not any(option.startswith(("--pretrained=", "--encoder_config=")) for option in more):
            from tools.bench_pretrained import save_base

            arguments.append(f"--pretrained={save_base(folder / 'base')}")
    sides = list[Side]()
    try:
        for name in list(compared)[: 1 if options.alone else None]:
            side = Side(name, arguments, compared[name])
            sides.append(side)  # which is stopped, and would stay so after an error of the next
            print(f"{name}: {side.facts['parameters']:,} parameters, {side.facts['device']}")
        take_turns(sides, options.rounds, seconds=options.seconds)
        print(table(sides))
        if options.to_cer is not None:
            race(sides, options.to_cer, options.seconds)
    finally:
        for side in sides:
            side.close()


def table(sides: Sequence[Side]) -> str:
    """Write the medians, and the speed of the first side relative to the best other side."""
    device = sides[0].facts["name"].split()
    for peak in [flops for name, flops in PEAKS.items() if name in device]:
        for side in sides:
            side.rounds = [
                {**measured, "mfu": measured["tflops"] / peak} for measured in side.rounds
            ]
    columns = [name for name in sides[0].rounds[0] if name != "seconds"]
    lines = [f"{'':20}" + "".join(f"{name:>12}" for name in columns)]
    for side in sides:
        figures = (f"{side.median(name):12.3g}" for name in columns)
        lines.append(f"{side.name:20}" + "".join(figures))
    if len(sides) == 1:
        return "\n".join(lines)
    ratio = sides[0].median("rtfx") / max(side.median("rtfx") for side in sides[1:])
    return "\n".join([*lines, f"sbkit to the best of the others: {ratio:.2f}"])


def race(sides: Sequence[Side], limit: float, seconds: float) -> None:
    """Train the first side, and then the fastest other one, until its dev CER is below the limit.

    The other one may take MAX_TIME_FACTOR times as long.
    """
    took: list[float] = []
    for side in [sides[0], *sorted(sides[1:], key=lambda side: -side.median("rtfx"))[:1]]:
        cer, spent = math.inf, sum(measured["seconds"] for measured in side.rounds)
        while cer >= limit and (not took or spent < MAX_TIME_FACTOR * took[0]):
            spent += side.ask(seconds=seconds)["seconds"]
            cer = side.ask(evaluate=1)["cer"]
            print(f"{side.name}: dev CER {cer:.3f} after {spent:.0f} s", flush=True)
        took.append(spent)
    if len(took) > 1:
        print(f"to dev CER {limit}: {took[1] / took[0]:.1f} times as fast", flush=True)


# -- one side ----------------------------------------------------------------------------------


def serve(options: argparse.Namespace, more: Sequence[str]) -> None:
    """Train and answer for each line of standard input."""
    from sbkit.base.allocator import keep_freed_memory
    from sbkit.base.openmp import ThreadWaiting

    keep_freed_memory()
    with ThreadWaiting():
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from tools.bench_sides import Ours, Theirs, make_side

        side_classes: dict[str, Any] = {"sbkit": Ours, "speechbrain": Theirs}
        if options.yaml == FINE_TUNING and options.side != "sbkit":  # which is spared transformers
            from tools.bench_pretrained import FineTunedTheirs, HuggingFace

            side_classes = {"speechbrain": FineTunedTheirs, "huggingface": HuggingFace}

        sizes = {**KNOBS.get(options.yaml, {}), "check": False}
        side = make_side(
            side_classes[options.side], Path(options.yaml), more, sizes, options.folder
        )
        parameters = sum(p.numel() for p in side.model.parameters())
        device = next(side.model.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = {"parameters": parameters, "device": str(device), "name": name}
        print(json.dumps(facts), flush=True)
        with FlopCounterMode(display=False) as counter:
            _, padded = side.step(next(side.batches))
        flops = counter.get_total_flops() / padded
        for line in sys.stdin:
            question = json.loads(line)
            if "evaluate" in question:
                answer = {"cer": side.cer()}
            else:
                answer = train(side, question["seconds"], flops, on_gpu=device.type == "cuda")
            print(json.dumps(answer), flush=True)


def train(side: Any, seconds: float, flops: float, *, on_gpu: bool) -> dict[str, float]:
    """Train for some seconds and return the figures; flops: per padded second of audio."""
    import torch

    audio = padded = waiting = 0.0
    updates = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        asked = time.perf_counter()
        batch = next(side.batches)
        waiting += time.perf_counter() - asked
        one, with_padding = side.step(batch)
        audio, padded, updates = audio + one, padded + with_padding, updates + 1
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if on_gpu:
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() / 2**30
    took = time.perf_counter() - start
    return {
        "seconds": took,
        "rtfx": audio / took,
        "update": audio / updates,
        "padding": 1 - audio / padded,
        "waiting": waiting / took,
        "memory": memory,  # GB
        "tflops": flops * padded / took / 1e12,
    }


if __name__ == "__main__":
    main()
