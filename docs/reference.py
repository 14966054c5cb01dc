"""Write docs/reference/: keys of the YAMLs, commands, files and the Python API, from their sources.

    python -m docs.reference

A test compares the committed pages with what this writes. To change a text, change the comment of
a YAML, the help of an option, or a docstring.
"""

import argparse
import ast
import inspect
import pydoc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sbkit
from sbkit import PUBLIC
from sbkit.base.errors import (
    ASKED_TO_STOP,
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    PARTLY_DONE,
    PIPE_CLOSED,
)
from sbkit.base.ranges import UNCHECKED
from sbkit.commands.cli import build_parser
from sbkit.config.hparams import read_spec
from sbkit.config.keys import REQUIRED, Key

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
NOTE = "\n\n<!-- `python -m docs.reference` writes this page. -->\n\n"
# The modules whose docstrings list files, by heading: a line is a name, two spaces and the content.
FILE_LISTS = {
    "A run folder": "sbkit/train/setup.py",
    "A bundle": "sbkit/bundle/bundle.py",
    "The labels of a recognizer, in both": "sbkit/tasks/asr/task.py",
    "The formats in a bundle": "sbkit/export/formats.py",
    "A folder of scores": "sbkit/commands/score.py",
    "A prepared corpus": "sbkit/data/prepared.py",
}
# SET, METRIC, SOURCE, COLUMN, VALUE and KEY stand for names. A test compares these with a run.
METRICS = "CER and WER are shares of the characters and words, which may exceed 1"
SUMMARY_FIELDS = {
    "test.SET.CER": f"{METRICS}. Other tasks have their metrics here: accuracy, error_rate",
    "test.SET.WER": "as CER; missing for a language without spaces between words",
    "test.SET.utterances": "number of scored utterances; a detector has speech_frames, too",
    "test.SET.words": "number of reference words",
    "test.SET.characters": "number of reference characters",
    "test.SET.word_errors.KEY": "numbers of substitutions, deletions and insertions",
    "test.SET.character_errors.KEY": "the same for characters",
    "test.SET.CER_interval.KEY": "low and high of the 95 % interval; its unit and their number",
    "test.SET.WER_interval.KEY": "the same for the WER",
    "test.SET.normalizer": "the text table, which the references and hypotheses have passed",
    "test.SET.references": "SHA-256 of ids and references; only equal ones can be compared",
    "test.SET.greedy.KEY": "these figures by greedy decoding, if the decoder is another",
    "test.SET.normalized.KEY": "these figures of texts without the case and marks of `text`",
    "test.SET.confidence.KEY": "how far the confidence of words can be trusted, if it is fitted",
    "test.SET.notes": "sentences about the set, if there are any",
    "test.SET.decoder": "greedy, beam or attention: what wrote the hypotheses",
    "test.SET.report_by.COLUMN.KEY": "with `report_by`: metrics and utterances of each value",
    "before_training.SET.KEY": "these figures of the recognizer that the run starts from, if any",
    "ends_with_start": "whether the run ends with the weights that it started from, if any",
    "model": "the run folder or the bundle",
    "values.KEY": "the YAML as it took effect; missing in a folder of scores of a bundle",
    "parameters": "number of the model's parameters, frozen ones included",
    "train_seconds": "wall time of training steps",
    "audio_seconds": "audio that was trained on, over all epochs",
    "rtfx": "audio_seconds / train_seconds",
    "provenance.KEY": "SHA-256 of the weights and the language models; the decoder",
    "versions.KEY": "the versions of Python and the libraries",
    "git_commit": "the commit of sbkit; `-dirty`: with changes; null outside of git",
    "machine.cpu": "its name",
    "machine.cores": "number of usable cores",
    "machine.device": "where the test ran",
    "machine.accelerator": "the name of the GPU, or null",
}
EXIT_CODES = {
    0: "done",
    FAILED: (
        "failed: an error in sbkit or in a recipe, `check` found errors, or a format was "
        "not exported. In a run that has taken a step: a store or network disk stayed away "
        "for `store_patience`, memory was short, or another process hung or was lost; the "
        "same command may succeed"
    ),
    BAD_INPUT: (
        "bad input or a wrong option, explained in one sentence. In a run: whatever fails "
        "before its first step, or twice at the same step; later, denied access, a missing "
        "file, a full disk, or a fault of data or code"
    ),
    PARTLY_DONE: (
        "`sbkit transcribe` and `speak --lines`: some files or lines failed, the others are"
        " written. `prepare --verify`: some shards are damaged. A run: it is trained and "
        "tested, but no bundle can hold its model"
    ),
    ASKED_TO_STOP: (
        "stopped by a signal; the same command resumes (`sbkit serve`: 0); or `sbkit "
        "prepare` with `--finish` lists missing units"
    ),
    INTERRUPTED: "Ctrl-C, except in training and in the steps after it",
    PIPE_CLOSED: "the reader of the output has closed it",
}
CHECK_FIELDS = {
    "findings.where": "FILE:LINE, or `override of KEY`",
    "findings.severity": "error or note",
    "findings.stops": "whether the run would not start: true for an error",
    "findings.problem": "a sentence without its period",
    "findings.fix": "advice; empty if the problem includes it",
    "findings.ids": "the utterances concerned, if any",
    "findings.check": "the name of the check, which the text has in brackets",
    "cost.parameters": "number of the model's parameters",
    "cost.trainable_parameters": "number of parameters that are trained, also if only later",
    "cost.steps_per_epoch": "optimizer steps",
    "cost.peak_bytes": "memory of the largest step and of the largest batch of an evaluation",
    "cost.device_bytes": "memory of the GPU; without one, what the process could allocate",
    "cost.step_seconds": "time of the largest step",
    "cost.fp32_step_seconds": "the same in fp32, if the run has less precision on the CPU; or null",
    "cost.epoch_seconds": "an estimate from the measured step",
    "cost.run_seconds": "an estimate for all epochs",
    "cost.num_checkpoints": "the most that the run folder has at a time",
    "cost.checkpoint_bytes": "size of one checkpoint",
    "cost.disk_bytes": "size of all checkpoints",
}
LOG_FIELDS = {
    "kind": "step, epoch (a validation) or test (of one set)",
    "epoch": "counted from 1; of a test: that of its weights",
    "step": "optimizer steps from the start; of a test: those of its weights",
    "loss": "step, epoch: mean training loss since the last such line, per unit of the loss",
    "learning_rate": "step: that of the first group of parameters",
    "rtfx": "step, epoch: seconds of audio per second, over all processes",
    "data_wait_share": "step: share of the time that the model waits for data",
    "skipped_steps": "step, epoch: number of steps with a loss or gradient that is not finite",
    "source_loss/SOURCE": "step, epoch: with `mix`, the loss of each source",
    "ctc": "step, epoch: a part of the loss; a recipe logs others by their names (`self.log`)",
    "inter_ctc": "step, epoch: see ctc",
    "attention": "step, epoch: see ctc",
    "valid_ctc": "epoch: what a validation logs has the prefix `valid_`",
    "valid_attention": "epoch: see valid_ctc",
    "grad_norm": "step, epoch: mean norm of the gradient before it is clipped; of several "
    "optimizers, `grad_norm/OPTIMIZER`",
    "grad_scale": "step, epoch: in fp16, the mean scale of the loss",
    "valid_loss": "epoch: mean loss of the validation sets; null without one",
    "CER": f"epoch, test: the metrics of the task, over all sets. {METRICS}",
    "WER": "epoch, test: see CER",
    "blank_frames": "epoch: share of the frames in which CTC writes nothing",
    "tokens_written": "epoch: greedily written tokens for each token of the references",
    "SET/METRIC": "epoch: the metrics of each validation set, if there are several",
    "split": "test: the name of the set",
    "decoder": "test: as in `summary.json`; null if the task has none",
}
LAUNCHERS = """\
torchrun replaces these codes by 1, and prints the error below its traceback, above the last rule.
One process needs no torchrun: started with python, `train.py` prints only the error.
`tools/launch` keeps the codes, prints the error as the last line, and starts a run again after any
code but 0, 2, 3 and 75; under Slurm, code 1 then queues the job again.
"""
KEYS_PAGE = """\
The keys of `hparams/*.yaml` with their defaults. A YAML with the key `base` has all keys of its
base, too: {variants}.

The column *changes* says what of a run another value changes first (what is made from it changes,
too), and when a run goes on with another value:

- never: its folder is refused; choose another `output_folder`.
- when resumed: the next start uses the new value.
- after training: also once all steps are done, until the run has results.
- per process: it may even differ between the processes of a run. Data sources are compared by the
  data that they lead to.
"""
Values = Mapping[str, str]  # by YAML, or by field


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a heading and a table in Markdown."""
    lines = (columns, ["---"] * len(columns), *rows)
    cells = ((cell.replace("|", r"\|") for cell in line) for line in lines)
    return f"\n## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells)


def read_keys(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield section, name, default and comment of each key above the objects of a YAML.

    Indented lines that only have a comment continue the comment of the key above them.
    """
    section = "run"
    for line in re.sub(r"\n +# ", "\0", text.partition("\n# ====")[0]).splitlines():
        if line.startswith("# ---- "):
            section = line.removeprefix("# ---- ").partition(":")[0]
        elif match := re.match(r"(\w+): *(?:!ref )?([^\0]*?)(?: +# |\0|$)(.*)", line):
            yield section, match[1], match[2], match[3].replace("\0", " ")


