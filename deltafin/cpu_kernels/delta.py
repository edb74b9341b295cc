"""A delta-rule layer between its projections, ``delta_net``; the form for a few tokens.

One region over the key heads. A row of the state, the keys of one value channel, is read, used and written once a
token (``ops.reference`` says why the state is value-major); everything else of a head fits the first-level cache.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.chunks import log_decays, many_tokens, normalise
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.mathematics import exp, sigmoid, sum_of_products
from deltafin.cpu_kernels.stored import as_array
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
    before, channels = len(tail), len(out)
    last = first + channels
    now = taps[before, first:last]
    for c in range(channels):
        out[c] = x[c] * now[c]
    for j in range(before):
        own, old = taps[j, first:last], tail[j, first:last]
        for c in range(channels):
            out[c] += old[c] * own[c]
    for c in range(channels):
        out[c] *= sigmoid(out[c])
    for j in range(before):
        old = tail[j, first:last]
        new = tail[j + 1, first:last] if j + 1 < before else x
        for c in range(channels):
            old[c] = new[c]


@kernel()
def _decays(z, speed, bias, floor, out):
    """The factors of some channels' decay, ``exp(g)``."""
    log_decays(z, speed, bias, floor, out)
    for i in range(len(out)):
        out[i] = exp(out[i])


@kernel()
def _step(S, k, ka, qa, a, values, beta, qk, out):
    """One head's state advanced by one token: ``S`` [V, K], decayed keys ``ka`` and queries ``qa``."""
    n = len(k)
    rows, width = S.ctypes.data, 4 * n
    if n % 16 == 0:
        where = (a.ctypes.data, k.ctypes.data, ka.ctypes.data, qa.ctypes.data)
        for j in range(len(values)):
            out[j] = v.delta_row(rows + j * width, where[0], where[1], where[2], where[3], beta, values[j], qk, n)
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
def _head(b, g, groups, inputs, weights, tails, S, floor, eps, out):
    """All tokens of key head g of sequence b, with its value heads."""
    q_in, k_in, v_in, z_in, beta_in, gate_in = inputs
    q_conv, k_conv, v_conv, decay_log, decay_bias, norm = weights
    q_tail, k_tail, v_tail = tails
    key, value = S.shape[3], S.shape[2]
    per_channel = z_in.shape[2] != beta_in.shape[2]
    room = np.empty((5, key), np.float32)
    q, k, a, ka, qa = room[0], room[1], room[2], room[3], room[4]
    values, o, one = np.empty(value, np.float32), np.empty(value, np.float32), np.empty(1, np.float32)
    keys = slice(g * key, (g + 1) * key)
    for t in range(q_in.shape[1]):
        _convolve(q_in[b, t, keys], q_conv, q_tail[b], keys.start, q)
        _convolve(k_in[b, t, keys], k_conv, k_tail[b], keys.start, k)
        normalise(q, np.float32(1) / np.sqrt(np.float32(key)))
        normalise(k, np.float32(1))
        qk = sum_of_products(q, k)
        for h in range(g * groups, (g + 1) * groups):
            own = slice(h * value, (h + 1) * value)
            _convolve(v_in[b, t, own], v_conv, v_tail[b], own.start, values)
            speed = np.exp(decay_log[h])
            if per_channel:
                channels = slice(h * key, (h + 1) * key)
                _decays(z_in[b, t, channels], speed, decay_bias[channels], floor, a)
            else:
                _decays(z_in[b, t, h : h + 1], speed, decay_bias[h : h + 1], floor, one)
                a[:] = one[0]
            for i in range(key):
                ka[i] = k[i] * a[i]
                qa[i] = q[i] * a[i]
            _step(S[b, h], k, ka, qa, a, values, sigmoid(beta_in[b, t, h]), qk, o)
            s = np.float32(1) / np.sqrt(sum_of_products(o, o) / np.float32(value) + eps)
            result, gate = out[b, t, own], gate_in[b, t, own]
            for i in range(value):
                result[i] = o[i] * s * norm[i] * sigmoid(gate[i])


@kernel(parallel=True)
def few_tokens(groups, inputs, weights, tails, S, floor, eps, out, nt):
    """All key heads of all sequences; each thread takes its share."""
    heads = S.shape[1] // groups
    work = len(S) * heads
    for t in prange(nt):
        for i in range(work * t // nt, work * (t + 1) // nt):
            _head(i // heads, i % heads, groups, inputs, weights, tails, S, floor, eps, out)


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
