"""Write the card of a bundle, README.md: what the model is, its data, results and licence.

Its head is YAML as model hubs read it. Everything comes from the task and from what training wrote
into the run folder; what is not known there is said to be unknown.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.base.text import printable
from sbkit.evaluate.run_results import DATA_REPORT
from sbkit.evaluate.summary import SUMMARY
from sbkit.logs.metric import Metric
from sbkit.logs.text_log import TEXT_LOG
from sbkit.tasks.task import Task

LICENCE_UNKNOWN = "unknown"
FORMATS = {  # how each is loaded, and what of
    "onnx": "onnxruntime: `audio` (B, S) float32 between -1 and 1 and `audio_lengths` (B,) int64 "
    "give `log_probs` (B, U, V) and `frame_lengths`; pad shorter audio to `min_samples`, which is "
    "in the metadata.",
    "torch": '`torch.export.load("model.pt2").module()` takes and gives the same. Load only files '
    "that you trust.",
    "sherpa-onnx": '`OfflineRecognizer.from_fire_red_asr_ctc(model="model.onnx", '
    'tokens="tokens.txt")` computes the features that the model was trained with. Where `HLG.fst` '
    "is, `OfflineRecognizerConfig` of `sherpa_onnx.offline_recognizer` takes it beside the model, "
    'as `ctc_fst_decoder_config=OfflineCtcFstDecoderConfig(graph="HLG.fst", max_active=3000)`.',
    "speechbrain": "`EncoderASR.from_hparams(source=FOLDER, savedir=None)`, beside sbkit.",
    "hub": "a copy of the bundle to upload.",
}


def model_card(
    run: Path,
    task: Task,
    config: Mapping[str, Any],
    certificates: Mapping[str, Mapping[str, Any]],
    *,
    licence: str = LICENCE_UNKNOWN,
) -> str:
    """Write the card of a run's bundle, with the certificates of its formats."""
    summary, report = _read_json(run / SUMMARY), _read_json(run / DATA_REPORT)
    sections = [
        _head(task, config, summary, licence),
        _about(task, config, summary),
        _use(task),
        _data(report),
        _results(task, config, summary),
        _making(run, summary),
        _licences(licence),
        _formats(certificates),
    ]
    return "\n".join(section for section in sections if section)


def _head(task: Task, config: Mapping[str, Any], summary: Mapping[str, Any], licence: str) -> str:
    language = str(config.get("language") or "und")
    lines = ["---", f"language: {json.dumps(language)}", f"license: {json.dumps(licence)}"]
    lines += ["library_name: sbkit"]
    if task.hub_task is None:
        return "\n".join([*lines, "tags: [speech]", "---", ""])
    lines += [f"pipeline_tag: {task.hub_task}", f"tags: [speech, {task.hub_task}]"]
    results = [
        f"  - task: {{type: {task.hub_task}}}\n"
        f"    dataset: {{name: {json.dumps(name)}, type: test}}\n"
        f"    metrics: [{{type: {key.lower()}, value: {figures[key]:.4f}}}]"
        for name, figures in summary.get("test", {}).items()
        for key in task.metrics
        if key in figures
    ]
    if results:
        lines += ["model-index:", "- name: sbkit", "  results:", *results]
    return "\n".join([*lines, "---", ""])


def _about(task: Task, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"`{printable(str(part.get('new')))}`" for part in config["parts"].values() if part
    )
    count = summary.get("parameters")
    size = f", {count:,} parameters" if count else ""
    return (
        f"# {task.model_name.capitalize()}: language {config.get('language') or 'unknown'}\n\n"
        f"A {task.model_name} trained with sbkit: audio of {config['sample_rate']} Hz{size}, made "
        f"of {parts}.\n"
    )


def _use(task: Task) -> str:
    uses = [f"    sbkit {command} FOLDER talk.wav" for command in task.commands]
    uses = uses or ['    sbkit.inference.bundle.bundle.load_bundle(Path("FOLDER")).predict([clip])']
    return "\n".join(["## Use", "", *uses, ""])


def _data(report: Mapping[str, Any]) -> str:
    rows = [
        f"| {printable(name)} | {split['utterances']} | {split['hours']:.2f} | "
        f"{split.get('speakers') or 'unknown'} |"
        for name, split in report.get("splits", {}).items()
    ]
    if not rows:
        return "## Data\n\nUnknown: the run folder has no report of its data.\n"
    head = ["| split | utterances | hours | speakers |", "|---|---|---|---|"]
    return "\n".join(["## Data", "", *head, *rows, ""])


