"""A delta-rule layer between its projections, for many tokens: the chunkwise form of ``ops.reference``.

One region over the key heads; what a chunk of a head needs fits the second-level cache. Matrix products are made of
one micro-kernel, four rows by sixteen columns in registers.

No difference of two sums of log-decays is formed, as the sums to the end of a block and those from there on are kept
apart: ``ends`` holds the keys, decayed to the end of the last block that is done, and a block's rows carry the decay
from its beginning. So float32 is enough, every exponent is at most 0, and the keys at the end of the chunk are those
that the state takes in. Inside a block the keys fade token by token.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.mathematics import exp, sigmoid, softplus, sum_of_products

CHUNK, BLOCK = 64, 16
"""Tokens of a chunk, and of a block of it."""


class Room(NamedTuple):
    """Buffers of one thread, all [rows, columns]: rows are tokens of a chunk unless said otherwise.

    Columns are cut to whole vectors and are 0 beyond the head's channels.
    """

    taps: np.ndarray  # a convolution, [W, channels]
    q: np.ndarray
    k: np.ndarray  # normalised, the query scaled
    decays: np.ndarray  # of a block: exp(g)
    faded: np.ndarray  # of a block: keys with the decays so far
    written: np.ndarray  # of a block: keys times -beta
    written_late: np.ndarray
    q_late: np.ndarray  # of a block: both with the decay since its beginning
    written_all: np.ndarray
    q_all: np.ndarray  # both with the decay since the chunk's beginning
    ends: np.ndarray  # [K, tokens]: keys with the decay from there to the end of the last block
    P: np.ndarray  # -beta P
    A: np.ndarray
    U: np.ndarray
    o: np.ndarray
    sums: np.ndarray  # rows: log-decays of a token, of the block, of the chunk; decay of the chunk; two dot products


@kernel()
def _room(width, key, value):
    """Buffers of zeros. Sixteen columns more than needed, so that rows do not compete for the same cache lines."""
    K, V = (key + 31) // 32 * 32 + 16, (value + 15) // 16 * 16 + 16
    return Room(
        np.zeros((width, max(key, value)), np.float32),
        np.zeros((CHUNK, K), np.float32),
        np.zeros((CHUNK, K), np.float32),
        np.zeros((BLOCK, K), np.float32),
        np.zeros((BLOCK, K), np.float32),
        np.zeros((BLOCK, K), np.float32),
        np.zeros((BLOCK, K), np.float32),
        np.zeros((BLOCK, K), np.float32),
        np.zeros((CHUNK, K), np.float32),
        np.zeros((CHUNK, K), np.float32),
        np.zeros((K - 16, CHUNK + 16), np.float32),
        np.zeros((CHUNK, CHUNK + 16), np.float32),
        np.zeros((CHUNK, CHUNK + 16), np.float32),
        np.zeros((CHUNK, V), np.float32),
        np.zeros((CHUNK, V), np.float32),
        np.zeros((5, K), np.float32),
    )


@kernel()
def _multiply(p, first, m, rows, count, y, columns):
    """``y[first : first + m, :columns] += p[:m, :count] @ rows[:count]``, m to whole fours, columns sixteens."""
    stride, width, out = p.strides[0], rows.strides[0], y.strides[0]
    for c in range(0, 4 * columns, 64):
        for i in range(0, m, 4):
            at = y.ctypes.data + (first + i) * out + c
            v.weighted_f32(p.ctypes.data + i * stride, stride, rows.ctypes.data + c, width, count, at, out, 16)


@kernel()
def _convolve(x, weights, tail, start, n, first, channels, taps, out):
    """Convolve ``channels`` from ``first`` on of n tokens of one sequence from ``start`` on, and apply SiLU."""
    width = len(taps)
    for c in range(channels):
        for j in range(width):
            taps[j, c] = weights[j, first + c]
    for t in range(n):
        y = out[t]
        y[:channels] = 0
        for j in range(width):
            at = start + t + 1 + j - width
            own, source = taps[j], x[at] if at >= 0 else tail[at + width - 1]
            for c in range(channels):
                y[c] += source[first + c] * own[c]
        for c in range(channels):
            y[c] = y[c] * sigmoid(y[c])


@kernel()
def _keep(x, tail, first, channels):
    """Move the tail on by all tokens of one sequence."""
    before = len(tail)
    for j in range(before):
        at = len(x) - before + j
        source = x[at] if at >= 0 else tail[at + before]
        for c in range(first, first + channels):
            tail[j, c] = source[c]


@kernel()
def normalise(x, scale):
    """To length ``scale``, with epsilon on the sum of squares."""
    s = scale / np.sqrt(sum_of_products(x, x) + np.float32(1e-6))
    for i in range(len(x)):
        x[i] *= s


@kernel()
def log_decays(z, speed, bias, floor, g):
    """Log-decays of one token, from where ``z`` and ``bias`` begin."""
    if floor < 0:
        for i in range(len(g)):
            g[i] = floor * sigmoid(speed * (z[i] + bias[i]))
    else:
        for i in range(len(g)):
            g[i] = -speed * softplus(z[i] + bias[i])


@kernel()
def _rows(r, start, n, z, h, speed, bias, floor, beta, key):
    """Everything of one block that is a token's own: decays, and keys and queries with them."""
    own, block, chunk, before = r.sums[0], r.sums[1], r.sums[2], r.sums[3]
    block[:] = 0
    per_channel = z.shape[1] != beta.shape[1]
    first, channels = (h * key, key) if per_channel else (h, 1)
    for i in range(n):
        log_decays(z[i, first:], speed, bias[first:], floor, own[:channels])
        if not per_channel:
            own[:key] = own[0]
        q, k, decays, faded, written = r.q[start + i], r.k[start + i], r.decays[i], r.faded[i], r.written[i]
        written_late, q_late = r.written_late[i], r.q_late[i]
        written_all, q_all = r.written_all[start + i], r.q_all[start + i]
        b = -sigmoid(beta[i, h])
        for d in range(key):
            decays[d] = exp(own[d])
            block[d] += own[d]
            late = exp(block[d])
            faded[d] = k[d]
            written[d] = k[d] * b
            written_late[d] = k[d] * b * late
            q_late[d] = q[d] * late
            written_all[d] = written_late[d] * before[d]
            q_all[d] = q_late[d] * before[d]
    for d in range(key):
        chunk[d] += block[d]
        before[d] = exp(chunk[d])


