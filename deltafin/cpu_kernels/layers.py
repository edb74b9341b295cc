"""Whole sublayers for a few tokens, norm included: the operations of ``model/*.py`` in their order, called from Numba.

For a small model the way from Python to a kernel and back costs more than the kernel. A sublayer is one call here, or
two where Python has something to do in between: a cache that grows, experts that must be fetched. ``Ops.whole`` lists
them by the kind of layer; the model's own forward does the same with one call an operation.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltafin import config
from deltafin.cpu_kernels.attention import attention
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.delta import PARALLEL, arrays, few_tokens
from deltafin.cpu_kernels.experts import few_experts, saturation
from deltafin.cpu_kernels.linear import few_rows
from deltafin.cpu_kernels.mathematics import sigmoid
from deltafin.cpu_kernels.small import choose, norm_rows
from deltafin.cpu_kernels.stored import HEAD, OUTPUTS, as_array, as_tensor, described, few, is_coarse, table_of
from deltafin.cpu_kernels.threads import threads

NONE = np.empty((0, 6), np.int64)
"""The table of a weight that a layer does not have; read-only as all tables are, or Numba would compile for both."""
NONE.flags.writeable = False


@kernel()
def product(table, x, coarse, nt):
    """All weights of the table times the rows of x, side by side."""
    outputs = 0
    for i in range(len(table)):
        outputs += table[i, OUTPUTS]
    y = np.empty((len(x), outputs), np.float32)
    few_rows(table, x, coarse, np.empty((len(x), 2 * HEAD + 8 * x.shape[1]), np.uint8), y, nt)
    return y


@kernel()
def normed(x, weight, eps):
    """The rows' RMS norm."""
    y = np.empty_like(x)
    norm_rows(x, weight, eps, y)
    return y


@kernel()
def _part(y, first, width):
    return np.ascontiguousarray(y[:, first : first + width])


@kernel()
def _kda(x, norm, eps, batch, groups, sizes, first, decay_up, gate_up, out, weights, tails, S, floor, coarse, nt):
    tokens = len(x) // batch
    y = product(first, normed(x, norm, eps), coarse, nt)
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
    o = np.empty((batch, tokens, values), np.float32)
    few_tokens(groups, inputs, weights, tails, S, floor, eps, o, nt if S.nbytes > PARALLEL else 1)
    return product(out, o.reshape(batch * tokens, values), coarse, nt)


def _plan(w: Any, *weights: Any) -> Any:
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


def kda(c: config.KDA, w: Any, s: Any, x_BTD: Tensor, norm: Tensor, eps: float, ops: Any) -> Tensor | None:
    """Norm and ``model.kda.forward``; None where they must be done operation by operation."""

    def make():
        tables = _plan(w, w.first, w.decay_up, w.gate_up, w.out)
        sizes = np.array((c.heads * c.key_dim, c.heads * c.value_dim, c.heads, c.decay_rank))
        between = arrays(w.between)
        return tables and (sizes, *tables, between)

    made, x = _kept(w, make), few(x_BTD)
    if made is None or x is None:
        return None
    sizes, first, decay_up, gate_up, out, between = made
    y = _kda(
        *(x, as_array(norm), np.float32(eps), len(x_BTD), 1, sizes, first, decay_up, gate_up, out, between),
        *((s.q_tail.numpy(), s.k_tail.numpy(), s.v_tail.numpy()), s.S_BHVK.numpy()),
        *(np.float32(c.decay_floor or 0), is_coarse(x_BTD), threads()),
    )
    s.length += x_BTD.shape[1]
    return as_tensor(y, x_BTD)


@kernel()
def _before(x, norm, eps, first, q_norm, q_up, latent_norm, inner_eps, queries, rank, common, coarse, nt):
    """Queries, normed latent, shared key, gate."""
    y = product(first, normed(x, norm, eps), coarse, nt)
    q = _part(y, 0, queries)
    if len(q_up):
        q = product(q_up, normed(q, q_norm, inner_eps), coarse, nt)
    latent = normed(_part(y, queries, rank), latent_norm, inner_eps)
    at = queries + rank
    return q, latent, _part(y, at, common), _part(y, at + common, y.shape[1] - at - common)


@kernel()
def _after(o, gate, out, coarse, nt):
    """The output gate and the last projection."""
    if gate.shape[1]:
        for n in range(len(o)):
            for i in range(o.shape[1]):
                o[n, i] *= sigmoid(gate[n, i])
    return product(out, o, coarse, nt)


