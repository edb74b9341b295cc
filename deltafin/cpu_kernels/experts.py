"""Feed-forwards of a few rows: ``gated``, and ``experts`` straight from their stored bytes.

Three regions: gate and up of all chosen experts, the activation, down. An expert that several rows have chosen is
read once. A row's result is the sum over its experts by increasing id, whatever else is in the call.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import prange
from numba.extending import register_jitable
from torch import Tensor

from deltafin.config import Activation, SiLU
from deltafin.cpu_kernels import mathematics
from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.linear import PARALLEL, aligned, block, kinds, prepare
from deltafin.cpu_kernels.many import filled, in_halves, product
from deltafin.cpu_kernels.stored import (
    OUTPUTS,
    STRIDE,
    Stored,
    described,
    few,
    floats,
    integers,
    is_coarse,
    keep,
    like,
    own,
    packed,
    plain,
    read,
    scratch,
    table_of,
)
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import Expert, reference


@kernel()
def grouped(ids, share, count):
    """The (row, expert) pairs of ``ids`` [N, E], one of ``count`` experts after the other.

    Where each used expert's pairs begin, and the last one's end; rows and shares of all pairs; which experts are used.
    """
    ends = np.zeros(count, np.int64)
    for x in ids.flat:
        ends[x] += 1
    used = np.flatnonzero(ends)
    start = np.zeros(len(used) + 1, np.int64)
    start[1:] = np.cumsum(ends[used])
    ends[used] = start[:-1]
    row, shares = np.empty(ids.size, np.int64), np.empty(ids.size, np.float32)
    for n in range(len(ids)):
        for e in range(ids.shape[1]):
            at = ends[ids[n, e]]
            row[at], shares[at] = n, share[n, e]
            ends[ids[n, e]] += 1
    return start, row, shares, used


@kernel()
def _up(table, start, row, x, prepared, gate, up, t, nt):
    """Thread t's share of the gate and up products of every (expert, row) pair."""
    columns, width = x.shape[1], gate.shape[1]
    all_rows = (len(start) - 1) * width
    offset = aligned(prepared)
    at, end = all_rows * t // nt, all_rows * (t + 1) // nt
    while at < end:
        e, r = at // width, at % width
        count = min(v.BLOCK, width - r, end - at)
        for which in range(2):
            out = gate if which == 0 else up
            for p in range(start[e], start[e + 1]):
                n = row[p]
                block(
                    *(table[3 * e + which], r, count, x.ctypes.data + 4 * n * columns),
                    *(prepared.ctypes.data + offset + n * prepared.shape[1], columns),
                    out.ctypes.data + 4 * (p * width + r),
                )
        at += count


@kernel()
def _activate(gate, up, limits, needs_int8, needs_mx, coarse, prepared, p):
    """Activate pair p in place of its gate, and prepare it for the down products."""
    g, u = gate[p], up[p]
    if limits[0] > 0:
        mathematics.situ_gated(g, u, limits[0], limits[1], g)
    else:
        mathematics.silu_gated(g, u, g)
    if needs_int8 or needs_mx:
        prepare(needs_int8, needs_mx, coarse, g, prepared[p, aligned(prepared) :])


@kernel()
def _down(table, start, row, share, h, prepared, y, t, nt):
    """Thread t's share of the outputs: the weighted down products, expert by expert."""
    width, outputs = h.shape[1], y.shape[1]
    first, last, offset = outputs * t // nt, outputs * (t + 1) // nt, aligned(prepared)
    part = np.empty(v.BLOCK, np.float32)
    y[:, first:last] = 0
    for e in range(len(start) - 1):
        for r in range(first, last, v.BLOCK):
            count = min(v.BLOCK, last - r)
            for p in range(start[e], start[e + 1]):
                block(
                    *(table[3 * e + 2], r, count, h.ctypes.data + 4 * p * width),
                    *(prepared.ctypes.data + offset + p * prepared.shape[1], width, part.ctypes.data),
                )
                for i in range(count):
                    y[row[p], r + i] += share[p] * part[i]


