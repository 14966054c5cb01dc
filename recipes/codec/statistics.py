"""How well utterances were coded, and which codes came: figures, a table, a picture.

Legend: U frames, G codebooks.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.base.files import write_bytes_atomically, write_text_atomically
from sbkit.models.code_space import Codes

logger = logging.getLogger(__name__)

FEW = 0.5  # of the codes that as many draws would reach, were all as frequent


class CodedUtterance(NamedTuple):
    """The mean difference of an utterance's log-mel features, its codes, and how many there are."""

    distance: float
    codes: Codes
    size: int


def count_codes(results: Sequence[CodedUtterance]) -> npt.NDArray[np.int64]:
    """Count how often each codebook has each code: -> (G, size)."""
    codes = np.concatenate([each.codes for each in results])
    return np.stack([np.bincount(each, minlength=results[0].size) for each in codes.T])


def measure(results: Sequence[CodedUtterance]) -> dict[str, float]:
    """Return the mel distance of a frame, and of the codes figures: their mean, and each.

    Usage is the share that came, entropy (in bits) and perplexity are of how often they did.
    """
    frames = [len(each.codes) for each in results]
    distance = float(np.average([each.distance for each in results], weights=frames))
    counts = count_codes(results)
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    of_each = {"usage": (counts > 0).mean(1), "perplexity": 2**entropy, "entropy": entropy}
    means = {name: float(found.mean()) for name, found in of_each.items()}
    each = {f"{name}_{n}": float(v) for name, found in of_each.items() for n, v in enumerate(found)}
    return {"mel_distance": distance, **means, **each}


def report(folder: Path, split: str, results: Sequence[CodedUtterance]) -> Mapping[str, Any]:
    """Write `codes_SPLIT.tsv`, how often each code came, and its picture; return the figures.

    A codebook most of whose codes must be dead is noted.
    """
    values, counts = measure(results), count_codes(results)
    rows = [["code", *map(str, range(len(counts)))]]
    rows += [[str(code), *map(str, each)] for code, each in enumerate(counts.T.tolist())]
    table = "".join("\t".join(row) + "\n" for row in rows)
    write_text_atomically(folder / f"codes_{split}.tsv", table)
    write_bytes_atomically(folder / f"codes_{split}.png", picture(counts, values))
    reached = 1 - (1 - 1 / counts.shape[1]) ** counts[0].sum()
    for number in range(len(counts)):
        if (usage := values[f"usage_{number}"]) < FEW * reached:
            logger.info(
                f"note: most codes of codebook {number} are dead in {split} ({usage:.0%} came). "
                "Try a lower lr or fewer levels."
            )
    return values


def picture(counts: npt.NDArray[np.int64], values: Mapping[str, float]) -> bytes:
    """Draw how often the codes of each codebook came, the most frequent first."""
    from matplotlib.figure import Figure  # 0.7 s to import

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, each in enumerate(counts):
        usage, perplexity = values[f"usage_{number}"], values[f"perplexity_{number}"]
        label = f"codebook {number}: {usage:.0%} used, perplexity {perplexity:.0f}"
        axes.plot(np.sort(each)[::-1], label=label)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="codes, by how often they came", ylabel="frames", ylim=(0, None))
    axes.legend()
    figure.savefig(png := io.BytesIO(), format="png", dpi=120)
    return png.getvalue()
