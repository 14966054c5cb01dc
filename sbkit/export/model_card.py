"""Write the model card of a bundle, README.md, about the model, its data, results and license.

The text is in `card.md.j2`, with a YAML header that model hubs read. All facts come from the task
and the files of the run folder; a fact that is missing there is called unknown. They are stored in
card.json, so that the card can be rewritten when a bundle gets another decoder.

Bundles are published. Of the corpus, the facts have counts only: no text, id, speaker or path.
"""

import json
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from sbkit.base.errors import ConfigError
from sbkit.base.files import RUN_YAML, to_json
from sbkit.base.messages import printable
from sbkit.bundle.task import Task
from sbkit.config.hparams import read_spec
from sbkit.config.overrides import parse_overrides
from sbkit.decoding.word_times import GREEDY
from sbkit.evaluate.run_results import DATA_REPORT, SUMMARY, read_json
from sbkit.export.format_table import FORMATS
from sbkit.logs.handlers import TEXT_LOG
from sbkit.logs.metric import Metric, percent
from sbkit.models.pretrained.transformers_encoder import CLASSES
from sbkit.runtime.onnx_model import MIN_ONNXRUNTIME
from sbkit.train.initialize import init_folders

CARD_FILE = "README.md"
FACTS_FILE = "card.json"
UNKNOWN_LICENSE = "unknown"
SBKIT = "sbkit"
COUNTS = ("utterances", "hours", "speakers")  # of a split
# Of the settings, the card has numbers and these; other texts may name files or people.
KEYS_OF_WORDS = ("precision", "token_type", "text")


def card_facts(
    run: Path,
    task: Task,
    config: Mapping[str, Any],
    formats: Sequence[str],
    *,
    license: str = UNKNOWN_LICENSE,
) -> dict[str, Any]:
    """Return the facts of the card of a run's bundle with these formats, as plain data.

    config: the content of the bundle's config.json.
    """
    settings = read_spec(run / RUN_YAML).settings if (run / RUN_YAML).is_file() else {}
    init_from = ", ".join(folder.name for folder in init_folders(settings))
    summary, data = (read_json(run / name) or {} for name in (SUMMARY, DATA_REPORT))
    parts = {
        name: part
        for name, part in config["parts"].items()
        if isinstance(part, dict) and "new" in part
    }
    transformer = parts.get("Transformer", {})
    encoder = transformer.get("arguments", {}).get("config") or {}
    start = init_from or (encoder.get("source") or {}).get("name")
    shown = {name: value for name, value in settings.items() if _is_shown(name, value)}
    return {
        "model_name": task.model_name,
        "uses": task.uses,
        "hub_task": task.hub_task,
        "language": str(config.get("language") or "und"),
        "license": license,
        "sample_rate": config["sample_rate"],
        "parameters": summary.get("parameters"),
        "parts": ", ".join(f"`{printable(str(part['new']))}`" for part in parts.values()),
        "corpus": data.get("corpus") or {},
        "base_model": init_from or None,
        "encoder_config": encoder,
        "has_decoder": transformer.get("new", "").endswith(".PretrainedTransformer"),
        "weights": start if summary.get("ends_with_start") else None,
        "ema_decay": settings.get("ema_decay"),
        "splits": {
            name: {key: split[key] for key in COUNTS}
            for name, split in (data.get("splits") or {}).items()
        },
        "results": [*_results(task, summary)],
        "cost_of_greedy": None,  # see `without_language_models`
        "command": _command(run, shown),
        "settings": {name: _as_json(value) for name, value in shown.items()},
        "made_with": {name: summary.get(name) for name in ("git_commit", "machine", "versions")},
        "user_modules": [printable(name) for name in config.get("user_modules", ())],
        "versions": config.get("versions"),
        "formats": {name: task.format_uses.get(name, FORMATS[name].use) for name in formats},
    }


