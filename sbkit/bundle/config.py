"""Read the files of a bundle, and parse its configuration, config.json, into typed fields."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from sbkit.audio.decode import MAX_RATE_HZ, MIN_RATE_HZ
from sbkit.base.checksums import CHECKSUMS, check_unchanged, read_checksums
from sbkit.base.errors import BundleError, SbkitError
from sbkit.base.files import RUN_CONFIG_FILE, RUN_YAML, from_plain, parsing_errors, read_regular
from sbkit.base.messages import listed
from sbkit.decoding.word_times import Confidence, WordOffsets
from sbkit.text.normalization import TextTable, language_table, table_from_stored

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
BUNDLE_FORMAT = 8  # up to 7, single clicks moved the level of features

Plain = Any  # what JSON can hold


@dataclass(frozen=True)
class BundleConfig:
    """The fields of config.json that are needed to run a bundle.

    task: the dotted path of its `sbkit.bundle.task.Task`.
    sample_rate: in Hz.
    model: the keys of the parts in the ModuleList, in order; none if transformers runs the model.
    parts: every part as plain data, by key.
    language: of the texts.
    normalizer: the normalization table of the training texts, also applied to references and to
        phrases of requests; None for the table that this sbkit has for the language.
    decoder: its beam size, weights and use of the attention decoder, and its error rates on the
        validation set; None for greedy decoding.
    confidence: the fitted weights of word features, by the name of the decoder; may be empty.
    word_offsets: the offsets from the frames of labels to the times of words.
    side_shapes: the types and shapes of an example of the side inputs, by name.
    """

    task: str
    sample_rate: int
    model: tuple[str, ...]
    parts: Mapping[str, Plain] = field(repr=False)
    language: str | None = None
    normalizer: TextTable | None = field(default=None, repr=False)
    decoder: Mapping[str, Any] | None = field(default=None, repr=False)
    confidence: Mapping[str, Confidence] = field(default_factory=dict, repr=False)
    word_offsets: WordOffsets = field(default_factory=WordOffsets, repr=False)
    side_shapes: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def has_words(self) -> bool:
        return self.text_table.spaces

    @property
    def text_table(self) -> TextTable:
        """The table that normalizes texts."""
        return self.normalizer or language_table(self.language or "und")


def is_transformers_folder(folder: Path) -> bool:
    """Return whether transformers wrote the config.json of a folder; False for a bundle."""
    file = folder / CONFIG_FILE
    if (folder / CHECKSUMS).exists():  # only a bundle has them
        return False
    with suppress(SbkitError), parsing_errors(file, "be JSON", fix="Restore it.", is_json=True):
        content = read_regular(file, subject=f"The {CONFIG_FILE}", follow_links=True)
        return "model_type" in json.loads(content)
    return False


def missing_model(folder: Path, kind: str, file: str) -> BundleError:
    """Return the error for a folder without this file; it lists subfolders that have the file.

    kind: "a bundle" or "a run folder".
    """
    reason = f"it has no {file}" if folder.exists() else "there is no such folder"
    name = f"bundle/{file}" if file == CONFIG_FILE else file
    files = chain.from_iterable(folder.glob("*/" * depth + name) for depth in range(4))
    models = listed(sorted(model.parent for model in files))
    advice = models or "the folder that training or `sbkit export` printed"
    return BundleError(f"{folder} is not {kind}: {reason}. Name {advice}.")


def require_run(folder: Path) -> None:
    """Raise BundleError unless a folder is the folder of a run."""
    for name in (RUN_YAML, RUN_CONFIG_FILE):
        if not (folder / name).is_file():
            raise missing_model(folder, "a run folder", name)


class BundleFiles:
    """The files of a bundle: `read` returns the bytes of one that match its checksum.

    config: the parsed config.json.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        if not (folder / CONFIG_FILE).exists():
            raise missing_model(folder, "a bundle", CONFIG_FILE)
        if is_transformers_folder(folder):
            raise BundleError(
                f"{folder} is a model of transformers, not of sbkit. Only `sbkit score` and `sbkit "
                "transcribe` run it, with --language TAG, and `load_bundle` with `language`."
            )
        self.folder = folder
        self._checksums = read_regular(folder / CHECKSUMS, subject=f"A bundle's {CHECKSUMS}")
        self.config = parse_config(self.read(CONFIG_FILE), file=folder / CONFIG_FILE)

    def read(self, name: str) -> bytes:
        """Read a regular file; raises SbkitError if it is missing or has another checksum."""
        content = read_regular(self.folder / name, subject=f"A bundle's {name}")
        check_unchanged({name: content}, self._checksums, folder=self.folder)
        return content

    def has(self, name: str) -> bool:
        """Return whether the bundle lists a file."""
        return name in read_checksums(self.folder)

    def read_modules(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read the code of the named modules that the bundle holds."""
        stored = [name for name in names if (self.folder / f"{name}.py").exists()]
        return {name: self.read(f"{name}.py") for name in stored}


def parse_config(content: bytes, *, file: Path) -> BundleConfig:
    """Parse the content of config.json; errors name the file."""
    fix = "Train its run again, or install the version of sbkit that exported it."
    with parsing_errors(file, "be what `sbkit export` writes", fix=fix, is_json=True):
        values = json.loads(content)
        if values["format"] != BUNDLE_FORMAT:
            raise ValueError(f"its format is {values['format']}, not {BUNDLE_FORMAT}")
        if values.get("normalizer") is not None:
            values["normalizer"] = table_from_stored(values["normalizer"])
        values["confidence"] = {
            name: Confidence(**weights)
            for name, weights in (values.get("confidence") or {}).items()
        }
        names = {field.name for field in fields(BundleConfig)} & values.keys()
        config = from_plain(BundleConfig, {name: values[name] for name in names})
        if not MIN_RATE_HZ <= config.sample_rate <= MAX_RATE_HZ:
            raise ValueError(f"its sample rate is {str(config.sample_rate)[:20]}")
        return config
