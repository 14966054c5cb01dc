"""Try another value of each key, and compare what it changes with what is declared about the key.

python -m tools.key_effects [--keys lr,seed] [--all] [--out PAGE] [YAML ...]

A trial is a tiny run on a CPU. It is compared with the run that lacks the value: its rows, labels,
weights and results. The first of these that differs must be the one that the key `affects`; if
nothing differs, the run or `sbkit check` must name the key. The value is also given to a stopped
run and to one of two processes, which go on or refuse it as `may_change` says. The exit code is 1
if a declaration is wrong. `--all` repeats a key in each YAML that has it.
"""

import argparse
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import torch

from docs.reference import declared_keys
from recipes.AsteriskPrompts.corpus import prepare_prompts
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.machine import usable_cores
from sbkit.base.process import run_main
from sbkit.base.ranges import Constraint, OneOf
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.config.document import Keys
from sbkit.config.hparams import RECIPE, read_spec
from sbkit.config.keys import KEYS, REQUIRED, Effect, Key
from sbkit.config.overrides import parse_command
from sbkit.data.manifest import CHANNEL_FAULT, MIX_SOURCE
from sbkit.data.shard import AUDIO
from sbkit.evaluate.run_results import read_json
from sbkit.run.run import Run
from sbkit.train.setup import declare_run
from tests import processes
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import SHORT, TINY, TINY_CODEC, TINY_VOICE, make_workplace, rows_of

