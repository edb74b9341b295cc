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
"""Tokens of a prompt that are prepared at a time: 1.3 KB of scratch memory each and head."""

ROWS = 16
"""Threads side by side that convolve a chunk, each its share of tokens one after the other."""

CHANNELS = 64
"""Channels that are convolved at a time: so many that weights are fetched as the inputs lie."""

COLUMNS = 32
"""Key channels that a program compares tokens in at a time: with more, registers do not suffice. Steps are summed for
twice as many: a product with 32 columns of them touched foreign memory on one H200 (Triton 3.6)."""

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
def _since(i, r):
    """A matrix that makes of steps their sums from token r(i) to token i, negative ones where r is the later one."""
    j = tl.trans(i)
    return tl.where((j > r) & (j <= i), 1.0, tl.where((j <= r) & (j > i), -1.0, 0.0)).to(tl.float16)


@triton.jit
def _inverse(L, i, LEVELS: tl.constexpr):
    """Invert I - L for a strictly lower matrix [C, C]: inverses of pairs of blocks are joined, from single rows on."""
    j = tl.trans(i)
    X = tl.where(i == j, 1.0, tl.where((j == i - 1) & (i % 2 == 1), L, 0.0))
    for half in range(1, LEVELS):
        block = i >> half
        earlier = tl.where(block % 2 == 1, block - 1, -1)
        X = _product(_product(X, tl.where(j >> half == earlier, L, 0.0)), X, X)
    return X


@triton.jit
def _one(which, a, b, c):
    """Choose a, b or c. What repeats is a loop: code is read from a small memory, too."""
    return tl.where(which == 0, a, tl.where(which == 1, b, c))


@triton.jit
def _input(x, x_token, tail, channels, t, row, tokens, step: tl.constexpr, W: tl.constexpr):
    """Inputs of a convolution ``step`` tokens after the rows; before the first token they are in the tail."""
    at = tl.minimum(t + row + step, tokens - 1)
    new = tl.load(x + at.to(tl.int64) * x_token, mask=at >= 0, other=0.0).to(tl.float32)
    if step < 0 and t == 0:
        new += tl.load(tail + (at + W - 1) * channels, mask=at < 0, other=0.0)
    return new


