"""Try another value of each key, and compare what a run leaves behind with what the key declares.

python -m tools.key_effects [--out PAGE] [YAML[:KEY,KEY] ...]

Each trial is a tiny run of a YAML of hparams/ on a few real prompts. A key is wrong if something
changes that its declaration does not name, or that follows from nothing it names; if nothing
changes and nobody says why; or if a run that it may not change goes on with another value. The exit
code is then 1. By default, all YAMLs are tried, and each key in the first YAML of its recipe that
has it.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import train
from docs.reference import declared_keys
from recipes.AsteriskPrompts.corpus import prepare_prompts
from sbkit.base.files import read_file, to_json
from sbkit.base.process import run_main
from sbkit.base.ranges import Either, Flag, OneOf, Range
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.config.document import read_document
from sbkit.config.hparams import read_spec
from sbkit.config.keys import Effect, Key
from sbkit.config.overrides import parse_command
from sbkit.run.run import Run
from sbkit.train.brain import Brain
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import SHORT, TINY, TINY_CODEC, TINY_VOICE, make_workplace

ROOT = Path(__file__).parents[1]
NO_NUMBERS = torch.zeros(0)
CHANNELS: tuple[Effect, ...] = ("rows", "labels", "weights", "results")  # each makes the next ones
DECODED = ("--word_lm_order=2", "--token_lm_order=3", "--beam_size=4", "--attention_rescoring=True")
SMALL = (*TINY, "--number_of_epochs=2", "--average_checkpoints=2")
BASES: Mapping[str, Sequence[str]] = {  # the tiny run of each YAML; FOLDER has files for it
    "ctc": (*SMALL, *DECODED),
    "ctc_large": SMALL,
    "ctc_streaming": (*SMALL, "--ctc_weight=1.0", "--num_decoder_layers=0"),
    "ctc_speechbrain": (*SMALL, *DECODED),
    "ctc_pretrained": (*SHORT, "--pretrained=FOLDER/tiny", "--num_linear_layers=1", *DECODED[:2]),
    "ctc_whisper": (*SHORT, "--pretrained=FOLDER/whisper"),
    "whisper": (*SHORT, "--pretrained=FOLDER/whisper", "--average_checkpoints=1"),
    "codec": TINY_CODEC,
    "tts": TINY_VOICE,
    "vad": SHORT,
}
# Values that no type tells, and the other keys that they need
VALUES: Mapping[str, Sequence[str]] = {
    "output_folder": ["output_folder=FOLDER/other"],
    "device": ["device=null"],
    "corpus": ["corpus=recipes.CommonVoice.corpus"],
    "data_folder": ["data_folder=FOLDER/moved"],
    "manifest": [
        "manifest={train: RELEASE/train.tsv, dev: RELEASE/dev.tsv, test: RELEASE/dev.tsv}"
    ],
    "language": ["language=de"],
    "splits": ["splits={train: train, valid: test, test: dev}"],
    "where": ["where={speaker: [allison]}"],
    "columns": ["columns={text: path}"],
    "encoding": ["encoding=cp1252"],
    "split_shares": [
        "manifest={all: FOLDER/all.csv}",
        "manifest={all: FOLDER/all.csv};split_shares={dev: 0.4, test: 0.2}",
    ],
    "text": ["text={case: keep}"],
    "keep_tags": ['keep_tags=["[noise]"]'],
    "vocab_size": ["token_type=bpe;vocab_size=30", "token_type=bpe;vocab_size=40"],
    "token_type": ["token_type=bpe;vocab_size=30"],
    "mix": ["mix={train: 0.5}"],
    "store_cache": ["store_cache=FOLDER/store"],
    "init_from": ["init_from=FOLDER/BASE"],
    "init_from_differs": [
        "text={case: keep}",
        "text={case: keep};init_from=FOLDER/BASE;init_from_differs=text",
    ],
    "average_checkpoints": ["average_checkpoints=1"],
    "grad_accumulation_factor": ["dropout=0", "dropout=0;grad_accumulation_factor=2"],
    "pretrained": ["pretrained=FOLDER/tiny2"],
    "pretrained_revision": ["pretrained_revision=main"],
    "encoder_config": ["pretrained=null;encoder_config={hidden_size: 48}"],
    "freeze": ["freeze=[PART]"],
    "lr_scale": ["lr_scale={PART: 0.1}"],
    "layer_decay": ["layer_decay={LAYERS: 0.5}"],
    "decoder": ["decoder.beam_size=2"],
    "lm_text": ["lm_text=FOLDER/lm.txt"],
    "report_by": ["report_by=[client_id]"],
    "export_formats": ["export_formats=[onnx]"],
    "ema_decay": ["average_checkpoints=1", "average_checkpoints=1;ema_decay=0.5"],
    "recognizer": ["recognizer=FOLDER/ctc"],
    "symbols": ["symbols=phonemes"],
    "lora": ["lora={rank: 2, projections: [q_proj]}"],
    "streaming": ["streaming={chunk_ms: 320, left_ms: 640, lookahead_ms: 0}"],
    "gain_db": ["gain_db=[0, 0]"],
    "snr_db": ["snr_db=[20, 20]"],
    "levels": ["levels=[4, 4]"],
    "speeds": ["speeds=[0.8]"],
    "level": ["level=none"],
    "min_seconds": ["min_seconds=1.5"],
    "max_seconds": ["max_seconds=1.5"],
    "num_decoder_layers": ["num_decoder_layers=2"],
    "ctc_weight": ["ctc_weight=0.5"],
    "nhead": ["nhead=4"],
    "d_model": ["d_model=24"],
    "kernel_size": ["kernel_size=7"],
    "hop": ["hop=160"],
    "sample_rate": ["sample_rate=8000"],
    "recipe": ["recipe=recipes.prepare.CorpusRecipe"],
    "subsampling": ["subsampling=8"],
    "discriminator_lr": ["adversarial_weight=1.0", "adversarial_weight=1.0;discriminator_lr=0.01"],
    "discriminator_channels": [
        "adversarial_weight=1.0",
        "adversarial_weight=1.0;discriminator_channels=4",
    ],
    "optimizer_step_limit": ["optimizer_step_limit=2"],
    "max_minutes": ["max_minutes=0.0001"],
    "early_stopping": ["lr=0;early_stopping=0", "lr=0;early_stopping=1;number_of_epochs=4"],
    "context_seconds": ["context_seconds=2.0"],
}
# Why a tiny run on a CPU cannot show what a key does
UNSEEN: Mapping[str, str] = {
    "recipe": "decides the YAML's other keys",
    "nonfinite_patience": "counts after a loss that is not finite",
    "shuffle_shards": "counts for prepared shards",
    "precision": "a CPU has bf16 and no fp16",
    "encoding": "all texts of the trial are ASCII",
    "data_folder": "the same data in another folder; other data are other rows",
    "manifest": "the same data by their tables; other data are other rows",
    "corpus": "names the corpus that the folder chooses, too",
    "keep_better_start": "counts for a run that becomes worse than its start",
    "eval_precision": "may round to the same figures",
    "base": "names the YAML whose keys these are",
    "language": "other tables normalize these prompts alike, where nothing is labeled by it",
    "pretrained_revision": "a folder has no revisions",
    "mix": "the trial has one source",
    "keep_tags": "the prompts have no tags",
    "eval_batch_seconds": "changes only how much is evaluated at once",
    "valid_interval_steps": "may find no better checkpoint",
    "max_grad_norm": "counts for a larger gradient",
}
# Keys that change the order of sums, whose rounding Adam enlarges; only this is seen
ROUNDING: Mapping[str, str] = {
    "grad_accumulation_factor": "sums the gradients of a step in another order",
    "compile": "fuses operations",
}


@dataclass(frozen=True)
class Trial:
    """Another value of a key, and what it changed."""

    yaml: str
    key: str
    declared: Key
    change: str
    seen: frozenset[str]
    message: str  # what the run said about the key, or why it failed
    went_on: Mapping[str, bool]  # by the kind of start, such as "when resumed"


# ---- values


def other_values(name: str, key: Key, value: object) -> Sequence[str]:
    """Return overrides without and with another value of a key; several are divided by ;."""
    if name in VALUES:
        return VALUES[name]
    parts = key.values.parts if isinstance(key.values, Either) else (key.values,)
    for part in parts:
        if isinstance(part, Flag):
            return [f"{name}={not value}"]
        if isinstance(part, OneOf) and (
            words := [w for w in part.values if w not in (value, None)]
        ):
            return [f"{name}={words[0]}"]
        if isinstance(part, Range):
            number: Any = value or 0
            candidates = (number + 1, number * 2, number / 2, 0.5, number - 1)
            fitting = [other for other in candidates if other in part and other != value]
            return [f"{name}={fitting[0]}"]
    return []


def parse_change(change: str, names: Mapping[str, str]) -> list[str]:
    """Return the options of a change, with the names of the folders and parts of the trial."""
    for name, text in names.items():
        change = change.replace(name, text)
    return [f"--{option}" for option in change.split(";") if option]


# ---- runs


def forked(
    arguments: Sequence[str], log: Path, *, only_starts: bool = False, **environment: str
) -> int:
    """Return the exit code of train.py in a fork of this process, which has the imports.

    only_starts: end it with 0 before its first step, or its test.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        file = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        torch.set_num_threads(1)
        sys.argv = ["train.py", *arguments]
        if only_starts:
            Brain.fit = Run._finish = end  # type: ignore[method-assign]
        try:
            run_main(train.main)
        except SystemExit as ended:
            code = int(ended.code or 0)
        if code == 0 and not only_starts and "RANK" not in environment:
            write_rows(arguments, log.with_suffix(".rows"))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def end(*_: object, **__: object) -> None:
    """End a process that has come so far."""
    raise SystemExit(0)