CHANNELS: tuple[Effect, ...] = ("rows", "labels", "weights", "results")  # each makes the next ones
ROWS_COLUMNS = ("id", "sentence", "samples")
UNCOMPARED_COLUMNS = (AUDIO, CHANNEL_FAULT, MIX_SOURCE)
LABEL_FILES = ("tokenizer.model", "symbols.txt", "decoder_tokenizer.json")
NO_EFFECT = re.compile("has no effect|Nothing in this run reads")
CLOCK_FIGURES = re.compile(r'"(rtfx|\w*seconds)": [^,}]*')
COUNTS = {"train": 8, "dev": 3, "test": 3}
TRAIN = """\
import sys
import train
from sbkit.base.process import run_main
from sbkit.logs import curves
from sbkit.run.run import Run
from sbkit.train.brain import Brain
curves.draw_png = lambda *_: b""  # it takes a fifth of so small a run
if "only starts" in sys.argv:
    sys.argv.remove("only starts")
    Brain.fit = Run._finish = lambda *_: sys.exit()
run_main(train.main)
"""
# In values, WORK is the folder of all trials, BASE that of the YAML's run, and RUN the trial's own.
TWO_EPOCHS = ("--number_of_epochs=2", "--average_checkpoints=2")
DECODED = ("--word_lm_order=2", "--token_lm_order=3", "--beam_size=4", "--attention_rescoring=True")
GREEDY = ("--word_lm_order=0", "--token_lm_order=0")
TINY_WORDS = (*TINY, *TWO_EPOCHS, "--dropout=0.1")
TINY_WHISPER = (*SHORT, "--pretrained=WORK/whisper", *TWO_EPOCHS)
BASES: Mapping[str, Sequence[str]] = {
    "ctc": (*TINY_WORDS, *DECODED),
    "ctc_large": (
        *(*TINY_WORDS, "--precision=fp32", "--num_workers=0"),
        *("--token_type=char", "--vocab_size=null"),
    ),
    "ctc_pretrained": (
        *(*SHORT, "--pretrained=WORK/tiny", *TWO_EPOCHS, *GREEDY),
        *("--num_linear_layers=1", "--mask_channel_length=4", "--inter_ctc_weight=0.3"),
    ),
    "ctc_speechbrain": (*TINY_WORDS, *DECODED),
    "ctc_streaming": (*TINY_WORDS, "--ctc_weight=1.0", "--num_decoder_layers=0"),
    "ctc_whisper": (*TINY_WHISPER, *GREEDY),
    "whisper": TINY_WHISPER,
    "codec": (*TINY_CODEC, *TWO_EPOCHS, "--ema_decay=0", "--adversarial_weight=0.5"),
    "tts": (*TINY_VOICE, *TWO_EPOCHS, "--ema_decay=0"),
    "vad": (*SHORT, *TWO_EPOCHS),
}
# Values that no type tells, or with an effect on so short a run; of one YAML: YAML:KEY.
VALUES: Mapping[str, str] = {
    "output_folder": "RUN/.",
    "device": "null",
    "corpus": "tests.user_parts.my_corpus",
    "data_folder": "WORK/other/release",
    "manifest": "{train: WORK/train.csv, dev: WORK/test.csv, test: WORK/dev.csv}",
    "language": "de",
    "splits": "{train: train, valid: test, test: dev}",
    "where": "{speaker: jane}",
    "columns": "{text: path}",
    "split_shares": "{dev: 0.4, test: 0.2}",
    "text": "{case: keep}",
    "token_type": "bpe",
    "vocab_size": "40",
    "level": "none",
    "encoder_module": "transformer",
    "speeds": "[0.8]",
    "mix": "{train-b: 0.5}",
    "min_seconds": "1.3",
    "max_seconds": "1.5",
    "store_cache": "WORK/store",
    "recipe": "tests.user_parts.my_step.TwoPasses",
    "init_from": "BASE",
    "pretrained": "WORK/whisper",
    "ctc_pretrained:pretrained": "WORK/tiny2",
    "pretrained_revision": "main",
    "lora": "{rank: 2, projections: [q_proj]}",
    "freeze": "[CNN]",
    "codec:freeze": "[encoder]",
    "tts:freeze": "[aligner]",
    "vad:freeze": "[conv]",
    "lr_scale": "{CNN: 0.1}",
    "codec:lr_scale": "{encoder: 0.1}",
    "tts:lr_scale": "{aligner: 0.1}",
    "vad:lr_scale": "{conv: 0.1}",
    "subsampling": "8",
    "layer_decay": "{Transformer.encoder: 0.5}",
    "codec:layer_decay": "{encoder.blocks: 0.5}",
    "tts:layer_decay": "{text_encoder.blocks: 0.5}",
    "vad:layer_decay": "{model: 0.5}",
    "ctc_pretrained:layer_decay": "{Transformer.body.layers: 0.5}",
    "ctc_whisper:layer_decay": "{Transformer.body.layers: 0.5}",
    "whisper:layer_decay": "{Transformer.body.layers: 0.5}",
    "number_of_epochs": "3",
    "max_minutes": "100",
    "optimizer_step_limit": "4",
    "early_stopping": "0",
    "valid_interval_steps": "1",
    "warmup_fraction": "0.9",
    "max_grad_norm": "0.01",
    "num_decoder_layers": "2",
    "lm_text": "WORK/lm.txt",
    "report_by": "[speaker]",
    "export_formats": "[onnx]",
    "recognizer": "WORK/ctc",
    "streaming": "{chunk_ms: 320}",
    "longest_symbol": "0.1",
    "gain_db": "[0, 0]",
    "snr_db": "[20, 20]",
    "levels": "[4, 4]",
    "context_seconds": "3.0",
    "inter_ctc_weight": "0.6",
    "intermediate_layer": "2",
    "layers": "2",
    "layerdrop": "0.9",
    "ema_decay": "0.5",
}
# What both runs of a trial also have
WITH: Mapping[str, Sequence[str]] = {
    "mix": (
        "--data_folder=null",
        "--manifest={train: WORK/release/train.tsv, train-b: WORK/other/release/train.tsv, "
        "dev: WORK/release/dev.tsv, test: WORK/release/test.tsv}",
    ),
    "manifest": (
        "--data_folder=null",
        "--manifest={train: WORK/train.csv, dev: WORK/dev.csv, test: WORK/test.csv}",
    ),
    "split_shares": ("--data_folder=null", "--manifest={all: WORK/train.csv}"),
    "vocab_size": ("--token_type=bpe", "--vocab_size=30"),
    "token_type": ("--token_type=unigram", "--vocab_size=30"),
    "ema_decay": ("--average_checkpoints=1",),
    "early_stopping": ("--lr=1e-6", "--number_of_epochs=4", "--early_stopping=1"),
}
# Why the first channel differs only in other runs
LATER: Mapping[str, str] = {"language": "it also chooses the default corpus"}
# Other names of the same data, which a run and some of its processes may have
SAME: Mapping[str, str] = {
    "data_folder": "WORK/copy/release",
    "manifest": "{train: WORK/copy/train.csv, dev: WORK/copy/dev.csv, test: WORK/copy/test.csv}",
    "corpus": "recipes.CommonVoice.corpus",
}
# Keys that are not tried, because so small a run on a CPU cannot show what they do
UNSEEN: Mapping[str, str] = {
    "decoder": "an object; its arguments refer to keys",
    "encoding": "its prompts are ASCII",
    "tier": "its tables have none",
    "keep_tags": "its prompts have no tags",
    "symbols": "phonemes need espeak-ng",
    "ctc_pretrained:sample_rate": "it is that of the encoder",
    "ctc_whisper:sample_rate": "it is that of the encoder",
    "whisper:sample_rate": "it is that of the encoder",
    "vad:level": "a detector takes only running",
    "compile": "it needs a compiler, and minutes",
    "grad_accumulation_factor": "only rounding differs, as tests/test_ranks.py says",
    "nonfinite_patience": "counts after a loss that is not finite",
    "eval_batch_seconds": "decides how recordings are cut that are longer than its prompts",
    "init_from_differs": "a run without it is refused",
    "keep_better_start": "counts for a run that ends worse than it started",
    "shuffle_shards": "counts for more than one shard",
    "encoder_config": "it is that of the pretrained encoder, which may be another one",
    "pretrained_revision": "a folder has no revisions",
}


