"""How the kernels see tensors: stored weights as rows of a table of addresses, activations as float32 rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from numba.extending import register_jitable
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.quant import MXFP4, Int8

Stored = Tensor | MXFP4 | Int8

ROWS = 16
"""Up to this many rows are few: ``FEW`` tokens of a batch of two, and more than pays for."""

WIDEST = 32768
"""Columns up to which the exact integer sums of int8 weights cannot overflow."""

F32, BF16, INT8, MX = range(4)
"""Kinds of storage."""

KIND, ADDRESS, STRIDE, SCALES, SCALE_STRIDE, OUTPUTS = range(6)
"""Columns of a table of weights, int64: addresses, and bytes from one row to the next."""

HEAD = 64
"""Bytes in front of a prepared row of input; its units stand there."""


class Row(NamedTuple):
    """A weight as the kernels read it: its row of a table, as bytes, and how many outputs it has."""

    packed: bytes
    outputs: int


def described(weight: Stored) -> Row | None:
    """A weight's row, kept with the weight; None for storage that the kernels do not know."""
    try:
        return weight._row  # type: ignore[union-attr]
    except AttributeError:
        object.__setattr__(weight, "_row", row := _describe(weight))
        return row


def _describe(weight: Stored) -> Row | None:
    if isinstance(weight, MXFP4):
        codes, scales = weight.codes, weight.scales
        known = codes.is_contiguous() and scales.is_contiguous()
        row = (MX, codes.data_ptr(), codes.shape[1], scales.data_ptr(), scales.shape[1], codes.shape[0])
    elif isinstance(weight, Int8):
        codes, scales = weight.codes, weight.scales
        known = codes.is_contiguous() and scales.is_contiguous() and codes.shape[1] <= WIDEST
        row = (INT8, codes.data_ptr(), codes.shape[1], scales.data_ptr(), 4, codes.shape[0])
    else:
        kind, size = (BF16, 2) if weight.dtype == torch.bfloat16 else (F32, 4)
        known = weight.dtype in (torch.bfloat16, torch.float32) and weight.is_contiguous()
        row = (kind, weight.data_ptr(), size * weight.shape[1], 0, 0, weight.shape[0])
    return Row(np.array(row).tobytes(), row[OUTPUTS]) if known else None


def table_of(rows: Sequence[Row]) -> np.ndarray:
    """Rows of several weights as a table, int64 [n, 6]."""
    return np.frombuffer(bytearray().join([row.packed for row in rows]), np.int64).reshape(-1, 6)


def few(x: Tensor) -> np.ndarray | None:
    """The rows of x as a float32 array, or None when they are too many, or float64."""
    columns = x.shape[-1]
    if x.numel() > ROWS * columns or x.dtype == torch.float64:
        return None
    return as_array(x).reshape(-1, columns)


def is_coarse(dtype: torch.dtype) -> bool:
    """Whether activations of this type may be rounded to some 15 bits where they meet integer weights: they have 8."""
    return dtype == torch.bfloat16


def as_array(x: Tensor) -> np.ndarray:
    """A tensor as a contiguous float32 array."""
    return plain(x).numpy()


def plain(x: Tensor) -> Tensor:
    """A tensor as float32 numbers that follow each other."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


def as_tensor(y: np.ndarray, like: Tensor) -> Tensor:
    """Rows as a tensor of the type and leading dimensions of ``like``."""
    out = torch.from_numpy(y)
    if like.dtype != torch.float32:
        out = out.to(like.dtype)
    return out.view(*like.shape[:-1], y.shape[-1])


@kernel()
def own(x: np.ndarray) -> np.ndarray:
    """The same array for one thread of a region, which must not outlive it.

    Who uses an array is counted, at every slice and call, in one place for all threads, which wait for each other
    there. Nobody counts who uses this one.
    """
    return carray(v.pointer(x.ctypes.data), x.shape, x.dtype)


@kernel()
def floats(address, shape):
    """A tensor's memory as an array. Python asks a tensor for its address in a tenth of the time of an array."""
    return carray(v.pointer(address), shape, np.float32)


@register_jitable
def scratch(xs: np.ndarray) -> np.ndarray:
    """Room for the prepared form of some rows."""
    return np.empty((len(xs), 2 * HEAD + 8 * xs.shape[1]), np.uint8)
