"""Measure error rates and delays of a streaming model, by chunk size and decoder.

python -m tools.bench_live RUN|BUNDLE [DATA] [--chunks 320,640,1280]

DATA is a table as for `sbkit score`; without it, the test sets of the run are used.
Every clip runs through a streaming session. The columns of the table:

- latency: from the end of a word (in the final text) to the end of the first chunk after which each
  partial text has the word at its position;
- revised: words of partial texts that changed later, per hundred final words; a last word that
  grows does not count. The next column has only those that the session called stable;
- endpoint: from the end of the last word to the event, if silence follows;
- final: the computing time of `finish` after the last sample.
- last word wrong: clips whose last word was recognized wrong.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.process import run_main
from sbkit.decoding.word_times import BEAM, GREEDY
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.export.export import exported_bundle
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.score_sets import prepare_test_sets, prepare_user_set, read_whole_clips
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle, as_recognizer
from sbkit.tasks.asr.session import (
    Endpoint,
    Event,
    Final,
    Partial,
    Session,
    StreamingRecognizer,
)
from tools.bench import Figures, measure_once

SILENCE_SECONDS = 3.0  # after a clip, to find its endpoint

ClipWithText = tuple[Samples, str]


@dataclass
class LiveResults:
    """The results of all clips with one chunk size and one decoder; delays are in seconds."""

    errors: TextErrors = field(default_factory=TextErrors)
    are_ends_wrong: list[bool] = field(default_factory=list)  # whether the last word is wrong
    latencies: list[float] = field(default_factory=list)
    endpoints: list[float] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)
    revised: int = 0
    stable_revised: int = 0

    def figures(self) -> Figures:
        """Return the columns of the table."""
        words = max(1, len(self.latencies))
        latencies = np.array(self.latencies or [np.nan])
        p50, p95 = np.percentile(latencies, (50, 95))
        endpoint, final = (np.median(x or [np.nan]) for x in (self.endpoints, self.finals))
        return {
            **rates(self.errors, self.are_ends_wrong),
            "latency: mean (ms)": 1000 * latencies.mean(),
            "p50": 1000 * p50,
            "p95": 1000 * p95,
            "revised (%)": 100 * self.revised / words,
            "revised though stable (%)": 100 * self.stable_revised / words,
            "endpoint: p50 (ms)": 1000 * endpoint,
            "final: p50 (ms)": 1000 * final,
        }


def rates(errors: TextErrors, are_ends_wrong: Sequence[bool]) -> dict[str, str]:
    """Return the error rates of all clips, and the number with a wrong last word."""
    wrong = f"{sum(are_ends_wrong)} of {len(are_ends_wrong)}"
    return {"CER": f"{errors.cer:.1%}", "WER": f"{errors.wer:.1%}", "last word wrong": wrong}


def has_wrong_end(text: str, hypothesis: str) -> bool:
    """Return whether the last word of a text is not the last one of a hypothesis."""
    return text.split()[-1:] != hypothesis.split()[-1:]


def main() -> None:
    """Measure each chunk size with each decoder, and whole clips."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="RUN|BUNDLE")
    parser.add_argument("data", type=Path, metavar="DATA", nargs="?")
    parser.add_argument("--chunks", metavar="MS,MS", default="320,640,1280")
    options = parser.parse_args()
    with exported_bundle(options.model) as folder:
        bundle = as_recognizer(load_bundle(folder))
        clips = list(read_clips(bundle, options))
        sides: dict[str, Callable[[], Figures]] = {}
        decoders = {GREEDY: bundle.with_decoder(GREEDY)}
        if bundle.decoder is not None:
            decoders[BEAM] = bundle
        for name, decoding in decoders.items():
            for chunk_ms in map(int, options.chunks.split(",")):
                sides[f"{chunk_ms} ms, {name}"] = partial(measure, decoding, clips, chunk_ms)
            sides[f"whole clip, {name}"] = partial(score_whole, decoding, clips)
        measure_once(sides)


def read_clips(
    bundle: AsrBundle[TorchModel], options: argparse.Namespace
) -> Iterator[ClipWithText]:
    """Yield all clips with their texts."""
    if options.data is not None:
        sets = [prepare_user_set(bundle, options.data)]
    else:
        sets = list(prepare_test_sets(options.model).test.values())
    for rows in sets:
        for batch in read_whole_clips(rows, bundle.config.sample_rate):
            yield from ((np.asarray(row["audio"]), row["text"]) for row in batch.values())