@kernel()
def _pairs(r, start, n, key):
    """P and A of one block: inside it pair by pair, then against all blocks before; and its keys join ``ends``."""
    whole, sums = (key + 31) // 32 * 32, r.sums[4]
    for i in range(n):
        x, y, a, out = r.written[i].ctypes.data, r.q[start + i].ctypes.data, r.decays[i].ctypes.data, sums.ctypes.data
        for j in range(i):
            v.fade_two_dots(r.faded[j].ctypes.data, a, x, y, out, whole)
            r.P[start + i, start + j], r.A[start + i, start + j] = sums[0], sums[1]
        v.two_dots(r.faded[i].ctypes.data, x, y, out, whole)
        r.A[start + i, start + i] = sums[1]
    if start:
        _multiply(r.written_late, start, n, r.ends, key, r.P, start)
        _multiply(r.q_late, start, n, r.ends, key, r.A, start)
    block = r.sums[1]
    for d in range(key):
        y, fade = r.ends[d], exp(block[d])
        for j in range(start):
            y[j] *= fade
        for j in range(n):
            y[start + j] = r.faded[j, d]


@kernel()
def _solve(r, n, columns):
    """``U - (-beta P) U = right-hand side`` in place, and ``o += A U``: four rows at a time."""
    for i in range(0, n, 4):
        _multiply(r.P[i:], i, 4, r.U, i, r.U, columns)
        for a in range(i + 1, min(i + 4, n)):
            for b in range(i, a):
                v.axpy_f32(r.P[a, b], r.U[b].ctypes.data, r.U[a].ctypes.data, columns)
        _multiply(r.A[i:], i, 4, r.U, min(i + 4, n), r.o, columns)


