"""The task of speech recognition: text by CTC over the tokens of a sentencepiece model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.task import Task
from sbkit.decoding.pool import Recognition as Recognized
from sbkit.evaluate.wer import (
    ERROR_RATES,
    ScoredUtterance,
    all_have_word_boundaries,
    total_errors,
)
from sbkit.evaluate.wer_report import (
    describe_results,
    figures_of_test_set,
    slice_figures,
    write_results,
)
from sbkit.logs.metric import Metric, Metrics
from sbkit.text.normalizers import Normalizer, table_normalizer
from sbkit.text.tokenizer import TOKENIZER_FILE, Tokenizer
from sbkit.text.transcripts import TOKEN, transcript_normalizer

READ_SIGNS = ".,:;?!-/*+=$€£¥₽₹°"  # by another normalizer, such as Whisper's


class Recognition(Task):
    """Speech recognition."""

    model_name = "speech recognizer"
    predicts = "text"
    uses = ("transcribe FOLDER talk.wav",)
    metrics: ClassVar[Metrics] = dict.fromkeys(("CER", *ERROR_RATES), Metric())
    label_file = TOKENIZER_FILE
    label_key = "tokenizer"
    heads = ("ctc_lin", "seq_lin")
    hub_task = "automatic-speech-recognition"

    def model_class(self) -> Any:
        from sbkit.tasks.recognition.model import AsrModel

        return AsrModel

    def read_labels(self, file: Path, content: bytes) -> Tokenizer:
        return Tokenizer(model_file=file, content=content)

    def label_names(self, labels: Tokenizer) -> Sequence[str]:
        return labels.pieces()

    def model_arguments(self, labels: Tokenizer) -> Mapping[str, object]:
        return {"vocabulary": labels.vocabulary}

    def measure(self, results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
        """Return the rates; none of words in a language without spaces between them."""
        return total_errors(results).rates(by_words=all_have_word_boundaries(results))

    figures = staticmethod(figures_of_test_set)
    slice_figures = staticmethod(slice_figures)
    describe = staticmethod(describe_results)
    report = staticmethod(write_results)

    def score(
        self,
        bundle: Any,
        rows: Sequence[Mapping[str, Any]],
        clips: Sequence[Samples],
        *,
        times: bool,
        normalizer: Normalizer | None = None,
    ) -> list[ScoredUtterance]:
        """Transcribe the clips of rows with a `sbkit.bundle.Bundle`, and compare the texts.

        With another decoder than the greedy one, the greedy texts are compared, too.

        normalizer: normalizes both sides for a second comparison, without tags; None for the plain
            table of the language, if the model keeps case or punctuation.
        """
        config = bundle.config
        language, table = config.language or "und", config.text_table
        if normalizer is None and not table.is_plain:
            normalizer = table_normalizer(language, table.plain)
        to_reference = transcript_normalizer(
            replace(table, keep_case=True, punctuation=READ_SIGNS + table.punctuation)
        )
        written_by = str(table_normalizer(language, table))

        def compare(recognized: Sequence[Recognized]) -> list[ScoredUtterance]:
            scored: list[ScoredUtterance] = []
            for row, result in zip(rows, recognized, strict=True):
                utterance = ScoredUtterance(
                    row["id"],
                    row["text"],
                    result.text,
                    speaker=str(row.get("speaker") or ""),
                    seconds=samples_to_seconds(row["samples"], config.sample_rate),
                    words=result.words,
                    by_words=config.has_words,
                    normalizer=written_by,
                )
                if normalizer is not None:
                    normalized = replace(
                        utterance,
                        reference=normalizer.normalize(to_reference(row["sentence"])),
                        hypothesis=normalizer.normalize(TOKEN.sub("", result.text)),
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
