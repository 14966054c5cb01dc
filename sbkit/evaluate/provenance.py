"""Provenance of scores: the weights, language models and decoder that were measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.base.files import parsing_errors, read_file

PROVENANCE = "provenance"  # the key of the record in `summary.json`
NUM_HASH_DIGITS = 12

Provenance = dict[str, Any]


def describe_provenance(record: Provenance | None) -> str:
    """Write a provenance in one line."""
    if record is None:
        return "measured without a bundle"
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
    facts += [f"{name} {weight:g}" for name, weight in decoder["weights"].items()]
    if decoder["attention_rescoring"]:
        facts.append("attention rescoring")
    return facts


def read_json(file: Path) -> Any:
    """Read a JSON file that training wrote into a run folder; None if it is not there."""
    if not file.exists():
        return None
    with parsing_errors(file, "be what sbkit wrote", fix="Restore it.", is_json=True):
        return json.loads(read_file(file))
