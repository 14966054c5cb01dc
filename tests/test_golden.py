"""What a run keeps for the next one comes out as it did when its version was last raised.

Each producer of something kept has a constant, which is in the name or the record of what it made.
Whoever changes an output raises the constant, and writes the outputs anew:

    python -m tests.test_golden
"""

import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import torch

from recipes.debian.release import ReleaseRow, write_release
from recipes.prepare import prepare_transcripts
from sbkit.audio.fbank import Fbank
from sbkit.audio.io import read_audio
from sbkit.config.overrides import parse_overrides
from sbkit.data.data_report import measure_data
from sbkit.data.prepared import read_data_settings
from sbkit.data.splits import Splits
from sbkit.lm.language_models import load
from sbkit.tasks.tts.recordings import track_pitch
from sbkit.tasks.tts.symbols import read_texts
from sbkit.tasks.vad.task import find_speech
from sbkit.text.normalization import text_table
from sbkit.text.tokenizer import TOKEN_TYPES, ensure_tokenizer
from sbkit.text.transcripts import transcript_normalizer
from sbkit.text.verbalize import spell_out
from tests.audio.formats import AMR, encode_tone, tone
from tests.decoding.spoken import TEXTS, char_tokenizer, train_models
from tests.runs import ROOT

FOLDER = Path(__file__).parent / "golden"
TEXTS_FOLDER = Path(__file__).parent / "text"
WRITE_COMMAND = "python -m tests.test_golden"
TOLERANCE = 0.003  # of the largest value: decoders and libraries round in other ways
EXACT_FORMATS = (("WAV", "PCM"), ("WAV", "G.711"), ("FLAC", "FLAC"), AMR)
# Kept as files: their encoders write other bytes on another kind of processor.
TONES = {"MP3 MP3": FOLDER / "tone.mp3", "Ogg Opus": FOLDER / "tone.opus"}
RATE = 16_000
SENTENCES = {  # by table; the empty one is left out
    "train.csv": ["Press 1 &amp; wait.", "It’s café [noise] time", "", "The cafÃ© is ours"],
    "dev.jsonl": ["Hold the line, please!"],
    "test.tsv": ["Dial 22 at 5 p.m."],
}


def sound(number: int, seconds: float = 0.4) -> Any:
    """Return half of silence and half of a tone with a rising pitch, as int16 (S,)."""
    times = np.arange(round(seconds * RATE)) / RATE
    wave = np.sin(2 * np.pi * (150 + 40 * number + 100 * times) * times) * (times > seconds / 2)
    return (8_000 * wave).astype(np.int16)


def decode_all(_: Path) -> dict[str, object]:
    """Decode a tone of each format, and a float WAV of two channels above full scale."""
    two = np.stack([3 * tone(44_100, 300.0), tone(44_100)], axis=1)
    soundfile.write(loud := io.BytesIO(), two, 44_100, "FLOAT", format="WAV")
    files = {" ".join(name): encode_tone(name) for name in EXACT_FORMATS}
    files |= {name: file.read_bytes() for name, file in TONES.items()} | {"loud": loud.getvalue()}
    decoded = {name: read_audio(io.BytesIO(content), RATE) for name, content in files.items()}
    return {
        name: {"samples": len(samples), "values": samples[::97].astype(float).tolist()}
        for name, samples in decoded.items()
    }


def make_splits(folder: Path) -> Splits:
    """Prepare tables of three formats, with spans of one recording and columns."""
    soundfile.write(folder / "all.flac", np.concatenate([*map(sound, range(6))]), RATE)
    number = 0
    for name, sentences in SENTENCES.items():
        rows: list[dict[str, object]] = []
        for text in sentences:
            span = {"start": 0.4 * number, "end": 0.4 * (number + 1)}
            speaker = f"s{number % 3}"
            rows.append({"path": "all.flac", **span, "text": text, "speaker": speaker, "age": ""})
            number += 1
        (folder / name).write_text(write_rows(rows, Path(name).suffix), encoding="utf-8")
    tables = (f"{Path(name).stem}={folder / name}" for name in SENTENCES)
    options = [word for table in tables for word in ("--manifest", table)]
    options += ["--language=en", f"--output_folder={folder / 'run'}"]
    overrides = parse_overrides(options)
    return prepare_transcripts(read_data_settings(Path(ROOT, "hparams/ctc.yaml"), overrides))


