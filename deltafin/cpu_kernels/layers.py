"""Whole sublayers for a few tokens, from the residual stream back to it: ``model/*.py`` in its order, from Numba.

The way from Python to a kernel and back costs more than a small kernel, the more so as the weights that were read have
pushed Python out of the caches. A sublayer is one call here, or a few: where experts must be fetched in between, and
where one would take too long to compile. ``Ops.whole`` lists them by the kind of layer; the model's own forward does
the same with one call an operation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from deltafin import config
from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.attention import attend_few, cache_of, suits_tiles
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.delta import PARALLEL, as_read, few_tokens
from deltafin.cpu_kernels.experts import alone, grouped, run, saturation
from deltafin.cpu_kernels.linear import few_rows
from deltafin.cpu_kernels.mathematics import gated
from deltafin.cpu_kernels.small import choose, mix, norm_rows
from deltafin.cpu_kernels.stored import (
    ADDRESS,
    F32,
    KIND,
    MX,
    OUTPUTS,
    as_array,
    described,
    floats,
    is_coarse,
    rounded,
    scratch,
    table_of,
)
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import Expert

NONE = np.empty((0, 6), np.int64)
"""The table of a weight that a layer does not have."""


@kernel()
def product(table, x, coarse, nt):
    """All weights of the table times the rows of x, side by side."""
    outputs = 0
    for i in range(len(table)):
        outputs += table[i, OUTPUTS]
    y = np.empty((len(x), outputs), np.float32)
    few_rows(table, x, coarse, scratch(x), y, nt)
    return y


@kernel()
def normed(x, weight, eps):
    """The rows' RMS norm."""
    y = np.empty_like(x)
    norm_rows(x, weight, eps, y)
    return y


@kernel()
def _read(sums, finished, query, eps):
    """What a sublayer sees of a stream, ``sums`` [S, N, D]: the one sum, or a mixture of the finished and the last."""
    if finished == 0:
        return sums[0]
    y = np.empty_like(sums[0])
    mix(sums[: finished + 1], query, eps, y)
    return y


@kernel()
def _add(sums, place, y):
    """Add to a sum of a stream, or begin it."""
    total = sums[place[0]]
    for n in range(len(y)):
        for i in range(y.shape[1]):
            total[n, i] = y[n, i] if place[1] else total[n, i] + y[n, i]


@kernel()
def _part(y, first, width):
    return np.ascontiguousarray(y[:, first : first + width])


