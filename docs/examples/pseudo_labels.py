"""Pseudo-labels: what a model hears with confidence in recordings, as a table to train on.

    python docs/examples/pseudo_labels.py my-model talks.csv pseudo.csv 0.9

talks.csv names recordings of any length in its column `path`. They are cut in pauses, and
pseudo.csv gets a row for each utterance whose words have a mean confidence of at least 0.9. With 0,
it gets every utterance with words, also by a model without confidences.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from sbkit import Transcriber
from sbkit.tasks.asr.transcript import Transcript

COLUMNS = ("path", "offset", "duration", "text", "confidence")
MARGIN_SECONDS = 0.5  # of an utterance's silence that is kept before and after its words


def confident_rows(transcript: Transcript, min_confidence: float) -> Iterator[dict[str, object]]:
    """Yield a row for each utterance whose words are confident enough."""
    for utterance in transcript.utterances:
        if not utterance.words:
            continue
        confidence = fmean(word.confidence or 0.0 for word in utterance.words)
        if confidence < min_confidence:
            continue
        start = max(utterance.start, utterance.words[0].start - MARGIN_SECONDS)
        end = min(utterance.start + utterance.seconds, utterance.words[-1].end + MARGIN_SECONDS)
        yield {
            "path": transcript.file,
            "offset": round(start, 3),
            "duration": round(end - start, 3),
            "text": utterance.text,
            "confidence": round(confidence, 3),
        }


def main(model: str, table: str, out: str, min_confidence: str) -> None:
    """Transcribe the recordings of a table, and write the rows that are kept."""
    with Path(table).open(encoding="utf-8", newline="") as file:
        recordings = [Path(table).resolve().parent / row["path"] for row in csv.DictReader(file)]
    with (
        Path(out).open("w", encoding="utf-8", newline="") as file,
        Transcriber.load(model) as transcriber,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for result in transcriber.stream(recordings):
            if isinstance(result, Transcript):
                writer.writerows(confident_rows(result, float(min_confidence)))
            else:
                print(result, file=sys.stderr)  # the error of this recording


if __name__ == "__main__":
    main(*sys.argv[1:])
