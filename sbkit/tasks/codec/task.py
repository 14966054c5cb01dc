"""The task of a codec: audio to codes and back, and how well audio is decoded from them.

This module does not import torch.

Legend: U frames of codes, G codebooks.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.base.arrays import Counts
from sbkit.base.files import write_lines_atomically
from sbkit.bundle.task import Figures, Graph, Labels, Task
from sbkit.logs.curves import write_picture
from sbkit.logs.metric import Metric, Metrics, describe_values
from sbkit.tasks.codec.codes import Codes

logger = logging.getLogger(__name__)

SHOWN_METRICS = ("mel_distance", "usage", "perplexity", "entropy")  # metrics shown after a test
# Below this share of the usage expected of equally likely codes, a note is logged.
MIN_USAGE_SHARE = 0.5


class CodedUtterance(NamedTuple):
    """The codes of an utterance, and the error of the audio decoded from them."""

    mel_distance_per_frame: float
    codes: Codes
    codebook_size: int


def count_codes(results: Sequence[CodedUtterance]) -> Counts:
    """Count the occurrences of each codebook's codes: -> (G, codebook_size)."""
    codes = np.concatenate([result.codes for result in results])
    size = results[0].codebook_size
    return np.stack([np.bincount(column, minlength=size) for column in codes.T])


def draw_codes(counts: Counts, values: Mapping[str, float]) -> bytes:
    """Draw the occurrences of each codebook's codes, the most frequent first, as PNG."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for codebook, occurrences in enumerate(counts):
        usage = values[f"usage_{codebook}"]
        perplexity = values[f"perplexity_{codebook}"]
        label = f"codebook {codebook}: {usage:.0%} used, perplexity {perplexity:.0f}"
        axes.plot(np.sort(occurrences)[::-1], label=label)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="codes, by frequency", ylabel="frames", ylim=(0, None))
    axes.legend()
    figure.savefig(png := io.BytesIO(), format="png", dpi=120)
    return png.getvalue()


class CodecTask(Task):
    """Audio as codes, and back."""

    model_name = "codec"
    predicts = "codes"
    uses = ("encode FOLDER talk.wav --out talk.codes", "decode FOLDER talk.codes --out talk.wav")
    metrics: ClassVar[Metrics] = {
        "mel_distance": Metric(is_fraction=False),
        "usage": Metric(lower_is_better=False),
    }
    training_parts = ("discriminator",)
    graphs: ClassVar[Mapping[str, Graph]] = {
        "encode": Graph(
            inputs=("audio", "audio_lengths"),
            outputs=("codes", "frame_lengths"),
            arguments=lambda run, audio, lengths: (audio, lengths),
        ),
        "decode": Graph(
            inputs=("codes",),
            outputs=("audio",),
            arguments=lambda run, audio, lengths: run("encode", audio, lengths)[:1],
        ),
    }
    format_uses: ClassVar[Mapping[str, str]] = {
        "onnx": "onnxruntime: `encode.onnx` takes `audio` (B, S), float32 between -1 and 1, "
        "and `audio_lengths` (B,), int64, and returns `codes` and `frame_lengths`; "
        "`decode.onnx` turns codes into audio. `sbkit decode` checks every code first."
    }

    def model_class(self) -> Any:
        from sbkit.tasks.codec.model import CodecModel

        return CodecModel

    def read_outputs(self, outputs: Any, labels: Labels) -> list[CodedUtterance]:
        """Check and measure the codes of each clip by the model's `CodedBatch`."""
        space, codes = outputs.space, outputs.codes.cpu().numpy()
        sums = outputs.mel_distance_sum.tolist()
        return [
            CodedUtterance(
                mel_distance_per_frame=distance_sum / num_frames,
                codes=space.check(padded[:num_frames], subject="the output of the model"),
                codebook_size=space.size,
            )
            for padded, num_frames, distance_sum in zip(
                codes, outputs.num_frames.tolist(), sums, strict=True
            )
        ]

    def result(self, prediction: CodedUtterance, row: Any, **options: Any) -> CodedUtterance:
        return prediction  # the figures, which were measured on the recording itself

    def measure(self, results: Sequence[CodedUtterance]) -> Mapping[str, float]:
        """Return the mel distance per frame; usage, perplexity and entropy of the codes.

        Usage is the share of a codebook's codes that occur. Entropy (in bits) and perplexity
        describe how evenly the codes occur. Each of the three is returned for each codebook, such
        as `usage_0`, and as the mean over the codebooks.
        """
        num_frames = [len(result.codes) for result in results]
        distances = [result.mel_distance_per_frame for result in results]
        counts = count_codes(results)
        shares = counts / counts.sum(1, keepdims=True)
        entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
        figures = {"usage": (counts > 0).mean(1), "perplexity": 2**entropy, "entropy": entropy}
        measured = {"mel_distance": float(np.average(distances, weights=num_frames))}
        for name, values in figures.items():
            measured[name] = float(values.mean())
        for name, values in figures.items():
            for codebook, value in enumerate(values):
                measured[f"{name}_{codebook}"] = float(value)
        return measured

    def figures(self, results: Sequence[CodedUtterance]) -> Figures:
        return self.measure(results)

    def describe(self, figures: Figures) -> str:
        """Write the mel distance, and the means over all codebooks."""
        means = {name: figures[name] for name in SHOWN_METRICS}
        return ", ".join(describe_values(self.metrics, means))

    def report(
        self,
        folder: Path,
        name: str,
        results: Sequence[CodedUtterance],
        figures: Figures,
        labels: Labels,
    ) -> None:
        """Write the count of each code as `codes_NAME.tsv` and as a picture.

        Log a note for each codebook in which most codes do not occur.
        """
        counts = count_codes(results)
        rows = [["code", *map(str, range(len(counts)))]]
        rows += [[str(code), *map(str, row)] for code, row in enumerate(counts.T.tolist())]
        write_lines_atomically(folder / f"codes_{name}.tsv", map("\t".join, rows))
        write_picture(folder / f"codes_{name}.png", lambda: draw_codes(counts, figures))
        codebook_size = counts.shape[1]
        num_draws = counts[0].sum()
        # A code of K equally likely ones is missing in n draws with probability (1 - 1/K)^n.
        expected_usage = 1 - (1 - 1 / codebook_size) ** num_draws
        for codebook in range(len(counts)):
            usage = figures[f"usage_{codebook}"]
            if usage < MIN_USAGE_SHARE * expected_usage:
                logger.info(
                    f"note: most codes of codebook {codebook} are dead in {name} ({usage:.0%} "
                    "occur). Try a lower lr or fewer levels."
                )