def without_language_models(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a bundle without them, which decodes greedily, and what that costs."""
    rows = {
        (row["split"], row["metric"]): row for row in facts["results"] if row["decoder"] == GREEDY
    }
    costs = [
        f"{row['metric']} on {printable(row['split'])} is {greedy['text']} instead of {row['text']}"
        for row in facts["results"]
        if row["is_chosen"] and (greedy := rows.get((row["split"], row["metric"])))
    ]
    results = [{**row, "is_chosen": True} for row in rows.values()]
    cost = "; ".join(costs) or "what that costs was not measured"
    return {**facts, "results": results, "cost_of_greedy": cost}


def write_card(folder: Path, facts: Mapping[str, Any], *, library: str = SBKIT) -> None:
    """Write the card of a bundle, with its facts.

    library: the library that loads the model: SBKIT or that of a format.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"printable": printable, "facts": _facts}
    has_graphs = any("onnxruntime" in FORMATS[name].packages for name in facts["formats"])
    options: dict[str, Any] = {"library": library}
    options["min_onnxruntime"] = has_graphs and MIN_ONNXRUNTIME
    options["transformers_encoders"] = [*CLASSES]  # need no zeros after a clip
    card = environment.get_template("card.md.j2").render(facts, **options)
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    if library == SBKIT:
        (folder / FACTS_FILE).write_text(to_json(facts, indent=1) + "\n", encoding="utf-8")


def _results(task: Task, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per test set, decoder and figure; the header lists rows with ``is_chosen``."""
    for split, result in summary.get("test", {}).items():
        chosen = result.get("decoder", "")
        normalized = result.get("normalized", {})
        for decoder, figures in (
            (chosen, result),
            (f"{chosen}, {normalized.get('normalizer')}", normalized),
            ("greedy", result.get("greedy", {})),
        ):
            for name, metric in task.metrics.items():
                if name in figures:
                    yield {
                        "split": split,
                        "decoder": decoder,
                        "metric": name,
                        "value": figures[name],
                        "text": _value(figures[name], metric),
                        "interval": _interval(figures.get(f"{name}_interval"), metric),
                        "is_chosen": figures is result,
                    }
            if "confidence" in figures:
                yield {
                    "split": split,
                    "decoder": decoder,
                    "metric": "calibration error of word confidences (ECE)",
                    "text": f"{figures['confidence']['ECE']:.2f}",
                    "interval": "unknown",
                    "is_chosen": False,
                }


def _value(value: float | None, metric: Metric) -> str:
    return percent(value, 2) if metric.is_fraction else metric.as_text(value)


def _interval(interval: Mapping[str, Any] | None, metric: Metric) -> str:
    if not interval or interval.get("low") is None:
        return "unknown"
    low, high = (_value(interval[name], metric).partition(" ")[0] for name in ("low", "high"))
    return f"{low} to {high} ({interval['unit_count']} {printable(str(interval['unit']))}s)"


def _facts(value: Mapping[str, object] | str | None) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {fact}" for name, fact in value.items() if fact is not None)
    return printable(str(value or "unknown"))


def _is_shown(name: str, value: object) -> bool:
    """Return whether a setting is a number, a flag, null, a list of them, or a word of sbkit's."""
    if isinstance(value, list | tuple):
        return all(_is_shown(name, item) for item in value)
    return value is None or isinstance(value, int | float) or name in KEYS_OF_WORDS


def _as_json(value: object) -> str:
    return json.dumps(value, default=str)


def _command(run: Path, shown: Container[str]) -> str:
    """Return the command of the run from its log, which begins with date, time and command.

    shown: the settings whose values the card shows; other values become "...".
    """
    if not (run / TEXT_LOG).is_file():
        return "(unknown: the run folder has no log)"
    with (run / TEXT_LOG).open(encoding="utf-8", errors="replace") as lines:
        title = lines.readline(10_000).rstrip("\n").split(" ", 2)[-1]
    if not title.startswith("train.py "):
        return "(unknown: the run was started in Python)"
    with suppress(ValueError, ConfigError):  # a longer line ends within quotes
        _, yaml, *words = shlex.split(title)
        options = (
            f"--{key}={_as_json(value) if key in shown and _is_shown(key, value) else '...'}"
            for key, value in parse_overrides(words).items()
        )
        return " ".join(["train.py", Path(yaml).name, *options])
    return "(unknown: it is too long)"
