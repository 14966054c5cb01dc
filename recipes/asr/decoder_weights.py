"""The weights of the decoder of a trained model: those of the YAML, or the best on validation."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage

from sbkit.base.files import to_json, write_text_atomically
from sbkit.decoding.decoder import DECODER_FILE, BeamDecoder
from sbkit.decoding.tune import Heard, tune, used_weights
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.wer import Scores
from sbkit.logs.log import say
from sbkit.train.evaluation import start_validation


def choose_weights(brain: Any, decoder: BeamDecoder, heard: Sequence[Heard]) -> BeamDecoder:
    """Return the decoder with its weights, and write them into the run folder.

    Those that the YAML leaves open are chosen on what was heard of the validation sets, never on a
    test set.
    """
    names = ("kind", "beam_size", "attention")
    record: dict[str, Any] = {name: getattr(decoder, name) for name in names}
    if decoder.is_open and any(used_weights(decoder)):
        ping = partial(brain.watchdog.ping, "tuning", brain.optimizer_step)
        tuned = tune(decoder, heard, by_words=brain.by_words, add=_add, ping=ping)
        decoder = decoder.with_weights(tuned.weights)
        record |= {"chosen_on": list(valid_sets(brain)), **tuned.plain()}
        chosen = tuned.weights.plain()
        said = ", ".join(f"{name} {chosen[name]:g}" for name in used_weights(decoder))
        if decoder.language_models.words is not None and not decoder.weights.word:
            said += ", without the model of words, which knows few of them and only misleads"
        say(f"decoder: {said} (chosen on {', '.join(valid_sets(brain))})")
    record["weights"] = decoder.weights.plain()
    if rank() == 0:
        folder = Path(brain.hparams.output_folder)
        write_text_atomically(folder / DECODER_FILE, to_json(record, indent=1) + "\n")
    return decoder


def valid_sets(brain: Any) -> dict[str, Any]:
    """Return the loaders of a run's validation sets by name."""
    return {} if brain.loaders is None else dict(brain.loaders.valid)


@torch.no_grad()
def hear(brain: Any) -> Iterator[Heard]:
    """Compute the log-probabilities of this rank's share of the validation sets."""
    start_validation(brain)
    brain.modules.eval()
    for loader in valid_sets(brain).values():
        for batch in brain.pinging(loader, "decoding"):
            yield from _hear(brain, batch)


def _hear(brain: Any, batch: Any) -> list[Heard]:
    placed = brain.placed(batch)
    with brain.evaluation_ctx:
        predictions = brain.compute_forward(placed, Stage.VALID)
    log_probs = predictions.log_probs.float().cpu().numpy()
    frames, attending = predictions.frames.tolist(), brain.attending(predictions)
    return [
        Heard(row[:count].copy(), text, attention)  # a view keeps the whole batch
        for text, row, count, attention in zip(
            batch.texts, log_probs, frames, attending, strict=True
        )
    ]


def _add(scores: Sequence[Scores]) -> list[Scores]:
    """Add the scores of all ranks."""
    everyone = gather_over_ranks(list(scores))
    return [sum(each, Scores()) for each in zip(*everyone, strict=True)]
