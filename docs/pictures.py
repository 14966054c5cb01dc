"""Draw the pictures of the documentation into docs/pictures/.

    python -m docs.pictures --run RUN --bundle BUNDLE            draws all
    python -m docs.pictures floors pipeline step                 draws only these

Drawings are SVG in the colors of the reader's system, light or dark. RUN is a run of
`hparams/ctc.yaml`, and BUNDLE is what `sbkit export` wrote from it. Screenshots need chromium.
Look at each picture before you commit it.
"""

import argparse
import base64
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import soundfile
from cycler import cycler
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from safetensors import safe_open
from selenium.webdriver.support.wait import WebDriverWait

from sbkit.evaluate.calibration import reliability_bins
from sbkit.evaluate.wer_report import read_utterances, word_confidences
from sbkit.logs.run_log import LOG_FILE, read_log
from sbkit.runtime.transcriber import Transcriber
from tests.browser import open_browser, visit
from tests.test_floors import FLOORS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
# Each color of the light theme, and its color in the dark theme.
INK, SOFT, CARD, LINE = "#1f2328", "#59636e", "#fefefe", "#8c959f"
BLUE, VIOLET, GREEN, ORANGE = "#2a66c8", "#7a4fc0", "#1d7a4c", "#b3590a"
DARK = {
    **{INK: "#e6edf3", SOFT: "#9aa4af", CARD: "#161b22", LINE: "#6e7681"},
    **{BLUE: "#5b9bf3", VIOLET: "#a583ea", GREEN: "#41b077", ORANGE: "#e08a3c"},
}
EMBEDDED_PNG = re.compile(r"(?<=data:image/png;base64,)[\w+/=\s]+")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def write_svg(name: str, svg: str) -> None:
    """Replace each color by a variable, which has a value for light and one for dark pages."""
    names = {color: f"--c{number}" for number, color in enumerate(DARK)}
    for color, variable in names.items():
        svg = svg.replace(color, f"var({variable})")
    light = "; ".join(f"{variable}: {color}" for color, variable in names.items())
    dark = "; ".join(f"{names[color]}: {value}" for color, value in DARK.items())
    style = f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    start = svg.index(">", svg.index("<svg")) + 1
    svg = f"{svg[:start]}<style>{style}</style>{svg[start:]}\n"
    (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


def drawing(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Return an SVG with a title, a background and the parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="{FONT}"><title>{title}</title>'
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="10" fill="{CARD}"/>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, content: str, size: int = 13, color: str = INK, more: str = "") -> str:
    """Return a line of text; ``more``: further attributes."""
    place = f'x="{x}" y="{y}" font-size="{size}" fill="{color}" {more}'
    return f"<text {place}>{escape(content)}</text>"


def box(x: float, y: float, width: float, height: float, color: str, *lines: str) -> str:
    """Return a box with a title and lines below it, all centered."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="7"'
    part = f'<rect {place} fill="{color}" fill-opacity="0.13" stroke="{color}"/>'
    for number, line in enumerate(lines):
        size, tone, weight = (12, SOFT, 400) if number else (16, INK, 600)
        baseline = y + height / 2 + 18 * number - 9 * (len(lines) - 1) + 5
        style = f'text-anchor="middle" font-weight="{weight}"'
        part += text(x + width / 2, baseline, line, size, tone, style)
    return part


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points with a head at its end."""
    path = " L".join(f"{x} {y}" for x, y in points)
    style = f'fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#head)"'
    return f'<path d="M{path}" {style}/>'


PIPELINE = """
Corpus: lists clips, texts / and other columns
Audio: decoded once, with / checksums
Batches: planned by seconds / for all processes
Features: log-mel, augmented / on the device
CNN: a frame of 40 ms / from four of 10 ms
Transformer: Conformer blocks, / an optional decoder
ctc_lin: log-probabilities of / tokens, per frame
Step: losses are summed and / divided once
Checkpoint: whole or absent, the / best are averaged
Decoder: beam search with / language models
Bundle: data without code, / formats are compared
Transcript: words with times and / confidences
"""


def draw_pipeline(_: argparse.Namespace) -> None:
    """Draw the way of an utterance from the file to the transcript."""
    boxes = [re.split(": | / ", line) for line in PIPELINE.strip().splitlines()]
    corners = [(20 + 202 * (n % 4), 50 + 122 * (n // 4)) for n in range(len(boxes))]
    heading = "One YAML declares every box: what it says is what trains, is saved and is exported"
    parts = [text(20, 30, heading, 14, SOFT)]
    for n, ((x, y), lines) in enumerate(zip(corners, boxes, strict=True)):
        parts.append(box(x, y, 170, 82, (BLUE, VIOLET, GREEN)[n // 4], *lines))
    for (x, y), (next_x, next_y) in pairwise(corners):
        if y == next_y:
            parts.append(arrow((x + 174, y + 41), (next_x - 4, y + 41)))
        else:
            between = (x + 85, y + 102), (next_x + 85, y + 102)
            parts.append(arrow((x + 85, y + 84), *between, (next_x + 85, next_y - 4)))
    write_svg("pipeline", drawing(816, 396, "The pipeline of sbkit", parts))


def draw_floors(_: argparse.Namespace) -> None:
    """Draw the floors with the first lines of their docstrings; the ground is at the bottom."""
    floors = [floor for floor in FLOORS if not floor.startswith("_")][::-1]
    bottom = 20 + 31 * len(floors)
    turned = f'text-anchor="middle" transform="rotate(-90 26 {bottom / 2})"'
    label = "a file imports only from its own floor and from those below"
    parts = [arrow((36, 24), (36, bottom - 8)), text(26, bottom / 2, label, 13, INK, turned)]
    for number, floor in enumerate(floors):
        y = 20 + 31 * number
        line = (import_module(f"sbkit.{floor}").__doc__ or "").partition("\n")[0].replace("`", "")
        line = re.sub(r"^(\w+|sbkit \w+): ", "", line)
        color = (GREEN, VIOLET, BLUE)[3 * number // len(floors)]
        parts.append(box(64, y, 118, 26, color, floor))
        parts.append(text(196, y + 18, f"{line[0].upper()}{line[1:]}"))
    write_svg("floors", drawing(830, bottom + 14, "The floors of sbkit", parts))


def draw_architecture(options: argparse.Namespace) -> None:
    """Draw the model of a bundle of `hparams/ctc.yaml`, with its sizes and numbers of weights."""
    config = json.loads((options.bundle / "config.json").read_text("utf-8"))
    sizes = {name: part["arguments"] for name, part in config["parts"].items()}
    cnn, encoder, tokens = sizes["CNN"], sizes["Transformer"], sizes["ctc_lin"]["out_features"]
    counts = dict.fromkeys(config["model"], 0)
    with safe_open(options.bundle / "model.safetensors", "np") as weights:
        names: list[str] = weights.keys()  # it is no mapping, and cannot be iterated itself
        for key in names:
            if ".normalize." not in key:  # its statistics are measured, not learned
                part = config["model"][int(key.partition(".")[0])]
                counts[part] += math.prod(weights.get_slice(key).get_shape())
    width, blocks, mels = encoder["d_model"], encoder["num_encoder_layers"], cnn["n_mels"]
    rows = (
        (BLUE, "Waveform", f"{config['sample_rate'] // 1000} kHz, (B, S)"),
        (BLUE, "Fbank", f"{mels} log-mel bins every 10 ms, (B, T, {mels})"),
        (ORANGE, "SpecAugment", "masks of frames and bins, in training"),
        (VIOLET, "CNN", f"two convolutions, {cnn['channels']} channels, (B, T/4, {width})"),
        (VIOLET, "Transformer", f"{blocks} Conformer blocks, (B, T/4, {width})"),
        (VIOLET, "ctc_lin", f"{tokens} tokens, (B, T/4, {tokens})"),
        (GREEN, "Log-probabilities", "CTC loss in training, beam search in tests"),
    )
    half = (
        VIOLET,
        "Feed-forward",
        f"width {width} to {encoder['d_ffn']} and back, half its output",
    )
    attention = (VIOLET, "Self-attention", f"{encoder['nhead']} heads, over the whole utterance")
    convolution = (VIOLET, "Convolution", f"{encoder['kernel_size']} frames of 40 ms")
    block = (half, attention, convolution, half)
    parts = [*column(24, 22, 330, 26, rows), *column(530, 172, 290, 18, block)]
    for number, (_, name, _) in enumerate(rows):
        if name in counts:
            parts.append(text(362, 40 + 84 * number, f"{counts[name]:,} weights", 12, SOFT))
    frame = f'fill="none" stroke="{LINE}" stroke-dasharray="5 4"'
    parts.append(f'<rect x="514" y="134" width="322" height="352" rx="10" {frame}/>')
    parts += [arrow((356, 387), (510, 387)), text(530, 158, "A block: each part adds to its input")]
    parts.append(text(514, 42, "The model of hparams/ctc.yaml", 18, INK, 'font-weight="600"'))
    total = f"{sum(counts.values()) / 1e6:.1f} million weights"
    parts.append(text(514, 66, f"{total}; B utterances, S samples, T frames", 12, SOFT))
    middle = f"ctc_lin also reads the states after block {blocks // 2}:"
    parts += [text(514, 510, middle, 12, SOFT), text(514, 527, "a second CTC loss", 12, SOFT)]
    write_svg("architecture", drawing(860, 620, "The default model", parts))


def column(x: int, y: int, width: int, gap: int, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield boxes below one another, with arrows between them."""
    for number, row in enumerate(rows):
        top = y + (58 + gap) * number
        yield box(x, top, width, 58, *row)
        if number:
            yield arrow((x + width / 2, top - gap + 2), (x + width / 2, top - 2))


# The pictures of docs/how-it-works/ are as wide as a phone shows without making letters small.
NARROW = 420


def draw_step(_: argparse.Namespace) -> None:
    """Draw the losses of four micro-batches on two processes, which are divided once."""
    losses = ((30, 10), (12, 6), (20, 8), (40, 16))  # with their tokens
    total, tokens = (sum(column) for column in zip(*losses, strict=True))
    mean_of_means = sum(loss / count for loss, count in losses) / len(losses)
    parts = [box(20, 20, 380, 58, BLUE, "One global batch", "at most batch_seconds of audio")]
    for process, x in enumerate((20, 220)):
        parts.append(arrow((x + 90, 80), (x + 90, 98)))
        label = 'text-anchor="middle"'
        parts.append(text(x + 90, 116, f"process {process}: micro-batches", 13, SOFT, label))
        for position, (loss, count) in enumerate(losses[2 * process : 2 * process + 2]):
            lines = (f"loss {loss}", f"of {count} tokens")
            parts.append(box(x, 126 + 66 * position, 180, 58, VIOLET, *lines))
        parts.append(arrow((x + 90, 252), (x + 90, 274)))
    divided = f"{total} / {tokens} = {total / tokens:.2f}"
    rows = (
        (VIOLET, f"loss {total} of {tokens} tokens", "added over all processes, as the gradients"),
        (VIOLET, divided, f"divided once; the mean of the four means is {mean_of_means:.2f}"),
        (GREEN, "One step", "clipped by one norm; skipped by all if it is not finite"),
    )
    parts += column(20, 278, 380, 24, rows)
    write_svg("step", drawing(NARROW, 520, "A step of training", parts))


def draw_checkpoints(_: argparse.Namespace) -> None:
    """Draw how a checkpoint is saved, and what a kill leaves at each moment."""
    rows = (
        (BLUE, "Write", "into .unfinished-CKPT+TIME"),
        (BLUE, "Add checksums", "SHA-256 of each file"),
        (BLUE, "Sync", "until all is on the disk"),
        (GREEN, "Rename", "to CKPT+TIME"),
        (GREEN, "Clean up", "remove what is not needed"),
    )
    parts = [*column(20, 20, 208, 24, rows)]
    notes = (
        (20, 254, BLUE, "Killed here:", "the checkpoint", "before it counts"),
        (266, 414, GREEN, "Killed here:", "this one counts"),
    )
    for top, bottom, color, *lines in notes:
        line = f"M240 {top} L248 {top} L248 {bottom} L240 {bottom}"
        parts.append(f'<path d="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for number, content in enumerate(lines):
            y = (top + bottom) / 2 + 20 * (number - len(lines) / 2) + 14
            parts.append(text(260, y, content, 14, SOFT if number else INK))
    write_svg("checkpoints", drawing(NARROW, 434, "How a checkpoint is saved", parts))


def draw_data(_: argparse.Namespace) -> None:
    """Draw the way of clips into batches: as many seconds in each, dealt to two processes."""
    rows = (
        (BLUE, "Table", "clips, texts and other columns"),
        (BLUE, "Shards in SBKIT_CACHE", "each clip decoded once, with a checksum"),
        (VIOLET, "Plan of an epoch", "from the seed, the same on every process"),
    )
    parts = [*column(20, 20, 380, 24, rows), arrow((210, 244), (210, 268))]
    random, top, second = Random(0), 290, 13
    for x, count, seconds in ((20, 8, 2), (120, 4, 4), (260, 2, 8)):
        for row in range(count):
            color = BLUE if row < count / 2 else GREEN
            place = f'x="{x}" y="{top + 13 * row}" height="9" rx="2"'
            padded = second * seconds
            width = padded * random.uniform(0.88, 1)
            parts.append(f'<rect {place} width="{padded}" fill="{LINE}" fill-opacity="0.25"/>')
            parts.append(f'<rect {place} width="{width:.0f}" fill="{color}"/>')
        parts.append(text(x, top + 124, f"{count} clips of {seconds} s", 13))
    parts.append(text(20, top + 154, "Each step has the same seconds, with little padding.", 14))
    for x, color, label in (
        (20, BLUE, "process 0"),
        (130, GREEN, "process 1"),
        (240, LINE, "padding"),
    ):
        opacity = 0.25 if color == LINE else 1
        place = f'x="{x}" y="{top + 170}" width="12" height="12" rx="2"'
        parts.append(f'<rect {place} fill="{color}" fill-opacity="{opacity}"/>')
        parts.append(text(x + 18, top + 181, label, 13, SOFT))
    write_svg("data", drawing(NARROW, top + 200, "From clips to batches", parts))


def draw_check(_: argparse.Namespace) -> None:
    """Draw what the check does, in its order."""
    rows = (
        (BLUE, "Reads the values", "ranges, device, precision"),
        (VIOLET, "Builds the parts", "owners, optimizers, batches, labels, masks"),
        (VIOLET, "Trains two clips on the CPU", "shapes, state, learning rate, padding"),
        (VIOLET, "Reads the data", "splits, letters, lengths, silence"),
        (ORANGE, "Trains the largest batch", "on the device of the run: memory, time, disk"),
        (GREEN, "Tries what comes later", "the run folder, initial weights, an export"),
    )
    parts = [*column(20, 20, 380, 30, rows)]
    parts.append(text(222, 97, "a wrong value ends the check", 12, SOFT))
    write_svg("check", drawing(NARROW, 536, "The order of sbkit check", parts))


def draw_bundles(_: argparse.Namespace) -> None:
    """Draw how a bundle is loaded: names through the list, numbers into the model."""
    top = (
        (BLUE, "A bundle", "a folder of regular files"),
        (BLUE, "Bytes are hashed", "and compared with checksums.json"),
    )
    left = (
        (VIOLET, "config.json", "classes by their names"),
        (ORANGE, "The list", "no other class is built"),
    )
    right = (
        (VIOLET, "model.safetensors", "numbers, no objects"),
        (ORANGE, "Names and shapes", "must be the model's"),
    )
    parts = [*column(20, 20, 380, 24, top)]
    for x, rows in ((20, left), (220, right)):
        parts += [arrow((x + 90, 162), (x + 90, 184)), *column(x, 188, 180, 24, rows)]
        parts.append(arrow((x + 90, 330), (x + 90, 352)))
    parts.append(
        box(20, 356, 380, 58, GREEN, "The model", "on the declared device, which is read back")
    )
    note = "MODULE.py, a part of your own, runs only with --import."
    parts.append(text(20, 442, note, 13, SOFT))
    write_svg("bundles", drawing(NARROW, 460, "How a bundle is loaded", parts))


def style() -> dict[Any, Any]:
    """Return matplotlib's settings for the colors above."""
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "sbkit", "font.size": 11}
    settings |= {"image.interpolation": "none"}  # stores an image once, and not as drawn
    settings |= dict.fromkeys(("text.color", "axes.labelcolor"), INK)
    settings |= dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), SOFT)
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), CARD)
    settings |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    return settings | {"axes.prop_cycle": cycler(color=(BLUE, ORANGE, GREEN, VIOLET))}


def write_figure(name: str, drawn: Figure) -> None:
    """Write a figure that was drawn with `style`, and close it."""
    svg = io.StringIO()
    drawn.savefig(svg, format="svg", metadata={"Date": None})
    pyplot.close(drawn)
    write_svg(name, EMBEDDED_PNG.sub(shrink_png, svg.getvalue()))


def shrink_png(match: re.Match[str]) -> str:
    """Encode an embedded picture in 256 colors; matplotlib's color maps have no more."""
    with Image.open(io.BytesIO(base64.b64decode(match[0]))) as picture:
        content = io.BytesIO()
        picture.quantize(256).save(content, format="PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


@contextmanager
def figure(name: str, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Yield one or several axes in the colors above, and write them as SVG."""
    with pyplot.rc_context(style()):
        panels, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
        yield axes
        write_figure(name, panels)


def draw_curves(options: argparse.Namespace) -> None:
    """Draw the losses and the error rates of a run by epoch."""
    epochs = [record for record in read_log(options.run / LOG_FILE) if record["kind"] == "epoch"]
    panels = (
        ("loss", {"loss": "training", "valid_loss": "validation"}),
        ("error rate of the validation set", {"CER": "CER", "WER": "WER"}),
    )
    with figure("curves", 2, (8.6, 3.3)) as axes:
        for axis, (title, curves) in zip(axes, panels, strict=True):
            for (key, label), color in zip(curves.items(), (BLUE, ORANGE), strict=True):
                points = [(record["epoch"], record[key]) for record in epochs]
                axis.plot(*zip(*points, strict=True), color=color, label=label, lw=2)
            axis.set(xlabel="epoch", ylabel=title, ylim=(0, None))
            axis.legend()


def draw_calibration(options: argparse.Namespace) -> None:
    """Draw the share of right words in each tenth of the confidences: a reliability diagram."""
    utterances = read_utterances(options.run / "utterances_test.jsonl")
    bins = reliability_bins(*word_confidences(utterances))
    points = [(b.confidence, b.right_share) for b in bins]
    with figure("calibration", 1, (5.2, 4.4)) as axis:
        axis.plot((0, 1), (0, 1), color=LINE, lw=1.5, ls="--", label="perfect calibration")
        axis.plot(*zip(*points, strict=True), color=BLUE, lw=2, marker="o", label="test set")
        for point, b in zip(points, bins, strict=True):
            axis.annotate(f"{b.words}", point, (8, -12), textcoords="offset points", fontsize=9)
        axis.set(xlabel="mean confidence", ylabel="share of right words")
        axis.set_title("with the number of words of each point", fontsize=11)
        axis.legend(loc="upper left")


def draw_word_times(options: argparse.Namespace) -> None:
    """Draw the words of a clip over its waveform, with their confidences in percent."""
    with Transcriber.load(options.bundle) as transcriber:
        words = transcriber.transcribe(options.clip).words
    samples, rate = soundfile.read(options.clip)
    block = rate // 100
    blocks = samples[: len(samples) // block * block].reshape(-1, block)
    limit = 1.2 * abs(samples).max()
    with figure("word-times", 1, (8.6, 2.9)) as axis:
        seconds = [0.01 * number for number in range(len(blocks))]
        axis.fill_between(seconds, blocks.min(1), blocks.max(1), color=SOFT, lw=0)
        for number, word in enumerate(words):
            color = (BLUE, VIOLET)[number % 2]
            style: Any = {"ha": "center", "color": color, "fontsize": 9}
            axis.axvspan(word.start, word.end, color=color, alpha=0.16, lw=0)
            middle = (word.start + word.end) / 2
            axis.text(middle, 1.05 * limit, word.text, **style)
            axis.text(middle, -limit, f"{100 * (word.confidence or 0):.0f}", **style)
        axis.set(xlim=(0, len(samples) / rate), ylim=(-1.1 * limit, limit), yticks=[])
        axis.set(xlabel="seconds; the numbers are confidences in percent")
        axis.spines["left"].set_visible(False)


def shoot(name: str, page: Path | str, script: str = "", clip: Path | None = None) -> None:
    """Open a page in chromium, upload a clip, run a script, and save the window in 256 colors."""
    with contextmanager(open_browser)(FOLDER, "--hide-scrollbars", has_network=True) as browser:
        visit(browser, page, width=1000)
        if clip is not None:
            wait = WebDriverWait(browser, 60)
            wait.until(lambda b: b.find_elements("css selector", "#record:enabled"))
            browser.find_element("css selector", "#file").send_keys(str(clip))
            wait.until(lambda b: b.find_elements("css selector", "#text .word"))
        browser.execute_script(script)
        time.sleep(1)  # until pictures are drawn
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
        picture.quantize(256).save(FOLDER / f"{name}.png")


def shoot_server(options: argparse.Namespace) -> None:
    """Show the page of a server that has transcribed a clip."""
    command = [sys.executable, "-m", "sbkit", "serve", str(options.bundle), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        address = next(match[0] for line in lines if (match := re.search(r"http://\S+\d", line)))
        try:
            script = "document.querySelectorAll('#text .word')[2].click()"
            shoot("server", address, script, options.clip)
        finally:
            server.terminate()


OPEN_WORST = "let t = document.querySelector('#table'); t.querySelector('.id').click(); "
OPEN_WORST += "t.scrollIntoView()"  # the first utterance of a report, which has most errors
PICTURES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "pipeline": draw_pipeline,
    "floors": draw_floors,
    "step": draw_step,
    "checkpoints": draw_checkpoints,
    "data": draw_data,
    "check": draw_check,
    "bundles": draw_bundles,
    "architecture": draw_architecture,
    "curves": draw_curves,
    "calibration": draw_calibration,
    "word-times": draw_word_times,
    "data-report": lambda options: shoot("data-report", options.run / "data_report.html"),
    "report": lambda options: shoot("report", options.run / "report.html", OPEN_WORST),
    "server": shoot_server,
}


def main() -> None:
    """Draw the named pictures, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(PICTURES))
    parser.add_argument("--run", type=Path, help="a run folder with a report")
    parser.add_argument("--bundle", type=Path, help="a bundle of that run")
    parser.add_argument("--clip", type=Path, help="a recording to transcribe")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        PICTURES[name](options)


if __name__ == "__main__":
    main()