def write_rows(arguments: Sequence[str], file: Path) -> None:
    """Write the rows of a run, with their texts before these are normalized."""
    splits = Run(*parse_command([*arguments])).prepare_splits()
    columns = ("id", "samples", "sentence")
    rows = {
        name: [split[column][:] for column in columns if column in split.column_names]
        for name, split in splits.named().items()
    }
    file.write_text(to_json(rows), "utf-8")


def on_two_ranks(commands: Sequence[Sequence[str]], log: Path, port: int) -> bool:
    """Return whether two processes with these arguments train together."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with ThreadPoolExecutor(2) as pool:
        codes = [
            pool.submit(
                forked,
                command,
                log.with_suffix(f".{rank}"),
                only_starts=True,
                **common,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                MASTER_PORT=str(port),
            )
            for rank, command in enumerate(commands)
        ]
        return all(code.result() == 0 for code in codes)


def digest(*values: object) -> str:
    """Return a hash of values by their texts."""
    return hashlib.sha256(to_json([str(value) for value in values]).encode()).hexdigest()


def fingerprints(run: Path, rows: Path) -> dict[str, tuple[str, Tensor]]:
    """Return a digest of what a run leaves behind, for each channel, and numbers that round.

    rows: the file of `write_rows`.
    """

    def read(name: str) -> Any:
        return json.loads(read_file(run / name)) if (run / name).is_file() else {}

    described = read("run_config.json")
    labels = sorted(run.glob("*tokenizer*")) + sorted(run.glob("symbols.txt"))
    last = Checkpointer(run / "checkpoints").find_checkpoint() if run.is_dir() else None
    state = {} if last is None else torch.load(last.paramfiles["model"], weights_only=True)
    config = read("bundle/config.json")
    tested = re.sub(
        r'"(rtfx|\w*seconds)": [^,}]*', "", to_json(read("summary.json").get("test", {}))
    )
    weights = run / "bundle/model.safetensors"
    exported = load_file(weights) if weights.is_file() else {}
    formats = sorted(path.name for path in (run / "bundle").glob("*"))
    return {
        "rows": (digest(_text(rows)), NO_NUMBERS),
        "labels": (
            digest(*map(_text, labels), config.get("normalizer"), described.get("data")),
            NO_NUMBERS,
        ),
        "weights": (digest(*state), sums_of(state)),
        "results": (digest(tested, config.get("decoder"), formats), sums_of(exported)),
    }


def sums_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the sum and the norm of each tensor."""
    tensors_as_float = [tensor.double() for _, tensor in sorted(tensors.items())]
    return torch.tensor([(tensor.sum(), tensor.norm()) for tensor in tensors_as_float])


