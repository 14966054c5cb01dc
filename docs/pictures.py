"""Draw the pictures of the documentation that show a run into docs/pictures/.

    python -m docs.pictures --run RUN --data-report PAGE --bundle BUNDLE --clip FILE      draws all
    python -m docs.pictures curves report --run RUN                          draws only these

Curves are SVG in the colors of the reader's system, light or dark. RUN is a run of
`hparams/ctc.yaml`, PAGE is of `sbkit prepare --report`, BUNDLE is what `sbkit export` wrote from
the run, and FILE is a recording to transcribe. Screenshots need chromium. Look at each picture
before you commit it.
"""

import argparse
import base64
import io
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from selenium.webdriver.support.wait import WebDriverWait

from sbkit.logs.run_log import LOG_FILE, read_log
from tests.browser import open_browser, visit

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
# Each color of the light theme, and its color in the dark theme.
INK, SOFT, CARD = "#1f2328", "#59636e", "#fefefe"
BLUE, VIOLET, GREEN, ORANGE = "#2a66c8", "#7a4fc0", "#1d7a4c", "#b3590a"
DARK = {
    **{INK: "#e6edf3", SOFT: "#9aa4af", CARD: "#161b22"},
    **{BLUE: "#5b9bf3", VIOLET: "#a583ea", GREEN: "#41b077", ORANGE: "#e08a3c"},
}
EMBEDDED_PNG = re.compile(r"(?<=data:image/png;base64,)[\w+/=\s]+")


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


def draw_curves(options: argparse.Namespace) -> None:
    """Draw the losses and the error rates of a run by epoch."""
    epochs = [record for record in read_log(options.run / LOG_FILE) if record["kind"] == "epoch"]
    panels = (
        ("loss", {"loss": "training", "valid_loss": "validation"}),
        ("error rate of the validation set", {"CER": "CER", "WER": "WER"}),
    )
    with pyplot.rc_context(style()):
        figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 3.3), layout="constrained")
        for axis, (title, curves) in zip(axes, panels, strict=True):
            for (key, label), color in zip(curves.items(), (BLUE, ORANGE), strict=True):
                points = [(record["epoch"], record[key]) for record in epochs]
                axis.plot(*zip(*points, strict=True), color=color, label=label, lw=2)
            axis.set(xlabel="epoch", ylabel=title, ylim=(0, None))
            axis.legend()
        write_figure("curves", figure)


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
    "curves": draw_curves,
    "data-report": lambda options: shoot("data-report", options.data_report),
    "report": lambda options: shoot("report", options.run / "report.html", OPEN_WORST),
    "server": shoot_server,
}


def main() -> None:
    """Draw the named pictures, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(PICTURES))
    parser.add_argument("--run", type=Path, help="a run folder with a report")
    parser.add_argument("--data-report", type=Path, help="a page of `sbkit prepare --report`")
    parser.add_argument("--bundle", type=Path, help="a bundle of that run")
    parser.add_argument("--clip", type=Path, help="a recording to transcribe")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        PICTURES[name](options)


if __name__ == "__main__":
    main()
