"""How well an utterance was coded, and which codes a codec uses: figures, a table, a picture.

Legend: U frames, G codebooks.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipes.codec.space import Codes, CodeSpace
from sbkit.base.files import write_bytes_atomically, write_text_atomically
from sbkit.logs.metric import Metric, Metrics, as_words

NAMES = ("usage", "perplexity", "entropy")  # of the codes of a codebook
METRICS: Metrics = {
    "mel_distance": Metric(is_fraction=False),
    "usage": Metric(lower_is_better=False),
}
FEW = 0.5  # of the codes that as many draws would reach, were all as frequent


class CodedUtterance(NamedTuple):
    """The mean difference of an utterance's log-mel features, and its codes."""

    distance: float
    codes: Codes
    space: CodeSpace


def count_codes(
    results: Sequence[CodedUtterance],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Count how often each codebook has each code: -> (G, size)."""
    codes, space = np.concatenate([each.codes for each in results]), results[0].space
    return np.stack([np.bincount(each, minlength=space.size) for each in codes.T])


def measure(results: Sequence[CodedUtterance]) -> dict[str, float]:
    """Return the mel distance a frame, and usage, perplexity and entropy (bits): mean and each.

    Usage is the share of the codes that came; entropy and perplexity are of how often they did.
    """
    frames = np.array([len(each.codes) for each in results])
    values = {"mel_distance": float(frames @ [each.distance for each in results] / frames.sum())}
    counts = count_codes(results)
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    of_each = dict(zip(NAMES, ((counts > 0).mean(1), 2**entropy, entropy), strict=True))
    for name, found in of_each.items():
        values[name] = float(found.mean())
        values |= {f"{name}_{number}": float(each) for number, each in enumerate(found)}
    return values


def dying(results: Sequence[CodedUtterance], values: Mapping[str, float]) -> list[int]:
    """Return the codebooks with so few codes that most must be dead."""
    space, frames = results[0].space, sum(len(each.codes) for each in results)
    reached = 1 - (1 - 1 / space.size) ** frames
    return [each for each in range(space.groups) if values[f"usage_{each}"] < FEW * reached]


def describe(results: Sequence[CodedUtterance]) -> str:
    """Write the means for the screen."""
    values = measure(results)
    return ", ".join(as_words(METRICS, {name: values[name] for name in ("mel_distance", *NAMES)}))


def report(folder: Path, name: str, results: Sequence[CodedUtterance]) -> dict[str, float]:
    """Write `codes_NAME.tsv`, how often each code came, and its picture; return the figures."""
    counts = count_codes(results)
    rows = [["code", *map(str, range(len(counts)))]]
    rows += [[str(code), *map(str, each)] for code, each in enumerate(counts.T.tolist())]
    write_text_atomically(folder / f"codes_{name}.tsv", "".join("\t".join(r) + "\n" for r in rows))
    values = measure(results)
    draw(folder / f"codes_{name}.png", counts, values)
    return values


def draw(
    png: Path, counts: np.ndarray[tuple[int, int], np.dtype[np.int64]], values: Mapping[str, float]
) -> None:
    """Draw how often the codes of each codebook came, the most frequent first."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, each in enumerate(counts):
        usage, perplexity, entropy = (values[f"{name}_{number}"] for name in NAMES)
        label = (
            f"codebook {number}: {usage:.0%} used, perplexity {perplexity:.0f}, {entropy:.1f} bits"
        )
        axes.plot(np.sort(each)[::-1], label=label)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="codes, by how often they came", ylabel="frames", ylim=(0, None))
    axes.legend()
    figure.savefig(picture := io.BytesIO(), format="png", dpi=120)
    write_bytes_atomically(png, picture.getvalue())
