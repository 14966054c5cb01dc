"""Provenance of scores: which weights, decoder, language models and confidences were measured.

The record is stored beside every score, and compared before the score is shown again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.errors import BundleError
from sbkit.base.files import to_json
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.checkpoint.weights import average
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.decoding.words import CONFIDENCE_FILE
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.wer_report import PROVENANCE
from sbkit.models.pretrained.lora import merge_adapters

NAMES_IN_SENTENCE = {
    "weights": "these weights",
    "decoder": "this decoder",
    "language_models": "these language models",
    "confidence": "these confidences",
}
# Fields of a decoder that decide its texts; the others record how it was fitted
DECODER_SETTINGS = ("decoder_type", "beam_size", "attention_rescoring", "weights")
NUM_HASH_DIGITS = 12

Provenance = dict[str, Any]


def make_provenance(
    *,
    weights: bytes | None,
    decoder: Mapping[str, Any] | None,
    language_models: bytes | None,
    confidence: Any,
) -> Provenance:
    """Return the record as plain data.

    Args:
        weights: a safetensors file.
        decoder: its settings; None for greedy decoding.
        language_models: a safetensors file.
        confidence: the contents of confidence.json.
    """
    return {
        "weights": _hash(weights),
        "decoder": settings_of(decoder),
        "language_models": _hash(language_models),
        "confidence": _hash(None if confidence is None else to_json(confidence).encode()),
    }


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def settings_of(decoder: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings that decide the texts of a decoder; None for greedy decoding."""
    return None if decoder is None else {name: decoder.get(name) for name in DECODER_SETTINGS}


def to_safetensors(best: Sequence[Checkpoint], parts: Sequence[int] | None = None) -> bytes:
    """Write the mean model of checkpoints, adapters merged; equal checkpoints give equal bytes.

    ``parts``: indices of the parts to write, which are then numbered from 0; None for all.
    """
    merged = merge_adapters(average(best, "model"))
    if parts is not None:
        new_index = {str(old): new for new, old in enumerate(parts)}
        split_names = ((name, *name.partition(".")[::2]) for name in merged)
        merged = {
            f"{new_index[index]}.{path}": merged[name]
            for name, index, path in split_names
            if index in new_index
        }
    return save({name: value.clone() for name, value in merged.items()})


def provenance_of_run(run: Path) -> Provenance | None:
    """Return the provenance of a bundle exported from a run now; None without a checkpoint."""
    best = Checkpointer(run / CHECKPOINTS).find_averaged() if (run / CHECKPOINTS).is_dir() else []
    if not best:
        return None
    decoder = read_json(run / DECODER_FILE)
    return make_provenance(
        weights=to_safetensors(best) if "model" in best[0].paramfiles else None,
        decoder=decoder,
        language_models=None if decoder is None else (run / LANGUAGE_MODELS).read_bytes(),
        confidence=read_json(run / CONFIDENCE_FILE),
    )


def describe_provenance(record: Provenance | None) -> str:
    """Write a provenance in one line."""
    if record is None:
        return "measured without a checkpoint"
    decoder = record["decoder"] or {"decoder_type": "none", "beam_size": None, "weights": {}}
    numbers = {"beam": decoder["beam_size"], **decoder["weights"]}
    settings = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    hashes = [
        f"{name.replace('_', ' ')} {value[:NUM_HASH_DIGITS]}"
        for name, value in record.items()
        if isinstance(value, str)
    ]
    facts = ", ".join([*hashes, f"decoder {decoder['decoder_type']}", *settings])
    return f"measured with {facts}"


def what_differs(measured: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    """Return a phrase such as "not measured with this decoder"; None if nothing differs.

    Nothing differs either if ``now`` is None: the score belongs to no run.
    """
    if now is None:
        return None
    names = [
        words
        for name, words in NAMES_IN_SENTENCE.items()
        if (measured or {}).get(name) != now.get(name)
    ]
    return f"not measured with {' and '.join(names)}" if names else None


def require_current_results(folder: Path) -> None:
    """Raise BundleError if the scores of a run were measured with other weights or decoders."""
    measured = (read_json(folder / SUMMARY) or {}).get(PROVENANCE)
    if differs := what_differs(measured, provenance_of_run(folder)):
        raise BundleError(
            f"The scores in {folder} are outdated: {differs}. Measure them again: sbkit score "
            f"{folder} --out DIR"
        )


def read_json(file: Path) -> Any:
    """Read a JSON file that training wrote into a run folder; None if it is not there."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