@kernel()
def _chunk(r, S, start, n, b, h, key, inputs, weights, tails, floor, eps, out):
    """One chunk of value head h, queries and keys being there; ``S`` [K to whole fours, V]."""
    v_in, z_in, beta_in, gate_in = inputs[2][b], inputs[3][b], inputs[4][b], inputs[5][b]
    decay_log, decay_bias, norm = weights[3], weights[4], weights[5]
    value = len(norm)
    columns = (value + 15) // 16 * 16
    r.P[:] = 0
    r.A[:] = 0
    r.o[:] = 0
    r.sums[2] = 0
    r.sums[3] = 1
    speed = np.exp(decay_log[h])
    for at in range(0, n, BLOCK):
        count = min(BLOCK, n - at)
        rows = slice(start + at, start + at + count)
        _rows(r, at, count, z_in[rows], h, speed, decay_bias, floor, beta_in[rows], key)
        _pairs(r, at, count, key)
    _convolve(v_in, weights[2], tails[2][b], start, n, h * value, value, r.taps, r.U)
    for i in range(n):
        beta = sigmoid(beta_in[start + i, h])
        for c in range(value):
            r.U[i, c] *= beta
    _multiply(r.written_all, 0, n, S, key, r.U, columns)
    _multiply(r.q_all, 0, n, S, key, r.o, columns)
    _solve(r, n, columns)
    for d in range(key):
        row, decay = S[d], r.sums[3, d]
        for c in range(columns):
            row[c] *= decay
    _multiply(r.ends, 0, key, r.U, n, S, columns)
    for i in range(n):
        o, gate, y = r.o[i], gate_in[start + i], out[b, start + i]
        s = np.float32(1) / np.sqrt(sum_of_products(o[:value], o[:value]) / np.float32(value) + eps)
        for c in range(value):
            y[h * value + c] = o[c] * s * norm[c] * sigmoid(gate[h * value + c])


@kernel()
def _head(r, states, b, g, groups, inputs, weights, tails, S, floor, eps, out):
    """All tokens of key head g of sequence b, with its value heads; ``states`` [groups, K to whole fours, V]."""
    key, value, tokens = S.shape[3], S.shape[2], out.shape[1]
    first, convs = g * groups, weights[:3]
    for h in range(groups):
        for i in range(value):
            for d in range(key):
                states[h, d, i] = S[b, first + h, i, d]
    for start in range(0, tokens, CHUNK):
        n = min(CHUNK, tokens - start)
        for which in range(2):
            rows = r.k if which else r.q
            _convolve(inputs[which][b], convs[which], tails[which][b], start, n, g * key, key, r.taps, rows)
            scale = np.float32(1) if which else np.float32(1) / np.sqrt(np.float32(key))
            for i in range(n):
                normalise(rows[i, :key], scale)
        for h in range(groups):
            _chunk(r, states[h], start, n, b, first + h, key, inputs, weights, tails, floor, eps, out)
    for h in range(groups):
        for i in range(value):
            for d in range(key):
                S[b, first + h, i, d] = states[h, d, i]
    for which in range(2):
        _keep(inputs[which][b], tails[which][b], g * key, key)
    _keep(inputs[2][b], tails[2][b], first * value, groups * value)


@kernel()
def _share(t, nt, groups, inputs, weights, tails, S, floor, eps, out):
    """Thread t's share of the key heads of all sequences."""
    key, value = S.shape[3], S.shape[2]
    heads = S.shape[1] // groups
    work = len(S) * heads
    r = _room(weights[0].shape[0], key, value)
    states = np.zeros((groups, (key + 3) // 4 * 4, r.U.shape[1]), np.float32)
    for i in range(work * t // nt, work * (t + 1) // nt):
        _head(r, states, i // heads, i % heads, groups, inputs, weights, tails, S, floor, eps, out)


@kernel(parallel=True)
def many_tokens(groups, inputs, weights, tails, S, floor, eps, out, nt):
    """All key heads of all sequences; each thread takes its share."""
    for t in prange(nt):
        _share(t, nt, groups, inputs, weights, tails, S, floor, eps, out)
