"""Operations on a token's vector alone: ``rms_norm``, ``mix_depth``, and ``route``, the choice of experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from deltafin.gpu_kernels.early import early, let_next, wait
from deltafin.gpu_kernels.linear import ROWS
from deltafin.ops import reference
from deltafin.weights import Weight

EXPERTS = 4
"""Experts whose logits one program makes: several share a row's input, and some hundred programs are needed."""

KNOWN = (torch.float32, torch.bfloat16)
"""Types of activations that kernels read; the reference does the others."""


@triton.jit
def _rms_norm(x, weight, y, width, eps, WIDTH: constexpr, EARLY: constexpr):
    """Normalise one row: rounded to its own type before the weight, which is rounded to it as well."""
    n, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    w = tl.load(weight + i, i < width, 0)
    wait(EARLY)
    let_next(EARLY)
    raw = tl.load(x + n * width + i, i < width, 0)
    a = raw.to(tl.float32)
    a = (a * tl.rsqrt(tl.sum(a * a, 0) / width + eps)).to(raw.dtype).to(tl.float32)
    tl.store(y + n * width + i, a * w.to(raw.dtype).to(tl.float32), i < width)


def _warps(width: int) -> int:
    """Warps for a program that holds so many numbers: 16 of them a thread, in 4 to 16 warps."""
    return min(16, max(4, width // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    if x.dtype not in KNOWN or not x.numel():
        return reference.rms_norm(x, weight, eps)
    x, width = x.contiguous(), x.shape[-1]
    y, block = torch.empty_like(x), triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](x, weight, y, width, eps, WIDTH=block, num_warps=_warps(block), **early(x.device))
    return y


@triton.jit
def _scores(sources, query, scores, rows, width, eps, WIDTH: constexpr, EARLY: constexpr):
    """Score one depth of one row: float32 into ``scores`` [depths, rows]."""
    place, i = tl.program_id(1).to(tl.int64) * rows + tl.program_id(0), tl.arange(0, WIDTH)
    q = tl.load(query + i, i < width, 0).to(tl.float32)
    wait(EARLY)
    x = tl.load(sources + place * width + i, i < width, 0).to(tl.float32)
    tl.store(scores + place, tl.sum(x * q, 0) * tl.rsqrt(tl.sum(x * x, 0) / width + eps))


@triton.jit
def _mix(sources, scores, y, depths, rows, width, DEPTHS: constexpr, PART: constexpr, EARLY: constexpr):
    """Mix PART channels of one row: the sum of ``sources`` [depths, rows, width] by the softmax of their scores."""
    wait(EARLY)
    let_next(EARLY)
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, DEPTHS)
    c = tl.program_id(1) * PART + tl.arange(0, PART)
    place = d * rows + n
    x = tl.load(sources + place[:, None] * width + c[None, :], (d < depths)[:, None] & (c < width)[None, :], 0)
    score = tl.load(scores + place, d < depths, -float("inf"))
    share = tl.exp(score - tl.max(score, 0))
    share /= tl.sum(share, 0)
    tl.store(y + n * width + c, tl.sum(share[:, None] * x.to(tl.float32), 0), c < width)


def mix_depth(sources: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """See ``reference.mix_depth``. Two launches: one multiprocessor alone would take longer to read every depth."""
    if sources.dtype not in KNOWN or not sources.numel():
        return reference.mix_depth(sources, query_D, eps)
    sources, depths, width = sources.contiguous(), len(sources), sources.shape[-1]
    y = torch.empty_like(sources[0])
    rows, block = y.numel() // width, triton.next_power_of_2(width)
    scores = torch.empty(depths, rows, device=y.device)
    part, how = min(128, block), early(y.device)
    _scores[rows, depths](sources, query_D, scores, rows, width, eps, WIDTH=block, num_warps=_warps(block), **how)
    _mix[rows, triton.cdiv(width, part)](
        *(sources, scores, y, depths, rows, width), DEPTHS=triton.next_power_of_2(depths), PART=part, **how
    )
    return y


@triton.jit(do_not_specialize=["rows"])  # one program for any number of rows: the same bits
def _logits(x, gate, y, rows, width, experts, EXPERTS: constexpr, WIDTH: constexpr, EARLY: constexpr):
    """The logits of EXPERTS experts for all rows: products and sums in float32, into ``y`` [rows, experts]."""
    e, i = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.arange(0, WIDTH)
    here = (e < experts)[:, None] & (i < width)[None, :]
    w = tl.load(gate + e.to(tl.int64)[:, None] * width + i[None, :], here, 0).to(tl.float32)
    wait(EARLY)
    let_next(EARLY)
    for n in tl.range(0, rows, num_stages=3):
        a = tl.load(x + n * width + i, i < width, 0).to(tl.float32)
        tl.store(y + n * experts + e, tl.sum(w * a[None, :], 1), e < experts)


@triton.jit
def _choose(
    logits,
    bias,
    ids,
    weights,
    experts,
    scale,
    CHOSEN: constexpr,
    PLACES: constexpr,
    EXPERTS: constexpr,
    RENORMALIZE: constexpr,
    EARLY: constexpr,
):
    """Choose a row's experts: the largest first, by whole numbers that are ordered as the scores are."""
    n, e = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    own = tl.load(bias + e, e < experts, 0).to(tl.float32)
    wait(EARLY)
    score = 1 / (1 + tl.exp(-tl.load(logits + n * experts + e, e < experts, 0)))
    ranked = score + own
    bits = ranked.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(ranked != ranked, 0x7FFFFFFF, order)  # not a number: chosen before all, so that it is seen
    order = (order.to(tl.int64) << 32) + (EXPERTS - e)  # the lower index on a tie
    order = tl.where(e < experts, order, -(1 << 63))
    best = tl.topk(order, PLACES)
    last = tl.min(tl.where(tl.arange(0, PLACES) < CHOSEN, best, (1 << 63) - 1), 0)
    taken = order >= last
    if RENORMALIZE:
        scale /= tl.sum(tl.where(taken, score, 0), 0) + 1e-20
    place = n * CHOSEN + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(ids + place, e, taken)
    tl.store(weights + place, score * scale, taken)


def route(
    x_ND: Tensor, gate_XD: Weight, bias_X: Tensor, chosen: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``reference.route``."""
    if x_ND.dtype not in KNOWN or not x_ND.numel():
        return reference.route(x_ND, gate_XD, bias_X, chosen, renormalize, scale)
    (rows, width), experts = x_ND.shape, gate_XD.shape[0]
    if rows <= ROWS and isinstance(gate_XD, Tensor) and gate_XD.dtype in KNOWN and gate_XD.is_contiguous():
        logits = torch.empty(rows, experts, device=x_ND.device)
        block = triton.next_power_of_2(width)
        _logits[(triton.cdiv(experts, EXPERTS),)](
            *(x_ND.contiguous(), gate_XD, logits, rows, width, experts),
            EXPERTS=EXPERTS,
            WIDTH=block,
            num_warps=_warps(EXPERTS * block),
            **early(x_ND.device),
        )
    else:
        logits = reference.linear(x_ND.float(), gate_XD)
    ids = torch.empty(rows, chosen, dtype=torch.int64, device=x_ND.device)
    weights = torch.empty(rows, chosen, device=x_ND.device)
    _choose[(rows,)](
        *(logits, bias_X, ids, weights, experts, scale),
        CHOSEN=chosen,
        PLACES=max(2, triton.next_power_of_2(chosen)),  # topk knows of no single place
        EXPERTS=max(2, triton.next_power_of_2(experts)),
        RENORMALIZE=renormalize,
        **early(x_ND.device),
    )
    return ids, weights
