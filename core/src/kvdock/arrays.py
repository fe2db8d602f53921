"""Types of the arrays that go between modules, one name each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
OutcomeArray = npt.NDArray[np.uint8]
"""One `Outcome` for each row."""

any_of: Callable[[npt.NDArray[Any]], bool] = np.logical_or.reduce
"""Whether any item of a row is true or above 0: `any()` of it, without its Python."""
all_of: Callable[[npt.NDArray[Any]], bool] = np.logical_and.reduce
"""Whether all items of a row are true: as `any_of`."""
least_of: Callable[[npt.NDArray[Any]], int] = np.minimum.reduce
"""The least item of a row that is not empty: as `any_of`."""
most_of: Callable[[npt.NDArray[Any]], int] = np.maximum.reduce
"""The largest item of a row that is not empty: as `any_of`."""
count_of: Callable[[npt.NDArray[Any]], int] = np.add.reduce
"""How many items of a row of bool are true: as `any_of`."""