@triton.jit
def _convolve(
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
    normal,
    K: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Convolve a chunk from token t on, K channels from ``first`` on, to ``out`` [C, K]; ``normal``ised and scaled.

    A thread takes C / ROWS tokens one after the other, so that it reads few of them twice; all is asked for before
    anything is written. After the last token anything may follow that is a number where the last tokens are.
    """
    i = tl.arange(0, BK)[None, :]
    row = tl.arange(0, ROWS)[:, None] * (C // ROWS)
    x += first + i
    taps += first + i
    tail += first + i
    ys, sums = (), ()
    for begin in tl.static_range(0, K, BK):
        inputs = (_input(x + begin, x_token, tail + begin, channels, t, row, tokens, 1 - W, W),)
        for step in tl.static_range(2 - W, C // ROWS):
            inputs += (_input(x + begin, x_token, tail + begin, channels, t, row, tokens, step, W),)
        weights = (tl.load(taps + begin),)
        for j in tl.static_range(1, W):
            weights += (tl.load(taps + j * channels + begin),)
        for step in tl.static_range(C // ROWS):
            y = weights[0] * inputs[step]
            for j in tl.static_range(1, W):
                y += weights[j] * inputs[step + j]
            y = _silu(y)
            ys += (y,)
            sums += (tl.sum(y * y, 1),)
    for step in tl.static_range(C // ROWS):
        total = 1e-6
        for part in tl.static_range(K // BK):
            total += sums[step + part * (C // ROWS)]  # type: ignore[operator]
        size = tl.where(normal, tl.rsqrt(total) * scale, 1.0)[:, None]
        for part in tl.static_range(K // BK):
            y = ys[step + part * (C // ROWS)] * size
            tl.store(out + (row + step) * K + part * BK + i, y.to(out.dtype.element_ty))


@triton.jit
def _decays(
    decay,
    decay_token,
    bias,
    speed,
    floor,
    out,
    quarters,
    t,
    tokens,
    K: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Log-decays in base 2 of a chunk from token t on, to ``out`` [C, K], and the sum of each quarter, [4, K].

    11 bits of a step: e^x is off by 0.37 of 2^-12 at most, a factor in bfloat16 by 2^-9. They are stored as float16,
    in memory for bfloat16.
    """
    i = tl.arange(0, BK)[None, :]
    row = tl.arange(0, ROWS)[:, None] * (C // ROWS)
    for begin in tl.static_range(0, K, BK):
        total = tl.zeros([ROWS, BK], tl.float32)
        shift = tl.load(bias + begin + i)
        raw = (tl.load(decay + tl.minimum(t + row, tokens - 1).to(tl.int64) * decay_token + begin + i),)
        for step in tl.static_range(1, C // ROWS):
            at = tl.minimum(t + row + step, tokens - 1)
            raw += (tl.load(decay + at.to(tl.int64) * decay_token + begin + i),)
        for step in tl.static_range(C // ROWS):
            root = tl.rsqrt(1.0 + tl.exp2(speed * (raw[step].to(tl.float32) + shift)))
            g = tl.where(t + row + step < tokens, floor * (root * root), 0.0).to(tl.float16)
            total += g.to(tl.float32)
            tl.store(out + (row + step) * K + begin + i, g.to(out.dtype.element_ty, bitcast=True))
        quarter = tl.sum(tl.reshape(total, [4, ROWS // 4, BK]), 1)
        tl.store(quarters + tl.arange(0, 4)[:, None] * K + begin + i, quarter)


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
    quarters,
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
    BC: tl.constexpr,
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
    channels, channel = heads * K, head * K
    tail = b * (W - 1) * channels
    for which in range(3):
        _convolve(
            _one(which, q + b * q_batch, k + b * k_batch, v + b * v_batch),
            _one(which, q_token, k_token, v_token),
            _one(which, q_conv, k_conv, v_conv),
            _one(which, q_tail, k_tail, v_tail) + tail,
            _one(which, asks, keeps, writes),
            channels,
            channel,
            t,
            tokens,
            tl.where(which == 0, scale, 1.0),
            which < 2,
            K,
            W,
            C,
            ROWS,
            BC,
        )
    decay += b * decay_batch + channel
    speed = -LOG2E * tl.exp(tl.load(decay_log + head))
    quarters += slot * 4 * K
    _decays(decay, decay_token, decay_bias + channel, speed, LOG2E * floor, reads, quarters, t, tokens, K, C, ROWS, BC)
    tl.debug_barrier()

    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    late = row >= C // 2
    ones = _since(row, (row & -(C // 2)) + C // 4 - 1)
    P = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for begin in range(0, K, 2 * N):
        steps = tl.load(reads + row * K + begin + tl.arange(0, 2 * N)[None, :]).to(tl.float16, bitcast=True)
        # Both halves of a chunk refer to a token in their middle: REACH keeps them in the range of numbers.
        both = tl.reshape(tl.dot(ones, steps), [C, 2, N])
        # All threads have read.
        tl.debug_barrier()
        since = tl.split(tl.permute(both, [0, 2, 1]))
        for part in tl.static_range(2):
            own = since[part]
            i = begin + part * N + tl.arange(0, N)[None, :]
            place = row * K + i
            queries, keys = tl.load(asks + place), tl.load(keeps + place)
            first, second = tl.load(quarters + i), tl.load(quarters + K + i)
            third, fourth = tl.load(quarters + 2 * K + i), tl.load(quarters + 3 * K + i)
            tl.store(lasts + slot * K + i, tl.exp2(first + second + third + fourth))
            up, down = tl.exp2(own), tl.exp2(-own)
            before = keys * down
            lasting = tl.where(late, tl.exp2(fourth), tl.exp2(second + third + fourth))
            x = tl.exp2(own + tl.where(late, second + third, 0.0))
            earlier = tl.trans(tl.where(late, 0.0, before))
            P = _product(keys * x, earlier, P)
            A = _product(queries * x, earlier, A)
            earlier = tl.trans(tl.where(late, before, 0.0))
            after, asked = keys * up, queries * up
            P = _product(after, earlier, P)
            A = _product(asked, earlier, A)
            sofar = tl.where(late, tl.exp2(first + second + third), tl.exp2(first))
            tl.store(keeps + place, (before * lasting).to(kind))
            tl.store(asks + place, (asked * sofar).to(kind))
            tl.store(reads + place, (after * sofar).to(kind))

    tl.store(mixes + (slot * C + row) * C + column, tl.where(row >= column, A, 0.0).to(kind))
    beta += b * beta_batch + t.to(tl.int64) * beta_token + head
    # Nothing is written after the last token.
    strength = _sigmoid(tl.load(beta + row * beta_token, mask=t + row < tokens, other=float("-inf")).to(tl.float32))
    X = _inverse(tl.where(row > column, -strength * P, 0.0), row, LEVELS)
    X *= _sigmoid(tl.load(beta + column * beta_token, mask=t + column < tokens, other=float("-inf")).to(tl.float32))
    X = X.to(kind)
    tl.debug_barrier()
    i = tl.arange(0, BK)[None, :]
    tl.store(reads + row * K + i, _product(X, tl.load(reads + row * K + i)).to(kind))
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
    quarters = q.new_empty(most, 4, key, dtype=torch.float32)
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
            quarters,
            tokens,
            start,
            floor or 0.0,
            key**-0.5,
            **sizes,
            W=w.q_conv.shape[1],
            LEVELS=CHUNK.bit_length() - 1,
            ROWS=ROWS,
            BC=CHANNELS,
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