@kernel(parallel=True)
def few_experts(table, start, row, share, limits, x, coarse, x_prepared, h, up, h_prepared, y, nt):
    """All chosen experts for all rows of x."""
    needs_int8, needs_mx = kinds(table)  # of the first products and the second alike
    if needs_int8 or needs_mx:
        for n in range(len(x)):
            prepare(needs_int8, needs_mx, coarse, x[n], x_prepared[n, aligned(x_prepared) :])
    if table[0, STRIDE] * h.size < PARALLEL:
        nt = 1
    pairs = len(row)
    for stage in range(3):
        for thread in prange(nt):
            t = np.int64(thread)  # ``prange`` counts in unsigned numbers, for which callees would be compiled anew
            every, first, rows, gates, ups, ready = own(table), own(start), own(row), own(h), own(up), own(h_prepared)
            if stage == 0:
                _up(every, first, rows, own(x), own(x_prepared), gates, ups, t, nt)
            elif stage == 1:
                for p in range(pairs * t // nt, pairs * (t + 1) // nt):
                    _activate(gates, ups, limits, needs_int8, needs_mx, coarse, ready, p)
            else:
                _down(every, first, rows, own(share), gates, ready, own(y), t, nt)


@register_jitable
def run(table, start, row, share, limits, x, coarse, nt):
    """``few_experts`` with room for what is between and for the outputs, which are returned."""
    h, up = np.empty((2, len(row), table[0, OUTPUTS]), np.float32)
    y = np.empty((len(x), table[2, OUTPUTS]), np.float32)
    few_experts(table, start, row, share, limits, x, coarse, scratch(x), h, up, scratch(h), y, nt)
    return y


@kernel()
def alone(table, limits, x, coarse, nt):
    """``run`` of one expert, the only one, for all rows."""
    rows = len(x)
    start, row, share = np.array((0, rows)), np.arange(rows), np.ones(rows, np.float32)
    return run(table, start, row, share, limits, x, coarse, nt)


@kernel(parallel=True)
def activate_rows(gate, up, limits, nt):
    """Activate all rows in place of their gate."""
    nothing = np.empty((1, 0), np.uint8)
    for t in prange(nt):
        for p in range(len(gate) * t // nt, len(gate) * (t + 1) // nt):
            _activate(gate, up, limits, False, False, False, nothing, p)


def _many_rows(x: Tensor, expert: Expert, limits: tuple[np.float32, np.float32]) -> Tensor:
    """One expert for many rows of float32 or bfloat16; the result is float32."""
    gate, up = product(x, expert.gate), product(x, expert.up)
    activate_rows(gate.numpy(), up.numpy(), limits, threads())
    return product(gate.to(x.dtype), expert.down)


def saturation(kind: Activation) -> tuple[np.float32, np.float32]:
    """Limits of gate and up; zeros for an activation that does not saturate."""
    if isinstance(kind, SiLU):
        return np.float32(0), np.float32(0)
    return np.float32(kind.gate_limit), np.float32(kind.up_limit)


def gated(x: Tensor, gate: Stored, up: Stored, down: Stored, kind: Activation) -> Tensor:
    """See ``reference.gated``."""
    rows, about, limits = few(x), [described(w) for w in (gate, up, down)], saturation(kind)
    if x.dtype == torch.float64:
        return reference.gated(x, gate, up, down, kind)
    if rows is None or None in about:
        y = _many_rows(x.reshape(-1, x.shape[-1]), Expert(gate, up, down), limits)
        return y.to(x.dtype).view(*x.shape[:-1], -1)
    table = table_of(about)  # type: ignore[arg-type]
    x, y, coarse = packed(x), like(x, about[2].outputs), is_coarse(x.dtype)  # type: ignore[union-attr]
    _gated(table, limits, x.data_ptr(), rows, x.shape[-1], coarse, y.data_ptr(), threads())
    return y


@kernel()
def _gated(table, limits, x, rows, columns, coarse, out, nt):
    """``alone`` for the activations at address x, to address ``out``."""
    keep(alone(table, limits, read(x, rows, columns, coarse), coarse, nt), out, coarse)


def experts(
    x_NM: Tensor,
    ids_NE: Tensor,
    weight_NE: Tensor,
    expert: Callable[[int], Expert],
    activation: Activation,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See ``reference.experts``."""
    dtype = dtype or x_NM.dtype
    if x_NM.dtype == torch.float64:
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation, dtype)
    rows, ids, share, limits = few(x_NM), packed(ids_NE), plain(weight_NE), saturation(activation)
    if rows is None:
        return _many_experts(x_NM, ids, share, expert, limits).to(dtype)
    each = ids.tolist()
    chosen = [expert(x) for x in (each[0] if rows == 1 else sorted({x for row in each for x in row}))]
    about = [described(w) for e in chosen for w in e]  # ``chosen`` keeps them alive until all is done
    if None in about:
        return _many_experts(x_NM, ids, share, expert, limits).to(dtype)
    x, y = packed(x_NM), torch.empty(x_NM.shape, dtype=dtype)
    _experts(
        *(table_of(about), ids.data_ptr(), share.data_ptr(), ids.shape[1], limits),  # type: ignore[arg-type]
        *(x.data_ptr(), rows, x.shape[1], is_coarse(x.dtype), y.data_ptr(), is_coarse(dtype), threads()),
    )
    return y


@kernel()
def _experts(table, ids, share, chosen, limits, x, rows, columns, coarse, out, halves, nt):
    """``run`` for what stands at these addresses: ids and shares [rows, chosen], x [rows, columns]."""
    which = integers(ids, (rows, chosen))
    start, row, shares, _ = grouped(which, floats(share, which.shape), which.max() + 1)
    keep(run(table, start, row, shares, limits, read(x, rows, columns, coarse), coarse, nt), out, halves)


def _many_experts(
    x: Tensor,
    ids: Tensor,
    share: Tensor,
    expert: Callable[[int], Expert],
    limits: tuple[np.float32, np.float32],
) -> Tensor:
    """Expert by expert, all rows that have chosen it at once; an expert is read when its turn comes."""
    start, row, shares, used = grouped(ids.numpy(), share.numpy(), int(ids.max()) + 1)
    y, rows, shares = torch.zeros(len(x), x.shape[1]), torch.from_numpy(row), torch.from_numpy(shares).unsqueeze(1)
    for i, which in enumerate(used.tolist()):
        part = slice(int(start[i]), int(start[i + 1]))
        mine, count = rows[part], int(start[i + 1] - start[i])
        if more := in_halves(x.dtype) and filled(count) - count:
            mine = torch.nn.functional.pad(mine, (0, more))  # row 0 some more times: nobody sees what becomes of it
        h = _many_rows(x[mine], expert(which), limits)[:count]
        y.index_add_(0, rows[part], h.mul_(shares[part]))
    return y
