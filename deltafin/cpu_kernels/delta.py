"""A delta-rule layer between its projections, for a few tokens: ``delta_net``.

One region over the key heads. A row of the state, the keys of one value channel, is read, used and written once a
token (``ops.reference`` says why the state is value-major); everything else of a head fits the first-level cache.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.mathematics import exp, sigmoid, sum_of_products
from deltafin.cpu_kernels.stored import as_array
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import FEW, DeltaState, DeltaWeights, reference

PARALLEL = 128 << 10
"""Bytes of state below which waking a second thread costs more than it saves."""


@kernel()
def _convolve(x, weights, tail, first, out):
    """Convolve channels ``first`` on of one token with what came before, apply SiLU, and move the tail on."""
    before = len(tail)
    for c in range(len(out)):
        out[c] = x[first + c] * weights[first + c, before]
    for j in range(before):
        for c in range(len(out)):
            out[c] += tail[j, first + c] * weights[first + c, j]
    for c in range(len(out)):
        out[c] = out[c] * sigmoid(out[c])
    for j in range(before - 1):
        tail[j, first : first + len(out)] = tail[j + 1, first : first + len(out)]
    if before:
        tail[before - 1, first : first + len(out)] = x[first : first + len(out)]


@kernel()
def _normalise(x, scale):
    """To length ``scale``, with epsilon on the sum of squares."""
    s = scale / np.sqrt(sum_of_products(x, x) + np.float32(1e-6))
    for i in range(len(x)):
        x[i] *= s


@kernel()
def _decay(z, speed, bias, floor):
    """The factor of one channel's decay, ``exp(g)``."""
    z = z + bias
    if floor < 0:
        return exp(floor * sigmoid(speed * z))
    softplus = max(z, np.float32(0)) + np.log1p(exp(-abs(z)))  # no overflow for large z
    return exp(-speed * softplus)


@kernel()
def _step(S, k, ka, qa, a, values, beta, qk, sums, out):
    """One head's state advanced by one token: ``S`` [V, K], decayed keys ``ka`` and queries ``qa``."""
    n = len(k)
    whole = n & ~31
    for j in range(len(values)):
        row = S[j]
        v.two_dots(row.ctypes.data, ka.ctypes.data, qa.ctypes.data, sums.ctypes.data, whole)
        p, o = sums[0], sums[1]
        for i in range(whole, n):
            p += ka[i] * row[i]
            o += qa[i] * row[i]
        d = beta * (values[j] - p)
        out[j] = o + qk * d
        for i in range(n):
            row[i] = a[i] * row[i] + k[i] * d


@kernel()
def _head(b, g, groups, inputs, weights, tails, S, floor, eps, out):
    """All tokens of key head g of sequence b, with its value heads."""
    q_in, k_in, v_in, z_in, beta_in, gate_in = inputs
    q_conv, k_conv, v_conv, decay_log, decay_bias, norm = weights
    q_tail, k_tail, v_tail = tails
    key, value = S.shape[3], S.shape[2]
    per_channel = z_in.shape[2] != beta_in.shape[2]
    q, k, a, ka, qa = (
        np.empty(key, np.float32),
        np.empty(key, np.float32),
        np.empty(key, np.float32),
        np.empty(key, np.float32),
        np.empty(key, np.float32),
    )
    values, o = np.empty(value, np.float32), np.empty(value, np.float32)
    sums = np.empty(2, np.float32)
    for t in range(q_in.shape[1]):
        _convolve(q_in[b, t], q_conv, q_tail[b], g * key, q)
        _convolve(k_in[b, t], k_conv, k_tail[b], g * key, k)
        _normalise(q, np.float32(1) / np.sqrt(np.float32(key)))
        _normalise(k, np.float32(1))
        qk = sum_of_products(q, k)
        for h in range(g * groups, (g + 1) * groups):
            _convolve(v_in[b, t], v_conv, v_tail[b], h * value, values)
            speed = np.exp(decay_log[h])
            if per_channel:
                for i in range(key):
                    a[i] = _decay(z_in[b, t, h * key + i], speed, decay_bias[h * key + i], floor)
            else:
                a[:] = _decay(z_in[b, t, h], speed, decay_bias[h], floor)
            for i in range(key):
                ka[i] = k[i] * a[i]
                qa[i] = q[i] * a[i]
            _step(S[b, h], k, ka, qa, a, values, sigmoid(beta_in[b, t, h]), qk, sums, o)
            s = np.float32(1) / np.sqrt(sum_of_products(o, o) / np.float32(value) + eps)
            for i in range(value):
                out[b, t, h * value + i] = o[i] * s * norm[i] * sigmoid(gate_in[b, t, h * value + i])


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
    if q_BTC.shape[1] > FEW or s.S_BHVK.dtype == torch.float64:
        return reference.delta_net(q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC, w, s, floor, eps)
    dtype = q_BTC.dtype
    inputs = tuple(as_array(x) for x in (q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC))
    tails = s[:3] if s.q_tail.dtype == torch.float32 else tuple(t.float() for t in s[:3])
    S = s.S_BHVK.numpy()
    groups = S.shape[1] * S.shape[3] // q_BTC.shape[2]
    out = np.empty((*q_BTC.shape[:2], S.shape[1] * S.shape[2]), np.float32)
    arguments = (
        *(groups, inputs, tuple(as_array(x) for x in w), tuple(t.numpy() for t in tails), S),
        *(np.float32(0 if floor is None else floor), np.float32(eps), out),
    )
    few_tokens(*arguments, threads() if S.nbytes > PARALLEL else 1)
    if dtype != torch.float32:
        for kept, moved in zip(s[:3], tails, strict=True):
            kept.copy_(moved)
    return torch.from_numpy(out) if dtype == torch.float32 else torch.from_numpy(out).to(dtype)