def differ(one: tuple[str, Tensor], other: tuple[str, Tensor]) -> bool:
    """Return whether fingerprints differ by more than rounding."""
    (digest_of_one, numbers), (digest_of_other, other_numbers) = one, other
    if digest_of_one != digest_of_other or numbers.shape != other_numbers.shape:
        return True
    return not torch.allclose(numbers, other_numbers, rtol=1e-4, atol=1e-4)


def _text(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


class Workbench:
    """Tiny runs of one YAML in a folder."""

    def __init__(self, yaml: str, folder: Path, names: Mapping[str, str]) -> None:
        self.yaml, self.folder = yaml, folder
        self.names = {**names, **_parts_of(yaml)}
        self.cache = str(folder / "cache")
        release = names["RELEASE"]
        base = parse_change(";".join(option[2:] for option in BASES[yaml]), self.names)
        self.arguments = [f"hparams/{yaml}.yaml", f"--data_folder={release}", *base]
        self._finished: dict[str, dict[str, tuple[str, Tensor]]] = {}

    def train(self, run: Path, *options: str, only_starts: bool = False) -> tuple[int, str]:
        """Return the exit code and the output of a run."""
        log = run.with_suffix(".log")
        command = [*self.arguments, f"--output_folder={run}", *options]
        code = forked(command, log, only_starts=only_starts, SBKIT_CACHE=self.cache)
        return code, log.read_text("utf-8", errors="replace")

    def base(self, change: str) -> dict[str, tuple[str, Tensor]]:
        """Return the fingerprints of the run without another value."""
        if change not in self._finished:
            run = self.folder / (self.yaml if not change else digest(change)[:8])
            code, output = self.train(run, *parse_change(change, self.names))
            if code != 0:
                raise SystemExit(f"{self.yaml} {change}: {output[-2000:]}")
            self._finished[change] = fingerprints(run, run.with_suffix(".rows"))
        return self._finished[change]

    def try_key(self, name: str, key: Key, value: object) -> Trial:
        """Train with another value of a key, and start other runs again with it."""
        *without, change = (
            ["", *other_values(name, key, value)][-2:]
            if name in VALUES
            else (
                "",
                *(other_values(name, key, value) or [""]),
            )
        )
        options = parse_change(change, self.names)
        run = self.folder / f"{self.yaml}-{name}"
        output_folder = self.folder / "other"
        code, output = self.train(run, *options) if options else (0, "")
        left = output_folder if name == "output_folder" else run
        before = self.base(without[0] if without else "")
        rows = run.with_suffix(".rows")
        after = fingerprints(left, rows) if options and code == 0 else before
        seen = frozenset(c for c in CHANNELS if differ(before[c], after[c]))
        message = _about(name, output, code)
        shutil.rmtree(left, ignore_errors=True)
        starts = options and not without[0] and run == left
        went_on = self._start_again(name, key, options) if starts else {}
        return Trial(self.yaml, name, key, change, seen, message, went_on)

    def _start_again(self, name: str, key: Key, options: Sequence[str]) -> dict[str, bool]:
        """Say whether a run goes on with other values: in its epochs, and after them."""
        went_on: dict[str, bool] = {}
        for kind, more in (("when resumed", "--number_of_epochs=3"), ("after training", "")):
            run = self.folder / f"{self.yaml}-{name}-{kind.split()[0]}"
            shutil.copytree(self.folder / self.yaml, run)
            for name_of_result in ("bundle", "summary.json"):
                path = run / name_of_result
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            given = [option for option in (more, *options) if option]
            went_on[kind] = self.train(run, *given, only_starts=True)[0] == 0
            shutil.rmtree(run)
        if key.may_change == "per process":
            run = self.folder / f"{self.yaml}-{name}-ranks"
            command = [*self.arguments, f"--output_folder={run}"]
            log, port = run.with_suffix(".log"), 20000 + os.getpid() % 20000
            os.environ["SBKIT_CACHE"] = self.cache
            went_on[key.may_change] = on_two_ranks([command, [*command, *options]], log, port)
            shutil.rmtree(run, ignore_errors=True)
        return went_on


def _parts_of(yaml: str) -> dict[str, str]:
    """Return a part of the model, and a list of layers, for keys that name parts."""
    parts = {"codec": "encoder", "tts": "aligner", "vad": "conv"}
    layers = {"codec": "encoder.blocks", "tts": "text_encoder.blocks", "vad": "conv"}
    body = {"ctc_pretrained", "ctc_whisper", "whisper"}
    usual = "Transformer.body.layers" if yaml in body else "Transformer.encoder"
    usual = "Transformer.encoder.layers" if yaml == "ctc_speechbrain" else usual
    return {"PART": parts.get(yaml, "CNN"), "LAYERS": layers.get(yaml, usual)}


def _about(name: str, output: str, code: int) -> str:
    """Return what a run says about a key; of one that fails, its error."""
    lines = [line for line in output.splitlines() if line.strip()]
    if code != 0:
        return (lines or ["nothing was said"])[-1]
    return next((line for line in lines if f"`{name}`" in line or f"{name}:" in line), "")


# ---- verdicts


def closure(affects: Sequence[str] | frozenset[str] | Any) -> set[str]:
    """Return the channels that another value may change: from the first named one on."""
    first = min((CHANNELS.index(channel) for channel in affects), default=len(CHANNELS))
    return {*CHANNELS[first:]}


def verdict(trial: Trial) -> str:
    """Say what is wrong with the declaration of a key; "" if nothing is."""
    key, faults = trial.declared, list[str]()
    if (more := trial.seen - closure(key.affects)) and trial.key not in ROUNDING:
        faults.append(f"changes {', '.join(sorted(more))}")
    missing = sorted(key.affects - trial.seen)
    if missing and not trial.message and trial.key not in UNSEEN:
        faults.append(f"does not change {', '.join(missing)}, without a word")
    is_equal = not trial.seen and not trial.message  # a value without an effect may be allowed
    may = {
        "never": set[str](),
        "when resumed": {"when resumed"},
        "after training": {"when resumed", "after training"},
        "per process": {"when resumed", "after training", "per process"},
    }[key.may_change]
    if not key.affects:
        may = may | {"when resumed", "after training"}
    for kind, goes_on in trial.went_on.items():
        if goes_on and kind not in may and not is_equal:
            faults.append(f"a run goes on {kind}")
        if not goes_on and kind in may:
            faults.append(f"a run is refused {kind}")
    return "; ".join(faults)


# ---- the page

PAGE = """\
# What each key changes

<!-- `python -m tools.key_effects --out docs/reference/key-effects.md` writes this page. -->

Each row is a tiny run on a CPU, of sixteen prompts and two epochs, with another value of one key.
*Declared* is what [Keys](keys.md) says: what another value changes first, and when a run goes on
with it. *Seen* is what differed from the run without it: the rows of the data, the labels, the
weights after the last step, or the results and the bundle; what follows from a declared change may
differ, too. A run was also started again with the value, before its last epoch and after it, and by
two processes of which one has it. Where nothing was seen, the last column says why, or what the run
said. A key is tried in the first YAML of its recipe that has it.
"""


def row_of(trial: Trial) -> str:
    """Return a row of the page."""
    declared = (
        f"{', '.join(sorted(trial.declared.affects)) or 'nothing'}; {trial.declared.may_change}"
    )
    seen = ", ".join(channel for channel in CHANNELS if channel in trial.seen) or "nothing"
    word = ROUNDING.get(trial.key) or (trial.message or UNSEEN.get(trial.key, "")) * (
        not trial.seen
    )
    word = re.sub(r"/tmp/\S*/", "", word)[:160]
    change = f"`{trial.change}`" if trial.change else ""
    cells = (trial.yaml, f"`{trial.key}`", change, declared, seen, verdict(trial) or word)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def page_of(trials: Sequence[Trial]) -> str:
    """Return the page."""
    columns = ("YAML", "key", "tried", "declared", "seen", "said")
    head = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return f"{PAGE}\n" + "\n".join([*head, *map(row_of, trials)]) + "\n"


# ---- all keys


def make_files(folder: Path) -> dict[str, str]:
    """Write releases, tables, texts and encoders for the trials; return their names."""
    prompts = prepare_prompts(language="en")
    release = make_workplace(prompts, folder).release
    for table in release.glob("*.tsv"):  # of two speakers
        lines = table.read_text("utf-8").splitlines()
        lines[1::2] = [line.replace("allison", "ben") for line in lines[1::2]]
        table.write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "moved").symlink_to(release)
    frames: dict[str, Any] = FRAMES
    make_folder(folder / "tiny", **frames)
    make_folder(folder / "tiny2", **frames, hidden_size=32)
    make_whisper(folder / "whisper", seconds=30, max_tokens=120)
    (folder / "lm.txt").write_text("please enter your number\nthank you for calling\n" * 20)
    rows = [
        line.split("\t") for line in (release / "train.tsv").read_text("utf-8").splitlines()[1:]
    ]
    clips = [f"{release}/clips/{path},{text},speaker-{n}" for n, (_, path, text) in enumerate(rows)]
    (folder / "all.csv").write_text("\n".join(["path,text,speaker", *clips]) + "\n", "utf-8")
    return {"FOLDER": str(folder), "RELEASE": str(release), "BASE": "ctc"}


