"""Measure a streaming model: error rates and delays by size of the chunks, and by decoder.

python -m tools.bench_live RUN|BUNDLE [DATA] [--chunks 320,640,1280] [--whole RUN|BUNDLE]
    [--plot bench_live.png]

DATA is a table as `sbkit score` takes it; without it, the test sets of the run. --whole adds
a row for a model of whole clips, such as one of hparams/ctc.yaml trained for the same time.
Every clip runs through a streaming session. Prints a table of Markdown, and draws the delays of
words:

- latency: from the end of a word, according to the final text, to the end of the chunk since which
  partial texts have it in its position;
- taken back: words of partial texts that changed later, per hundred final words; a last word that
  grows does not count; then the same for words that were called stable;
- endpoint: from the end of the last word to the event, if silence follows;
- final: the computing time of `finish` after the last sample, in ms.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.base.process import run_main
from sbkit.commands.score import open_model, prepare_source
from sbkit.decoding.words import GREEDY
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.export.test_sets import prepare_test_sets, read_whole_clips
from sbkit.models.streaming import FRAME_MS, StreamingConfig
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.torch_model import TorchBundle
from sbkit.streaming.session import Endpoint, Event, Final, Partial, Session, StreamingRecognizer

SILENCE_SECONDS = 3.0  # after a clip, to find its endpoint
COLUMNS = (
    *("chunk", "decoder", "CER", "WER", "latency: mean", "p50", "p95 (ms)"),
    *("taken back (%)", "stable ones (%)", "endpoint: p50 (ms)", "final: p50 (ms)"),
)


@dataclass
class Measurements:
    """The results of all clips, with one chunk size and decoder; delays in seconds."""

    scores: Scores = field(default_factory=Scores)
    latencies: list[float] = field(default_factory=list)
    endpoints: list[float] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)
    taken_back: int = 0
    stable_taken_back: int = 0

    def row(self, chunk: str, decoder: str) -> list[str]:
        """Write a row of the table."""
        words = max(1, len(self.latencies))
        return [
            *(chunk, decoder, f"{self.scores.cer:.1%}", f"{self.scores.wer:.1%}"),
            _ms(np.mean, self.latencies),
            *(_ms(np.percentile, self.latencies, share) for share in (50, 95)),
            *(f"{100 * count / words:.1f}" for count in (self.taken_back, self.stable_taken_back)),
            *(_ms(np.percentile, delays, 50) for delays in (self.endpoints, self.finals)),
        ]


def _ms(measure: Any, seconds: Sequence[float], *more: float) -> str:
    return f"{1000 * measure(seconds, *more):.0f}" if seconds else "-"


def main() -> None:
    """Measure each size of chunk with each decoder, print the table, and draw the plot."""
    options = _parse()
    rows: list[list[str]] = []
    latencies: dict[str, list[float]] = {}
    with open_model(options.model) as bundle:
        clips = list(read_clips(bundle, options))
        if options.whole is not None:
            with open_model(options.whole) as whole_model:
                rows += [score_whole(one, clips) for one in with_decoders(whole_model)]
        for chunk_ms in map(int, options.chunks.split(",")):
            for variant in with_decoders(set_chunk(bundle, chunk_ms)):
                decoder = GREEDY if variant.decoder is None else variant.decoder.decoder_type
                results = measure(variant, clips)
                rows.append(results.row(f"{chunk_ms} ms", decoder))
                latencies[f"{chunk_ms} ms, {decoder}"] = results.latencies
        set_chunk(bundle, None)
        rows += [score_whole(variant, clips, "whole clip") for variant in with_decoders(bundle)]
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |", flush=True)
    draw(latencies, options.plot)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Error rates and delays of a streaming model.")
    parser.add_argument("model", type=Path, metavar="RUN|BUNDLE")
    parser.add_argument("data", type=Path, metavar="DATA", nargs="?")
    parser.add_argument("--chunks", metavar="MS,MS", default="320,640,1280")
    parser.add_argument("--whole", type=Path, metavar="RUN|BUNDLE", help="of whole clips")
    parser.add_argument("--plot", type=Path, metavar="PNG", default=Path("bench_live.png"))
    return parser.parse_args()


def read_clips(bundle: TorchBundle, options: argparse.Namespace) -> Iterator[tuple[Samples, str]]:
    """Yield all clips with their texts."""
    if options.data is not None:
        sets = [prepare_source(bundle, options.data)]
    else:
        sets = list(prepare_test_sets(options.model).values())
    for rows in sets:
        for batch in read_whole_clips(rows, bundle.config.sample_rate):
            yield from ((np.asarray(row["audio"]), row["text"]) for row in batch.values())


def with_decoders(bundle: TorchBundle) -> Iterator[TorchBundle]:
    """Yield the bundle with greedy decoding, and with its own decoder if it has one."""
    yield bundle.with_decoder(GREEDY)
    if bundle.decoder is not None:
        yield bundle


def set_chunk(bundle: TorchBundle, chunk_ms: int | None) -> TorchBundle:
    """Change the size of the chunks that the model sees; None for whole clips."""
    encoder = bundle.model.network.encoder.modules.get("Transformer")
    if not isinstance(streaming := getattr(encoder, "streaming", None), StreamingConfig):
        raise SbkitError(
            "This model only takes whole clips. Name a run of hparams/ctc_streaming.yaml."
        )
    chunk = None if chunk_ms is None else chunk_ms // FRAME_MS
    encoder.streaming = replace(streaming, chunk_frames=chunk)
    return bundle


def score_whole(
    bundle: TorchBundle, clips: Sequence[tuple[Samples, str]], name: str = "whole-clip model"
) -> list[str]:
    """Return the row of a model that sees whole clips."""
    results = Measurements()
    for clip, text in clips:
        results.scores += count_errors(text, *bundle.transcribe([clip]))
    return results.row(name, GREEDY if bundle.decoder is None else bundle.decoder.decoder_type)


def measure(bundle: TorchBundle, clips: Sequence[tuple[Samples, str]]) -> Measurements:
    """Run each clip through a session, and through a copy that continues with silence."""
    results, silence = (
        Measurements(),
        np.zeros(round(SILENCE_SECONDS * bundle.config.sample_rate), np.int16),
    )
    model = bundle.model
    opened = OpenBundle(
        config=bundle.config,
        task=bundle.task,
        labels=bundle.labels,
        model=ModelThread(lambda: model),
        decoder=bundle.decoder,
        word_lm=bundle.word_lm,
    )
    with StreamingRecognizer(bundle=opened) as recognizer:
        for clip, text in clips:
            session = Session(recognizer)
            events = session.push(clip)
            waiting = [*events, *session.copy().push(silence)]
            began = time.perf_counter()
            events += session.finish()
            results.finals.append(time.perf_counter() - began)
            text_found = " ".join(event.text for event in events if isinstance(event, Final))
            results.scores += count_errors(text, text_found)
            add_delays(results, events)
            add_endpoint(results, waiting)
    return results


def add_endpoint(results: Measurements, events: Sequence[Event]) -> None:
    """Add the delay from the last word to its endpoint."""
    for event, after in pairwise(events):
        if isinstance(event, Endpoint) and event.rule == "silence" and isinstance(after, Final):
            results.endpoints.append(event.seconds - after.words[-1].end)


def add_delays(results: Measurements, events: Sequence[Event]) -> None:
    """Add the latency of each word of each utterance, and count words that were taken back."""
    partial: list[Partial] = []
    for event in events:
        if isinstance(event, Partial):
            partial.append(event)
        elif isinstance(event, Final):
            partial_words = [event.text.split() for event in partial]
            words = event.text.split()
            for index, (text, word) in enumerate(zip(words, event.words, strict=True)):
                at = event.seconds
                for earlier, so_far in zip(reversed(partial), reversed(partial_words), strict=True):
                    if so_far[index : index + 1] != [text]:
                        break
                    at = earlier.seconds
                results.latencies.append(at - word.end)
            for earlier, (before, after) in zip(
                partial, pairwise([*partial_words, words]), strict=True
            ):
                gone = changed_words(before, after)
                results.taken_back += len(gone)
                results.stable_taken_back += sum(index < earlier.stable for index in gone)
            partial = []


def changed_words(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Return the indices of words that have changed; the last one may have grown."""
    grown = len(before) - 1
    return [
        index
        for index, word in enumerate(before)
        if after[index : index + 1] != [word]
        and not (index == grown and index < len(after) and after[index].startswith(word))
    ]


def draw(latencies: dict[str, list[float]], file: Path) -> None:
    """Draw the cumulative distribution of the latencies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")  # inches
    axes = figure.subplots()
    for name, seconds in latencies.items():
        axes.ecdf([1000 * second for second in seconds] or [0.0], label=name, linewidth=2)
    axes.set(xlabel="from the end of a word to its text (ms)", ylabel="share of the words")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    run_main(main)
