"""Prompts of Kimi Delta Attention in bfloat16, for heads of 128 and decays with a floor: ``delta_net`` in two kernels.

``_prepare`` takes a chunk of one head, all of them side by side, from its projections to where the state is needed:
nothing but what the state meets passes through memory. ``_advance`` takes a head's state through its chunks.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafin.ops import DeltaState, DeltaWeights

CHIP = (9, 0)
"""The compute capability that this was measured on, and is taken for: others want other sizes."""

CHUNK = 64
"""Tokens whose writes to the state are solved for together."""

SLICE = 2048
"""Tokens of a prompt that are prepared at a time: 1.2 KB of scratch memory each and head."""

ROWS = 16
"""Tokens that a program convolves at a time."""

COLUMNS = 64
"""Key channels that a program compares tokens in at a time. With 32 results were wrong on one H200 (Triton 3.6)."""

REACH = 116
"""How large an exponent of two may become: with what it multiplies, at most 1, it stays a number in bfloat16."""

LOG2E = tl.constexpr(1.4426950408889634)

_launched = cast("Callable[..., Any]", triton.jit)
"""What makes a kernel of a function, to be launched as kernel[grid](...)."""


@triton.jit
def _sigmoid(x):
    """The square of ``rsqrt`` is a reciprocal in two instructions, a division in ten; ``exp2`` is one, ``exp`` six."""
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2E * x))
    return root * root


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _product(a, b, total=None):
    """``total + a @ b`` of bfloat16, with float32 sums."""
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)


@triton.jit
def _decay(g, i, r):
    """Exponents, in base 2, of the decay between each token i and token r(i): sums of g [C, N], all at most 0.

    They are products with ones, of what lies between alone: no large sums are subtracted.
    """
    j = tl.trans(i)
    between = (j > tl.minimum(i, r)) & (j <= tl.maximum(i, r))
    # 11 bits of a step: e^x is off by 0.37 of 2^-12 at most, a factor in bfloat16 by 2^-9.
    return tl.dot(tl.where(between, 1.0, 0.0).to(tl.float16), g.to(tl.float16))


@triton.jit
def _within(P, A, q, k, g, i):
    """Add some channels of P and A for pairs of tokens of the same half of a chunk; of others nothing that matters.

    Both decays refer to a token in the middle of the half: REACH keeps them in the range of numbers.
    """
    C: tl.constexpr = q.shape[0]
    middle = (i & -(C // 2)) + C // 4 - 1
    since = tl.where(i > middle, 1.0, -1.0) * _decay(g, i, middle)
    x = tl.exp2(since)
    before = tl.trans(k * tl.exp2(-since))
    P = _product(k * x, before, P)
    A = _product(q * x, before, A)
    return P, A


@triton.jit
def _inverse(L, i, LEVELS: tl.constexpr):
    """Invert I + L for a strictly lower matrix [C, C]: inverses of pairs of blocks are joined, from single rows on."""
    j = tl.trans(i)
    X = tl.where(i == j, 1.0, tl.where((j == i - 1) & (i % 2 == 1), -L, 0.0))
    for half in range(1, LEVELS):
        first = i >> half + 1 << half + 1
        middle = first + (1 << half)
        halves = tl.where((i >= middle) & (j >= first) & (j < middle), L, 0.0)
        X -= _product(_product(X, halves), X)
    return X


@triton.jit
def _convolved_chunk(
    x,
    x_token,
    taps,
    tail,
    out,
    channels,
    first,
    t,
    tokens,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Convolve a chunk from token t on, K channels from ``first`` on, to ``out`` [C, K]; zeros after the last token.

    With NORM what comes out is normalised and scaled. What repeats is a loop: code is read from a small memory, too.
    """
    i = tl.arange(0, BK)[None, :]
    x += t.to(tl.int64) * x_token + first + i
    taps += first + i
    weights = (tl.load(taps + (W - 1) * channels, mask=i < K, other=0.0),)
    for j in tl.static_range(1, W):
        weights += (tl.load(taps + (W - 1 - j) * channels, mask=i < K, other=0.0),)
    for begin in range(0, C, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        mask = (t + row < tokens) & (i < K)
        y = tl.zeros([ROWS, BK], tl.float32)
        for j in tl.static_range(W):
            y += weights[j] * tl.load(x + (row - j) * x_token, mask=mask & (t + row >= j), other=0.0).to(tl.float32)
        if t + begin == 0:
            for place in range(W - 1):
                old = tl.load(tail + (row + place) * channels + first + i, mask=mask & (row + place < W - 1), other=0.0)
                y += tl.load(taps + place * channels, mask=i < K, other=0.0) * old
        y = tl.where(mask, _silu(y), 0.0)
        if NORM:
            y *= (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * scale)[:, None]
        tl.store(out + row * K + i, y.to(out.dtype.element_ty), mask=i < K)


@_launched(do_not_specialize=["tokens", "start"])
def _prepare(
    q,
    k,
    v,
    decay,
    beta,
    q_batch,
    q_token,
    k_batch,
    k_token,
    v_batch,
    v_token,
    decay_batch,
    decay_token,
    beta_batch,
    beta_token,
    q_conv,
    k_conv,
    v_conv,
    decay_log,
    decay_bias,
    q_tail,
    k_tail,
    v_tail,
    reads,
    writes,
    asks,
    keeps,
    mixes,
    lasts,
    tokens,
    start,
    floor,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """One chunk of one head up to where the state is needed.

    With the state S [V, K] before the chunk, its writes [V, C] are ``writes - S @ reads.T``, its outputs
    ``S @ asks.T + (those) @ mixes.T``, and the state after it ``lasts * S + (those) @ keeps``.
    """
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    kind = mixes.dtype.element_ty
    slot = (b * heads + head) * tl.num_programs(0) + chunk
    asks += slot * C * K
    keeps += slot * C * K
    reads += slot * C * K
    writes += slot * C * V
    t = start + chunk * C
    of_keys, key = heads * K, head * K
    tail = b * (W - 1) * of_keys
    _convolved_chunk(
        q + b * q_batch, q_token, q_conv, q_tail + tail, asks, of_keys, key, t, tokens, scale, K, BK, W, C, ROWS, True
    )
    _convolved_chunk(
        k + b * k_batch, k_token, k_conv, k_tail + tail, keeps, of_keys, key, t, tokens, 1.0, K, BK, W, C, ROWS, True
    )
    of_values, value = heads * V, head * V
    tail = b * (W - 1) * of_values
    _convolved_chunk(
        v + b * v_batch,
        v_token,
        v_conv,
        v_tail + tail,
        writes,
        of_values,
        value,
        t,
        tokens,
        1.0,
        V,
        BV,
        W,
        C,
        ROWS,
        False,
    )
    tl.debug_barrier()

    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # Pairs of tokens of different halves, and of the same one.
    P_apart = tl.zeros([C, C], tl.float32)
    A_apart = tl.zeros([C, C], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    log = tl.load(decay_log + head)
    decay += b * decay_batch + t.to(tl.int64) * decay_token
    for begin in range(0, BK, N):
        i = begin + tl.arange(0, N)[None, :]
        is_key = i < K
        rate = head * K + i
        z = tl.load(decay + row * decay_token + rate, mask=(t + row < tokens) & is_key, other=0.0).to(tl.float32)
        z += tl.load(decay_bias + rate, mask=is_key, other=0.0)
        g = LOG2E * (floor * _sigmoid(tl.exp(log) * z))
        # 2^-160 is 0: a larger step, even an infinite one, does the same.
        g = tl.where((t + row < tokens) & is_key, tl.where(g < -160.0, -160.0, g), 0.0)
        place = row * K + i
        queries = tl.load(asks + place, mask=is_key, other=0.0)
        keys = tl.load(keeps + place, mask=is_key, other=0.0)
        x = tl.exp2(_decay(g, row, C // 2 - 1))
        later = keys * x
        earlier = tl.trans(later)
        P_apart = _product(later, earlier, P_apart)
        A_apart = _product(queries * x, earlier, A_apart)
        P, A = _within(P, A, queries, keys, g, row)
        tl.store(keeps + place, (keys * tl.exp2(_decay(g, row, C - 1))).to(kind), mask=is_key)
        sofar = tl.exp2(_decay(g, row, -1))
        tl.store(asks + place, (queries * sofar).to(kind), mask=is_key)
        tl.store(reads + place, (keys * sofar).to(kind), mask=is_key)
        tl.store(lasts + slot * K + i + row * 0, sofar, mask=is_key & (row == C - 1))

    apart = (row >= C // 2) & (column < C // 2)
    A = tl.where(apart, A_apart, tl.where(row >= column, A, 0.0))
    tl.store(mixes + (slot * C + row) * C + column, A.to(kind))
    beta += b * beta_batch + t.to(tl.int64) * beta_token + head
    strength = _sigmoid(tl.load(beta + row * beta_token, mask=t + row < tokens, other=0.0).to(tl.float32))
    X = _inverse(tl.where(row > column, strength * tl.where(apart, P_apart, P), 0.0), row, LEVELS)
    X *= _sigmoid(tl.load(beta + column * beta_token, mask=t + column < tokens, other=0.0).to(tl.float32))
    X = X.to(kind)
    for begin in range(0, BK, N):
        i = begin + tl.arange(0, N)[None, :]
        met = reads + row * K + i
        tl.store(met, _product(X, tl.load(met, mask=i < K, other=0.0)).to(kind), mask=i < K)
    o = tl.arange(0, BV)[None, :]
    x = _product(X, tl.load(writes + row * V + o, mask=o < V, other=0.0)).to(kind)
    tl.debug_barrier()
    tl.store(writes + o * C + row, x, mask=o < V)


@_launched(do_not_specialize=["tokens", "start", "chunks"])
def _advance(
    reads,
    writes,
    asks,
    keeps,
    mixes,
    lasts,
    gate,
    gate_batch,
    gate_token,
    norm,
    S,
    out,
    tokens,
    start,
    chunks,
    eps,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    """One head's state through the chunks that are prepared, and their outputs with norm and gate."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    row, i, o = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    is_key, is_value = (i < K)[None, :], (o < V)[:, None]
    cells = S + ((b * heads + head) * V + o[:, None]) * K + i[None, :]
    state = tl.load(cells, mask=is_value & is_key, other=0.0)
    kind = reads.dtype.element_ty
    norms = tl.load(norm + o, mask=o < V, other=0.0)[:, None]
    for chunk in range(chunks):
        # What no product reads first: nobody fetches it ahead of time.
        slot = (b * heads + head) * chunks + chunk
        last = tl.load(lasts + slot * K + i, mask=i < K, other=0.0)
        t = (start + chunk * C + row).to(tl.int64)[:, None]
        value, here = head * V + o[None, :], (t < tokens) & (o < V)[None, :]
        z = tl.trans(tl.load(gate + b * gate_batch + t * gate_token + value, mask=here, other=0.0))
        rows = (slot * C + row)[:, None]
        keys = rows * K + i[None, :]
        held = state.to(kind)
        u = tl.load(writes + (slot * V + o[:, None]) * C + row[None, :], mask=is_value, other=0.0).to(tl.float32)
        u -= _product(held, tl.trans(tl.load(reads + keys, mask=is_key, other=0.0)))
        y = _product(held, tl.trans(tl.load(asks + keys, mask=is_key, other=0.0)))
        u = u.to(kind)
        y += _product(u, tl.trans(tl.load(mixes + rows * C + row[None, :])))
        state *= last[None, :]
        state += _product(u, tl.load(keeps + keys, mask=is_key, other=0.0))
        y *= (tl.rsqrt(tl.sum(y * y, 0) / V + eps)[None, :] * norms) * _sigmoid(z.to(tl.float32))
        tl.store(out + (b * tokens + t) * heads * V + value, tl.trans(y.to(out.dtype.element_ty)), mask=here)
    tl.store(cells, state, mask=is_value & is_key)


def serves(inputs: tuple[Tensor, ...], w: DeltaWeights, s: DeltaState, floor: float | None) -> bool:
    """Whether the kernels are for such a layer: one key head for each value head, decays in reach, and that chip."""
    _, heads, value, key = s.S_BHVK.shape
    return (
        inputs[0].dtype == torch.bfloat16
        and key == value == 128
        and w.q_conv.shape[0] == w.decay_bias.numel() == heads * key
        and floor is not None
        and -floor * LOG2E.value * CHUNK / 4 <= REACH
        and inputs[0].is_cuda
        and torch.cuda.get_device_capability(inputs[0].device) == CHIP
    )


def delta_net(
    inputs: tuple[Tensor, ...], w: DeltaWeights, s: DeltaState, floor: float | None, eps: float, out: Tensor
) -> None:
    """Write what ``reference.delta_net`` returns to ``out``; the state's matrix advances, its tails stay."""
    q, gate = inputs[0], inputs[5]
    batch, heads, value, key = s.S_BHVK.shape
    tokens = q.shape[1]
    most = batch * heads * triton.cdiv(min(tokens, SLICE), CHUNK)
    reads, asks, keeps = (q.new_empty(most, CHUNK, key, dtype=torch.bfloat16) for _ in range(3))
    writes = q.new_empty(most, value, CHUNK, dtype=torch.bfloat16)
    mixes = q.new_empty(most, CHUNK, CHUNK, dtype=torch.bfloat16)
    lasts = q.new_empty(most, key, dtype=torch.float32)
    scratch = (reads, writes, asks, keeps, mixes, lasts)
    sizes = {"K": key, "V": value, "BK": key, "BV": value, "C": CHUNK}
    strides = [stride for x in inputs[:5] for stride in x.stride()[:2]]
    # Of each tap all channels together: read in wide pieces.
    taps = [x.t().contiguous() for x in w[:3]]
    for start in range(0, tokens, SLICE):
        chunks = triton.cdiv(min(tokens - start, SLICE), CHUNK)
        _prepare[(chunks, heads, batch)](
            *inputs[:5],
            *strides,
            *taps,
            w.decay_log,
            w.decay_bias,
            *s[:3],
            *scratch,
            tokens,
            start,
            floor or 0.0,
            key**-0.5,
            **sizes,
            W=w.q_conv.shape[1],
            LEVELS=CHUNK.bit_length() - 1,
            ROWS=ROWS,
            N=COLUMNS,
            num_warps=4,
            num_stages=1,
        )
        _advance[(heads, batch)](
            *scratch,
            gate,
            *gate.stride()[:2],
            w.norm,
            s.S_BHVK,
            out,
            tokens,
            start,
            chunks,
            eps,
            **sizes,
            num_warps=8,
            num_stages=3,
        )