def insert_new(order: list[str], names: Iterable[str]) -> None:
    """Insert each name that the order lacks behind the name before it, or at the end."""
    position = len(order)
    for name in names:
        if name not in order:
            order.insert(position, name)
        position = order.index(name) + 1


def declared_keys(file: Path) -> dict[str, Key]:
    """Return what is declared about the keys of a YAML: by its recipe, or by an argument."""
    spec = read_spec(file, {"data_folder": "x"})
    recipe: Any = pydoc.locate(str(spec.settings["recipe"]))
    arguments = {
        str(argument.key[0]): argument.constraint
        for argument in spec.arguments()
        if len(argument.key) == 1 and argument.constraint is not UNCHECKED
    }
    declared = dict(recipe.keys)
    for name in spec.document.own_keys & arguments.keys():
        key = declared.get(name, Key())
        declared[name] = replace(key, type=arguments[name]) if key.type is UNCHECKED else key
    return declared


def keys() -> str:
    """Write the page of keys, in the order of the first YAML that has them."""
    files = {file.stem: file for file in (ROOT / "hparams").glob("*.yaml")}
    sections: list[str] = []
    names: dict[str, list[str]] = {}
    home: dict[str, str] = {}
    defaults: dict[str, dict[str, str]] = {}
    meanings: dict[str, dict[str, str]] = {}
    declared: dict[str, Key] = {}
    for yaml in sorted(files, key=lambda name: (name != "ctc", name)):
        declared = declared_keys(files[yaml]) | declared
        entries = [*read_keys(files[yaml].read_text("utf-8"))]
        for section, name, default, comment in entries:
            home.setdefault(name, section)
            defaults.setdefault(name, {})[yaml] = f"`{default}`"
            meanings.setdefault(name, {})[yaml] = comment
        insert_new(sections, (home[name] for _, name, *_ in entries))
        for section in sections:
            its_names = [name for _, name, *_ in entries if home[name] == section]
            insert_new(names.setdefault(section, []), its_names)
    variants = {*defaults["base"]}
    text = f"# Keys of the YAMLs{NOTE}{KEYS_PAGE.format(variants=', '.join(sorted(variants)))}"
    columns = ("key", "default", "values", "meaning", "changes", "YAMLs")
    for section in sections:
        rows = []
        for name in names[section]:
            where = _where(defaults[name], sorted({*files} - variants))
            values, changes = _declaration(declared.get(name))
            rows.append(
                (f"`{name}`", _join(defaults[name]), values, _join(meanings[name]), changes, where)
            )
        text += table(section.capitalize(), columns, rows)
    title = "Keys that a YAML may leave out\n\nAn override sets them, too. `sbkit config` prints "
    title += "them with `--all`, and a run folder has them all."
    optional = {
        name: key
        for name, key in declared.items()
        if name not in defaults and key.default is not REQUIRED
    }
    optional_rows = []
    for name, key in optional.items():
        values, changes = _declaration(key)
        optional_rows.append((f"`{name}`", f"`{_yaml(key.default)}`", values, key.meaning, changes))
    return text + table(title, columns[:-1], optional_rows)