def set_chunk(bundle: AsrBundle[TorchModel], chunk_ms: int | None) -> None:
    """Set the chunk size of a streaming model; None is for whole clips."""
    encoder = bundle.model.network.encoder.modules.get("Transformer")
    if streaming := getattr(encoder, "streaming", None):  # `StreamingRecognizer` refuses others
        chunk_frames = None if chunk_ms is None else chunk_ms // encoder.frame_ms
        encoder.streaming = replace(streaming, chunk_frames=chunk_frames)


def score_whole(bundle: AsrBundle[TorchModel], clips: Sequence[ClipWithText]) -> Figures:
    """Measure the error rates of a model that sees whole clips."""
    set_chunk(bundle, None)
    pairs = [(text, *bundle.transcribe([audio])) for audio, text in clips]
    errors = sum((count_errors(*pair) for pair in pairs), TextErrors())
    return rates(errors, [has_wrong_end(*pair) for pair in pairs])


def measure(bundle: AsrBundle[TorchModel], clips: Sequence[ClipWithText], chunk_ms: int) -> Figures:
    """Run each clip through a session, and through another that continues with silence."""
    set_chunk(bundle, chunk_ms)
    results = LiveResults()
    network, rate = bundle.model.network, bundle.config.sample_rate
    model = TorchModel(network, parts=(), sample_rate=rate)  # it makes its streaming form once
    silence = np.zeros(round(SILENCE_SECONDS * rate), np.int16)
    opened = bundle.with_model(ModelThread(lambda: model))
    with StreamingRecognizer(bundle=opened) as recognizer:
        for audio, text in clips:
            session = Session(recognizer)
            events = session.push(audio)
            events_with_silence = Session(recognizer).push(np.append(audio, silence))
            start = time.perf_counter()
            events += session.finish()
            results.finals.append(time.perf_counter() - start)
            hypothesis = " ".join(event.text for event in events if isinstance(event, Final))
            results.errors += count_errors(text, hypothesis)
            results.are_ends_wrong.append(has_wrong_end(text, hypothesis))
            add_utterances(results, events)
            add_endpoint(results, events_with_silence)
    return results.figures()


def add_endpoint(results: LiveResults, events: Sequence[Event]) -> None:
    """Add the delay from the last word to its endpoint."""
    for event, after in pairwise(events):
        if isinstance(event, Endpoint) and event.rule == "silence" and isinstance(after, Final):
            results.endpoints.append(event.seconds - after.words[-1].end)


def add_utterances(results: LiveResults, events: Sequence[Event]) -> None:
    """Add the latencies and the revised words of all utterances."""
    partials: list[Partial] = []
    for event in events:
        if isinstance(event, Partial):
            partials.append(event)
        elif isinstance(event, Final):
            add_utterance(results, partials, event)
            partials = []


def add_utterance(results: LiveResults, partials: Sequence[Partial], final: Final) -> None:
    """Add the latency of each word, and count the words of partial texts that were revised."""
    final_words = final.text.split()
    partial_words = [partial.text.split() for partial in partials]
    for index, (text, word) in enumerate(zip(final_words, final.words, strict=True)):
        emitted = final.seconds
        for earlier, words in zip(reversed(partials), reversed(partial_words), strict=True):
            if words[index : index + 1] != [text]:
                break
            emitted = earlier.seconds
        results.latencies.append(emitted - word.end)
    changes = pairwise([*partial_words, final_words])
    for earlier, (before, after) in zip(partials, changes, strict=True):
        revised = revised_words(before, after)
        results.revised += len(revised)
        results.stable_revised += sum(index < earlier.stable for index in revised)


def revised_words(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Return the indices of words that have changed; a last word that has grown does not count."""
    revised = [n for n, word in enumerate(before) if after[n : n + 1] != [word]]
    last = len(before) - 1
    if last in revised and last < len(after) and after[last].startswith(before[last]):
        revised.remove(last)
    return revised


if __name__ == "__main__":
    run_main(main)
