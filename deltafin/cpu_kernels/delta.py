"""A delta-rule layer between its projections, ``delta_net``; the form for a few tokens.

One region over the key heads. A row of the state, the keys of one value channel, is read, used and written once a
token (``ops.reference`` says why the state is value-major); everything else stays in the cache.
"""

from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.chunks import many_tokens, normalise
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.mathematics import convolve, exps, gated, log_decays, sigmoid, sum_of_products
from deltafin.cpu_kernels.stored import floats, is_coarse, keep, own, plain, room
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import FEW, DeltaState, DeltaWeights, reference

PARALLEL = 128 << 10
"""Bytes of state, counted every ``FEW`` tokens, below which waking a second thread costs more than it saves."""

HEADS = 16
"""Key heads whose convolutions and decays are made at a time: what they read is long enough to be read ahead, and
what they make stays in the cache until the state is read, which nothing interrupts then."""


@kernel()
def _convolve(x, taps, tail, first, out):
    """Convolve the channels from ``first`` on of one token with what came before, apply SiLU, and move the tail on.

    ``taps`` [W, channels], ``tail`` [W - 1, channels]: of all channels; ``x`` and ``out`` have these channels alone.
    """
    taps_at, tail_at = taps.ctypes.data + 4 * first, tail.ctypes.data + 4 * first
    convolve(x.ctypes.data, taps_at, tail_at, taps.strides[0], len(tail), out.ctypes.data, len(out))


@kernel()
def _decays(z, speed, bias, floor, out):
    """The factors of some channels' decay, ``exp(g)``."""
    log_decays(z, speed, bias, floor, out)
    exps(out, np.float32(0), out)


@kernel()
def _step(S, k, ka, qa, a, values, beta, qk, out):
    """One head's state advanced by one token: ``S`` [V, K], decayed keys ``ka`` and queries ``qa``."""
    n = len(k)
    rows, width = S.ctypes.data, 4 * n
    if n % 16 == 0:
        sides = (a.ctypes.data, k.ctypes.data, ka.ctypes.data, qa.ctypes.data)
        source, target, pairs = values.ctypes.data, out.ctypes.data, len(values) // v.ROWS * v.ROWS
        for j in range(0, pairs, v.ROWS):
            v.delta_rows(rows + j * width, *sides, beta, source + 4 * j, qk, target + 4 * j, n)
        for j in range(pairs, len(values)):
            v.delta_row(rows + j * width, *sides, beta, source + 4 * j, qk, target + 4 * j, n)
        return
    for j in range(len(values)):
        p, o = np.float32(0), np.float32(0)
        for i in range(n):
            p += ka[i] * S[j, i]
            o += qa[i] * S[j, i]
        d = beta * (values[j] - p)
        out[j] = o + qk * d
        for i in range(n):
            S[j, i] = a[i] * S[j, i] + k[i] * d


@kernel()
def _heads(b, first, end, groups, inputs, weights, tails, S, floor, eps, room, out):
    """All tokens of sequence b, for the key heads from ``first`` to ``end`` and their value heads.

    ``room``: for queries and keys [T, HEADS, K], values [T, HEADS * groups, V], decays [T, HEADS * groups, K or 1].
    """
    q_in, k_in, v_in, z_in, beta_in, gate_in = inputs
    q_conv, k_conv, v_conv, decay_log, decay_bias, norm = weights
    q_tail, k_tail, v_tail = tails
    qs, ks, vs, decays, rows = room
    tokens, key, value, wide = q_in.shape[1], S.shape[3], S.shape[2], decays.shape[2]
    count, begin = end - first, first * groups
    keys, channels = slice(first * key, end * key), slice(begin * value, end * groups * value)
    for t in range(tokens):
        _convolve(q_in[b, t, keys], q_conv, q_tail[b], keys.start, qs[t, :count].reshape(-1))
        _convolve(k_in[b, t, keys], k_conv, k_tail[b], keys.start, ks[t, :count].reshape(-1))
        _convolve(v_in[b, t, channels], v_conv, v_tail[b], channels.start, vs[t, : count * groups].reshape(-1))
        for i in range(count * groups):
            mine = slice((begin + i) * wide, (begin + i + 1) * wide)
            _decays(z_in[b, t, mine], np.exp(decay_log[begin + i]), decay_bias[mine], floor, decays[t, i])
    a, ka, qa, o = rows[0, :key], rows[1, :key], rows[2, :key], rows[3, :value]
    for g in range(count):
        for t in range(tokens):
            q, k = qs[t, g], ks[t, g]
            normalise(q, np.float32(1) / np.sqrt(np.float32(key)))
            normalise(k, np.float32(1))
            qk = sum_of_products(q, k)
            for i in range(g * groups, (g + 1) * groups):
                h = begin + i
                if wide == key:
                    a[:] = decays[t, i]
                else:
                    a[:] = decays[t, i, 0]
                for c in range(key):
                    ka[c] = k[c] * a[c]
                    qa[c] = q[c] * a[c]
                _step(S[b, h], k, ka, qa, a, vs[t, i], sigmoid(beta_in[b, t, h]), qk, o)
                s = np.float32(1) / np.sqrt(sum_of_products(o, o) / np.float32(value) + eps)
                for c in range(value):
                    o[c] *= s * norm[c]
                mine = slice(h * value, (h + 1) * value)
                gated(o, gate_in[b, t, mine], out[b, t, mine])


