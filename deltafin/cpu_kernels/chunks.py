"""A delta-rule layer between its projections, for many tokens: the chunkwise form of ``ops.reference``.

One region over the key heads; what a chunk of a head needs fits the second-level cache. Matrix products are made of
one micro-kernel, four rows by sixteen columns in registers.

No difference of two sums of log-decays is formed, as the sums up to the end of a block and those from there on are
kept apart: ENDS holds the keys, decayed to the end of the last block that is done, and the rows of a block carry the
decay since it began. So float32 is enough, every exponent is at most 0, and the keys at the end of the chunk are
those that the state takes in. Inside a block the keys fade token by token.

A compiler that optimises a function with all that it calls, and again for each function that calls it, needs long for
this one. So few levels call each other, a thread's buffers are one array, the layer's tensors come as a table of
addresses and shapes, and the parallel loop calls the rest by its address.
"""

from functools import cache

import numpy as np
from numba import carray, cfunc, prange, types

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import FOLDER, kernel
from deltafin.cpu_kernels.mathematics import exps, gated, log_decays, sigmoid, silus, sum_of_products

CHUNK, BLOCK = 64, 16
"""Tokens of a chunk, and of a block of it."""

X, WEIGHTS, TAILS, STATES, OUT, CONSTANTS, TENSORS = 0, 6, 12, 15, 16, 17, 18
"""Places in a sequence's table: inputs [T, C], weights (taps [W, C]), tails [W - 1, C], states [H V, K], output
[T, H V], floor and epsilon [1, 2]."""

SIZES = 9
"""What precedes the tables: sequences, key heads, value heads of each, K, V; the address of all threads' buffers, and
buffers, rows and columns of one."""

(
    DECAYS,  # e^g: [tokens, K]
    FADED,  # of a block, the keys with the decay up to the token at hand
    WRITTEN,  # the keys times -beta
    WRITTEN_LATE,  # the same, and the queries, with the decay since the block began
    Q_LATE,
    WRITTEN_ALL,  # the same with the decay since the chunk began
    Q_ALL,
    ENDS,  # keys with the decay from their token to the end of the last block: [K, tokens]
    P,  # -beta P: [tokens, tokens]
    A,
    U,  # [tokens, V]
    RESULT,  # [tokens, V]
    ROWS,  # single rows, see below
    Q,  # queries and keys, normalised, the query scaled: [tokens, K]
    KEYS,
    VALUES,  # of the first value head [tokens, V], others follow, then their states [K, V]
) = range(16)
"""A thread's buffers; each is large enough for any of them, and 0 beyond its own columns."""

BLOCK_SUM, CHUNK_SUM, LATE, BEFORE, PAIR = range(5)
"""Log-decays of the block and of the chunk; the decays since they began; two dot products."""


@kernel()
def _tensor(table, i):
    """Tensor i of a table of addresses, rows and columns."""
    return carray(v.pointer(table[i, 0]), (table[i, 1], table[i, 2]), np.float32)


@kernel()
def _multiply(p, rows, count, y, m, columns):
    """``y[:m, :columns] += p[:m, :count] @ rows[:count]``, rows by fours and columns by sixteens."""
    stride = p.strides[0]
    for c in range(0, 4 * columns, 64):
        for i in range(0, m * stride, 4 * stride):
            at = y.ctypes.data + i + c
            v.weighted_f32(p.ctypes.data + i, stride, rows.ctypes.data + c, stride, count, at, stride, 16)


@kernel()
def _convolve(table, which, first, channels, start, tokens, out):
    """Convolve ``channels`` from ``first`` on of some tokens, and apply SiLU."""
    x, weights, tail = _tensor(table, X + which), _tensor(table, WEIGHTS + which), _tensor(table, TAILS + which)
    before = len(tail)
    for t in range(tokens):
        y = out[t]
        for c in range(channels):
            y[c] = 0
        for j in range(before + 1):
            at = start + t - before + j
            source, taps = (x[at] if at >= 0 else tail[at + before])[first:], weights[j, first:]
            for c in range(channels):
                y[c] += source[c] * taps[c]
        silus(y, y[:channels])


