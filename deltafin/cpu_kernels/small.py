"""Operations on a token's vector alone, by one thread: ``rms_norm``, ``mix_depth``, and the choice of ``route``."""

import numpy as np
import torch
from torch import Tensor

from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.linear import linear
from deltafin.cpu_kernels.mathematics import exp, sigmoids, sum_of_products
from deltafin.cpu_kernels.stored import (
    ROWS,
    Stored,
    few,
    floats,
    is_coarse,
    keep,
    packed,
    plain,
    read,
    room,
    widened,
)
from deltafin.ops import reference


@kernel()
def norm_rows(x, weight, eps, y):
    """Each row over its root mean square, times the weight."""
    for n in range(len(x)):
        s = np.float32(1) / np.sqrt(sum_of_products(x[n], x[n]) / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            y[n, i] = x[n, i] * s * weight[i]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    rows = few(x)
    if rows is None or x.dtype == torch.float64:
        return reference.rms_norm(x, weight, eps)
    x, y, w = packed(x), torch.empty(x.shape, dtype=x.dtype), widened(weight)
    _norm(x.data_ptr(), rows, len(w), is_coarse(x.dtype), w.data_ptr(), eps, y.data_ptr())
    return y


@kernel()
def _norm(x, rows, columns, halves, weight, eps, out):
    xs, y = read(x, rows, columns, halves), room(out, rows, columns, halves)
    norm_rows(xs, floats(weight, (columns,)), np.float32(eps), y)
    keep(y, out, halves)


@kernel()
def mix(sources, query, eps, y):
    """See ``reference.mix_depth``; sources [depth, rows, D]."""
    depth, width = sources.shape[0], sources.shape[2]
    score = np.empty(depth, np.float32)
    for n in range(sources.shape[1]):
        top = -np.float32(np.inf)
        for d in range(depth):
            x = sources[d, n]
            score[d] = sum_of_products(x, query) / np.sqrt(sum_of_products(x, x) / np.float32(width) + eps)
            top = max(top, score[d])
        total = np.float32(0)
        for d in range(depth):
            score[d] = exp(score[d] - top)
            total += score[d]
        y[n] = 0
        for d in range(depth):
            share, x = score[d] / total, sources[d, n]
            for i in range(width):
                y[n, i] += share * x[i]


def mix_depth(sources: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """See ``reference.mix_depth``."""
    depth, width = len(sources), sources.shape[-1]
    rows = sources[0].numel() // width
    if rows > ROWS or sources.dtype == torch.float64:
        return reference.mix_depth(sources, query_D, eps)
    stack, query, y = plain(sources).view(depth, rows, width), widened(query_D), np.empty((rows, width), np.float32)
    mix(stack.numpy(), query.numpy(), np.float32(eps), y)
    return torch.from_numpy(y).to(sources.dtype).view(sources.shape[1:])


@kernel()
def choose(logits, bias, renormalize, scale, ids, weights):
    """The experts of each row by their logits: ids, increasing, and weights."""
    score = np.empty(logits.shape[1], np.float32)
    for n in range(len(logits)):
        sigmoids(logits[n], score)
        taken = np.zeros(len(score), np.bool_)
        for _ in range(ids.shape[1]):
            best, top = -1, np.float32(0)
            for x in range(len(score)):
                s = score[x] + bias[x]
                if not taken[x] and (best < 0 or s > top):  # the lower index on a tie
                    best, top = x, s
            taken[best] = True
        e, total = 0, np.float32(0)
        for x in range(len(score)):
            if taken[x]:
                ids[n, e], weights[n, e] = x, score[x]
                total += score[x]
                e += 1
        for e in range(ids.shape[1]):
            weights[n, e] *= scale / (total + np.float32(1e-20)) if renormalize else scale


def route(
    x_ND: Tensor, gate_XD: Stored, bias_X: Tensor, chosen: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``reference.route``."""
    if len(x_ND) > ROWS or x_ND.dtype == torch.float64:
        return reference.route(x_ND, gate_XD, bias_X, chosen, renormalize, scale)
    logits = linear(x_ND.float(), gate_XD).numpy()
    ids, weights = np.empty((len(x_ND), chosen), np.int64), np.empty((len(x_ND), chosen), np.float32)
    choose(logits, widened(bias_X).numpy(), renormalize, np.float32(scale), ids, weights)
    return torch.from_numpy(ids), torch.from_numpy(weights)
