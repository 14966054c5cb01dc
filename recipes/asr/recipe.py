"""The data, the labels and the keys of a recognizer's runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from recipes.asr.data import make_asr_loaders, prepare_tokenizer
from recipes.prepare import CorpusRecipe, prepare_transcripts
from sbkit.base.ranges import Dropout, OneOf, Range, Text
from sbkit.config.keys import (
    LANGUAGE_MODELS,
    Key,
    above,
    below,
    data_key,
    end_key,
    label_key,
    one_of,
)
from sbkit.lm.ngram import MAX_ORDER
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.tokenizer import TOKEN_TYPES
from sbkit.train.recipe import BrainClass

LM_ORDER = Range(low=0, high=MAX_ORDER, integer=True, advice="Pass 0 for no model.")


class AsrRecipe(CorpusRecipe):
    """Train a recognizer on transcripts."""

    task = AsrTask()
    brain: ClassVar[BrainClass] = "recipes.asr.brain.AsrBrain"
    keys: ClassVar[Mapping[str, Key]] = {
        **CorpusRecipe.keys,
        "language": data_key(
            Text(
                name="one language tag",
                advice="For several, write mul, and the tables of all languages as `manifest`.",
            )
        ),
        "token_type": label_key(OneOf(values=TOKEN_TYPES, advice="char suits little text.")),
        "ctc_weight": Key(
            Range(low=0.01, high=1, advice="At 0, the CTC head would not be trained."),
            1.0,
            "1.0: only CTC; below, the attention decoder's loss has the rest",
        ),
        "inter_ctc_weight": Key(
            Range(
                low=0, high=0.99, advice="At 1, the upper half of the encoder would not be trained."
            )
        ),
        "label_smoothing": Key(Dropout, needs={"ctc_weight": below(1)}),
        "word_lm_order": end_key(
            LM_ORDER, 0, "order of the n-gram language model of words; 0: no model"
        ),
        "token_lm_order": end_key(
            LM_ORDER,
            0,
            "order of the model of tokens, for words that the word model lacks; 0: none",
        ),
        "beam_size": end_key(needs={**LANGUAGE_MODELS, "ctc_weight": below(1)}),
        # Arguments of parts, which their classes declare.
        "pause_seconds": Key(needs={"pause_prob": above(0)}),
        "time_width": Key(needs={"time_masks": above(0)}),
        "max_time_fraction": Key(needs={"time_masks": above(0)}),
        "freq_width": Key(needs={"freq_masks": above(0)}),
        "mask_time_length": Key(needs={"mask_time_prob": above(0)}),
        "mask_channel_length": Key(needs={"mask_channel_prob": above(0)}),
        "kernel_size": Key(needs={"encoder_module": one_of("conformer", "branchformer")}),
        "intermediate_layer": Key(needs={"inter_ctc_weight": above(0)}),
    }
    prepare_splits = staticmethod(prepare_transcripts)
    prepare_labels = staticmethod(prepare_tokenizer)
    make_loaders = staticmethod(make_asr_loaders)

    def checks(self) -> Sequence[Callable[[Any], Any]]:
        from recipes.asr.checks import CHECKS

        return CHECKS
