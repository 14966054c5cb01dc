"""Provenance of scores: the weights, decoder, language models and confidences that were measured.

The record is stored with every score, and compared before the score is shown again.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.base.files import parsing_errors, read_file, to_json

FIELD_PHRASES = {
    "weights": "these weights",
    "decoder": "this decoder",
    "language_models": "these language models",
    "confidence": "these confidences",
}
# The fields of a decoder's record that change the texts; the others tell how it was fitted.
TEXT_SETTINGS = ("beam_size", "attention_rescoring", "weights")
NUM_HASH_DIGITS = 12

Provenance = dict[str, Any]


def make_provenance(
    *,
    weights: bytes,
    decoder: Mapping[str, Any] | None = None,
    language_models: bytes | None = None,
    confidence: Any = None,
) -> Provenance:
    """Return the record of files and of plain data; without a decoder, of greedy decoding."""
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "decoder": text_settings(decoder),
        "language_models": _hash(language_models),
        "confidence": _hash(None if confidence is None else to_json(confidence).encode()),
    }


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def text_settings(decoder: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of a decoder that change its texts; None for greedy decoding."""
    if decoder is None:
        return None
    return {name: decoder.get(name) for name in TEXT_SETTINGS}


def describe_provenance(record: Provenance | None) -> str:
    """Write a provenance in one line."""
    if record is None:
        return "measured without a checkpoint"
    hashes = [
        f"{name.replace('_', ' ')} {value[:NUM_HASH_DIGITS]}"
        for name, value in record.items()
        if isinstance(value, str)
    ]
    return f"measured with {', '.join([*hashes, *_describe_decoder(record['decoder'])])}"


def _describe_decoder(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return ["decoder none"]
    facts = ["decoder beam", f"beam {decoder['beam_size']}"]
    weights = decoder["weights"] or {}  # null if they have not been fitted
    facts += [f"{name} {weight:g}" for name, weight in weights.items()]
    if decoder["attention_rescoring"]:
        facts.append("attention rescoring")
    return facts


def describe_difference(
    measured: Mapping[str, Any] | None, current: Mapping[str, Any] | None
) -> str | None:
    """Return a phrase such as "not measured with this decoder"; None if nothing differs.

    current: None for a score without a run, which cannot be outdated.
    """
    if current is None:
        return None
    measured = measured or {}
    names = [name for name in FIELD_PHRASES if measured.get(name) != current.get(name)]
    phrases = " or ".join(FIELD_PHRASES[name] for name in names)
    return f"not measured with {phrases}" if names else None


def read_json(file: Path) -> Any:
    """Read a JSON file that training wrote into a run folder; None if it is not there."""
    if not file.exists():
        return None
    with parsing_errors(file, "be what sbkit wrote", fix="Restore it.", is_json=True):
        return json.loads(read_file(file))
