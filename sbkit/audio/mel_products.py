"""Mel energies by products of matrices, for ONNX runtimes, whose transform of Fourier is slow.

Legend: B utterances, S samples, T frames, M mel bins, F the size of the transform, P samples in a
row, Q rows in a window, K = F / P / 2 + 1.

onnxruntime's DFT is a loop over single numbers: with what cuts and prepares the windows it took 1.6
ms of a second of audio, and this takes 0.5 (one core, November 2026). Where window, shift and F
have a common divisor P (16 at 16 kHz: 400, 160, 512), samples are rows of P, windows are Q rows
each, and the transform is one over the rows of a window and then one over its columns (Cooley and
Tukey 1965). PyTorch's FFT is twice as fast as this.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

FEWEST = 8  # samples in a row; with fewer, the products are large

Reals = npt.NDArray[np.floating]


class MelProducts:
    """Compute mel energies of windows without their mean: (B, S) of float64 -> (B, T, M)."""

    def __init__(
        self,
        window_samples: int,
        shift: int,
        size: int,
        *,
        preemphasis: float,
        window: Reals,
        filters: Reals,
    ) -> None:
        """Make the matrices of windows, shifts and a transform of so many samples.

        preemphasis: the share of the sample before that is taken from each; window: (F,), whose
        first number is zero; filters: (F / 2 + 1, M).
        """
        self._samples, self._shift, self._preemphasis = window_samples, shift, preemphasis
        row = self._row = math.gcd(window_samples, shift, size)
        self._window = torch.from_numpy(np.float64(window[:window_samples]).reshape(-1, row))
        rows = size // row
        ends = np.arange(rows // 2 + 1)
        turns = np.exp(-2j * np.pi * np.outer(ends, np.arange(len(self._window))) / rows)
        self._of_rows = torch.from_numpy(_parts(turns, 1).reshape(2 * len(ends), -1))  # (2K, Q)
        bins = ends[:, None] + rows * np.arange(row)  # (K, P)
        turns = np.exp(-2j * np.pi * bins[:, None] * np.arange(row)[:, None] / size)  # (K, P, P)
        both = np.stack([_parts(turns, -1), _parts(1j * turns, -1)], 1)  # (K, 2, P, P, 2)
        self._of_columns = torch.from_numpy(both.reshape(len(ends), 2 * row, 2 * row))
        self._filters = torch.from_numpy(_reorder(filters, np.minimum(bins, size - bins)))

    def __call__(self, audio: Tensor) -> Tensor:
        """Compute the energies of all whole windows."""
        shift, row, count = self._shift // self._row, self._row, len(self._window)
        frames = (audio.shape[1] - self._samples) // self._shift + 1
        places = (torch.arange(frames).unsqueeze(1) * shift + torch.arange(count)).flatten()
        more = row - audio.shape[1] % row  # never 0, for which a tracer would make a rule
        sums = nn.functional.pad(audio, (0, more)).reshape(audio.shape[0], -1, row).sum(-1)
        means = sums.index_select(1, places).reshape(-1, frames, count).sum(-1) / self._samples
        # The first sample of a window has none before it; it counts nothing, its weight is zero.
        emphasized = audio[:, 1:] - self._preemphasis * audio[:, :-1]
        emphasized = nn.functional.pad(emphasized, (1, more))
        rows = emphasized.reshape(audio.shape[0], -1, row)  # (B, S / P, P)
        windows = rows.index_select(1, places).reshape(-1, frames, count, row)  # (B, T, Q, P)
        windows = windows - ((1 - self._preemphasis) * means)[..., None, None]
        windows = windows * self._window
        spectra = torch.matmul(self._of_rows, windows)  # (B, T, 2K, P)
        spectra = spectra.reshape(-1, len(self._of_columns), 2 * row).transpose(0, 1)
        spectra = torch.matmul(spectra, self._of_columns)  # (K, B * T, 2P)
        squares = spectra.float().square().transpose(0, 1)  # (B * T, K, 2P)
        return squares.reshape(audio.shape[0], -1, len(self._filters)) @ self._filters


def _parts(turns: npt.NDArray[np.complex128], axis: int) -> npt.NDArray[np.float64]:
    """Put real and imaginary parts beside each other."""
    return np.stack([turns.real, turns.imag], axis)


def _reorder(filters: Reals, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the filters of the two parts of each bin, (K, P), which counts once: (2KP, M)."""
    order = bins.ravel()
    again = np.ones(order.size, bool)
    again[np.unique(order, return_index=True)[1]] = False
    chosen = np.where(again[:, None], np.float32(0), filters[order])
    return np.repeat(chosen, 2, axis=0).astype(np.float32)
