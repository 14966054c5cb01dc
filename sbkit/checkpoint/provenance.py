"""What a score was measured with: a record beside every score, compared before it is shown again.

A figure belongs to the weights, decoder, language models and confidences that it was measured with.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.run_config import CHECKPOINTS
from sbkit.checkpoint.weights import average
from sbkit.decoding.confidence import CONFIDENCE_FILE
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS
from sbkit.evaluate.run_results import SUMMARY
from sbkit.evaluate.utterances import PROVENANCE
from sbkit.models.pretrained.lora import merge_adapters

SAID = {
    "weights": "these weights",
    "decoder": "this decoder",
    "language_models": "these language models",
    "confidence": "these confidences",
}
SETTINGS = (
    "decoder_type",
    "beam_size",
    "attention_rescoring",
    "weights",
)  # of a decoder; others say how it was made
DIGITS = 12  # of a hash on a page

Provenance = dict[str, Any]


def make_provenance(
    *,
    weights: bytes | None,
    decoder: Mapping[str, Any] | None,
    language_models: bytes | None,
    confidence: Any,
) -> Provenance:
    """Return the record, plain data.

    weights, language_models: files of safetensors; decoder: its settings, None for greedy decoding;
    confidence: of the words, as confidence.json has it.
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
    """Return what decides about the texts of a decoder, None for greedy decoding."""
    return None if decoder is None else {name: decoder.get(name) for name in SETTINGS}


def to_safetensors(best: Sequence[Checkpoint], kept: Sequence[int] | None = None) -> bytes:
    """Average the model of checkpoints, adapters merged; the same ones give the same bytes.

    ``kept``: the numbers of the parts that are written, which are then counted anew; None for all.
    """
    merged = merge_adapters(average(best, "model"))
    if kept is not None:
        split = {name: name.partition(".") for name in merged}
        numbers = {str(old): new for new, old in enumerate(kept)}
        merged = {
            f"{numbers[number]}.{rest}": merged[name]
            for name, (number, _, rest) in split.items()
            if number in numbers
        }
    return save({name: value.clone() for name, value in merged.items()})


def provenance_of_run(run: Path) -> Provenance | None:
    """Return the record of what a run would be exported with now; None without a checkpoint."""
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
    """Write a record in one line."""
    if record is None:
        return "measured without a checkpoint"
    decoder = record["decoder"] or {"decoder_type": "none", "beam_size": None, "weights": {}}
    chosen = {"beam": decoder["beam_size"], **decoder["weights"]}
    settings = [f"{name} {value:g}" for name, value in chosen.items() if value is not None]
    hashes = [
        f"{name.replace('_', ' ')} {each[:DIGITS]}"
        for name, each in record.items()
        if isinstance(each, str)
    ]
    said = ", ".join([*hashes, f"decoder {decoder['decoder_type']}", *settings])
    return f"measured with {said}"


def what_differs(measured: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    """Return "not measured with this decoder" and the like; None where nothing differs.

    What is no run has no record, and nothing to differ from.
    """
    if now is None:
        return None
    names = [said for name, said in SAID.items() if (measured or {}).get(name) != now.get(name)]
    return f"not measured with {' and '.join(names)}" if names else None


def require_current_results(folder: Path) -> None:
    """Raise SbkitError where the figures of a run are not those of the run as it is now."""
    measured = (read_json(folder / SUMMARY) or {}).get(PROVENANCE)
    if differs := what_differs(measured, provenance_of_run(folder)):
        raise SbkitError(
            f"The figures of {folder} must be those of the run as it is now, but are {differs}. "
            f"Measure them again: sbkit score {folder} --out DIR"
        )


def read_json(file: Path) -> Any:
    """Read what training wrote into a run folder; None where it wrote nothing."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
