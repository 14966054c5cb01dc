"""Measure a streaming model: error rates and delays by size of the chunks, and by decoder.

python -m tools.bench_live RUN|BUNDLE [DATA] [--chunks 320,640,1280] [--whole RUN|BUNDLE]
    [--plot bench_live.png]

DATA is a table as `sbkit score` takes it; without it, the test sets of the run. --whole names a
model of whole clips, such as one of hparams/ctc.yaml trained for the same time, for a row beside.
Every clip goes through a live session. Prints a table of Markdown, and draws the delays of words:

- latency: from the end of a word, as the final text has it, to the end of the chunk from which on
  it is shown in its place;
- taken back: words that were shown and then changed, in a hundred of final words; a last word that
  grows is not counted; then the same of those that were called stable;
- endpoint: from the end of the last word to the event, where silence follows;
- final: what `finish` takes after the last sample, in ms of computing.
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
from sbkit.commands.score import ScoreOptions, open_model, prepare_source
from sbkit.decoding.confidence import GREEDY
from sbkit.evaluate.wer import Scores, count_errors
from sbkit.export.test_sets import prepare_test_sets, read_whole_clips
from sbkit.models.streaming import FRAME_MS, StreamingConfig
from sbkit.runtime.model import ModelThread
from sbkit.runtime.runtimes import OpenBundle
from sbkit.runtime.torch_model import TorchBundle
from sbkit.streaming.recognizer import StreamingRecognizer
from sbkit.streaming.session import Endpoint, Event, Final, Partial, Session

SILENCE = 3.0  # seconds after a clip, in which its endpoint is found
COLUMNS = (
    *("chunk", "decoder", "CER", "WER", "latency: mean", "p50", "p95 (ms)"),
    *("taken back (%)", "stable ones (%)", "endpoint: p50 (ms)", "final: p50 (ms)"),
)


@dataclass
class Found:
    """What all clips came to, with one chunk and decoder; delays in seconds."""

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
            *(f"{100 * each / words:.1f}" for each in (self.taken_back, self.stable_taken_back)),
            *(_ms(np.percentile, each, 50) for each in (self.endpoints, self.finals)),
        ]


def _ms(measure: Any, seconds: Sequence[float], *more: float) -> str:
    return f"{1000 * measure(seconds, *more):.0f}" if seconds else "-"


def main() -> None:
    """Measure each size of chunk with each decoder, print the table, and draw the plot."""
    options = _parse()
    rows, drawn = list[list[str]](), dict[str, list[float]]()
    with open_model(options.model) as bundle:
        clips = list(read_clips(bundle, options))
        if options.whole is not None:
            with open_model(options.whole) as whole:
                rows += [score_whole(each, clips) for each in with_decoders(whole)]
        for chunk_ms in map(int, options.chunks.split(",")):
            for each in with_decoders(set_chunk(bundle, chunk_ms)):
                decoder = GREEDY if each.decoder is None else each.decoder.decoder_type
                found = measure(each, clips)
                rows.append(found.row(f"{chunk_ms} ms", decoder))
                drawn[f"{chunk_ms} ms, {decoder}"] = found.latencies
        set_chunk(bundle, None)
        rows += [score_whole(each, clips, "whole clip") for each in with_decoders(bundle)]
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |", flush=True)
    draw(drawn, options.plot)


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
        sets = [prepare_source(bundle, options.data, ScoreOptions(), options.data.stem)]
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
    """Let the model see chunks of another size, or whole clips."""
    encoder = bundle.model.network.encoder.modules.get("Transformer")
    if not isinstance(streaming := getattr(encoder, "streaming", None), StreamingConfig):
        raise SbkitError(
            "The model must be a streaming one, but takes whole clips alone. Name a run of "
            "hparams/ctc_streaming.yaml."
        )
    chunk = None if chunk_ms is None else chunk_ms // FRAME_MS
    encoder.streaming = replace(streaming, chunk=chunk)
    return bundle


def score_whole(
    bundle: TorchBundle, clips: Sequence[tuple[Samples, str]], name: str = "whole-clip model"
) -> list[str]:
    """Return the row of a model that sees whole clips."""
    found = Found()
    for clip, text in clips:
        found.scores += count_errors(text, *bundle.transcribe([clip]))
    return found.row(name, GREEDY if bundle.decoder is None else bundle.decoder.decoder_type)


def measure(bundle: TorchBundle, clips: Sequence[tuple[Samples, str]]) -> Found:
    """Run each clip through a session, and through a copy that goes on with silence."""
    found, silence = Found(), np.zeros(round(SILENCE * bundle.config.sample_rate), np.int16)
    model = bundle.model
    with StreamingRecognizer(
        bundle=OpenBundle.of(bundle, ModelThread(lambda: model))
    ) as recognizer:
        for clip, text in clips:
            session = Session(recognizer)
            events = session.push(clip)
            waiting = [*events, *session.copy().push(silence)]
            began = time.perf_counter()
            events += session.finish()
            found.finals.append(time.perf_counter() - began)
            said = " ".join(each.text for each in events if isinstance(each, Final))
            found.scores += count_errors(text, said)
            add_delays(found, events)
            add_endpoint(found, waiting)
    return found


def add_endpoint(found: Found, events: Sequence[Event]) -> None:
    """Add how long after the last word its endpoint came."""
    for event, after in pairwise(events):
        if isinstance(event, Endpoint) and event.rule == "silence" and isinstance(after, Final):
            found.endpoints.append(event.seconds - after.words[-1].end)


def add_delays(found: Found, events: Sequence[Event]) -> None:
    """Add the latency of each word of each utterance, and what was taken back."""
    partial: list[Partial] = []
    for event in events:
        if isinstance(event, Partial):
            partial.append(event)
        elif isinstance(event, Final):
            shown = [each.text.split() for each in partial]
            words = event.text.split()
            for place, (text, word) in enumerate(zip(words, event.words, strict=True)):
                at = event.seconds
                for each, so_far in zip(reversed(partial), reversed(shown), strict=True):
                    if so_far[place : place + 1] != [text]:
                        break
                    at = each.seconds
                found.latencies.append(at - word.end)
            for each, (before, after) in zip(partial, pairwise([*shown, words]), strict=True):
                gone = changed(before, after)
                found.taken_back += len(gone)
                found.stable_taken_back += sum(place < each.stable for place in gone)
            partial = []


def changed(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Return the places of words that are others now; the last one may have grown."""
    grown = len(before) - 1
    return [
        place
        for place, word in enumerate(before)
        if after[place : place + 1] != [word]
        and not (place == grown and place < len(after) and after[place].startswith(word))
    ]


def draw(latencies: dict[str, list[float]], file: Path) -> None:
    """Draw which share of the words is shown how long after it was said."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")  # inches
    axes = figure.subplots()
    for name, seconds in latencies.items():
        axes.ecdf([1000 * each for each in seconds] or [0.0], label=name, linewidth=2)
    axes.set(xlabel="from the end of a word to its text (ms)", ylabel="share of the words")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    run_main(main)
