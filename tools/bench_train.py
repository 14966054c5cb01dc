"""Train sbkit and SpeechBrain in alternating rounds, and compare their speed.

python -m tools.bench_train [--rounds 5] [--seconds 20] [--yaml FILE]
    [--side sbkit [--switch=--key=value ...] [--profile]] [--key=value of the YAML ...]

SpeechBrain's side is its CommonVoice transformer recipe. All sides have the same corpus (48 kHz
mp3; without --data_folder, the default corpus is converted), labels, precision, subsampling, number
of parameters within 1 %, and maximum seconds of audio in an update. Only the side `sbkit default`
is `hparams/ctc.yaml` as it is, with updates of 32 s.

`rtfx` is seconds of audio trained on per second, and the last column its ratio to the second side,
the faster of SpeechBrain's. `update` is the mean number of seconds of audio in an update. A small
corpus makes it low: SpeechBrain's 200 buckets fill only with many clips, and small batches are
slower. `memory` is the largest in GB. `tflops` counts matrix products, convolutions and attention,
padding included, as torch does; `mfu` is its share of the peak of a GPU in bfloat16.

`--side` trains only that side, in this process. Each switch adds a variant that takes turns with
it; on a GPU, their `memory` includes the weights of all. `--profile` shows where the time goes.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from tools.bench import Worker, answer, start_worker, take_turns

WAIT_POLICY = "OMP_WAIT_POLICY"
YAML = "hparams/ctc.yaml"
# The sides, and the environment variables of each; sbkit itself chooses how its threads wait.
SIDES = {
    "sbkit": {},
    "speechbrain active": {WAIT_POLICY: "active"},
    "speechbrain passive": {WAIT_POLICY: "passive"},
    "sbkit default": {},
}
SAME_SIZE = (  # of YAML: CTC and attention, 2.8 million parameters; each clip is listed eight times
    *("--num_encoder_layers=4", "--num_decoder_layers=2", "--d_ffn=576", "--ctc_weight=0.3"),
    *("--token_type=bpe", "--vocab_size=100", "--batch_seconds=60.0", "--number_of_epochs=11"),
)


def main() -> None:
    """Run all sides, or act as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in a round")
    parser.add_argument("--yaml", default=YAML, help="train this model")
    parser.add_argument("--side", help="only sbkit or speechbrain")
    parser.add_argument("--switch", action="append", default=[], help="also with this option")
    parser.add_argument("--profile", action="store_true", help="six steps after the last round")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.side:
            run_side(options, overrides, options.folder or Path(folder))
        else:
            compare(options, overrides, Path(folder))


def compare(options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Run all sides in turns, and print the results."""
    arguments = ["--yaml", options.yaml, "--folder", str(folder), f"--seconds={options.seconds}"]
    same_size = [*SAME_SIZE * (options.yaml == YAML), *overrides]
    as_it_is = [f"--output_folder={folder}/default", *overrides]
    with ExitStack() as stack:
        sides: list[Worker] = []
        for name, variables in SIDES.items():
            if name == "sbkit default" and options.yaml != YAML:
                continue
            settings = as_it_is if name == "sbkit default" else same_size
            start = start_worker("tools.bench_train", name, [*arguments, *settings], **variables)
            side = stack.enter_context(start)
            sides.append(side)
            print(f"{name}: {side.facts['parameters']:,} parameters")
        take_turns({side.name: side.measure for side in sides}, options.rounds, sides[1].name)


def run_side(options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Train a round for each line of standard input; without --folder, in turns with variants."""
    from sbkit.base.threads_and_memory import SpinSwitch, keep_freed_memory

    keep_freed_memory()
    with SpinSwitch():
        from tools.bench_sides import iterate_rounds, make_side, profile_steps

        @cache
        def make(switch: str) -> Any:
            arguments = [*overrides, *switch.split()]
            return make_side(options.side, Path(options.yaml), arguments, folder / switch)

        sides = {
            switch or options.side: partial(next, iterate_rounds(make, switch, options.seconds))
            for switch in ("", *options.switch)
        }
        facts = {"parameters": sum(p.numel() for p in make("").model.parameters())}
        if options.folder:
            answer(facts, sides[options.side])
            return
        print(facts, flush=True)
        take_turns(sides, options.rounds, options.side)
        if options.profile:
            print(json.dumps({"side": options.side, **profile_steps(make(""))}), flush=True)


if __name__ == "__main__":
    main()
