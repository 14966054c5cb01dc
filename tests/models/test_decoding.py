"""From the best path to labels."""

from itertools import groupby

import pytest
import torch
from torch import Tensor

from sbkit.models.decoding import greedy

PATHS: list[tuple[list[int], list[int]]] = [
    ([], []),
    ([0, 0, 0], []),
    ([5], [5]),
    ([5, 5, 5], [5]),
    ([5, 0, 5], [5, 5]),
    ([0, 5, 5, 0, 0, 6, 6, 5], [5, 6, 5]),
    ([4, 5, 6], [4, 5, 6]),
    ([1, 0, 1], [1, 1]),  # unk is a label like any other; only the blank is nothing
    ([3, 2, 0], [3, 2]),
]


def certain(paths: list[list[int]], size: int = 7) -> Tensor:
    """Make scores (B, U, V) whose best path is the given one; the padding shouts another label."""
    scores = torch.full((len(paths), max(map(len, paths)), size), -9.0)
    scores[..., 4] = 9.0
    for n, path in enumerate(paths):
        scores[n, : len(path)] = -9.0
        scores[n, torch.arange(len(path)), torch.tensor(path).long()] = 0.0
    return scores


@pytest.mark.parametrize(("path", "labels"), PATHS)
def test_a_path_becomes_labels(path: list[int], labels: list[int]) -> None:
    scores = certain([path, [6] * 9])
    assert greedy(scores, torch.tensor([len(path), 9]), blank=0) == [labels, [6]]


def test_all_at_once_and_only_within_the_lengths() -> None:
    paths, labels = map(list, zip(*PATHS, strict=True))
    frames = torch.tensor([len(path) for path in paths])
    assert greedy(certain(paths), frames, blank=0) == labels


def test_the_blank_may_be_another_id() -> None:
    assert greedy(certain([[6, 0, 0, 6, 0, 1]]), torch.tensor([6]), blank=6) == [[0, 0, 1]]


def test_random_paths_are_merged_as_the_definition_says() -> None:
    torch.manual_seed(0)
    scores, frames = torch.randn(50, 40, 5), torch.randint(0, 41, (50,))
    for best, count, labels in zip(
        scores.argmax(-1), frames, greedy(scores, frames, blank=0), strict=True
    ):
        assert labels == [label for label, _ in groupby(best[:count].tolist()) if label != 0]
