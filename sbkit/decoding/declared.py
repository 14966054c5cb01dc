"""The decoder that a YAML, a bundle or a command declares."""

from collections.abc import Mapping
from typing import Any

from sbkit.base.errors import ConfigError
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import LanguageModelDecoder
from sbkit.decoding.decoding_graph import GraphDecoder

LM_ORDERS = ("word_lm_order", "token_lm_order")  # keys of a YAML
DECODERS: dict[str, type[LanguageModelDecoder]] = {
    decoder_class.decoder_type: decoder_class for decoder_class in (BeamDecoder, GraphDecoder)
}


def make_decoder(
    *, decoder_type: str = BeamDecoder.decoder_type, **settings: Any
) -> LanguageModelDecoder:
    """Make a decoder with language models.

    decoder_type: "beam" for prefix beam search, "graph" for the best path through a decoding graph.
    settings: the arguments of `BeamDecoder` or `GraphDecoder`.
    Raises ConfigError if one of them is invalid.
    """
    if decoder_type not in [*DECODERS]:  # a list cannot be looked up
        raise ConfigError(f"`decoder_type` must be {' or '.join(DECODERS)}; got {decoder_type}.")
    return DECODERS[decoder_type](**settings)


vars(make_decoder)["RANGES"] = LanguageModelDecoder.RANGES  # `check` refuses other numbers early


def declared_decoder(hparams: Mapping[str, Any]) -> LanguageModelDecoder | None:
    """Return the decoder of a YAML, without rescoring if no attention decoder is trained.

    None decodes greedily. Raises ConfigError for a decoder that no bundle can hold, or that cannot
    run here.
    """
    decoder = hparams.get("decoder")
    if decoder is None:
        if any(hparams.get(name, 0) for name in LM_ORDERS):
            raise ConfigError(
                f"`{LM_ORDERS[0]}` and `{LM_ORDERS[1]}` belong to a `decoder`, but the YAML has "
                "none, and greedy decoding uses no language model. Set both to 0, or add the "
                "decoder."
            )
        return None
    if not isinstance(decoder, LanguageModelDecoder) or type(decoder) not in DECODERS.values():
        raise ConfigError(
            "`decoder` must be made by sbkit.decoding.declared.make_decoder, so that a bundle can "
            f"hold it, but is a {type(decoder).__name__}. Correct it, or leave `decoder` out."
        )
    if hparams.get("ctc_weight", 1) == 1:  # the attention decoder is not trained
        decoder = decoder.copy_with(attention_rescoring=False)
    decoder.check()
    return decoder