def mla(c: config.MLA, w: Any, s: Any, x_BTD: Tensor, norm: Tensor, eps: float, ops: Any) -> Tensor | None:
    """Norm and ``model.mla.forward``; None where they must be done operation by operation."""

    def make():
        tables = _plan(w, w.first, w.q_up, w.latent_up, w.out)
        return tables and (*tables, as_array(norm if w.q_norm is None else w.q_norm), as_array(w.latent_norm))

    made, x = _kept(w, make), few(x_BTD)
    if made is None or x is None:
        return None
    first, q_up, _, out, q_norm, latent_norm = made
    q, latent, shared, gate = _before(
        *(x, as_array(norm), np.float32(eps), first, q_norm, q_up, latent_norm, np.float32(c.eps)),
        *(int(first[0, OUTPUTS]), c.latent_rank, c.shared_dim, is_coarse(x_BTD), threads()),
    )
    batch, tokens = x_BTD.shape[:2]
    s.append(*(torch.from_numpy(y).view(batch, tokens, -1) for y in (latent, shared)))
    cache = s.tensors()
    q_BTHC = torch.from_numpy(q).view(batch, tokens, c.heads, -1).to(x_BTD.dtype)
    o = attention(q_BTHC, cache["latent_BSR"], cache["shared_BSJ"], w.latent_up, c.value_dim)
    return as_tensor(_after(as_array(o).reshape(len(x), -1), gate, out, is_coarse(x_BTD), threads()), x_BTD)


@kernel()
def _gated(x, table, limits, coarse, nt):
    rows = len(x)
    width = table[0, OUTPUTS]
    h, up = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    y = np.empty((rows, table[2, OUTPUTS]), np.float32)
    start, row, share = np.array((0, rows)), np.arange(rows), np.ones(rows, np.float32)
    prepared = np.empty((rows, 2 * HEAD + 8 * x.shape[1]), np.uint8)
    prepared_h = np.empty((rows, 2 * HEAD + 8 * width), np.uint8)
    few_experts(table, start, row, share, limits, x, coarse, prepared, h, up, prepared_h, y, nt)
    return y


@kernel()
def _mlp(x, norm, eps, table, limits, coarse, nt):
    return _gated(normed(x, norm, eps), table, limits, coarse, nt)


def mlp(c: config.MLP, w: Any, x_BTD: Tensor, norm: Tensor, eps: float, ops: Any) -> Tensor | None:
    """Norm and ``model.mlp.forward``; None where they must be done operation by operation."""
    made, x = _kept(w, lambda: _plan(w, (w.gate, w.up, w.down))), few(x_BTD)
    if made is None or x is None:
        return None
    y = _mlp(x, as_array(norm), np.float32(eps), made[0], saturation(c.activation), is_coarse(x_BTD), threads())
    return as_tensor(y, x_BTD)


@kernel()
def _chosen(x, norm, eps, router, bias, chosen, renormalize, scale, latent_down, coarse, nt):
    """The normed rows, their form for the experts, ids and weights."""
    x = normed(x, norm, eps)
    ids, weights = np.empty((len(x), chosen), np.int64), np.empty((len(x), chosen), np.float32)
    choose(product(router, x, False, nt), bias, renormalize, scale, ids, weights)  # a choice is not rounded
    return x, product(latent_down, x, coarse, nt) if len(latent_down) else x, ids, weights


@kernel()
def _rest(x, y, eps, latent_norm, latent_up, shared, limits, coarse, nt):
    """What follows the experts: back from the latent width, and the shared expert."""
    if len(latent_norm):
        y = normed(y, latent_norm, eps)
    if len(latent_up):
        y = product(latent_up, y, coarse, nt)
    if len(shared):
        other = _gated(x, shared, limits, coarse, nt)
        for n in range(len(y)):
            for i in range(y.shape[1]):
                y[n, i] += other[n, i]
    return y


def moe(c: config.MoE, w: Any, x_BTD: Tensor, norm: Tensor, eps: float, ops: Any) -> Tensor | None:
    """Norm and ``model.moe.forward``; None where they must be done operation by operation."""

    def make():
        tables = _plan(w, w.router, w.latent_down, w.latent_up, (w.shared_gate, w.shared_up, w.shared_down))
        latent_norm = np.empty(0, np.float32) if w.latent_norm is None else as_array(w.latent_norm)
        return tables and (*tables, as_array(w.router_bias), latent_norm)

    made, x = _kept(w, make), few(x_BTD)
    if made is None or x is None:
        return None
    router, latent_down, latent_up, shared, bias, latent_norm = made
    eps32, coarse, nt = np.float32(eps), is_coarse(x_BTD), threads()
    x, z, ids, weights = _chosen(
        *(x, as_array(norm), eps32, router, bias, c.chosen, c.renormalize, np.float32(c.scale)),
        *(latent_down, coarse, nt),
    )
    z, ids, weights = (torch.from_numpy(a) for a in (z, ids, weights))
    y = as_array(w.experts(z.to(x_BTD.dtype), ids, weights, c.activation, ops))
    limits = saturation(c.activation)
    return as_tensor(_rest(x, y, eps32, latent_norm, latent_up, shared, limits, coarse, nt), x_BTD)


WHOLE = {config.KDA: kda, config.MLA: mla, config.MLP: mlp, config.MoE: moe}
