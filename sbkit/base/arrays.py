"""Types of numpy arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # an array of any type
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]  # ids and indices
Counts = npt.NDArray[np.signedinteger[Any]]  # counts, lengths and indices, in 16 to 64 bits
Bools = npt.NDArray[np.bool_]
LogProbs = npt.NDArray[np.floating]  # natural logarithms; usually (U, V): frames by tokens
