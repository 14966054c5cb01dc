"""How sure a trained model's words are: fitted to its validation sets, for each of its decoders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.asr.decoder_weights import valid_sets
from sbkit.base.files import to_json, write_text_atomically
from sbkit.decoding.confidence import CONFIDENCE_FILE, GREEDY
from sbkit.decoding.confidence_fit import Judged, fit_confidence, judge
from sbkit.decoding.decoder import BeamDecoder, best_tokens
from sbkit.decoding.tune import Heard
from sbkit.decoding.word_reader import WordReader
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.log import say


def fit_readers(
    brain: Any, decoder: BeamDecoder | None, heard: Sequence[Heard]
) -> dict[str, WordReader]:
    """Return what reads the words of each decoder, and write the confidences into the run folder.

    They are fitted to what was heard of the validation sets, never of a test set.
    """
    hparams, sets = brain.hparams, ", ".join(valid_sets(brain)) or "no validation set"
    reader = WordReader(
        tokenizer=brain.tokenizer,
        samples_per_frame=brain.asr_model.samples_per_frame,
        sample_rate=hparams.sample_rate,
        lm=None if decoder is None else decoder.language_models.words,
    )
    names = [GREEDY] if decoder is None else [GREEDY, decoder.kind]
    judged: dict[str, list[Judged]] = {name: [] for name in names}
    for each in heard:
        brain.watchdog.ping("confidence", brain.optimizer_step)
        judged[GREEDY].append(_judge_greedy(reader, each))
        if decoder is not None:
            judged[decoder.kind].append(_judge_beam(reader, decoder, each))
    fitted = {
        name: fit_confidence([each for share in gather_over_ranks(own) for each in share])
        for name, own in judged.items()
    }
    for name, found in fitted.items():
        say(f"confidence of words, {name}: {found} ({sets})")
    if rank() == 0:
        record = {name: found.plain() for name, found in fitted.items()}
        file = Path(hparams.output_folder) / CONFIDENCE_FILE
        write_text_atomically(file, to_json(record, indent=1) + "\n")
    return {name: replace(reader, confidence=found.confidence) for name, found in fitted.items()}


def _judge_greedy(reader: WordReader, heard: Heard) -> Judged:
    tokens = best_tokens(heard.log_probs, reader.tokenizer.vocabulary.blank)
    return judge(reader.weigh(heard.log_probs, tokens), heard.text)


def _judge_beam(reader: WordReader, decoder: BeamDecoder, heard: Heard) -> Judged:
    beam = decoder.nbest(heard.log_probs, heard.attention)
    return judge(reader.weigh(heard.log_probs, beam[0].tokens, beam), heard.text)
