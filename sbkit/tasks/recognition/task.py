"""The task of speech recognition: text by CTC over the tokens of a sentencepiece model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sbkit.bundle.task import Task
from sbkit.evaluate.wer import ScoredUtterance, all_have_word_boundaries, total_errors
from sbkit.evaluate.wer_report import (
    describe_results,
    figures_of_test_set,
    slice_figures,
    write_results,
)
from sbkit.logs.metric import Metric, Metrics
from sbkit.tasks.recognition.score import transcribe_rows
from sbkit.text.tokenizer import TOKENIZER_FILE, Tokenizer


class Recognition(Task):
    """Speech recognition."""

    model_name = "speech recognizer"
    predicts = "text"
    uses = ("transcribe FOLDER talk.wav",)
    metrics: ClassVar[Metrics] = {"CER": Metric(), "WER": Metric()}
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
        """Return the CER and, of a language with spaces between words, the WER."""
        errors = total_errors(results)
        has_words = all_have_word_boundaries(results)
        return {"CER": errors.cer} | ({"WER": errors.wer} if has_words else {})

    figures = staticmethod(figures_of_test_set)
    slice_figures = staticmethod(slice_figures)
    describe = staticmethod(describe_results)
    report = staticmethod(write_results)
    score = staticmethod(transcribe_rows)
