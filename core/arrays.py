"""What numpy arrays (edge, no torch) and torch tensors (cloud) have under different names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


def library(array: Array) -> Any:
    """numpy or torch, whichever the array belongs to."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def on(array: Array) -> dict[str, Any]:
    """Keywords that make a new array lie where `array` does."""
    return {} if isinstance(array, np.ndarray) else {"device": array.device}


def float64(array: Array) -> Array:
    return array.astype(np.float64, copy=False) if isinstance(array, np.ndarray) else array.double()


def row_maximum(array: Array) -> Array:
    """[R, 1]: each row's largest value."""
    return array.max(-1)[:, None] if isinstance(array, np.ndarray) else array.amax(-1)[:, None]


def like(array: Array, values: Sequence[Any], dtype: Any) -> Array:
    """`values` as an array of the same library and device; dtype: of that library."""
    if isinstance(array, np.ndarray):
        return np.array(values, dtype)
    return sys.modules["torch"].tensor(values, dtype=dtype, device=array.device)


def column(array: Array, values: Sequence[float], dtype: Any) -> Array:
    """`values`, one for each row, as [R, 1]."""
    return like(array, values, dtype)[:, None]


def take(values: Array, order: Array) -> Array:
    """values[r, order[r, c]] for each row."""
    if isinstance(values, np.ndarray):
        return np.take_along_axis(values, order, -1)
    return values.take_along_dim(order, -1)
