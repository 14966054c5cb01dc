"""`tools/key_effects` compares what a key changes with its declaration."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sbkit.config.keys import Effect, Key
from tests.runs import ROOT
from tools.key_effects import (
    ENDED,
    GOES_ON,
    REFUSED,
    STOPPED,
    TWO_PROCESSES,
    Trial,
    faults_of,
    page_of,
)

WEIGHTS = Key(affects={"weights"}, may_change="when resumed")
NOTHING = Key(affects=frozenset(), may_change="per process")
# A faulty declaration or code by the key that it makes wrong: what replaces what in which file
KEYS = "sbkit/config/keys.py"
FAULTS: Mapping[str, tuple[str, str, str]] = {
    "seed affects weights, not rows": (KEYS, '"seed": Key(', '"seed": data_key('),
    "max_grad_norm affects weights, not results": (
        *(KEYS, '"max_grad_norm": resumed_key(', '"max_grad_norm": end_key('),
    ),
    "batch_seconds affects weights, not nothing": (
        *(KEYS, '"batch_seconds": Key(', '"batch_seconds": machine_key('),
    ),
    "soften_prob has no effect, without a word": (
        *("sbkit/audio/augment.py", "draws[2] < self.prob, draws[3] < 0.5"),
        "draws[2] < 0.3, draws[3] < 0.5",
    ),
    "sample_rate stopped: is refused": (
        *(KEYS, '"sample_rate": data_key('),
        '"sample_rate": partial(data_key, may_change="when resumed")(',
    ),
    "lr two processes: goes on with other": (
        *(KEYS, '"lr": resumed_key(', '"lr": partial(Key, may_change="per process")('),
    ),
}


@pytest.mark.parametrize(
    ("key", "seen", "word", "starts", "faults"),
    [
        (WEIGHTS, {"weights", "results"}, "", {STOPPED: GOES_ON, TWO_PROCESSES: REFUSED}, []),
        (WEIGHTS, {"weights"}, "", {}, []),
        (WEIGHTS, {"labels", "weights"}, "", {}, ["affects labels, not weights"]),
        (WEIGHTS, {"results"}, "", {}, ["affects results, not weights"]),
        (WEIGHTS, {*()}, "`lr` needs `x`", {}, []),
        (WEIGHTS, {*()}, "", {}, ["has no effect, without a word, but should affect weights"]),
        (NOTHING, {*()}, "", {STOPPED: GOES_ON, ENDED: GOES_ON, TWO_PROCESSES: GOES_ON}, []),
        (NOTHING, {"results"}, "", {}, ["affects results, not nothing"]),
        (
            *(WEIGHTS, {"weights"}, "", {STOPPED: REFUSED, TWO_PROCESSES: GOES_ON}),
            [
                "stopped: is refused, but `may_change` is when resumed",
                "two processes: goes on, but `may_change` is when resumed",
            ],
        ),
    ],
)
def test_first_channel_that_differs_is_the_declared_one(
    key: Key, seen: set[Effect], word: str, starts: Mapping[str, str], faults: list[str]
) -> None:
    values = {"before": "1", "value": "2"}
    trial = Trial(yaml="ctc", name="lr", key=key, seen=seen, word=word, starts=starts, **values)
    assert [*faults_of(trial)] == faults
    assert ("right |" in page_of([trial])) == (not faults)


def try_keys(checkout: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.key_effects", *map(str, words)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


@pytest.mark.release
def test_keys_of_two_yamls_do_what_they_declare(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    keys = "--keys=data_folder,text,lr,beam_size,log_every,noise_prob,label_smoothing"
    process = try_keys(ROOT, keys, f"--out={page}", "hparams/ctc.yaml", "hparams/vad.yaml")
    assert process.returncode == 0, process.stdout + process.stderr
    assert ", 0 faults" in process.stdout
    row = next(line for line in page.read_text().splitlines() if "| `noise_prob` |" in line)
    assert row.startswith("| vad | ")
    assert "| weights, results |" in row


@pytest.mark.release
def test_faulty_declarations_and_an_ignored_key_are_named(tmp_path: Path) -> None:
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for file, before, after in FAULTS.values():
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, before
        (tmp_path / file).write_text(text.replace(before, after), encoding="utf-8")
    keys = {fault.split()[0] for fault in FAULTS}
    process = try_keys(tmp_path, f"--keys={','.join(keys)}", "hparams/ctc.yaml")
    assert process.returncode == 1, process.stderr
    for fault in FAULTS:
        assert f"ctc: {fault}" in process.stdout