def _results(task: Task, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    rows = [
        f"| {printable(name)} | {decoder} | {key} | {_value(figures[key], metric)} | "
        f"{_interval(figures.get(f'{key}_interval'), metric)} |"
        for name, result in summary.get("test", {}).items()
        for decoder, figures in _by_decoder(task, config, result)
        for key, metric in task.metrics.items()
        if key in figures
    ]
    if not rows:
        return "## Results\n\nUnknown: the run was not tested.\n"
    head = ["| test set | decoder | metric | value | 95 % interval |", "|---|---|---|---|---|"]
    return "\n".join(["## Results", "", *head, *rows, ""])


def _by_decoder(
    task: Task, config: Mapping[str, Any], result: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    decoder = result.get("decoder", "beam" if config.get("decoder") else "greedy")
    yield (decoder if "transcribe" in task.commands else "", result)
    if "greedy" in result:
        yield "greedy", result["greedy"]


def _value(value: float, metric: Metric) -> str:
    return f"{100 * value:.2f} %" if metric.is_fraction else f"{value:.4g}"


def _interval(found: Mapping[str, Any] | None, metric: Metric) -> str:
    if not found or found.get("low") is None:
        return "unknown"
    low, high = (_value(found[name], metric).removesuffix(" %") for name in ("low", "high"))
    return f"{low} to {high} ({found['unit_count']} {printable(str(found['unit']))}s)"


def _making(run: Path, summary: Mapping[str, Any]) -> str:
    lines = ["## How it was made", "", f"    {_command(run)}", ""]
    for key, name in (("git_commit", "commit"), ("machine", "machine"), ("versions", "versions")):
        value = summary.get(key)
        if isinstance(value, dict):
            value = ", ".join(f"{one} {two}" for one, two in value.items() if two is not None)
        lines.append(f"- {name}: {printable(str(value or 'unknown'))}")
    return "\n".join([*lines, ""])


def _command(run: Path) -> str:
    """Find the command that began the run: its log begins with date, time and command."""
    file = run / TEXT_LOG
    if not file.is_file():
        return "(unknown: the run folder has no log)"
    with file.open(encoding="utf-8", errors="replace") as lines:
        words = lines.readline().rstrip("\n").split(" ", 2)
    return printable(words[2]) if len(words) == 3 else "(unknown)"


def _licences(licence: str) -> str:
    model = "not stated; fill it in before you publish" if licence == LICENCE_UNKNOWN else licence
    return (
        "## Licences\n\n"
        f"- model: {printable(model)}\n"
        "- data: that of the corpus above, which may ask for a notice here\n"
        "- code: Apache-2.0 (sbkit)\n"
    )


def _formats(certificates: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe each format beside the trained model."""
    if not certificates:
        return ""
    head = ["| format | largest difference | other tokens | held-out clips |", "|---|---|---|---|"]
    rows = [
        f"| {name} {precision} | {_agreement(found)}"
        for name, several in certificates.items()
        for precision, found in several.items()
    ]
    note = (
        "Differences are those of log-probabilities from the trained model's, over batches, "
        "lengths and paddings; `parity.json` of each folder has all of it."
    )
    uses = [f"- {name}: {FORMATS[name]}" for name in certificates]
    return "\n".join(["## Formats", "", *uses, "", *head, *rows, "", note, ""])


def _agreement(found: Mapping[str, Any]) -> str:
    if "grid" not in found:
        return f"not written: {printable(found['reasons'][0])} | |"
    grid, clips = found["grid"], found["held_out"]
    tokens = f"{grid['utterances_with_other_tokens']} of {grid['utterances']} utterances"
    difference = f"{grid['largest_difference']:.1e}" + ("" if found["written"] else ", not written")
    return f"{difference} | {tokens} | {_words(clips)} |"


def _words(clips: Mapping[str, Any]) -> str:
    if "error_rates" not in clips:
        return "not compared: they are not there"
    trained = clips["error_rates_of_the_trained_model"]
    rates = ", ".join(
        f"{rate} {100 * figures[rate]:.2f} % ({decoder}; trained model "
        f"{100 * trained[decoder][rate]:.2f} %)"
        for decoder, figures in clips["error_rates"].items()
        for rate in ["WER" if "WER" in figures else "CER"]
    )
    return (
        f"{rates}; other words in {clips['transcripts_with_other_words']} of {clips['utterances']}"
    )


def _read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found