@kernel()
def _keep(table, which, first, channels):
    """Move a convolution's tail on by all tokens."""
    x, tail = _tensor(table, X + which), _tensor(table, TAILS + which)
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
def _rows(table, h, key, floor, start, at, tokens, room):
    """What decays and write strengths make of the keys and queries of one block, ``at`` in the chunk at ``start``.

    One array is written at a time, so that the compiler can do many lanes at once.
    """
    z, beta, bias = _tensor(table, X + 3), _tensor(table, X + 4), _tensor(table, WEIGHTS + 4)[0]
    speed = np.exp(_tensor(table, WEIGHTS + 3)[0, h])
    whole = z.shape[1] == beta.shape[1]
    first = h if whole else h * key
    block, chunk, late, before = room[ROWS, BLOCK_SUM], room[ROWS, CHUNK_SUM], room[ROWS, LATE], room[ROWS, BEFORE]
    block[:] = 0
    for i in range(at, at + tokens):
        q, k, g, faded, written = room[Q, i], room[KEYS, i], room[DECAYS, i], room[FADED, i - at], room[WRITTEN, i]
        log_decays(z[start + i, first:], speed, bias[first:], floor, g[: 1 if whole else key])
        if whole:
            g[:key] = g[0]
        b = -sigmoid(beta[start + i, h])
        for d in range(key):
            block[d] += g[d]
        exps(block, np.float32(0), late[:key])
        exps(g, np.float32(0), g[:key])
        for d in range(key):
            faded[d] = k[d]
        for d in range(key):
            written[d] = k[d] * b
        for x, x_late, x_all in (
            (written, room[WRITTEN_LATE, i], room[WRITTEN_ALL, i]),
            (q, room[Q_LATE, i], room[Q_ALL, i]),
        ):
            for d in range(key):
                x_late[d] = x[d] * late[d]
            for d in range(key):
                x_all[d] = x_late[d] * before[d]
    for d in range(key):
        chunk[d] += block[d]
    exps(chunk, np.float32(0), before[:key])


@kernel()
def _products(at, tokens, key, room):
    """P and A of one block: inside it pair by pair, then with all blocks before; and its keys join ENDS."""
    columns, out = (key + 31) // 32 * 32, room[ROWS, PAIR].ctypes.data
    sums, late, ends = room[ROWS, PAIR], room[ROWS, LATE], room[ENDS]
    for i in range(tokens):
        x, y, decays = room[WRITTEN, at + i].ctypes.data, room[Q, at + i].ctypes.data, room[DECAYS, at + i].ctypes.data
        p, a = room[P, at + i], room[A, at + i]
        for j in range(i):
            v.fade_two_dots(room[FADED, j].ctypes.data, decays, x, y, out, columns)
            p[at + j], a[at + j] = sums[0], sums[1]
        v.two_dots(room[FADED, i].ctypes.data, x, y, out, columns)
        a[at + i] = sums[1]
    _multiply(room[WRITTEN_LATE, at:], ends, key, room[P, at:], tokens, at)
    _multiply(room[Q_LATE, at:], ends, key, room[A, at:], tokens, at)
    for d in range(key):
        y = ends[d]
        for j in range(at):
            y[j] *= late[d]
        for j in range(tokens):
            y[at + j] = room[FADED, j, d]


@kernel()
def _chunk(tokens, key, columns, room, S):
    """Solve for U, which holds beta V; make the output and the next state S [K, V]."""
    u, o = room[U], room[RESULT]
    _multiply(room[WRITTEN_ALL], S, key, u, tokens, columns)
    _multiply(room[Q_ALL], S, key, o, tokens, columns)
    for i in range(0, tokens, 4):
        last = min(i + 4, tokens)
        p = room[P, i:]
        _multiply(p, u, i, u[i:], last - i, columns)
        for a in range(i + 1, last):
            for b in range(i, a):
                v.axpy_f32(p[a - i, b], u[b].ctypes.data, u[a].ctypes.data, columns)
        _multiply(room[A, i:], u, last, o[i:], last - i, columns)
    for d in range(key):
        row, decay = S[d], room[ROWS, BEFORE, d]
        for c in range(columns):
            row[c] *= decay
    _multiply(room[ENDS], u, tokens, S, key, columns)


