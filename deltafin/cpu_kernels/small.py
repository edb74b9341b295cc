"""Operations on a token's vector alone, by one thread: ``rms_norm``, ``mix_depth``, and the choice of ``route``."""

import numpy as np
import torch
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.linear import linear
from deltafin.cpu_kernels.mathematics import exp, sigmoids, sum_of_products
from deltafin.cpu_kernels.stored import ROWS, Stored, as_array, as_tensor, few
from deltafin.ops import reference


@kernel()
def rounded(x):
    """The bits of the nearest bfloat16, the even one on a tie."""
    bits = v.as_u32(x)
    if x != x:
        return np.uint32(0x7FC0)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


@kernel()
def norm_rows(x, weight, eps, y):
    """Each row over its root mean square, times the weight."""
    for n in range(len(x)):
        s = np.float32(1) / np.sqrt(sum_of_products(x[n], x[n]) / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            y[n, i] = x[n, i] * s * weight[i]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    xs = few(x)
    if xs is None:
        return reference.rms_norm(x, weight, eps)
    y = np.empty_like(xs)
    norm_rows(xs, as_array(weight), np.float32(eps), y)
    return as_tensor(y, x)


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
    if sources.numel() > depth * ROWS * width or sources.dtype == torch.float64:
        return reference.mix_depth(sources, query_D, eps)
    stack = as_array(sources).reshape(depth, -1, width)
    y = np.empty(stack.shape[1:], np.float32)
    mix(stack, as_array(query_D), np.float32(eps), y)
    return as_tensor(y, sources[0])


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
    choose(logits, as_array(bias_X), renormalize, np.float32(scale), ids, weights)
    return torch.from_numpy(ids), torch.from_numpy(weights)
