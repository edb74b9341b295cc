"""How the kernels see tensors: stored weights as rows of a table of addresses, activations as float32 rows.

An operation of torch, once weights have pushed its code out of the caches, takes ten times as long as otherwise, and a
tensor's address is had without one. So a call of a few rows goes into a kernel with addresses, and what it returns is
the only tensor that is made.
"""

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
    """A weight as the kernels read it: a table of it alone, the table's bytes, and how many outputs it has."""

    table: np.ndarray
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
    table = np.array([row])
    return Row(table, table.tobytes(), row[OUTPUTS]) if known else None


def table_of(rows: Sequence[Row]) -> np.ndarray:
    """Rows of several weights as a table, int64 [n, 6]."""
    return np.frombuffer(bytearray().join([row.packed for row in rows]), np.int64).reshape(-1, 6)


def few(x: Tensor) -> int | None:
    """How many rows x has, or None when they are too many."""
    rows = x.numel() // x.shape[-1]
    return rows if rows <= ROWS else None


def is_coarse(dtype: torch.dtype) -> bool:
    """Whether activations of this type may be rounded to some 15 bits where they meet integer weights: they have 8."""
    return dtype == torch.bfloat16


def as_array(x: Tensor) -> np.ndarray:
    """A tensor as a contiguous float32 array."""
    return plain(x).numpy()


def plain(x: Tensor) -> Tensor:
    """A tensor as float32 numbers that follow each other."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


def widened(w: Tensor) -> Tensor:
    """A small weight as float32 numbers that follow each other; if it has to be made, made once and kept with it."""
    if w.dtype == torch.float32:
        return plain(w)
    try:
        return w._widened  # type: ignore[attr-defined]
    except AttributeError:
        w._widened = wide = plain(w)  # type: ignore[attr-defined]
        return wide


def packed(x: Tensor) -> Tensor:
    """Activations whose numbers follow each other."""
    return x if x.is_contiguous() else x.contiguous()


def like(x: Tensor, columns: int) -> Tensor:
    """Room for as many rows of another width."""
    return torch.empty((*x.shape[:-1], columns), dtype=x.dtype)


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


@kernel()
def integers(address, shape):
    """The same of whole numbers."""
    return carray(v.pointer(address), shape, np.int64)


@kernel()
def rounded(x):
    """The bits of the nearest bfloat16, the even one on a tie."""
    bits = v.as_u32(x)
    if x != x:
        return np.uint32(0x7FC0)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


@kernel()
def read(address, rows, columns, halves):
    """Activations as float32 rows: those that lie there, or a copy of bfloat16."""
    if not halves:
        return floats(address, (rows, columns))
    x, stored = np.empty((rows, columns), np.float32), carray(v.pointer(address), (rows, columns), np.uint16)
    for n in range(rows):
        for i in range(columns):
            x[n, i] = v.as_f32(np.uint32(stored[n, i]) << np.uint32(16))
    return x


@kernel()
def room(address, rows, columns, halves):
    """Where float32 rows are made for an address: there, or elsewhere if they are still to be rounded."""
    return np.empty((rows, columns), np.float32) if halves else floats(address, (rows, columns))


@kernel()
def keep(y, address, halves):
    """Store float32 rows at an address, unless they were made there; rounded to bfloat16 if it is to hold that."""
    if halves:
        stored = carray(v.pointer(address), y.shape, np.uint16)
        for n in range(len(y)):
            for i in range(y.shape[1]):
                stored[n, i] = rounded(y[n, i])
    elif y.ctypes.data != address:
        floats(address, y.shape)[:] = y


@register_jitable
def scratch(xs: np.ndarray) -> np.ndarray:
    """Room for the prepared form of some rows."""
    return np.empty((len(xs), 2 * HEAD + 8 * xs.shape[1]), np.uint8)