@kernel(parallel=True)
def few_tokens(groups, inputs, weights, tails, S, floor, eps, out, nt):
    """All key heads of all sequences; each thread takes its share."""
    heads, value, key, tokens = S.shape[1] // groups, S.shape[2], S.shape[3], out.shape[1]
    work, most, wide = len(S) * heads, min(heads, HEADS), inputs[3].shape[2] // S.shape[1]
    for thread in prange(nt):
        t = np.int64(thread)  # ``prange`` counts in unsigned numbers, for which callees would be compiled anew
        x, w = inputs, weights
        mine = (
            (own(x[0]), own(x[1]), own(x[2]), own(x[3]), own(x[4]), own(x[5])),
            (own(w[0]), own(w[1]), own(w[2]), own(w[3]), own(w[4]), own(w[5])),
            (own(tails[0]), own(tails[1]), own(tails[2])),
            own(S),
        )
        result, at, end = own(out), work * t // nt, work * (t + 1) // nt
        qs = np.empty((tokens, most, key), np.float32)
        ks = np.empty((tokens, most, key), np.float32)
        vs = np.empty((tokens, most * groups, value), np.float32)
        decays = np.empty((tokens, most * groups, wide), np.float32)
        rows = np.empty((4, max(key, value)), np.float32)
        while at < end:
            b, first = at // heads, at % heads
            count = min(most, end - at, heads - first)
            room = own(qs), own(ks), own(vs), own(decays), own(rows)
            _heads(b, first, first + count, groups, *mine, floor, eps, room, result)
            at += count


@kernel()
def _few(groups, sizes, inputs, weights, state, floor, eps, halves, out, nt):
    """``few_tokens`` of what stands at these addresses; ``sizes``: sequences, tokens, value heads, V, K, decays, W."""
    batch, tokens, heads, value, key, wide, window = sizes
    keys, values = heads // groups * key, heads * value
    y = room(out, batch * tokens, values, halves)
    few_tokens(
        groups,
        (
            floats(inputs[0], (batch, tokens, keys)),
            floats(inputs[1], (batch, tokens, keys)),
            floats(inputs[2], (batch, tokens, values)),
            floats(inputs[3], (batch, tokens, wide)),
            floats(inputs[4], (batch, tokens, heads)),
            floats(inputs[5], (batch, tokens, values)),
        ),
        (
            floats(weights[0], (window, keys)),
            floats(weights[1], (window, keys)),
            floats(weights[2], (window, values)),
            floats(weights[3], (heads,)),
            floats(weights[4], (wide,)),
            floats(weights[5], (value,)),
        ),
        (
            floats(state[0], (batch, window - 1, keys)),
            floats(state[1], (batch, window - 1, keys)),
            floats(state[2], (batch, window - 1, values)),
        ),
        floats(state[3], (batch, heads, value, key)),
        np.float32(floor),
        np.float32(eps),
        y.reshape(batch, tokens, values),
        nt,
    )
    keep(y, out, halves)


def delta_net(
    q_BTC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    decay_BTC: Tensor,
    beta_BTH: Tensor,
    gate_BTC: Tensor,
    w: DeltaWeights,
    s: DeltaState,
    floor: float | None,
    eps: float,
) -> Tensor:
    """See ``reference.delta_net``; the state is contiguous."""
    S = s.S_BHVK
    if S.dtype == torch.float64:
        return reference.delta_net(q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC, w, s, floor, eps)
    if not all([t.is_contiguous() for t in s]):
        raise ValueError("the delta rule wants a contiguous state")
    inputs, weights = [plain(x) for x in (q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC)], as_read(w)
    (batch, heads, value, key), (_, tokens, keys), dtype = S.shape, q_BTC.shape, q_BTC.dtype
    groups = heads * key // keys
    nt = threads() if 4 * S.numel() * max(1, tokens // FEW) > PARALLEL else 1
    if tokens <= FEW:
        y = torch.empty((batch, tokens, heads * value), dtype=dtype)
        sizes = batch, tokens, heads, value, key, decay_BTC.shape[2], len(weights.tensors[0])
        x_at, s_at = tuple([x.data_ptr() for x in inputs]), tuple([x.data_ptr() for x in s])
        _few(groups, sizes, x_at, weights.addresses, s_at, floor or 0.0, eps, is_coarse(dtype), y.data_ptr(), nt)
        return y
    y = torch.empty((batch, tokens, heads * value))
    xs, ws, tails = [[x.numpy() for x in every] for every in (inputs, weights.tensors, s[:3])]
    many_tokens(groups, xs, ws, tails, S.numpy(), np.float32(floor or 0), np.float32(eps), y.numpy(), nt)
    return y.to(dtype)


class Read(NamedTuple):
    """Weights as the kernels take them, which convolutions are turned for: [W, channels]; and their addresses."""

    others: tuple[Tensor, ...]
    """What they were made of besides the one that they are kept with, which would never be given back otherwise."""
    tensors: list[Tensor]
    addresses: tuple[int, ...]


def as_read(w: DeltaWeights) -> Read:
    """The weights as the kernels take them, made once and kept with the first of them."""
    read = getattr(w.q_conv, "_read", None)
    if read is None or not all(map(is_, read.others, w[1:])):
        tensors = [*(plain(conv.T) for conv in w[:3]), *(plain(x) for x in w[3:])]
        w.q_conv._read = read = Read(w[1:], tensors, tuple(x.data_ptr() for x in tensors))  # type: ignore[attr-defined]
    return read
