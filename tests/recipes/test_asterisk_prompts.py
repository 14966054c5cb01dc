"""The default corpus, from tiny packages that are built here, and from the real ones."""

import gzip
import os
import subprocess
from pathlib import Path
from shutil import which

import G722
import numpy as np
import pytest
import soundfile

from recipes.AsteriskPrompts.corpus import prepare_prompts, read_clips, spell_digits
from recipes.debian.release import choose_split, write_release
from sbkit.base.errors import SbkitError
from sbkit.data.manifest import Clip
from tests.shortage import largest_file
from tests.stores import read_split

TEXT = """\ufeffhello: Hello,  World.

; Core Asterisk Sounds: English
press: Press 1, then *.
digits/7: seven
again: hello world!
no-sound: Nobody recorded this.
iax: IAX (note: does not say "2")
join: <beep>
monkeys: [sound of monkeys screaming]
damaged: sar? esattamente
dots: ...
beep: a beep
silence/1: one second
note: Two: a colon
utf: Café
"""
CONTENT = TEXT.encode() + "latin: Café\r\n".encode("latin-1")
SPOKEN = ["hello", "press", "digits/7", "again", "note", "utf", "latin"]
NOISES = ["iax", "join", "monkeys", "damaged", "dots", "beep", "silence/1"]


def make_packages(root: Path) -> Path:
    """Write the files of two unpacked packages; every sound is half a second of 440 Hz."""
    tone = (8000 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16_000)).astype(np.int16)
    documents = root / "usr/share/doc/asterisk-core-sounds-en"
    documents.mkdir(parents=True)
    (documents / "core-sounds-en.txt.gz").write_bytes(gzip.compress(CONTENT))
    for key in SPOKEN + NOISES:
        file = root / f"usr/share/asterisk/sounds/en_US_f_Ann/{key}.g722"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(G722.G722(16_000, 64_000).encode(tone))
    return root


def all_clips(release: Path) -> dict[str, Clip]:
    manifest = read_split({"data_folder": release}, "validated")
    return {clip.id: clip for clip in manifest}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    write_release(folder, read_clips(make_packages(tmp_path / "root"), "en"))
    return folder


def test_write_release_keeps_speech_only(release: Path) -> None:
    sentences = {id: clip.sentence for id, clip in all_clips(release).items()}
    assert sentences == {
        "hello": "Hello, World.",
        "press": "Press one, then star.",
        "digits_7": "seven",
        "again": "hello world!",
        "note": "Two: a colon",
        "utf": "Café",
        "latin": "Café",
    }


def test_prompts_become_flac_at_16_khz(release: Path) -> None:
    for clip in all_clips(release).values():
        samples, rate = soundfile.read(clip.path, dtype="int16")
        assert (clip.path.suffix, rate, len(samples)) == (".flac", 16_000, 8000)
        spectrum = np.abs(np.fft.rfft(samples.astype(float)))
        assert np.argmax(spectrum) * 2 == 440


def test_choose_split_is_stable() -> None:
    texts = ("activated", "call forwarding", "added")
    assert [*map(choose_split, texts)] == ["test", "dev", "train"]


def install_apt(folder: Path, monkeypatch: pytest.MonkeyPatch, *, script: str) -> None:
    program = folder / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def build_packages(folder: Path) -> None:
    """Build the two packages with dpkg-deb: the text in one, the sounds in the other."""
    root = make_packages(folder / "root")
    for name, version, part in (("en", "9.9-1", "doc"), ("en-g722", "9.8-1", "asterisk")):
        package = f"asterisk-core-sounds-{name}"
        tree = folder / name
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {package}\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: Ann <ann@example.org>\nDescription: test\n"
        )
        (tree / "usr/share").mkdir(parents=True)
        (root / "usr/share" / part).rename(tree / "usr/share" / part)
        file = folder / f"{package}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "-b", tree, file], check=True, stdout=-3)


@pytest.mark.skipif(which("dpkg-deb") is None, reason="builds real packages")
@pytest.mark.usefixtures("own_cache")
def test_packages_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_packages(tmp_path)
    script = (
        f'echo "$@" >> {tmp_path}/calls\ncase "$*" in *download*) cp {tmp_path}/*.deb . ;; esac'
    )
    install_apt(tmp_path, monkeypatch, script=script)
    for _ in range(2):
        release = prepare_prompts(language="en")
        # Named after the first package, although the other one comes first in the alphabet.
        assert release.match("cache/asterisk-prompts/9.9-1-*/en")
        assert len(all_clips(release)) == len(SPOKEN)
    update, download = (tmp_path / "calls").read_text().splitlines()
    assert update.endswith("update")
    assert download.endswith("download asterisk-core-sounds-en asterisk-core-sounds-en-g722")


@pytest.mark.usefixtures("own_cache")
def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "LibsndfileError: System error." with a traceback."""
    root = make_packages(tmp_path / "root")
    monkeypatch.setattr("recipes.debian.release.fetch_packages", lambda *_: ("1", root))
    with largest_file(200), pytest.raises(SbkitError, match=f"{tmp_path}.* full"):
        prepare_prompts(language="en")


def test_failed_download_quotes_apt_get(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "case $* in *update*) echo 'W: Failed to fetch http://x  No route' >&2 ;;"
        " *) echo 'E: Unable to locate package' >&2; exit 100 ;; esac"
    )
    install_apt(tmp_path, monkeypatch, script=script)
    words = r"apt-get failed \(W: Failed to fetch http://x  No route\)"
    with pytest.raises(SbkitError, match=f"{words}.*as `data_folder"):
        prepare_prompts(language="en")
    assert not own_cache.exists()


def test_spell_digits() -> None:
    assert spell_digits("extension 1234", "en") == "extension twelve thirty-four"
    assert spell_digits("IAX2 3D", "en") == "IAX two three D"
    assert spell_digits("appuyez sur 21 #", "fr") == "appuyez sur vingt et un dièse"
