"""Folders in which what is written leads elsewhere by links, and what is read is somebody's own."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.attacks.case import Case, Place
from tests.attacks.tables import ESCAPE

OF_RUNS = (
    "train_log.jsonl", "train.log", "hyperparams.yaml", "summary.json", "report.html",
    "data_report.json", "data_report.html", "utterances_test.jsonl", "wer_test.txt",
    "left_out.tsv", "prediction.json", "decoder.json", "confidence.json", "lm.safetensors",
    "train_curves.svg", "train_curves.png", "checkpoints/averaged.json", "accuracy_test.json",
)  # fmt: skip
FOLDERS_OF_RUNS = ("tensorboard", "heartbeats", "nonfinite")
OF_SCORES = ("scores.json", "report.html", "utterances_data.jsonl", "wer_data.txt")


def all_links() -> Iterator[Case]:
    """List every folder that leads elsewhere, and every name that is strange on a screen."""
    for name in OF_RUNS:
        for kind in ("link", "temporary"):
            called = f"run {name} {kind}"
            yield Case("link", called, partial(_resumed, _LINKED[kind], name), harmless=True)
    for name in FOLDERS_OF_RUNS:
        yield Case("link", f"run {name}", partial(_resumed, _link_folder, name), harmless=True)
    for name in OF_SCORES:
        for kind, link in _LINKED.items():
            yield Case("link", f"scores {name} {kind}", partial(_scored, link, name), harmless=True)
    for kind, link in _LINKED.items():
        yield Case("link", f"transcript {kind}", partial(_transcribed, link), harmless=True)
        yield Case("link", f"page {kind}", partial(_compared, link), harmless=True)
        yield Case("link", f"arpa {kind}", partial(_trained, link), harmless=True)
    for name in NAMES:
        for command in ("text", "json", "srt", "score", "bundle"):
            prepare = partial(_named, command, name)
            yield Case("name", f"{command} {name!r:.40}", prepare, harmless=True)


def _link(file: Path, place: Place) -> None:
    """Let a file be a link to somebody's own."""
    file.unlink(missing_ok=True)
    file.symlink_to(place.mine / "kept.txt")


def _link_folder(folder: Path, place: Place) -> None:
    """Let a folder be a link to somebody's own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.symlink_to(place.mine)


def _link_temporary(file: Path, place: Place) -> None:
    """Let what is written before it is renamed be one: its name can be known."""
    for process in (os.getpid(), os.getpid() + 1):
        _link(file.with_name(f".{file.name}.{process}.tmp"), place)


_LINKED: dict[str, Callable[[Path, Place], None]] = {"link": _link, "temporary": _link_temporary}


def _resumed(link: Callable[[Path, Place], None], name: str, place: Place) -> list[str]:
    link(place.trained / name, place)
    return ["resume", str(place.folder)]


def _data(place: Place) -> Path:
    os.environ["SBKIT_CACHE"] = str(place.folder / "cache")
    file = place.folder / "data.csv"
    file.write_text("path,text\nclip.wav,hello there\n")
    return file


def _scored(link: Callable[[Path, Place], None], name: str, place: Place) -> list[str]:
    out = place.folder / "scores"
    out.mkdir()
    link(out / name, place)
    return ["score", str(place.bundle), str(_data(place)), "--out", str(out)]


def _transcribed(link: Callable[[Path, Place], None], place: Place) -> list[str]:
    out = place.folder / "out"
    out.mkdir()
    link(out / "clip.txt", place)
    return [*place.transcribe(), "--out", str(out)]


def _compared(link: Callable[[Path, Place], None], place: Place) -> list[str]:
    page = place.folder / "page.html"
    link(page, place)
    return ["compare", *[str(place.trained)] * 2, "--html", str(page)]


def _trained(link: Callable[[Path, Place], None], place: Place) -> list[str]:
    (place.folder / "text.txt").write_text("one two\ntwo one\n" * 20)
    link(place.folder / "out.arpa", place)
    return ["lm", str(place.folder / "text.txt"), "--out", str(place.folder / "out.arpa")]


# -- names ----------------------------------------------------------------------------------------

NAMES = (f"{ESCAPE}gone", "\u202ew", "a\nb: ok", "\x9b2J", "..hidden", "-x", "a" * 240, "\udcff",
         "\u200b", "con.mp3", "a\tb", "{0}", "%s", "[bold]a")  # fmt: skip


def _named(command: str, name: str, place: Place) -> list[str]:
    """Give a file, or a folder, that is called so."""
    folder = place.folder / "named"
    folder.mkdir()
    data = _data(place)
    if command == "score":
        file = folder / f"{name}.csv"
        file.write_text(data.read_text().replace("clip.wav", str(place.clip)))
        return ["score", str(place.bundle), str(file)]
    if command == "bundle":
        place.bundle.rename(folder / name)
        return ["classify", str(folder / name), str(place.clip)]
    place.clip.rename(folder / f"{name}.wav")
    (folder / f"{name} broken.wav").write_text("no audio")
    if command == "srt":
        return ["transcribe", str(place.bundle), str(folder / f"{name}.wav"), "--format", "srt"]
    return ["transcribe", str(place.bundle), str(folder), "--format", command]