def write_rows(rows: Sequence[dict[str, object]], suffix: str) -> str:
    """Return a table of JSON Lines, or one whose columns are separated by commas or tabs."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    lines = [[*rows[0]], *([*map(str, row.values())] for row in rows)]
    return "".join(("\t" if suffix == ".tsv" else ",").join(map(quoted, x)) + "\n" for x in lines)


def quoted(cell: str) -> str:
    return f'"{cell}"' if "," in cell else cell


def prepare_rows(folder: Path) -> dict[str, object]:
    """Prepare a corpus, and list all rows without their audio."""
    splits = make_splits(folder)
    left_out = [*map(str, splits.excluded), *map(str, splits.out_of_range)]
    rows = {name: split.remove_columns("audio").to_list() for name, split in splits.named().items()}
    return without_folder({"left_out": left_out, "rows": rows}, folder)


def without_folder(value: Any, folder: Path) -> Any:
    """Return plain data whose paths begin in an unnamed folder."""
    return json.loads(json.dumps(value, default=str).replace(str(folder), "FOLDER"))


def report_data(folder: Path) -> dict[str, object]:
    facts = measure_data(make_splits(folder), sample_rate=RATE, language="en")
    del facts["normalizer"]  # the version of another producer
    return without_folder(facts, folder)


def normalize_all(_: Path) -> dict[str, str]:
    """Normalize and spell out the transcripts of two tables of tests, whichever their outputs."""
    outputs: dict[str, str] = {}
    for line in (TEXTS_FOLDER / "transcripts.tsv").read_text("utf-8").splitlines()[1:]:
        language, text, _ = line.split("\t")
        for way, settings in (("plain", None), ("kept", {"case": "keep", "punctuation": ["."]})):
            normalize = transcript_normalizer(text_table(language, settings))
            outputs[f"{language}, {way}: {text}"] = normalize(text)
    for line in (TEXTS_FOLDER / "verbalize.tsv").read_text("utf-8").splitlines():
        language, text, _ = line.split("\t")
        outputs[f"{language}, spelled out: {text}"] = spell_out(text, language).text
    return outputs


def train_tokenizers(folder: Path) -> dict[str, object]:
    outputs: dict[str, object] = {}
    for kind in TOKEN_TYPES:
        size = None if kind == "char" else 24
        tokenizer = ensure_tokenizer(
            model_file=folder / kind, token_type=kind, vocab_size=size, texts=lambda: TEXTS
        )
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        outputs[kind] = {"pieces": pieces, "ids": [*map(tokenizer.encode, TEXTS)]}
    return outputs


def train_language_models(folder: Path) -> dict[str, object]:
    train_models(folder / "lm", char_tokenizer(folder), words=3, tokens=4)
    return {
        name: {
            "words": [*model.words],
            "log_probs": [grams.log_probs.astype(float).tolist() for grams in model.grams],
        }
        for name, model in load(folder / "lm")[0].items()
    }


def write_symbols(_: Path) -> list[str]:
    texts = ["Press 12, or wait. It's 5 p.m. (R&D)!", 'He said: "No?"']
    return read_texts(texts, "en", "characters")


def measure_pitch(_: Path) -> list[float]:
    pitch: list[float] = track_pitch(sound(1), RATE, 160).astype(float).tolist()
    return pitch


def label_speech(_: Path) -> list[bool]:
    signal = np.concatenate([sound(1), sound(2), sound(0) // 2])
    labels: list[bool] = find_speech(signal, RATE).tolist()
    return labels


def write_debian_release(folder: Path) -> dict[str, object]:
    (folder / "release").mkdir()
    sentences = ["Press one.", "Hold the line.", "Goodbye, Ann!", "Two", "Seven"]
    clips = [
        (ReleaseRow(client_id="ann", path=f"{i}.flac", sentence=text, locale="en"), sound(i), RATE)
        for i, text in enumerate(sentences)
    ]
    write_release(folder / "release", clips)
    tables = {file.name: file.read_text("utf-8") for file in folder.glob("release/*.tsv")}
    return {name: tables[name].splitlines() for name in sorted(tables)}


def compute_features(_: Path) -> list[list[float]]:
    audio = torch.from_numpy(np.concatenate([sound(3), sound(1)])).float()[None] / 32_768
    features, _lengths = Fbank().eval()(audio, torch.tensor([audio.shape[1]]))
    values: list[list[float]] = features[0, ::7, ::9].double().tolist()
    return values


class Producer(NamedTuple):
    """What makes an output from an empty folder, and its version: a module's constant."""

    make: Callable[[Path], Any]
    module: str
    constant: str

    @property
    def version(self) -> int:
        version: int = getattr(import_module(self.module), self.constant)
        return version


def be_other_code(patches: pytest.MonkeyPatch) -> None:
    """Raise all versions, in each module that has imported them."""
    constants = {producer.constant for producer in PRODUCERS.values()}
    for name, module in [*sys.modules.items()]:
        if name.startswith(("sbkit.", "recipes.")):
            for constant in constants & vars(module).keys():
                patches.setattr(module, constant, 99)


