"""Measure the speed of training on a GPU, in one call of ten minutes.

python -m tools.bench_gpu [--fine_tuning] [--data_folder=RELEASE] [--seconds 8]

The tests that need a GPU; ctc_large in bfloat16 beside SpeechBrain's recipe; a Conformer CTC of 30
million parameters; where its step spends its time. With --fine_tuning, in their place, an encoder
of XLS-R's 300 million parameters, of random weights, in bfloat16: as hparams/ctc_pretrained.yaml
trains it, with its activations computed again, and by adapters alone. Without a release it makes
one of noise, which trains as fast as speech does. A part that fails is said, and the others run.
The tables come last.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

BENCH = (sys.executable, "-m", "tools.bench_train", "--rounds=2")
CLIPS, RATE = {"train": 1500, "dev": 20, "test": 20}, 16_000
TESTS = ("tests/test_gpu.py", "tests/checkpoint/test_rng.py")
COPIES = 8  # of a training clip: 16 hours, so that loaders seldom begin an epoch
WORKERS = 8  # processes that read ahead
SECONDS = (1.5, 10.5)  # of a clip, as in Common Voice; drawn from a gamma distribution of mean 5
SYLLABLES = [*map("".join, product("bdfghklmnprstvwz", "aeiou"))]
LEXICON = 8000  # words, of which a unigram tokenizer makes the 5120 tokens of ctc_large
END = 24  # lines of what a part prints
CONFORMER = (  # 30 million parameters
    *("--d_model=256", "--nhead=4", "--d_ffn=1024", "--num_encoder_layers=20"),
    *("--cnn_channels=128", "--num_decoder_layers=0", "--ctc_weight=1.0", "--token_type=char"),
    *("--vocab_size=null", "--precision=bf16"),
)

XLS_R = (  # 300 million parameters
    *("--yaml", "hparams/ctc_pretrained.yaml", "--precision=bf16", "--batch_seconds=200"),
    "--encoder_config={model_type: wav2vec2, hidden_size: 1024, num_hidden_layers: 24, "
    "num_attention_heads: 16, intermediate_size: 4096, do_stable_layer_norm: True, "
    "feat_extract_norm: layer, conv_bias: True}",
)
FINE_TUNINGS = {
    "all but the convolutions": (),
    "gradient checkpointing": ("--gradient_checkpointing=True",),
    "adapters": ("--lora={rank: 8, projections: [q_proj, v_proj]}",),
}


class Part(NamedTuple):
    """A command with its time limit in seconds."""

    title: str
    command: Sequence[str]
    limit: float


def main() -> None:
    """Run all parts, and print the last lines of each together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data_folder", type=Path, help="a release of Common Voice")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in a round")
    parser.add_argument("--fine_tuning", action="store_true", help="measure that alone")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        release = options.data_folder or make_release(Path(folder) / "release", CLIPS)
        common = [f"--data_folder={release}", f"--seconds={options.seconds}", read_ahead(), *more]
        if options.fine_tuning:
            commands = fine_tunings(common)
        else:
            commands = parts(common, Path(folder) / "run")
        ends = [run(part) for part in commands]
    print("\n\n".join(["", *ends]))


def read_ahead() -> str:
    """Use worker processes if shared memory has room for their batches."""
    has_room = shutil.disk_usage("/dev/shm").free > WORKERS * 2 * 100e6  # two each, of 51 MB
    return f"--num_workers={WORKERS if has_room else 0}"


def parts(common: Sequence[str], folder: Path) -> list[Part]:
    """List the parts; ``common`` are options of all training commands."""
    python = (sys.executable, "-m")
    bench = (*BENCH, *common)
    large, conformer = "hparams/ctc_large.yaml", "hparams/ctc.yaml"
    knobs = [option for option in common if not option.startswith("--seconds")]
    short = (
        *("--profile", "--batch_seconds=1600", "--number_of_epochs=1", "--check=False"),
        *("--word_lm_order=0", "--token_lm_order=0"),
    )
    profiled = ("train.py", conformer, *CONFORMER, *knobs, *short, f"--output_folder={folder}")
    # Other files of tests need packages that a bare machine lacks; warnings may be new there.
    tests = ("pytest", "-q", "-m", "gpu", "--timeout=90", "-W", "default")
    return [
        Part("tests on a GPU", (*python, *tests, "--continue-on-collection-errors", *TESTS), 240),
        Part("ctc_large in bf16", (*bench, "--yaml", large, "--precision=bf16"), 180),
        Part("Conformer CTC, 30 M", (*bench, "--alone", "--batch_seconds=1600", *CONFORMER), 70),
        Part("its profile", (sys.executable, *profiled), 70),
    ]


def fine_tunings(common: Sequence[str]) -> list[Part]:
    """List the ways to train a large encoder; ``common`` are options of all of them."""
    bench = (*BENCH, "--alone", *XLS_R, *common)
    return [Part(f"XLS-R, 300 M: {way}", (*bench, *how), 170) for way, how in FINE_TUNINGS.items()]


def run(part: Part) -> str:
    """Run a part, show what it prints, and return its end."""
    print(f"== {part.title}: {shlex.join(part.command)}", flush=True)
    began = time.perf_counter()
    # All its processes are ended, stopped ones too, which would keep the GPU.
    limited = ["timeout", "--signal=KILL", str(part.limit), *part.command]
    done = subprocess.run(limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    took = f"exit code {done.returncode}, {time.perf_counter() - began:.0f} s"
    return "\n".join([f"{part.title} ({took})", *done.stdout.splitlines()[-END:]])


def make_release(folder: Path, clips: dict[str, int]) -> Path:
    """Write a release of modulated noise, with sentences of made-up words."""
    random = np.random.default_rng(0)
    counts = random.integers(2, 5, LEXICON)  # syllables of a word
    words = ["".join(random.choice(SYLLABLES, count)) for count in counts]
    loudness = np.abs(np.sin(np.arange(60 * RATE) * 2 * np.pi * 4 / RATE))
    noise = (random.standard_normal(len(loudness)) * loudness * 0.1).astype(np.float32)
    (folder / "clips").mkdir(parents=True)
    for split, count in clips.items():
        rows = ["path\tsentence"]
        for number in range(count):
            seconds = float(np.clip(random.gamma(4.0, 1.25), *SECONDS))
            start = int(random.integers(len(noise) - int(seconds * RATE)))
            first = folder / "clips" / f"{split}-{number}-0.wav"
            soundfile.write(first, noise[start : start + int(seconds * RATE)], RATE)
            for copy in range(COPIES if split == "train" else 1):
                file = first.with_name(f"{split}-{number}-{copy}.wav")
                if file != first:
                    file.hardlink_to(first)
                sentence = " ".join(random.choice(words, max(1, int(seconds * 1.5))))
                rows.append(f"{file.name}\t{sentence}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
