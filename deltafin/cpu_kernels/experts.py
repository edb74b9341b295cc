"""Feed-forwards of a few rows: ``gated``, and ``experts`` straight from their stored bytes.

Three regions: gate and up of all chosen experts, the activation, down. An expert that several rows have chosen is
read once. A row's result is the sum over its experts by increasing id, whatever else is in the call.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.config import Activation, SiTU
from deltafin.cpu_kernels import mathematics
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.linear import (
    ADDRESS,
    HEAD,
    INT8,
    KIND,
    MX,
    PARALLEL,
    ROWS,
    SCALE_STRIDE,
    SCALES,
    STRIDE,
    describe,
    dot,
    prepare,
    readable,
    rows_of,
)
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import Expert, reference
from deltafin.quant import MXFP4, Int8

Stored = Tensor | MXFP4 | Int8


@kernel()
def _up(table, start, row, x, prepared, gate, up, t, nt):
    """Thread t's share of the gate and up products of every (expert, row) pair."""
    columns, width = x.shape[1], gate.shape[1]
    all_rows = (len(start) - 1) * width
    for g in range(all_rows * t // nt, all_rows * (t + 1) // nt):
        e, r = g // width, g % width
        for which in range(2):
            w = table[3 * e + which]
            out = gate if which == 0 else up
            for p in range(start[e], start[e + 1]):
                n = row[p]
                out[p, r] = dot(
                    w[KIND],
                    w[ADDRESS] + r * w[STRIDE],
                    w[SCALES] + r * w[SCALE_STRIDE],
                    x.ctypes.data + 4 * n * columns,
                    prepared.ctypes.data + n * prepared.shape[1],
                    columns,
                )


@kernel()
def _activate(gate, up, limits, needs_int8, needs_mx, prepared, p):
    """Activate pair p in place of its gate, and prepare it for the down products."""
    g, u = gate[p], up[p]
    if limits[0] > 0:
        a, b = limits[0], limits[1]
        for i in range(len(g)):
            g[i] = a * mathematics.tanh(g[i] / a) * mathematics.sigmoid(g[i]) * (b * mathematics.tanh(u[i] / b))
    else:
        for i in range(len(g)):
            g[i] = g[i] * mathematics.sigmoid(g[i]) * u[i]
    if needs_int8 or needs_mx:
        prepare(needs_int8, needs_mx, g, prepared[p])


@kernel()
def _down(table, start, row, share, h, prepared, y, t, nt):
    """Thread t's share of the outputs: the weighted down products, expert by expert."""
    width, outputs = h.shape[1], y.shape[1]
    first, last = outputs * t // nt, outputs * (t + 1) // nt
    y[:, first:last] = 0
    for e in range(len(start) - 1):
        w = table[3 * e + 2]
        for r in range(first, last):
            for p in range(start[e], start[e + 1]):
                y[row[p], r] += share[p] * dot(
                    w[KIND],
                    w[ADDRESS] + r * w[STRIDE],
                    w[SCALES] + r * w[SCALE_STRIDE],
                    h.ctypes.data + 4 * p * width,
                    prepared.ctypes.data + p * prepared.shape[1],
                    width,
                )


@kernel(parallel=True)
def few_rows(table, start, row, share, limits, needs, x, x_prepared, h, up, h_prepared, y, nt):
    """All chosen experts for all rows of x."""
    pairs = len(row)
    for n in range(len(x_prepared)):
        prepare(needs[0], needs[1], x[n], x_prepared[n])
    if nt == 1:
        _up(table, start, row, x, x_prepared, h, up, 0, 1)
        for p in range(pairs):
            _activate(h, up, limits, needs[2], needs[3], h_prepared, p)
        _down(table, start, row, share, h, h_prepared, y, 0, 1)
    else:
        for t in prange(nt):
            _up(table, start, row, x, x_prepared, h, up, t, nt)
        for t in prange(nt):
            for p in range(pairs * t // nt, pairs * (t + 1) // nt):
                _activate(h, up, limits, needs[2], needs[3], h_prepared, p)
        for t in prange(nt):
            _down(table, start, row, share, h, h_prepared, y, t, nt)


def _run(
    x: Tensor, chosen: Sequence[Expert], start: np.ndarray, row: np.ndarray, share: np.ndarray, activation: Activation
) -> Tensor:
    table = np.array([(*describe(w), 0) for expert in chosen for w in expert], np.int64)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    width, pairs = chosen[0].down.shape[1], len(row)
    kinds = table[:, KIND].reshape(-1, 3)
    first, last = set(kinds[:, :2].ravel().tolist()), set(kinds[:, 2].tolist())
    needs = np.array([INT8 in first, MX in first, INT8 in last, MX in last])
    limits = np.zeros(2, np.float32)
    if isinstance(activation, SiTU):
        limits[:] = activation.gate_limit, activation.up_limit
    xs = rows_of(x, rows, columns)
    x_prepared = np.empty((rows if needs[:2].any() else 0, HEAD + 8 * columns), np.uint8)
    h_prepared = np.empty((pairs if needs[2:].any() else 0, HEAD + 8 * width), np.uint8)
    h, up = np.empty((pairs, width), np.float32), np.empty((pairs, width), np.float32)
    y = np.empty((rows, chosen[0].down.shape[0]), np.float32)
    arguments = (table, start, row, share, limits, needs, xs, x_prepared, h, up, h_prepared, y)
    size = int(table[0, STRIDE]) * width * pairs
    few_rows(*arguments, threads() if size > PARALLEL else 1)
    return torch.from_numpy(y).to(x.dtype).view(*x.shape[:-1], -1)


def gated(x: Tensor, gate: Stored, up: Stored, down: Stored, kind: Activation) -> Tensor:
    """See ``reference.gated``."""
    rows = x.numel() // x.shape[-1]
    if rows > ROWS or x.dtype == torch.float64 or not (readable(gate) and readable(up) and readable(down)):
        return reference.gated(x, gate, up, down, kind)
    one = np.ones(rows, np.float32)
    return _run(x, [Expert(gate, up, down)], np.array([0, rows]), np.arange(rows), one, kind)


def experts(
    x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, expert: Callable[[int], Expert], activation: Activation
) -> Tensor:
    """See ``reference.experts``."""
    if len(x_NM) > ROWS or x_NM.dtype == torch.float64:
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation)
    ids = ids_NE.numpy()
    if len(ids) == 1:  # increasing by contract
        used, row = ids[0].tolist(), np.zeros(ids.shape[1], np.int64)
        start, share = np.arange(len(used) + 1), weight_NE.float().numpy()[0]
    else:
        flat = ids.ravel()
        order = np.argsort(flat, kind="stable")
        used, first = np.unique(flat[order], return_index=True)
        used, start = used.tolist(), np.append(first, len(flat))
        row, share = order // ids.shape[1], weight_NE.float().numpy().ravel()[order]
    chosen = [expert(x) for x in used]
    if not all(readable(w) for e in chosen for w in e):
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation)
    return _run(x_NM, chosen, start, row, np.ascontiguousarray(share), activation)
