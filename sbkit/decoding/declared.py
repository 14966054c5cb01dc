"""The decoder that a YAML, a bundle or a command declares."""

from typing import Any

from sbkit.base.errors import ConfigError
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LanguageModelDecoder
from sbkit.decoding.decoding_graph import GraphDecoder

DECODERS: dict[str, type[LanguageModelDecoder]] = {
    decoder_class.decoder_type: decoder_class for decoder_class in (BeamDecoder, GraphDecoder)
}


def make_decoder(
    *, decoder_type: str = BeamDecoder.decoder_type, **settings: Any
) -> LanguageModelDecoder:
    """Make a decoder with language models.

    decoder_type: "beam" for prefix beam search, "graph" for the best path through a decoding graph.
    settings: the arguments of a `LanguageModelDecoder`.
    Raises ConfigError if one of them is invalid.
    """
    if decoder_type not in [*DECODERS]:  # a list cannot be looked up
        raise ConfigError(f"`decoder_type` must be {' or '.join(DECODERS)}; got {decoder_type}.")
    return DECODERS[decoder_type](**settings)


vars(make_decoder)["RANGES"] = LanguageModelDecoder.RANGES  # `check` refuses other numbers early
