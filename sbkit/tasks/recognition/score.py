"""The score of a recognizer: rows and their clips -> texts beside the right ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.clips import Recognition
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.text.normalizers import Normalizer, table_normalizer


def transcribe_rows(
    bundle: Any,
    rows: Sequence[Mapping[str, Any]],
    clips: Sequence[Samples],
    *,
    times: bool,
    normalizer: Normalizer | None = None,
) -> list[ScoredUtterance]:
    """Transcribe the clips of rows with a `sbkit.bundle.Bundle`, and compare the texts.

    With another decoder than the greedy one, the greedy texts are compared, too.

    normalizer: normalizes both sides for a second comparison; None for the plain table of the
        language, if the model keeps case or punctuation.
    """
    config = bundle.config
    language = config.language or "und"
    if normalizer is None and not config.text_table.is_plain:
        normalizer = table_normalizer(language, config.text_table.plain)
    written_by = str(table_normalizer(language, config.text_table))

    def compare(recognized: Sequence[Recognition]) -> list[ScoredUtterance]:
        scored: list[ScoredUtterance] = []
        for row, result in zip(rows, recognized, strict=True):
            utterance = ScoredUtterance(
                row["id"],
                row["text"],
                result.text,
                speaker=str(row.get("speaker", "")),
                seconds=samples_to_seconds(row["samples"], config.sample_rate),
                words=result.words,
                by_words=config.has_words,
                normalizer=written_by,
            )
            if normalizer is not None:
                normalized = replace(
                    utterance,
                    reference=normalizer.normalize(row["sentence"]),
                    hypothesis=normalizer.normalize(utterance.hypothesis),
                    words=(),  # their times are those of the other text
                    normalizer=str(normalizer),
                )
                utterance = replace(utterance, normalized=normalized)
            scored.append(utterance)
        return scored

    inputs = bundle.decoder_inputs(clips)
    scored = compare(bundle.decoder_pool.decode(inputs, with_times=times))
    if bundle.decoder is None:
        return scored
    greedy = compare(bundle.greedy_pool.decode(inputs, with_times=times))
    return [replace(pair[0], greedy=pair[1]) for pair in zip(scored, greedy, strict=True)]