def _declaration(key: Key | None) -> tuple[str, str]:
    """Return the values of a key, and what another value changes."""
    if key is None:
        return "", ""
    values = "" if key.type is UNCHECKED else str(key.values)
    return values, f"{', '.join(sorted(key.affects)) or 'nothing'}; {key.may_change}"


def _yaml(value: object) -> str:
    """Return a plain value as YAML writes it."""
    return "null" if value is None else str(value)


def _where(present: Values, yamls: Sequence[str]) -> str:
    missing = [yaml for yaml in yamls if yaml not in present]
    full = [yaml for yaml in yamls if yaml in present]
    if len(full) > len(missing):
        return f"all but {', '.join(missing)}" if missing else "all"
    return ", ".join(full or present)


def _join(values: Values) -> str:
    """Join the value of the first YAML, and the other values with the names of their YAMLs."""
    first, *others = dict.fromkeys(values.values())
    named = [f"{', '.join(n for n, v in values.items() if v == o)}: {o}" for o in others if o]
    return "<br>".join(filter(None, [first, *named]))


def cli() -> str:
    """Write the page of commands."""
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    text = f"# Commands{NOTE}`sbkit COMMAND --help` prints the same. In the name of an option, "
    text += "`_` means `-`.\nTraining is not one of them: `python train.py YAML --KEY=VALUE`.\n"
    for choice in action._choices_actions:
        rows = [*_arguments(action.choices[choice.dest])]
        if action.choices[choice.dest].get_default("takes_overrides"):
            rows.append(("`--KEY=VALUE`", "another value for any key of the YAML"))
        purpose = f"{choice.help}."
        heading = f"sbkit {choice.dest}\n\n{purpose[0].upper()}{purpose[1:]}"
        text += table(heading, ("argument", "meaning"), rows)
    return text


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        value = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
        value = " ".join(value) if isinstance(value, tuple) else value
        names = [name if action.nargs == 0 else f"{name} {value}" for name in action.option_strings]
        meaning = action.help or ""
        if action.default and action.nargs != 0 and "default" not in meaning:
            meaning += f" (default: {action.default})"
        if action.required and names:
            meaning += " (required)"
        yield ", ".join(f"`{name}`" for name in names or [value]), meaning.strip()