@kernel()
def _kda(stream, norm, batch, sizes, first, decay_up, gate_up, out, weights, state, floor, coarse, nt):
    sums, finished, place, query, eps = stream
    x = normed(_read(sums, finished, query, eps), norm, eps)
    tokens = len(x) // batch
    y = product(first, x, coarse, nt)
    keys, values, heads = sizes[0], sizes[1], sizes[2]
    q, k, v = _part(y, 0, keys), _part(y, keys, keys), _part(y, 2 * keys, values)
    at = 2 * keys + values
    beta = _part(y, at, heads)
    decay = _part(y, at + heads, sizes[3])
    gate = _part(y, at + heads + sizes[3], y.shape[1] - at - heads - sizes[3])
    decay = product(decay_up, decay, coarse, nt)
    if len(gate_up):
        gate = product(gate_up, gate, coarse, nt)
    inputs = (
        q.reshape(batch, tokens, keys),
        k.reshape(batch, tokens, keys),
        v.reshape(batch, tokens, values),
        decay.reshape(batch, tokens, decay.shape[1]),
        beta.reshape(batch, tokens, heads),
        gate.reshape(batch, tokens, values),
    )
    narrow, wide = (batch, len(weights[0]) - 1, keys), (batch, len(weights[0]) - 1, values)
    tails = floats(state[0], narrow), floats(state[1], narrow), floats(state[2], wide)
    S = floats(state[3], (batch, heads, values // heads, keys // heads))
    o = np.empty((batch, tokens, values), np.float32)
    groups = np.int64(1)  # a literal would be compiled for anew
    few_tokens(groups, inputs, weights, tails, S, floor, eps, o, nt if S.nbytes > PARALLEL else 1)
    _add(sums, place, product(out, o.reshape(batch * tokens, values), coarse, nt))


def _plan(*weights: Any) -> Any:
    """Tables of several weights or groups of them; ``NONE`` for one that is absent. None if a storage is not known."""
    tables = []
    for group in weights:
        rows = [described(x) for x in (group if isinstance(group, tuple) else (group,)) if x is not None]
        if None in rows:
            return None
        tables.append(table_of(rows) if rows else NONE)  # type: ignore[arg-type]
    return tuple(tables)


def _kept(w: Any, make: Any) -> Any:
    """What ``make`` gives, made once and kept with the layer's weights."""
    try:
        return w._whole
    except AttributeError:
        object.__setattr__(w, "_whole", made := make())
        return made


def _stream(stream: Any, query: Any) -> Any:
    """A stream as the kernels see it: its sums, how many are finished, where the next output goes, a query, epsilon."""
    return stream.rows, stream.finished, stream.next(), query, np.float32(stream.eps)


def _query(query: Tensor | None) -> np.ndarray:
    return np.empty(0, np.float32) if query is None else as_array(query)


def kda(c: config.KDA, w: Any, s: Any, stream: Any, norm: Tensor, query: Tensor | None, ops: Any) -> bool:
    """Norm, ``model.kda.forward``, and the sum; False where they must be done operation by operation."""

    def make():
        tables = _plan(w.first, w.decay_up, w.gate_up, w.out)
        sizes = np.array((c.heads * c.key_dim, c.heads * c.value_dim, c.heads, c.decay_rank))
        about = _query(query), as_array(norm), np.float32(c.decay_floor or 0)
        return tables and (sizes, *tables, *about, tuple(x.numpy() for x in as_read(w.between).tensors))

    made = _kept(w, make)
    if made is None:
        return False
    sizes, first, decay_up, gate_up, out, read, before, floor, between = made
    _kda(
        *(_stream(stream, read), before, stream.batch, sizes, first, decay_up, gate_up, out, between),
        *((s.q_tail.data_ptr(), s.k_tail.data_ptr(), s.v_tail.data_ptr(), s.S_BHVK.data_ptr()), floor),
        *(is_coarse(stream.dtype), threads()),
    )
    s.length += stream.tokens
    return True


@kernel()
def _keep(kind, address, y):
    """Store a row in a cache."""
    if kind == F32:
        place = carray(v.pointer(address), len(y), np.float32)
        for i in range(len(y)):
            place[i] = y[i]
    else:
        halves = carray(v.pointer(address), len(y), np.uint16)
        for i in range(len(y)):
            halves[i] = rounded(y[i])


@kernel()
def _before(stream, norms, first, q_up, queries, cache, seen, tokens, coarse, nt):
    """Queries and output gate of the tokens, whose positions are stored."""
    sums, finished, _, query, eps = stream
    norm, q_norm, latent_norm, inner_eps = norms
    kind, latents, latent_batch, latent_stride, shared, shared_batch, shared_stride, rank, common = cache
    y = product(first, normed(_read(sums, finished, query, eps), norm, eps), coarse, nt)
    q, at = _part(y, 0, queries), queries + rank
    if len(q_up):
        q = product(q_up, normed(q, q_norm, inner_eps), coarse, nt)
    latent = normed(_part(y, queries, rank), latent_norm, inner_eps)
    for n in range(len(y)):
        b, position = n // tokens, seen - tokens + n % tokens
        _keep(kind, latents + b * latent_batch + position * latent_stride, latent[n])
        _keep(kind, shared + b * shared_batch + position * shared_stride, y[n, at : at + common])
    return q, _part(y, at + common, y.shape[1] - at - common)


@kernel()
def _after(stream, o, gate, out, coarse, nt):
    """The output gate, the last projection, and the sum."""
    if gate.shape[1]:
        for n in range(len(o)):
            gated(o[n], gate[n], o[n])
    _add(stream[0], stream[2], product(out, o, coarse, nt))


def mla(c: config.MLA, w: Any, s: Any, stream: Any, norm: Tensor, query: Tensor | None, ops: Any) -> bool:
    """Norm, ``model.mla.forward``, and the sum; False where they must be done operation by operation."""

    def make():
        tables = _plan(w.first, w.q_up, w.latent_up, w.out)
        if tables is None or tables[2][0, KIND] == MX:
            return None
        norms = (norm, norm if w.q_norm is None else w.q_norm, w.latent_norm)
        return _query(query), (*(as_array(n) for n in norms), np.float32(c.eps)), *tables

    made, tokens = _kept(w, make), stream.tokens
    if made is None:
        return False
    read, norms, first, q_up, up, out = made
    end = s.reserve(tokens)
    cache = cache_of(*s.buffers())
    if cache is None:
        return False
    coarse, nt, rows = is_coarse(stream.dtype), threads(), _stream(stream, read)
    q, gate = _before(rows, norms, first, q_up, int(first[0, OUTPUTS]), cache, end, tokens, coarse, nt)
    q = q.reshape(len(q), c.heads, -1)
    o = attend_few(up[0], c.value_dim, q, coarse, cache, end, tokens, suits_tiles(stream.dtype, cache), nt)
    _after(rows, o.reshape(len(q), -1), gate, out, coarse, nt)
    s.length = end
    return True


@kernel()
def _mlp(stream, norm, table, limits, coarse, nt):
    sums, finished, place, query, eps = stream
    x = normed(_read(sums, finished, query, eps), norm, eps)
    _add(sums, place, alone(table, limits, x, coarse, nt))


def mlp(c: config.MLP, w: Any, stream: Any, norm: Tensor, query: Tensor | None, ops: Any) -> bool:
    """Norm, ``model.mlp.forward``, and the sum; False where they must be done operation by operation."""

    def make():
        tables = _plan((w.gate, w.up, w.down))
        return tables and (*tables, _query(query), as_array(norm), saturation(c.activation))

    made = _kept(w, make)
    if made is None:
        return False
    table, read, before, limits = made
    _mlp(_stream(stream, read), before, table, limits, is_coarse(stream.dtype), threads())
    return True


@kernel()
def _chosen(stream, norm, choice, coarse, nt):
    """The normed rows, their form for the experts, ids and weights."""
    router, bias, chosen, renormalize, scale, latent_down = choice
    sums, finished, _, query, eps = stream
    x = normed(_read(sums, finished, query, eps), norm, eps)
    ids, weights = np.empty((len(x), chosen), np.int64), np.empty((len(x), chosen), np.float32)
    exact = np.bool_(False)  # a choice is not rounded; a literal would be compiled for anew
    choose(product(router, x, exact, nt), bias, renormalize, scale, ids, weights)
    return x, product(latent_down, x, coarse, nt) if len(latent_down) else x, ids, weights


@kernel()
def _rest(stream, x, y, back, limits, coarse, nt):
    """What follows the experts: back from the latent width, the shared expert, and the sum."""
    latent_norm, latent_up, shared = back
    sums, _, place, _, eps = stream
    if len(latent_norm):
        y = normed(y, latent_norm, eps)
    if len(latent_up):
        y = product(latent_up, y, coarse, nt)
    if len(shared):
        other = alone(shared, limits, x, coarse, nt)
        for n in range(len(y)):
            for i in range(y.shape[1]):
                y[n, i] += other[n, i]
    _add(sums, place, y)


@kernel()
def _rounded(x):
    """What is left of rows that become bfloat16, as they do on their way through Python."""
    y = np.empty_like(x)
    for n in range(len(x)):
        for i in range(x.shape[1]):
            y[n, i] = v.as_f32(rounded(x[n, i]) << np.uint32(16))
    return y


@kernel()
def _at_hand(stream, norm, choice, experts, back, limits, coarse, nt):
    """All of it, if it is known where the chosen experts are; if not, only the ids of those of which it is not."""
    x, z, ids, share = _chosen(stream, norm, choice, coarse, nt)
    start, row, shares, used = grouped(ids, share, len(experts))
    missing = used[experts[used, 0, ADDRESS] == 0]
    if not len(missing):
        table = experts[used].reshape(-1, experts.shape[2])
        z = _rounded(z) if coarse else z
        y = run(table, start, row, shares, limits, z, coarse, nt)
        y = _rounded(y) if coarse else y
        _rest(stream, x, y, back, limits, coarse, nt)
        return None
    return missing


def moe(c: config.MoE, w: Any, stream: Any, norm: Tensor, query: Tensor | None, ops: Any) -> bool:
    """Norm, ``model.moe.forward``, and the sum; False where they must be done operation by operation."""

    def make():
        tables = _plan(w.router, w.latent_down, w.latent_up, (w.shared_gate, w.shared_up, w.shared_down))
        if tables is None:
            return None
        router, latent_down, latent_up, shared = tables
        latent_norm = np.empty(0, np.float32) if w.latent_norm is None else as_array(w.latent_norm)
        choice = router, as_array(w.router_bias), c.chosen, c.renormalize, np.float32(c.scale), latent_down
        back = latent_norm, latent_up, shared
        return _query(query), as_array(norm), choice, back, saturation(c.activation), Places(w.experts, c.experts)

    made = _kept(w, make)
    if made is None:
        return False
    read, before, choice, back, limits, places = made
    coarse, nt, rows = is_coarse(stream.dtype), threads(), _stream(stream, read)
    while places.known:
        missing = _at_hand(rows, before, choice, places.table, back, limits, coarse, nt)
        if missing is None:
            return True
        places.find(missing.tolist())
    x, z, ids, weights = _chosen(rows, before, choice, coarse, nt)
    z, ids, weights = (torch.from_numpy(a) for a in (z, ids, weights))
    y = as_array(w.experts(z.to(stream.dtype), ids, weights, c.activation, ops))
    _rest(rows, x, y, back, limits, coarse, nt)
    return True


MOST = 256
"""Experts of a layer up to which all that were met are remembered: a view takes some kilobytes."""


class Places:
    """Where a layer's experts are, if their bytes stay where they are: ``table`` int64 [experts, 3, 6]."""

    def __init__(self, experts: Any, count: int) -> None:
        self.read: Callable[[int], Expert] = getattr(experts, "lasting", None)  # type: ignore[assignment]
        self.known = self.read is not None and count <= MOST
        self.table = np.zeros((count, 3, NONE.shape[1]), np.int64)
        self.met = list[Expert]()

    def find(self, ids: list[int]) -> None:
        """Note where some experts are; that nothing is known if one is stored as no kernel reads it."""
        for x in ids:
            self.met.append(expert := self.read(x))
            rows = [row for w in expert if (row := described(w))]
            if len(rows) < len(expert):
                self.known = False
                return
            self.table[x] = table_of(rows)


WHOLE = {config.KDA: kda, config.MLA: mla, config.MLP: mlp, config.MoE: moe}
