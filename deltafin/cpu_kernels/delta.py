"""A delta-rule layer between its projections, ``delta_net``; the form for a few tokens.

One region over the key heads. A row of the state, the keys of one value channel, is read, used and written once a
token (``ops.reference`` says why the state is value-major); everything else of a head fits the first-level cache.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.chunks import many_tokens, normalise
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.mathematics import exps, gated, log_decays, sigmoid, silus, sum_of_products
from deltafin.cpu_kernels.stored import as_array, own
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import FEW, DeltaState, DeltaWeights, reference

PARALLEL = 128 << 10
"""Bytes of state, counted every ``FEW`` tokens, below which waking a second thread costs more than it saves."""


@kernel()
def _convolve(x, taps, tail, first, out):
    """Convolve the channels from ``first`` on of one token with what came before, apply SiLU, and move the tail on.

    ``taps`` [W, channels], ``tail`` [W - 1, channels]: of all channels, and cut row by row, because a column of a
    matrix is not known to be contiguous; ``x`` and ``out`` have these channels alone.
    """
    before, channels, stride = len(tail), len(out), taps.strides[0]
    whole, at = channels & ~15, 4 * first
    v.convolve(x.ctypes.data, taps.ctypes.data + at, tail.ctypes.data + at, stride, before, out.ctypes.data, whole)
    for c in range(whole, channels):
        out[c] = x[c] * taps[before, first + c]
        for j in range(before):
            out[c] += tail[j, first + c] * taps[j, first + c]
            tail[j, first + c] = tail[j + 1, first + c] if j + 1 < before else x[c]
    silus(out, out)


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
def _head(b, g, groups, inputs, weights, tails, S, floor, eps, out, room):
    """All tokens of key head g of sequence b, with its value heads; ``room`` [7, K or V, the larger]."""
    q_in, k_in, v_in, z_in, beta_in, gate_in = inputs
    q_conv, k_conv, v_conv, decay_log, decay_bias, norm = weights
    q_tail, k_tail, v_tail = tails
    key, value = S.shape[3], S.shape[2]
    per_channel = z_in.shape[2] != beta_in.shape[2]
    q, k, a, ka, qa = room[0, :key], room[1, :key], room[2, :key], room[3, :key], room[4, :key]
    values, o = room[5, :value], room[6, :value]
    keys = slice(g * key, (g + 1) * key)
    for t in range(q_in.shape[1]):
        _convolve(q_in[b, t, keys], q_conv, q_tail[b], keys.start, q)
        _convolve(k_in[b, t, keys], k_conv, k_tail[b], keys.start, k)
        normalise(q, np.float32(1) / np.sqrt(np.float32(key)))
        normalise(k, np.float32(1))
        qk = sum_of_products(q, k)
        for h in range(g * groups, (g + 1) * groups):
            mine = slice(h * value, (h + 1) * value)
            _convolve(v_in[b, t, mine], v_conv, v_tail[b], mine.start, values)
            speed = np.exp(decay_log[h])
            if per_channel:
                channels = slice(h * key, (h + 1) * key)
                _decays(z_in[b, t, channels], speed, decay_bias[channels], floor, a)
            else:
                _decays(z_in[b, t, h : h + 1], speed, decay_bias[h : h + 1], floor, a[:1])
                a[1:] = a[0]
            for i in range(key):
                ka[i] = k[i] * a[i]
                qa[i] = q[i] * a[i]
            _step(S[b, h], k, ka, qa, a, values, sigmoid(beta_in[b, t, h]), qk, o)
            s = np.float32(1) / np.sqrt(sum_of_products(o, o) / np.float32(value) + eps)
            for i in range(value):
                o[i] *= s * norm[i]
            gated(o, gate_in[b, t, mine], out[b, t, mine])


@kernel(parallel=True)
def few_tokens(groups, inputs, weights, tails, S, floor, eps, out, nt):
    """All key heads of all sequences; each thread takes its share."""
    heads = S.shape[1] // groups
    work = len(S) * heads
    for t in prange(nt):
        x, w = inputs, weights
        mine = (
            (own(x[0]), own(x[1]), own(x[2]), own(x[3]), own(x[4]), own(x[5])),
            (own(w[0]), own(w[1]), own(w[2]), own(w[3]), own(w[4]), own(w[5])),
            (own(tails[0]), own(tails[1]), own(tails[2])),
            own(S),
        )
        result, room = own(out), np.empty((7, max(S.shape[2], S.shape[3])), np.float32)
        for i in range(work * t // nt, work * (t + 1) // nt):
            _head(i // heads, i % heads, groups, *mine, floor, eps, result, own(room))


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
    """See ``reference.delta_net``."""
    if s.S_BHVK.dtype == torch.float64:
        return reference.delta_net(q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC, w, s, floor, eps)
    dtype = q_BTC.dtype
    inputs = tuple(as_array(x) for x in (q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC))
    S = s.S_BHVK.numpy()
    groups = S.shape[1] * S.shape[3] // q_BTC.shape[2]
    out = np.empty((*q_BTC.shape[:2], S.shape[1] * S.shape[2]), np.float32)
    arguments = (
        *(groups, inputs, arrays(w), tuple(t.numpy() for t in s[:3]), S),
        *(np.float32(0 if floor is None else floor), np.float32(eps), out),
    )
    tokens = q_BTC.shape[1]
    form = few_tokens if tokens <= FEW else many_tokens
    form(*arguments, threads() if S.nbytes * max(1, tokens // FEW) > PARALLEL else 1)
    return torch.from_numpy(out) if dtype == torch.float32 else torch.from_numpy(out).to(dtype)


def arrays(w: DeltaWeights) -> tuple[np.ndarray, ...]:
    """The weights as the kernels take them: convolutions as [W, channels], turned once and kept."""
    return (*(_taps(conv) for conv in w[:3]), *(as_array(x) for x in w[3:]))


def _taps(conv: Tensor) -> np.ndarray:
    try:
        return conv._taps  # type: ignore[attr-defined]
    except AttributeError:
        conv._taps = taps = as_array(conv.T)  # type: ignore[attr-defined]
        return taps
