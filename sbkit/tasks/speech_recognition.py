"""The task of speech recognition: text, by CTC over the tokens of a sentencepiece model."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.evaluate.wer import Scored
from sbkit.evaluate.wer_report import describe_results, report_errors, slice_error_rates
from sbkit.logs.metric import Metric
from sbkit.tasks.task import Exportable, LabelFile, Scorer, Task
from sbkit.text.tokenizer import Tokenizer


def transcribe_rows(
    bundle: Any, rows: Sequence[Mapping[str, Any]], clips: list[Samples], *, times: bool, **_: Any
) -> list[Scored]:
    """Transcribe the clips of rows with a `sbkit.bundle.Bundle`, and count each clip's errors."""
    rate, recognized = bundle.config.sample_rate, bundle.recognize(clips, times=times)
    return [
        Scored(
            row["id"],
            row["text"],
            hypothesis.text,
            speaker=str(row.get("speaker", "")),
            seconds=samples_to_seconds(row["samples"], rate),
            words=hypothesis.words,
            by_words=bundle.config.has_words,
        )
        for row, hypothesis in zip(rows, recognized, strict=True)
    ]


SPEECH_RECOGNITION = Task(
    name="sbkit.tasks.speech_recognition.SPEECH_RECOGNITION",
    model_name="speech recognizer",
    predicts="text",
    metrics={"CER": Metric(), "WER": Metric()},
    labels=LabelFile(
        name="tokenizer.model",
        key="tokenizer",
        read=lambda file, content: Tokenizer(model_file=file, content=content),
        names=Tokenizer.pieces,
        arguments=lambda tokenizer: {"vocabulary": tokenizer.vocabulary},
    ),
    heads=("ctc_lin", "seq_lin"),
    scorer=Scorer(
        target="text",
        score=transcribe_rows,
        measure=slice_error_rates,
        describe=describe_results,
        report=report_errors,
    ),
    export=Exportable(
        model_class="sbkit.models.asr.AsrModel", hub_task="automatic-speech-recognition"
    ),
)
