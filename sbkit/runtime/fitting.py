"""Encode the validation sets that the decoder of a bundle is fitted to.

rows -> log-probabilities of a sample
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import datasets

from sbkit.audio.segments import longest_whole
from sbkit.base.units import seconds_to_samples
from sbkit.data.splits import sample_counts
from sbkit.decoding.sample import ValidationUtterance, order_of, sample_utterances
from sbkit.distributed.ranks import world_size
from sbkit.logs.progress import Ping, no_ping, progress_bar
from sbkit.runtime.test_sets import BATCH_SECONDS, read_whole_clips
from sbkit.runtime.torch_model import TorchBundle

# Of audio of each set: the tokens of a sample, if each frame of 40 ms has one.
MAX_SECONDS = 2400.0


def sample_validation(
    bundle: TorchBundle,
    sets: Mapping[str, datasets.Dataset],
    *,
    with_attention: bool,
    batch_seconds: float = BATCH_SECONDS,
    ping: Ping = no_ping,
    quiet: bool = False,
) -> list[ValidationUtterance]:
    """Return this rank's part of a sample of the validation sets, with log-probabilities.

    At most MAX_SECONDS of each set are encoded. Long recordings are left out, because a decoder is
    fitted to utterances.

    with_attention: whether a decoder rescores, and so needs the encoder's states.
    """
    rate = bundle.config.sample_rate
    longest = longest_whole(batch_seconds, rate)
    title, total = "encoding the validation sets", sum(map(len, sets.values()))
    with progress_bar(title, total, quiet=quiet) as advance:

        def encode() -> Iterator[ValidationUtterance]:
            for rows in sets.values():
                ids = rows["id"][:]
                samples = sample_counts(rows)
                order = [row for row in range(len(rows)) if samples[row] <= longest]
                order.sort(key=lambda row: order_of(ids[row]))
                fits = samples[order].cumsum() <= seconds_to_samples(MAX_SECONDS, rate)
                selected = rows.select(sorted(order[: max(1, fits.sum())]))
                for batch in read_whole_clips(selected, rate, batch_seconds=batch_seconds):
                    clips = [*batch.values()]
                    advance(world_size() * len(clips))
                    if ping("encoding", [clip["id"] for clip in clips]):
                        return
                    encoded_clips = bundle.model.encode([clip["audio"] for clip in clips])
                    for clip, encoded in zip(clips, encoded_clips, strict=True):
                        # Copies: a view would keep the outputs of the whole batch.
                        encoded = replace(encoded, states=encoded.states.clone())
                        yield ValidationUtterance(
                            encoded.log_probs.copy(),
                            clip["text"],
                            bundle.attention_decoder(encoded) if with_attention else None,
                            clip["id"],
                        )

        return sample_utterances(encode(), bundle.tokenizer.silent)