def files() -> str:
    """Write the page of files."""
    text = f"# Files{NOTE}What sbkit writes. SET stands for the name of a test set.\n"
    for title, source in FILE_LISTS.items():
        docstring = ast.get_docstring(ast.parse((ROOT / source).read_text("utf-8"))) or ""
        lines = re.findall(r"(?m)^ {,4}(\S+(?:, \S+)*)  +(\S.*(?:\n {8,}\S.*)*)$", docstring)
        rows = ((f"`{name}`", re.sub(r"\s+", " ", content)) for name, content in lines)
        text += table(title, ("file", "content"), rows)
    return text + _fields_table("The fields of train_log.jsonl", LOG_FIELDS)


def programs() -> str:
    """Write the page of what programs read."""
    text = f"# For programs{NOTE}A program that sets up runs needs the exit codes and the JSON on "
    text += "this page. What is printed for\npeople may change.\n"
    rows = ((str(code), meaning) for code, meaning in EXIT_CODES.items())
    text += table("Exit codes", ("exit code", "meaning"), rows) + "\n" + LAUNCHERS
    title = "sbkit check --json\n\n`findings` is a list. `cost`, of one process, may be missing."
    text += _fields_table(title, CHECK_FIELDS)
    title = "summary.json, and sbkit score --json\n\nThe command prints `test` and `model`."
    return text + _fields_table(title, SUMMARY_FIELDS)


def _fields_table(title: str, fields: Values) -> str:
    rows = ((f"`{name}`", meaning) for name, meaning in fields.items())
    return table(title, ("field", "meaning"), rows)


def fields_of(record: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value in nested mappings."""
    if not isinstance(record, dict) or not record:
        yield path
        return
    for key, value in record.items():
        yield from fields_of(value, (*path, key))


def is_field(path: Sequence[str], documented: str) -> bool:
    """Return whether a path is that of a documented field; KEY stands for all that is below."""
    *parts, last = documented.split(".")
    if last == "KEY":
        path = (*path[: len(parts)], last)
    patterns = (re.sub("SET|METRIC|SOURCE|COLUMN", ".+", part) for part in (*parts, last))
    return len(path) == len(parts) + 1 and all(map(re.fullmatch, patterns, path))


def compare_fields(documented: Values, records: Iterable[object]) -> tuple[set[str], set[str]]:
    """Return fields of the records that are not documented, and documented ones that they lack."""
    paths = {path for record in records for path in fields_of(record)}
    unknown = {".".join(path) for path in paths if not any(is_field(path, n) for n in documented)}
    return unknown, {n for n in documented if not any(is_field(path, n) for path in paths)}


def api() -> str:
    """Write the page of public names."""
    text = (
        f"# Python API{NOTE}The public names: `from sbkit import Run`. A name links to its source, "
    )
    text += "whose docstring has the\nshapes, units and errors.\n"
    rows = [_api_row(getattr(sbkit, name), name, module) for name, module in sorted(PUBLIC.items())]
    return text + table("sbkit", ("name", "what it does"), rows)


def _api_row(value: Any, name: str, module: str) -> tuple[str, str]:
    """Return the signature, linked to the source, and the first line of the docstring."""
    text = re.sub(r"``?([^`]+)``?", r"`\1`", (inspect.getdoc(value) or "").partition("\n")[0])
    members = vars(value) if inspect.isclass(value) else {}
    methods = [
        f"`{method}`"
        for method in members
        if callable(getattr(value, method)) and getattr(value, method).__doc__ and method[0] != "_"
    ]
    text += f" Methods: {', '.join(methods)}." if methods else ""
    return f"[`{name}{_signature(value)}`](../../{module.replace('.', '/')}.py)", text


def _signature(value: Any) -> str:
    """Return the parameters of a function or class and their defaults, without types."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # not callable, or an exception without an `__init__`
        return ""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    text = re.sub(r"=(\(<.*?>\)|<.*?>)(?=[,)])", "=...", text)  # defaults that are objects
    return "" if text == "(*args, **kwargs)" else text  # of protocols


PAGES = {
    "keys.md": keys,
    "cli.md": cli,
    "files.md": files,
    "programs.md": programs,
    "api.md": api,
}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write(), encoding="utf-8")
