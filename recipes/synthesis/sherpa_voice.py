"""A voice as one graph for sherpa-onnx's `OfflineTts`, in the form of its VITS of characters.

sherpa-onnx splits a text into characters, which it looks up in `tokens.txt`, and gives the graph
those of one sentence (`offline-tts-character-frontend.cc`). Numbers and abbreviations are not
spelled out there.
"""

from collections.abc import Mapping
from typing import Any

from recipes.synthesis.symbols import KINDS
from sbkit.base.errors import SbkitError

TOKENS = "tokens.txt"
Texts = Mapping[str, str]


def as_vits(bundle: Any) -> tuple[Mapping[str, Any], Texts]:
    """Return the metadata that sherpa-onnx reads, and the list of characters.

    Raises SbkitError for a voice of phonemes, which are more than a character each.
    """
    kind = bundle.model.settings["kind"]
    if kind != KINDS[0]:
        raise SbkitError(
            f"A voice for sherpa-onnx must read {KINDS[0]}, one by one, but this one reads {kind}. "
            "Leave the format out."
        )
    metadata = {
        "model_type": "vits",
        "frontend": "characters",
        "comment": "sbkit",
        "language": bundle.config.language or "und",
        "n_speakers": 1,
        "add_blank": 0,
        "use_eos_bos": 0,
    }
    return metadata, {TOKENS: tokens_of(bundle.labels.names)}


def tokens_of(names: list[str]) -> str:
    """List characters with their ids, capitals too: sherpa-onnx lowers those of ASCII alone."""
    ids = {name: id for id, name in enumerate(names) if len(name) == 1}
    upper = {name.upper(): id for name, id in ids.items()}
    ids = {name: id for name, id in upper.items() if len(name) == 1} | ids
    return "".join(f"{name} {id}\n" for name, id in ids.items())