PRODUCERS = {
    "decoding": Producer(decode_all, "sbkit.audio.io", "DECODING_VERSION"),
    "rows": Producer(prepare_rows, "sbkit.data.cache", "ROWS_VERSION"),
    "data_report": Producer(report_data, "sbkit.data.data_report", "REPORT_VERSION"),
    "texts": Producer(normalize_all, "sbkit.text.normalization", "TEXT_VERSION"),
    "tokenizers": Producer(train_tokenizers, "sbkit.text.tokenizer", "TOKENIZER_VERSION"),
    "lm": Producer(train_language_models, "sbkit.lm.language_models", "LM_VERSION"),
    "symbols": Producer(write_symbols, "sbkit.tasks.tts.symbols", "SYMBOLS_VERSION"),
    "pitch": Producer(measure_pitch, "sbkit.tasks.tts.recordings", "PITCH_VERSION"),
    "speech": Producer(label_speech, "recipes.vad.data", "SPEECH_VERSION"),
    "releases": Producer(write_debian_release, "recipes.debian.release", "RELEASE_VERSION"),
    "features": Producer(compute_features, "sbkit.bundle.config", "BUNDLE_FORMAT"),
}


def find_change(old: Any, new: Any, name: str = "output") -> str | None:
    """Name the first value that differs; floats of a list may, by a share of their maximum."""
    pairs: Iterable[tuple[str, Any, Any]]
    if is_vector(old) and is_vector(new) and len(old) == len(new):
        difference = np.abs(np.subtract(old, new)).max()
        is_equal = difference <= TOLERANCE * np.abs(old).max()
        return None if is_equal else f"{name} by up to {difference:.4g}"
    if isinstance(old, dict) and isinstance(new, dict):
        # An input that was added since changes nothing of what is made from the others.
        keys = old if name == "output" else {**old, **new}
        pairs = ((f"{name}.{key}", old.get(key), new.get(key)) for key in keys)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = ((f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)))
    else:
        return None if old == new else f"{name}: {old!r} -> {new!r}"
    return next(filter(None, (find_change(a, b, place) for place, a, b in pairs)), None)


def is_vector(value: object) -> bool:
    return isinstance(value, list) and {*map(type, value)} == {float}


def change_values(value: Any) -> Iterator[Any]:
    """Yield copies of plain data, in each of which another value differs by little."""
    if is_vector(value):
        yield [value[0] + 2 * TOLERANCE * max(map(abs, value)), *value[1:]]
    elif isinstance(value, dict):
        yield from ({**value, key: x} for key in value for x in change_values(value[key]))
    elif isinstance(value, list):
        yield [*value, value]
        for i, item in enumerate(value):
            yield from ([*value[:i], x, *value[i + 1 :]] for x in change_values(item))
    else:
        yield [value]


def read_golden(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return golden


def describe_fault(name: str, golden: dict[str, Any], output: object) -> str | None:
    """Say what to do about an output that has changed while its version has not."""
    change = find_change(golden["output"], output)
    if change is None or PRODUCERS[name].version != golden["version"]:
        return None
    return (
        f"The {name} have changed ({change}), and runs keep them. Raise "
        f"{PRODUCERS[name].constant} of {PRODUCERS[name].module}, then run {WRITE_COMMAND}."
    )


@pytest.mark.parametrize("name", PRODUCERS)
def test_outputs_change_with_their_version_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    golden = read_golden(name)
    output = PRODUCERS[name].make(tmp_path)
    assert describe_fault(name, golden, output) is None
    assert golden["version"] == PRODUCERS[name].version, f"Run {WRITE_COMMAND}."
    for changed in change_values(golden["output"]):
        assert PRODUCERS[name].constant in str(describe_fault(name, golden, changed))
    other_version = {**golden, "version": golden["version"] - 1}
    assert describe_fault(name, other_version, [output]) is None


def write_outputs(names: Sequence[str]) -> None:
    """Write the outputs of producers; stop at one that has changed with an unchanged version."""
    for name in names:
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
            patches.setenv("SBKIT_CACHE", f"{folder}/cache")
            output = PRODUCERS[name].make(Path(folder))
        file = FOLDER / f"{name}.json"
        if file.exists() and (fault := describe_fault(name, read_golden(name), output)):
            raise SystemExit(fault)
        golden = {"version": PRODUCERS[name].version, "output": output}
        text = json.dumps(golden, ensure_ascii=False, indent=1) + "\n"
        lists = re.compile(r"\[[-\d.,e\s]+\]")  # of numbers, which stand on one line
        text = lists.sub(lambda match: " ".join(match.group().split()), text)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_outputs([*PRODUCERS])