# ---- the rule

GOES_ON, REFUSED = "goes on", "is refused"
NEW, STOPPED, ENDED, TWO_PROCESSES = "new", "stopped", "ended", "two processes"
MAY_GO_ON: Mapping[str, Sequence[str]] = {
    "never": (NEW,),
    "when resumed": (NEW, STOPPED),
    "after training": (NEW, STOPPED, ENDED),
    "per process": (NEW, STOPPED, ENDED, TWO_PROCESSES),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What another value of a key did.

    seen: the channels that differ.
    word: what the run or the check said about the key; "" if neither did.
    starts: what other starts with the value did: GOES_ON, REFUSED, or something else.
    """

    yaml: str
    name: str
    key: Key
    before: str
    value: str
    seen: Set[Effect]
    word: str
    starts: Mapping[str, str]


def closure(affects: Set[Effect]) -> Sequence[Effect]:
    """Return the channels that may change: those that are named, and what is made from them."""
    first = min(map(CHANNELS.index, affects), default=len(CHANNELS))
    return CHANNELS[first:]


def faults_of(trial: Trial) -> Iterator[str]:
    """Yield what is wrong with the declaration of a key."""
    key = trial.key
    declared, first = ((*closure(channels), "nothing")[0] for channels in (key.affects, trial.seen))
    is_late = trial.name in LATER and first in closure(key.affects)
    if first not in ("nothing", declared) and not is_late:
        yield f"affects {first}, not {declared}"
    if declared != first == "nothing" and not trial.word:
        yield f"has no effect, without a word, but should affect {declared}"
    for kind, outcome in trial.starts.items():
        expected = GOES_ON if kind in MAY_GO_ON[key.may_change] else REFUSED
        if outcome != expected:
            yield f"{kind}: {outcome}, but `may_change` is {key.may_change}"


# ---- values


def other_value(value: object, values: Constraint) -> str | None:
    """Return another flag, number or word of a type, as YAML; None for a type that tells none."""
    candidates: Sequence[object] = ()
    if isinstance(value, bool):
        candidates = (not value,)
    elif isinstance(value, int):
        candidates = (value // 2, value * 2, value + 1)
    elif isinstance(value, float):
        candidates = (value * 2, value / 2, value + 0.5)
    for part in getattr(values, "parts", (values,)):
        candidates = part.values if isinstance(part, OneOf) and len(part.values) > 1 else candidates
    excluded = (0, value) if not isinstance(value, bool) else (value,)  # 0 may turn off other keys
    fitting = (other for other in candidates if other in values and other not in excluded)
    return next((to_json(other).strip('"') for other in fitting), None)


def keys_of(yaml: str) -> Iterator[tuple[str, Key, Hashable]]:
    """Yield the keys of a YAML and of its tables, and what reads each."""
    file = processes.ROOT / f"hparams/{yaml}.yaml"
    spec = read_spec(file, {"data_folder": "corpus"})
    declared, values = declared_keys(file), dict(spec.settings.items())
    readers: dict[Keys, set[tuple[str, object]]] = {}
    for argument in spec.arguments():
        readers.setdefault(argument.key, set()).add((argument.builder, argument.path[-1]))
    for name in {**values, **declared}:
        key = declared.get(name, Key())
        if name in spec.tree or key.default is not REQUIRED:
            readers_of_key = frozenset(readers.get((name,), ()))
            is_general = name == RECIPE or key is KEYS.get(name)  # one code reads it in any run
            yield name, key, (None if is_general else values[RECIPE], name, readers_of_key)


# ---- runs


def fingerprints(run: Path) -> Mapping[Effect, str]:
    """Return a digest of what a run leaves behind in each channel."""
    splits = Run.open(run).prepare_splits().named().items()
    columns = {(split, name): rows[name][:] for split, rows in splits for name in rows.column_names}
    columns = {key: column for key, column in columns.items() if key[1] not in UNCOMPARED_COLUMNS}
    rows = {key: column for key, column in columns.items() if key[1] in ROWS_COLUMNS}
    last = Checkpointer(run / "checkpoints").find_checkpoint()
    assert last is not None
    weights: dict[str, torch.Tensor] = torch.load(last.paramfiles["model"], weights_only=True)
    config = read_json(run / "bundle/config.json") or {}
    figures = CLOCK_FIGURES.sub("", to_json((read_json(run / "summary.json") or {}).get("test")))
    bundle = [file for file in sorted(run.glob("bundle/*")) if file.name != "checksums.json"]
    tables = [*run.glob("utterances_*"), *run.glob("report_by_*"), run / "bundle/model.safetensors"]
    return {
        "rows": digest(rows),
        "labels": digest(columns, *map(content, map(run.joinpath, LABEL_FILES))),
        "weights": digest([(name, t.tolist()) for name, t in weights.items()]),
        "results": digest(
            *(figures, config.get("decoder"), config.get("checkpoints")),
            *([file.name for file in bundle], *map(content, tables)),
        ),
    }


def digest(*values: object) -> str:
    """Return a hash of plain values and bytes."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def content(file: Path) -> bytes:
    """Read a file; one that is missing is empty."""
    return file.read_bytes() if file.is_file() else b""


def word_about(name: str, output: str) -> str:
    """Return the first line of an output that names a key; "" if there is none."""
    names_key = re.compile(rf"`{name}[`.]|override of {name}\b|\b{name}: .* before, ")
    return next((line.strip() for line in output.splitlines() if names_key.search(line)), "")


class Workbench:
    """Tiny runs of a YAML, in a folder with data and encoders (`make_files`)."""

    def __init__(self, yaml: str, work: Path) -> None:
        self.yaml, self.work = yaml, work
        self._lock = threading.Lock()
        self._references: dict[object, tuple[Path, Mapping[Effect, str]]] = {}

    def words(self, run: Path, options: Iterable[str]) -> list[str]:
        """Return the YAML and the options of a run."""
        names = {"WORK": self.work, "BASE": self.work / self.yaml, "RUN": run}
        folders = ("--data_folder=WORK/release", "--output_folder=RUN")
        texts = [*folders, *BASES[self.yaml], *options]
        for name, folder in names.items():
            texts = [re.sub(rf"\b{name}\b", str(folder), text) for text in texts]
        return [f"hparams/{self.yaml}.yaml", *texts]

    def train(
        self,
        run: Path,
        options: Sequence[str] = (),
        *,
        differing: Sequence[str] = (),
        ranks: int = 1,
        only_starts: bool = False,
    ) -> CompletedProcess[str]:
        """Train in a process or two, of which the last one has differing options as well.

        only_starts: end with 0 before the first step, or before the test.
        """
        words, last_words = (
            ["-c", TRAIN, *["only starts"] * only_starts, *self.words(run, [*options, *more])]
            for more in ((), differing)
        )
        return processes.run(words, ranks=ranks, last_words=last_words)

    def reference(
        self, options: Sequence[str] = (), ranks: int = 1
    ) -> tuple[Path, Mapping[Effect, str]]:
        """Return the folder and the fingerprints of the run that trials are compared with."""
        with self._lock:
            identity = (*options, ranks)
            if identity not in self._references:
                number = len(self._references)
                run = self.work / (f"{self.yaml}-{number}" if number else self.yaml)
                process = self.train(run, options, ranks=ranks)
                if process.returncode:
                    raise SbkitError(f"{process.stderr}\nThe run {identity} of {self.yaml} failed.")
                self._references[identity] = run, fingerprints(run)
            return self._references[identity]

    def noise(self) -> Set[Effect]:
        """Return the channels in which two equal runs differ."""
        run = self.work / f"{self.yaml}-again"
        self.train(run)
        return differing_channels(self.reference()[1], fingerprints(run))

    def try_key(self, name: str, key: Key, *, starts: bool) -> Trial:
        """Train with another value of a key, and start other runs with it if `starts`."""
        options = WITH.get(name, ())
        settings = declare_run(*parse_command(self.words(self.work, options))).settings
        value = settings.get(name)
        text = VALUES.get(f"{self.yaml}:{name}", VALUES.get(name)) or other_value(value, key.values)
        if text is None:
            raise SbkitError(f"{self.yaml}: VALUES lacks another value of `{name}` than {value!r}.")
        run = self.work / f"{self.yaml}-{name}"
        change = [*options, f"--{name}={text}"]
        process = self.train(run, change)
        word = word_about(name, process.stderr + process.stdout)
        seen: Set[Effect] = frozenset()
        if process.returncode == 0:
            seen = differing_channels(self.reference(options)[1], fingerprints(run))
        if key.affects and not (seen or word):
            check = ["-m", "sbkit", "check", *self.words(run, change)]
            word = word_about(name, processes.run(check).stdout)
        shutil.rmtree(run, ignore_errors=True)
        same = f"--{name}={SAME.get(name, text)}"
        outcomes = self._start(name, key, options, same) if starts else {}
        if process.returncode and not NO_EFFECT.search(word):  # a refused value shows nothing
            outcomes = {NEW: fails(process)}
        return Trial(
            yaml=self.yaml,
            name=name,
            key=key,
            before=to_json(value).replace(str(self.work), "WORK"),
            value=text,
            seen=seen,
            word=word.replace(str(self.work), "WORK"),
            starts=outcomes,
        )

    def _start(self, name: str, key: Key, options: Sequence[str], change: str) -> Mapping[str, str]:
        """Give a value to a stopped run, to an ended one, and to one of two processes."""
        outcomes: dict[str, str] = {}
        # Only these end like the run without the value.
        only_starts = bool(key.affects) and key.may_change != "per process"
        for kind in (STOPPED, ENDED):
            if kind == ENDED and kind not in MAY_GO_ON[key.may_change]:
                continue  # a run that has ended may still be refused for another reason
            finished, expected = self.reference(options)
            run = self.work / f"{self.yaml}-{name}-{kind}"
            shutil.copytree(finished, run)
            shutil.rmtree(run / "bundle", ignore_errors=True)
            for file in ("summary.json", "report.html"):
                (run / file).unlink(missing_ok=True)
            if kind == STOPPED:  # after its first epoch
                checkpoints = Checkpointer(run / "checkpoints")
                last = checkpoints.find_checkpoint()
                assert last is not None
                shutil.rmtree(last.path)
                if checkpoints.find_checkpoint() is None:  # the last one was also the best
                    continue
            process = self.train(run, [*options, change], only_starts=only_starts)
            outcomes[kind] = outcome_of(process, name, run, {} if only_starts else expected)
            shutil.rmtree(run)
        run = self.work / f"{self.yaml}-{name}-two"
        process = self.train(run, options, differing=[change], ranks=2, only_starts=only_starts)
        is_equal = not only_starts and process.returncode == 0
        expected = self.reference(options, ranks=2)[1] if is_equal else {}
        outcomes[TWO_PROCESSES] = outcome_of(process, name, run, expected)
        shutil.rmtree(run, ignore_errors=True)
        return outcomes


def differing_channels(before: Mapping[Effect, str], now: Mapping[Effect, str]) -> Set[Effect]:
    """Return the channels whose fingerprints differ."""
    return {channel for channel in before if before[channel] != now[channel]}


def outcome_of(
    process: CompletedProcess[str], name: str, run: Path, expected: Mapping[Effect, str]
) -> str:
    """Say what a start with another value did; ``expected`` is what it must leave behind."""
    if process.returncode == 0:
        changed = differing_channels(expected, fingerprints(run)) if expected else ()
        return f"{GOES_ON} with other {', '.join(sorted(changed))}" if changed else GOES_ON
    is_refused = re.search(rf"\b{name}\b", process.stderr) and "Traceback" not in process.stderr
    return REFUSED if is_refused else fails(process)


def fails(process: CompletedProcess[str]) -> str:
    """Say with which error a process failed."""
    return "fails: " + (process.stderr.strip() or process.stdout.strip()).rpartition("\n")[2]


# ---- all keys


def make_files(work: Path) -> None:
    """Write the corpora, tables, texts and encoders that the trials read."""
    prompts = prepare_prompts(language="en")
    release = make_workplace(prompts, work, COUNTS).release
    make_workplace(prompts, work / "other", {**COUNTS, "train": 6})
    for split in COUNTS:
        rows = rows_of(release / f"{split}.tsv")
        columns = [("jane" if n % 3 else "eve", *[*row.values()][1:]) for n, row in enumerate(rows)]
        lines = ["\t".join(line) for line in (tuple(rows[0]), *columns)]
        (release / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        lines = [f"release/clips/{path},{text},{n}" for n, (_, path, text) in enumerate(columns)]
        (work / f"{split}.csv").write_text("\n".join(["path,text,speaker", *lines]) + "\n")
        (work / "copy").mkdir(exist_ok=True)
        shutil.copy(work / f"{split}.csv", work / "copy")
    shutil.copytree(release, work / "copy/release")
    (work / "lm.txt").write_text("please enter your number\nthank you for calling\n" * 20)
    for folder, size in (("tiny", 24), ("tiny2", 32)):
        make_folder(work / folder, "wav2vec2", **FRAMES, hidden_size=size)
    make_whisper(work / "whisper", seconds=30, max_tokens=120)


def try_all(
    yamls: Sequence[str], names: Collection[str], work: Path, *, repeats: bool
) -> Iterator[Trial]:
    """Try each key in the first YAML where the same code reads it, and its starts only once."""
    make_files(work)
    benches = {yaml: Workbench(yaml, work) for yaml in {"ctc": None, **dict.fromkeys(yamls)}}
    benches["ctc"].reference()  # a detector reads it
    tried, started = set[Hashable](), set[str]()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for yaml in yamls:
            if noise := benches[yaml].noise():
                raise SbkitError(f"Two equal runs of {yaml} differ in {', '.join(noise)}.")
            trials = []
            for name, key, readers in keys_of(yaml):
                is_new = (repeats or readers not in tried) and not {
                    name,
                    f"{yaml}:{name}",
                } & UNSEEN.keys()
                if is_new and (not names or name in names):
                    starts = name not in started
                    try_key = partial(benches[yaml].try_key, name, key, starts=starts)
                    trials.append(pool.submit(try_key))
                    tried.add(readers)
                    started.add(name)
            for trial in trials:
                yield trial.result()


# ---- the page

TITLE = """# What each key changes

<!-- `python -m tools.key_effects --out docs/reference/key-effects.md` writes this page. -->

Each row is a run of eight prompts and two epochs on a CPU with another value of one key, compared
with the run that lacks the value. A row stands for all YAMLs in which the same code reads the key.
Other starts are tried in the first of them.

- **value**: before, and as tried. `WORK` is the folder of all trials, `BASE` the run that it is
  compared with, `RUN` its own folder.
- **declared**: what another value changes first, and when a run goes on with it
  ([Keys](keys.md) explains these words).
- **seen**: what differed: *rows* (ids, transcripts and lengths of all clips), *labels* (the file of
  labels, and all other columns, such as normalized transcripts), *weights* (of the last
  checkpoint), *results* (the figures and texts of the test, and the bundle).
- **other starts**: what the value did to a run that was stopped after its first epoch, to one that
  ended without its test, and to one of two processes. With a key that changes nothing, the first
  two end as they do without it; with one that may differ per process, all three do.
- **said**: what the run or `sbkit check` says about the key. One without an effect is named.
"""
NOT_TRIED = "\n## Keys that are not tried\n\nSo small a run on a CPU cannot show what they do.\n\n"


def row_of(trial: Trial) -> str:
    """Return a row of the table."""
    key = trial.key
    starts = [f"{kind}: {outcome}" for kind, outcome in trial.starts.items()]
    cells = (
        *(trial.yaml, f"`{trial.name}`", f"`{trial.before}` → `{trial.value}`"),
        f"{', '.join(sorted(key.affects)) or 'nothing'}; {key.may_change}",
        ", ".join(channel for channel in CHANNELS if channel in trial.seen) or "nothing",
        *(
            "<br>".join(starts),
            LATER.get(trial.name, trial.word),
            "<br>".join(faults_of(trial)) or "right",
        ),
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def page_of(trials: Iterable[Trial]) -> str:
    """Return the page."""
    columns = ("YAML", "key", "value", "declared", "seen", "other starts", "said", "verdict")
    table = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *map(row_of, trials)]
    reasons = ["| key | why |", "| --- | --- |", *(f"| `{k}` | {v} |" for k, v in UNSEEN.items())]
    return "\n".join([TITLE, *table, NOT_TRIED, *reasons, ""])


def main() -> int:
    """Print a row for each key; return 1 if the declaration of one is wrong."""
    parser = argparse.ArgumentParser("key_effects", description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", default="", help="only these keys, such as lr,seed")
    parser.add_argument("--all", action="store_true", help="try a key in each YAML that has it")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("yamls", nargs="*", type=Path, metavar="YAML", help="of hparams/")
    options = parser.parse_args()
    yamls = [file.stem for file in options.yamls] or [*BASES]
    trials: list[Trial] = []
    with TemporaryDirectory(prefix="key_effects_") as folder:
        os.environ["SBKIT_CACHE"] = f"{folder}/cache"
        names = {*filter(None, options.keys.split(","))}
        for trial in try_all(yamls, names, Path(folder), repeats=options.all):
            print(row_of(trial), flush=True)
            trials.append(trial)
    if options.out:
        options.out.write_text(page_of(trials), encoding="utf-8")
    wrong = [f"{t.yaml}: {t.name} {fault}" for t in trials for fault in faults_of(t)]
    print(*wrong, f"{len(trials)} keys, {len(wrong)} faults", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    run_main(main)