def keys_to_try(yamls: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of each YAML that no earlier one of its recipe has."""
    tried: dict[str, set[str]] = {}
    for yaml in yamls:
        yaml, _, chosen = yaml.partition(":")
        file = ROOT / f"hparams/{yaml}.yaml"
        declared = declared_keys(file)
        document = read_document(file)
        names = {*document.own_keys & declared.keys(), *_without_a_line(declared, document.root)}
        recipe = str(document.root["recipe"])
        new = names - tried.setdefault(recipe, set())
        tried[recipe] |= names
        yield yaml, chosen.split(",") if chosen else sorted(new)


def _without_a_line(declared: Mapping[str, Key], root: Mapping[str, Any]) -> set[str]:
    """Return the keys with a default that a YAML leaves out."""
    settings = read_spec(ROOT / "hparams/ctc.yaml").settings
    return {name for name in declared if name not in root and name in {*settings}}


def try_all(yamls: Sequence[str], folder: Path, show: Callable[[str], object]) -> list[Trial]:
    """Try the keys of YAMLs, two at a time."""
    names = make_files(folder)
    trials: list[Trial] = []
    for yaml, keys in keys_to_try(yamls):
        bench = Workbench(yaml, folder, {**names, "BASE": yaml})
        first, again = bench.base(""), bench.base("seed=3407")
        if noise := [c for c in CHANNELS if differ(first[c], again[c])]:
            raise SystemExit(f"{yaml}: two equal runs differ in {', '.join(noise)}")
        declared = declared_keys(ROOT / f"hparams/{yaml}.yaml")
        settings = dict(read_spec(*parse_command(bench.arguments)).settings.items())
        declarations, values = ([m.get(name) for name in keys] for m in (declared, settings))
        with ThreadPoolExecutor(2) as pool:
            for trial in pool.map(bench.try_key, keys, declarations, values):
                trials.append(trial)
                show(row_of(trial))
    return trials


def main() -> int:
    """Print a row for each key; return 1 if the declaration of one is wrong."""
    parser = argparse.ArgumentParser("key_effects", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("yamls", nargs="*", default=[*BASES])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="key_effects_") as folder:
        trials = try_all(options.yamls, Path(folder), lambda row: print(row, flush=True))
    if options.out:
        options.out.write_text(page_of(trials), encoding="utf-8")
    wrong = [f"{trial.yaml} {trial.key}: {verdict(trial)}" for trial in trials if verdict(trial)]
    print(*wrong, f"{len(trials)} keys, {len(wrong)} wrong", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    run_main(main)
