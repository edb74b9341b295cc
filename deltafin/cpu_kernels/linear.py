"""Products of a few rows with stored weights: ``linear``, ``linears``.

Decoding reads every weight once and does little else, so the kernels do too: a row of weights is met by all rows of
the input while it is in the first-level cache, and rows are shared out evenly over the threads, one parallel region
for as many weights as share an input. A row's dot product has one order of summation, whatever the number of rows
and threads. Many rows are a matrix product: ``many``.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.many import many_rows
from deltafin.cpu_kernels.stored import (
    ADDRESS,
    BF16,
    F32,
    HEAD,
    INT8,
    KIND,
    MX,
    OUTPUTS,
    SCALE_STRIDE,
    SCALES,
    STRIDE,
    Stored,
    described,
    few,
    is_coarse,
    keep,
    like,
    own,
    packed,
    read,
    room,
    scratch,
    table_of,
)
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import reference

PARALLEL = 64 << 10
"""Bytes of weights below which waking a second thread costs more than it saves."""

LIMIT = 8_355_000
"""Somewhat below 8,355,711, the largest number that three signed digits of 8 bits can write."""

COARSE_LIMIT = 32_600
"""Somewhat below 32,639, the largest number that two of them can write."""

COARSE_SUM = (1 << 31) // 127 - 1
"""What the magnitudes of all inputs in one lane of 32 bits may add up to, to be multiplied by int8 weights."""

BYTES, PORTABLE = v.BYTES or 16, not v.BYTES


@kernel()
def _unit(x, limit):
    """The step that cuts a vector to whole numbers up to ``limit``; NaN when a value is not finite."""
    bits, largest = x.view(np.int32), np.int32(0)
    for i in range(len(x)):  # compared as whole numbers: magnitudes have the same order, and NaN is above them
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    if largest >= 0x7F800000:
        return np.float32(np.nan)
    return v.as_f32(np.uint32(largest)) / np.float32(limit)


@kernel()
def _number(x, per):
    t = x * per
    return np.int32(t + np.float32(0.5)) if t >= 0 else np.int32(t - np.float32(0.5))


@kernel()
def prepare_mxfp4(coarse, x, out):
    """Lay one input vector out for ``dot_mxfp4``, or its coarse or portable form; return the unit of the result."""
    n = len(x)
    if PORTABLE:
        values = out[: 4 * n].view(np.float32)
        half = n // 2
        for i in range(half):
            values[i] = x[2 * i]
            values[half + i] = x[2 * i + 1]
        return np.float32(0.5)
    unit = _unit(x, COARSE_LIMIT if coarse else LIMIT)
    per = np.float32(1) / unit if unit > 0 else np.float32(0)
    groups, address = BYTES // 16, out.ctypes.data
    for g in range(n // v.STEP * (v.STEP // 32)):
        at, place = x.ctypes.data + 128 * g, address + g % groups * 16
        if coarse:
            v.digits_mxfp4_coarse(at, per, place + g // groups * 5 * BYTES)
        else:
            v.digits_mxfp4(at, per, place + g // groups * 7 * BYTES)
    return unit * np.float32(0.5)


@kernel()
def prepare_int8(coarse, x, out):
    """Cut one input vector in the two digits of ``dot_int8``, or the coarse one; return the unit of the result."""
    n = len(x)
    unit = _unit(x, min(COARSE_LIMIT, COARSE_SUM // ((n + 15) // 16)) if coarse else LIMIT)
    per = np.float32(1) / unit if unit > 0 else np.float32(0)
    address, whole = out.ctypes.data, n & ~15
    for i in range(0, whole, 16):
        at, place = x.ctypes.data + 4 * i, address + 2 * i
        if coarse:
            v.digit_int8(at, per, place)
        else:
            v.digits_int8(at, per, place, place + 2 * n)
    digits = out[: 4 * n].view(np.int16)
    for i in range(whole, n):
        number = _number(x[i], per)
        if coarse:
            digits[i] = number
        else:
            high = (number + 2048) >> 12
            digits[i] = high
            digits[n + i] = number - (high << 12)
    return unit


@kernel()
def prepare(needs_int8, needs_mx, coarse, x, out):
    """Prepare one input vector for the kinds of weights it will meet: to 23 bits, or coarsely to about 15."""
    units = out[:8].view(np.float32)
    out[8] = coarse
    n = len(x)
    if needs_int8:
        units[0] = prepare_int8(coarse, x, out[HEAD:])
    if needs_mx:
        units[1] = prepare_mxfp4(coarse, x, out[HEAD + 4 * n :])


@kernel()
def _coarse(prepared):
    """How an input was prepared."""
    return v.peek_u8(prepared + 8) != 0


@kernel()
def _code(nibble):
    m = nibble & 7
    m = m + max(m - 4, 0) + 2 * ((m + 1) >> 3)
    return np.float32(-m if nibble > 7 else m)


@kernel()
def digit(coarse, digits, i, columns):
    """The one digit of column i, or both put together again."""
    high = np.int64(np.int16(v.peek_u16(digits + 2 * i)))
    if coarse:
        return high
    return (high << 12) + np.int64(np.int16(v.peek_u16(digits + 2 * (columns + i))))


@kernel()
def _dot(kind, w, s, x, prepared, columns):
    """One row of weights of any width times one row of input: the vector code as far as it goes, then the rest."""
    room = np.empty(2, np.int64)
    out = room.ctypes.data
    if kind in (F32, BF16):
        whole = columns & ~31
        y = v.dot_f32(w, x, whole) if kind == F32 else v.dot_bf16(w, x, whole)
        for i in range(whole, columns):
            if kind == F32:
                weight = v.peek_f32(w + 4 * i)
            else:
                weight = v.as_f32(np.uint32(v.peek_u16(w + 2 * i)) << np.uint32(16))
            y += weight * v.peek_f32(x + 4 * i)
        return y
    if kind == INT8:
        whole, coarse = columns & ~31, _coarse(prepared)
        if coarse:
            v.dot_int8_coarse(w, 0, 0, 0, prepared + HEAD, np.float32(0), out, whole, columns)
        else:
            v.dot_int8(w, 0, 0, 0, prepared + HEAD, np.float32(0), out, whole, columns)
        number = room[0]
        for i in range(whole, columns):
            number += v.peek_i8(w + i) * digit(coarse, prepared + HEAD, i, columns)
        return np.float32(number) * v.peek_f32(prepared) * v.peek_f32(s)
    unit, laid_out = v.peek_f32(prepared + 4), prepared + HEAD + 4 * columns
    if PORTABLE:
        return unit * v.dot_mxfp4_portable(w, s, laid_out, columns)
    whole = columns // v.STEP * v.STEP
    if _coarse(prepared):
        v.dot_mxfp4_coarse(w, 0, s, 0, laid_out, out, whole)
    else:
        v.dot_mxfp4(w, 0, s, 0, laid_out, out, whole)
    y = unit * v.peek_f32(out)
    for group in range(whole // 32, columns // 32):
        part = np.float32(0)
        for i in range(16):
            byte = np.int64(v.peek_u8(w + 16 * group + i))
            part += _code(byte & 15) * v.peek_f32(x + 4 * (32 * group + 2 * i))
            part += _code(byte >> 4) * v.peek_f32(x + 4 * (32 * group + 2 * i + 1))
        bits = max(np.uint32(v.peek_u8(s + group)) << np.uint32(23), np.uint32(1 << 22))
        y += np.float32(0.5) * part * v.as_f32(bits)
    return y


@kernel()
def block(w, first, count, x, prepared, columns, out):
    """Rows ``first`` on, at most BLOCK, of a weight (a row of a table) times one row of input, to address ``out``.

    The same bits for a row whatever block it is in.
    """
    kind, stride, scale_stride = w[KIND], w[STRIDE], w[SCALE_STRIDE]
    row, s = w[ADDRESS] + first * stride, w[SCALES] + first * scale_stride
    r = 0
    if columns % v.STEP == 0:
        if count == v.BLOCK and kind in (F32, BF16):
            if kind == F32:
                v.dots_f32(row, stride, x, out, columns)
            else:
                v.dots_bf16(row, stride, x, out, columns)
            return
        if kind == INT8:
            unit, laid_out, coarse = v.peek_f32(prepared), prepared + HEAD, _coarse(prepared)
            at_once = v.COARSE_AT_ONCE if coarse else v.AT_ONCE
            while r + at_once <= count:
                at, scales, place = row + r * stride, s + r * scale_stride, out + 4 * r
                if coarse:
                    v.dots_int8_coarse(at, stride, scales, scale_stride, laid_out, unit, place, columns, columns)
                else:
                    v.dots_int8(at, stride, scales, scale_stride, laid_out, unit, place, columns, columns)
                r += at_once
        elif kind == MX and not PORTABLE:
            unit, laid_out, coarse = v.peek_f32(prepared + 4), prepared + HEAD + 4 * columns, _coarse(prepared)
            at_once = v.COARSE_AT_ONCE if coarse else v.AT_ONCE
            while r + at_once <= count:
                at, scales, place = row + r * stride, s + r * scale_stride, out + 4 * r
                if coarse:
                    v.dots_mxfp4_coarse(at, stride, scales, scale_stride, laid_out, place, columns)
                else:
                    v.dots_mxfp4(at, stride, scales, scale_stride, laid_out, place, columns)
                for i in range(at_once):
                    v.poke_f32(place + 4 * i, unit * v.peek_f32(place + 4 * i))
                r += at_once
    while r < count:
        y = _dot(kind, row + r * stride, s + r * scale_stride, x, prepared, columns)
        v.poke_f32(out + 4 * r, y)
        r += 1


@kernel()
def kinds(table):
    """Which preparations the input of these weights needs: for int8, for MXFP4."""
    needs_int8, needs_mx = False, False
    for i in range(len(table)):
        needs_int8 |= table[i, KIND] == INT8
        needs_mx |= table[i, KIND] == MX
    return needs_int8, needs_mx


@kernel()
def aligned(prepared):
    """Where in each prepared row the first whole cache line begins: loads that cross lines cost double."""
    return -prepared.ctypes.data & (HEAD - 1)


@kernel(parallel=True)
def few_rows(table, x, coarse, prepared, y, nt):
    """All weights of the table times all rows of x, side by side in y; each thread takes its share of every weight."""
    needs_int8, needs_mx = kinds(table)
    rows, columns = x.shape
    offset = aligned(prepared)
    if needs_int8 or needs_mx:
        for n in range(rows):
            prepare(needs_int8, needs_mx, coarse, x[n], prepared[n, offset:])
    size = 0
    for i in range(len(table)):
        size += table[i, STRIDE] * table[i, OUTPUTS]
    if size * rows < PARALLEL:
        nt = 1
    for thread in prange(nt):
        t = np.int64(thread)  # ``prange`` counts in unsigned numbers, for which callees would be compiled anew
        every, xs, ready, ys, start = own(table), own(x), own(prepared), own(y), 0
        for i in range(len(every)):
            w = every[i]
            outputs = w[OUTPUTS]
            last = outputs * (t + 1) // nt
            for r in range(outputs * t // nt, last, v.BLOCK):
                count = min(v.BLOCK, last - r)
                for n in range(rows):
                    block(
                        *(w, r, count, xs.ctypes.data + 4 * n * columns),
                        *(ready.ctypes.data + offset + n * ready.shape[1], columns),
                        ys.ctypes.data + 4 * (n * ys.shape[1] + start + r),
                    )
            start += outputs


def linears(x: Tensor, weights: Sequence[Stored]) -> tuple[Tensor, ...]:
    """See ``reference.linears``."""
    if x.dtype == torch.float64:
        return reference.linears(x, weights)
    rows, about = few(x), [described(w) for w in weights]
    if rows is None or None in about:
        return tuple(many_rows(x, weight) for weight in weights)
    sizes = [row.outputs for row in about]  # type: ignore[union-attr]
    return _few(x, rows, table_of(about), sum(sizes)).split(sizes, -1)  # type: ignore[arg-type]


def linear(x: Tensor, weight: Stored) -> Tensor:
    """See ``reference.linear``."""
    if x.dtype == torch.float64:
        return reference.linear(x, weight)
    rows, row = few(x), described(weight)
    if rows is None or row is None:
        return many_rows(x, weight)
    return _few(x, rows, row.table, row.outputs)


def _few(x: Tensor, rows: int, table: np.ndarray, outputs: int) -> Tensor:
    """All weights of the table, which have so many outputs, times the rows of x, side by side."""
    x, y, coarse = packed(x), like(x, outputs), is_coarse(x.dtype)
    _product(table, x.data_ptr(), rows, x.shape[-1], coarse, y.data_ptr(), outputs, threads())
    return y


@kernel()
def _product(table, x, rows, columns, coarse, out, outputs, nt):
    """``few_rows`` of the activations at address x to address ``out``."""
    xs, y = read(x, rows, columns, coarse), room(out, rows, outputs, coarse)
    few_rows(table, xs, coarse, scratch(xs), y, nt)
    keep(y, out, coarse)
