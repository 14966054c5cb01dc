"""The task of speech recognition: text by CTC over the tokens of a sentencepiece model.

Its files in a run folder and in a bundle, beside those of every task:

tokenizer.model         the tokenizer, of sentencepiece
decoder_tokenizer.json  the tokens of an attention decoder that has its own, such as Whisper's
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sbkit.base.units import samples_to_seconds
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.task import ClipBatch, Labels, Task
from sbkit.decoding.pool import RecognizedClip
from sbkit.evaluate import wer_report
from sbkit.evaluate.wer import ERROR_RATES, ScoredUtterance, all_have_word_boundaries, total_errors
from sbkit.logs.metric import Metric, Metrics
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE
from sbkit.text.normalization import TextTable
from sbkit.text.normalizers import Normalizer, table_normalizer
from sbkit.text.tokenizer import TOKENIZER_FILE, TOKENIZER_VERSION, Tokenizer
from sbkit.text.transcripts import TAG_TOKEN, transcript_normalizer

READ_SIGNS = ".,:;?!-/*+=$€£¥₽₹°"  # by another normalizer, such as Whisper's


class AsrTask(Task):
    """Speech recognition."""

    model_name = "speech recognizer"
    predicts = "text"
    uses = ("transcribe FOLDER talk.wav",)
    metrics: ClassVar[Metrics] = dict.fromkeys(("CER", *ERROR_RATES), Metric())
    label_file: ClassVar[str | None] = TOKENIZER_FILE
    label_key = "tokenizer"
    label_count = "vocab_size"
    label_version = TOKENIZER_VERSION
    further_files: ClassVar[Mapping[tuple[str, str], str]] = {
        ("decoder_tokenizer", "file"): DECODER_TOKENIZER_FILE
    }
    heads: ClassVar[tuple[str, ...]] = ("ctc_lin", "seq_lin")
    fresh_heads: ClassVar[tuple[str, ...]] = ("ctc_lin", "linear_stack")
    hub_task = "automatic-speech-recognition"

    def model_class(self) -> Any:
        from sbkit.tasks.asr.model import AsrModel

        return AsrModel

    def bundle_class(self) -> Any:
        from sbkit.tasks.asr.bundle import AsrBundle

        return AsrBundle

    def read_labels(self, file: Path, content: bytes) -> Tokenizer:
        return Tokenizer(model_file=file, content=content)

    def label_names(self, labels: Tokenizer) -> Sequence[str]:
        return labels.pieces()

    def normalizer(self, table: TextTable, labels: Labels) -> Callable[[str], str]:
        return transcript_normalizer(table, labels.tags if isinstance(labels, Tokenizer) else ())

    def model_arguments(self, labels: Tokenizer) -> Mapping[str, object]:
        return {"vocabulary": labels.vocabulary}

    def measure(self, results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
        """Return the rates; none of words in a language without spaces between them."""
        return total_errors(results).rates(by_words=all_have_word_boundaries(results))

    figures = staticmethod(wer_report.figures_of_test_set)
    slice_figures = staticmethod(wer_report.slice_figures)
    read_figures = staticmethod(wer_report.TextFigures.from_plain)
    report = staticmethod(wer_report.write_results)

    @property
    def decodes_frames(self) -> bool:
        """Whether `predict` is the one below; set it to True in a task that calls this one."""
        return type(self).predict is AsrTask.predict

    def predict(self, bundle: Any, batch: ClipBatch) -> Sequence[RecognizedClip]:
        """Decode CTC's log-probabilities of clips with the decoder of an open bundle."""
        if batch.encode is None:
            inputs = bundle.decoder_inputs(batch.clips, batch.rows)
        else:
            inputs = batch.encode()
        inputs = [replace(item, phrases=batch.phrases, nbest=batch.nbest) for item in inputs]
        recognized: list[RecognizedClip] = bundle.decoder_pool.decode(
            inputs, with_times=batch.times
        )
        if not batch.with_greedy or bundle.decoder is None:
            return recognized
        greedy = bundle.greedy_pool.decode(inputs, with_times=batch.times)
        return [replace(pair[0], greedy=pair[1]) for pair in zip(recognized, greedy, strict=True)]

    def result(
        self,
        prediction: RecognizedClip,
        row: Mapping[str, Any],
        *,
        config: BundleConfig,
        normalizer: Normalizer | None = None,
    ) -> ScoredUtterance:
        """Compare the text of a clip, and the greedy one if there is one, with that of its row.

        normalizer: normalizes both sides for a second comparison, without tags; None for the plain
            table of the language, if the model keeps case or punctuation.
        """
        language, table = config.language or "und", config.text_table
        utterance = ScoredUtterance(
            row["id"],
            row["text"],
            prediction.text,
            speaker=str(row.get("speaker") or ""),
            seconds=samples_to_seconds(row["samples"], config.sample_rate),
            words=prediction.words,
            by_words=config.has_words,
            normalizer=str(table_normalizer(language, table)),
        )
        if normalizer is None and not table.is_plain:
            normalizer = table_normalizer(language, table.plain)
        if normalizer is not None:
            to_reference = transcript_normalizer(
                replace(table, keep_case=True, punctuation=READ_SIGNS + table.punctuation)
            )
            normalized = replace(
                utterance,
                reference=normalizer.normalize(to_reference(row["sentence"])),
                hypothesis=normalizer.normalize(TAG_TOKEN.sub("", prediction.text)),
                words=(),  # the times belong to the words of the other text
                normalizer=str(normalizer),
            )
            utterance = replace(utterance, normalized=normalized)
        if prediction.greedy is None:
            return utterance
        greedy = self.result(prediction.greedy, row, config=config, normalizer=normalizer)
        return replace(utterance, greedy=greedy)


class TextOnlyAsrTask(AsrTask):
    """Speech recognition by a model whose `predict` returns texts, such as one of transformers."""

    label_file = None

    def predict(self, bundle: Any, batch: ClipBatch) -> Sequence[RecognizedClip]:
        """Write texts as the training transcripts of the bundle would be."""
        texts = bundle.model.predict(batch.clips)
        return [*map(RecognizedClip, map(bundle.normalizer(), texts))]
