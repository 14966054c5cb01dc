"""The task of speech recognition: text by CTC over the tokens of a sentencepiece model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sbkit.audio.io import Samples
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.clips import Recognition
from sbkit.evaluate.wer import ScoredUtterance, all_have_word_boundaries, total_errors
from sbkit.evaluate.wer_report import (
    describe_results,
    figures_of_test_set,
    slice_figures,
    write_results,
)
from sbkit.logs.metric import Metric
from sbkit.tasks.task import Exportable, LabelFile, Scorer, Task
from sbkit.text.normalization import Orthography
from sbkit.text.normalizers import Normalizer, table_normalizer
from sbkit.text.tokenizer import TOKENIZER_FILE, Tokenizer


def score_texts(
    recognized: Sequence[Recognition],
    *,
    ids: Sequence[str],
    texts: Sequence[str],
    sentences: Sequence[str],
    speakers: Sequence[str],
    samples: Sequence[int],
    sample_rate: int,
    by_words: bool,
    language: str,
    table: Orthography,
    normalizer: Normalizer | None = None,
) -> list[ScoredUtterance]:
    """Compare recognized utterances with their references.

    recognized: the text of each utterance, and perhaps its words with times.
    texts: the references, which ``table`` has normalized.
    sentences: the references as the corpus writes them.
    speakers: "" if unknown.
    samples: the lengths of the utterances.
    by_words: False for a language without spaces between words.
    normalizer: normalizes both sides for a second comparison; None for the plain table of the
        language, if ``table`` keeps case or punctuation.
    """
    if normalizer is None and not table.is_plain:
        normalizer = table_normalizer(language, table.plain)
    written_by = str(table_normalizer(language, table))
    scored = [
        ScoredUtterance(
            id,
            text,
            result.text,
            speaker=speaker,
            seconds=samples_to_seconds(count, sample_rate),
            words=result.words,
            by_words=by_words,
            normalizer=written_by,
        )
        for result, id, text, speaker, count in zip(
            recognized, ids, texts, speakers, samples, strict=True
        )
    ]
    if normalizer is None:
        return scored
    both_written: list[ScoredUtterance] = []
    for utterance, sentence in zip(scored, sentences, strict=True):
        normalized = replace(
            utterance,
            reference=normalizer.normalize(sentence),
            hypothesis=normalizer.normalize(utterance.hypothesis),
            words=(),  # their times are those of the other text
            normalizer=str(normalizer),
        )
        both_written.append(replace(utterance, normalized=normalized))
    return both_written


def transcribe_rows(
    bundle: Any,
    rows: Sequence[Mapping[str, Any]],
    clips: list[Samples],
    *,
    times: bool,
    normalizer: Normalizer | None = None,
    **_: Any,
) -> list[ScoredUtterance]:
    """Transcribe the clips of rows with a `sbkit.bundle.Bundle`, and compare the texts.

    With another decoder than the greedy one, the greedy texts are compared, too.
    """
    compare = partial(
        score_texts,
        ids=[row["id"] for row in rows],
        texts=[row["text"] for row in rows],
        sentences=[row["sentence"] for row in rows],
        speakers=[str(row.get("speaker", "")) for row in rows],
        samples=[row["samples"] for row in rows],
        sample_rate=bundle.config.sample_rate,
        by_words=bundle.config.has_words,
        language=bundle.config.language or "und",
        table=bundle.config.text_table,
        normalizer=normalizer,
    )
    inputs = bundle.decoder_inputs(clips)
    scored = compare(bundle.decoder_pool.decode(inputs, with_times=times))
    if bundle.decoder is None:
        return scored
    greedy = compare(bundle.greedy_pool.decode(inputs, with_times=times))
    return [replace(pair[0], greedy=pair[1]) for pair in zip(scored, greedy, strict=True)]


def measure_texts(results: Sequence[ScoredUtterance]) -> Mapping[str, float]:
    """Return the CER and, of a language with spaces between words, the WER."""
    errors = total_errors(results)
    return {"CER": errors.cer} | ({"WER": errors.wer} if all_have_word_boundaries(results) else {})


SPEECH_RECOGNITION = Task(
    name="sbkit.tasks.speech_recognition.SPEECH_RECOGNITION",
    model_name="speech recognizer",
    predicts="text",
    metrics={"CER": Metric(), "WER": Metric()},
    labels=LabelFile(
        name=TOKENIZER_FILE,
        key="tokenizer",
        read=lambda file, content: Tokenizer(model_file=file, content=content),
        names=Tokenizer.pieces,
        arguments=lambda tokenizer: {"vocabulary": tokenizer.vocabulary},
    ),
    heads=("ctc_lin", "seq_lin"),
    scorer=Scorer(
        measure=measure_texts,
        figures=figures_of_test_set,
        slice_figures=slice_figures,
        describe=describe_results,
        report=write_results,
        score=transcribe_rows,
        target="text",
    ),
    export=Exportable(
        model_class="sbkit.models.asr.AsrModel", hub_task="automatic-speech-recognition"
    ),
)