@kernel()
def _value_head(table, h, key, value, start, tokens, room, values, S):
    """One chunk of value head h: queries, keys and values are there."""
    floor, eps = _tensor(table, CONSTANTS)[0]
    for i in range(tokens):
        for j in range(tokens):
            room[P, i, j] = room[A, i, j] = 0
    for d in range(key):
        room[ROWS, CHUNK_SUM, d], room[ROWS, BEFORE, d] = 0, 1
    for at in range(0, tokens, BLOCK):
        n = min(BLOCK, tokens - at)
        _rows(table, h, key, floor, start, at, n, room)
        _products(at, n, key, room)
    beta, gate, out = _tensor(table, X + 4), _tensor(table, X + 5), _tensor(table, OUT)
    for i in range(tokens):
        u, o, x, b = room[U, i], room[RESULT, i], values[i], sigmoid(beta[start + i, h])
        for c in range(value):
            u[c] = x[c] * b
        for c in range(value):
            o[c] = 0
    _chunk(tokens, key, (value + 15) // 16 * 16, room, S)
    norm = _tensor(table, WEIGHTS + 5)[0]
    for i in range(tokens):
        o, z, y = room[RESULT, i, :value], gate[start + i, h * value :], out[start + i, h * value :]
        s = np.float32(1) / np.sqrt(sum_of_products(o, o) / np.float32(value) + eps)
        for c in range(value):
            o[c] = o[c] * s * norm[c]
        gated(o, z, y[:value])


def _head(plan, i, t):
    """All tokens of one key head with its value heads, in thread t's buffers; states are kept transposed meanwhile."""
    _, heads, groups, key, value, rooms, buffers, rows, columns = carray(v.pointer(plan), (SIZES,), np.int64)
    b, g = i // heads, i % heads
    table = carray(v.pointer(plan + 8 * (SIZES + 3 * TENSORS * b)), (TENSORS, 3), np.int64)
    room = carray(v.pointer(rooms + 4 * t * buffers * rows * columns), (buffers, rows, columns), np.float32)  # type: ignore
    states, tokens, state = _tensor(table, STATES), len(_tensor(table, OUT)), VALUES + groups
    for i in range(groups * value):
        row, h, c = states[g * groups * value + i], i // value, i % value
        for d in range(key):
            room[state + h, d, c] = row[d]
    for start in range(0, tokens, CHUNK):
        n = min(CHUNK, tokens - start)
        for part in range(2 + groups):
            which, first, channels = part, g * key, key
            if part >= 2:
                which, first, channels = 2, (g * groups + part - 2) * value, value
            _convolve(table, which, first, channels, start, n, room[Q + part])
            if part < 2:
                scale = np.float32(1) if part else np.float32(1) / np.sqrt(np.float32(key))
                for i in range(n):
                    normalise(room[Q + part, i, :key], scale)
        for h in range(groups):
            _value_head(table, g * groups + h, key, value, start, n, room, room[VALUES + h], room[state + h])
    for i in range(groups * value):
        row, h, c = states[g * groups * value + i], i // value, i % value
        for d in range(key):
            row[d] = room[state + h, d, c]
    for which in range(3):
        wide = groups * value if which == 2 else key
        _keep(table, which, g * wide, wide)


@cache
def _address() -> int:
    """Where ``_head`` is, compiled."""
    compiled = cfunc(types.void(*[types.int64] * 3), cache=FOLDER is not None, error_model="numpy")
    return compiled(_head).address  # type: ignore[return-value]


@kernel(parallel=True)
def _spread(function, plan, work, nt):
    """Each thread takes its share of the key heads of all sequences."""
    for t in prange(nt):
        for i in range(work * t // nt, work * (t + 1) // nt):
            v.call_at(function, plan, i, t)


def many_tokens(groups, inputs, weights, tails, S, floor, eps, out, nt):
    """As ``delta.few_tokens``."""
    heads, key, value = S.shape[1] // groups, S.shape[3], S.shape[2]
    # An odd number of cache lines: the rows of a column of a product do not compete for the same places of a cache.
    columns = (max(key, value, CHUNK) + 31) // 32 * 32 + 16
    rooms = np.zeros((nt, VALUES + 2 * groups, max(CHUNK, (key + 3) // 4 * 4), columns), np.float32)
    constants = np.array([[floor, eps]], np.float32)
    plan = [len(S), heads, groups, key, value, rooms.ctypes.data, *rooms.shape[1:]]
    for b in range(len(S)):
        for x in (*(x[b] for x in inputs), *weights, *(x[b] for x in tails), S[b], out[b], constants):
            if not x.flags.c_contiguous:
                raise ValueError("the delta rule by chunk wants contiguous tensors")
            plan += x.ctypes.data, x.size // x.shape[-1], x.shape[-1]
    kept = np.array(plan, np.int64)
    _spread(_address(), kept.ctypes.data, len(S) * heads, nt)
