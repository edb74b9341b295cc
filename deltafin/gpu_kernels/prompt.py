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

SLICE = 4096
"""Tokens of a prompt that are prepared at a time: 1.7 KB of scratch memory each and head."""

ROWS = 16
"""Threads side by side that convolve a chunk, each its share of tokens one after the other."""

CHANNELS = 64
"""Channels that are convolved at a time: so many that weights are fetched as the inputs lie."""

REGISTERS = 168
"""Of a thread that prepares, so that three programs share a multiprocessor: with four, too much of them is spilled."""

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
def _product(a, b, total=None):
    """``total + a @ b`` of bfloat16, with float32 sums."""
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)


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
    x += at.to(tl.int64) * x_token
    if step < 0:
        new = tl.load(x, mask=at >= 0, other=0.0).to(tl.float32)
        if t == 0:
            new += tl.load(tail + (at + W - 1) * channels, mask=at < 0, other=0.0)
    else:
        new = tl.load(x)
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

    ``taps`` [W, channels] are -log2(e) times the weights, what ``exp2`` takes in a SiLU, which is undone with the norm.
    A thread takes C / ROWS tokens one after the other, so that it reads few of them twice; all is asked for before
    anything is written. After the last token anything may follow that is a number where the last tokens are.
    """
    i = tl.arange(0, BK)[None, :]
    row = tl.arange(0, ROWS)[:, None] * (C // ROWS)
    x += first + i
    taps += first + i
    tail += first + i
    ys, sums, inputs = (), (), ()
    for begin in tl.static_range(0, K, BK):
        for step in tl.static_range(1 - W, C // ROWS):
            inputs += (_input(x + begin, x_token, tail + begin, channels, t, row, tokens, step, W),)
    for begin in tl.static_range(0, K, BK):
        weights = (tl.load(taps + begin),)
        for j in tl.static_range(1, W):
            weights += (tl.load(taps + j * channels + begin),)
        for step in tl.static_range(C // ROWS):
            y = weights[0] * inputs[step].to(tl.float32)  # type: ignore[attr-defined]
            for j in tl.static_range(1, W):
                y += weights[j] * inputs[step + j].to(tl.float32)  # type: ignore[attr-defined]
            root = tl.rsqrt(1.0 + tl.exp2(y))
            y *= root * root
            ys += (y,)
            sums += (tl.sum(y * y, 1),)
        inputs = inputs[C // ROWS + W - 1 :]
    for step in tl.static_range(C // ROWS):
        total = 1e-6 * LOG2E * LOG2E
        for part in tl.static_range(K // BK):
            total += sums[step + part * (C // ROWS)]  # type: ignore[operator]
        size = tl.where(normal, tl.rsqrt(total) * -scale, -1.0 / LOG2E)[:, None]
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
    quarters,
    t,
    tokens,
    K: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Sums of a chunk's log-decays in base 2, from the middle of a token's half on, to that token: tiles [ROWS, BK].

    Negative ones of what follows, where the token is before the middle. There are as many tiles as a thread has tokens,
    for each BK channels. What a quarter of the chunk multiplies by goes to ``quarters`` [4, K].
    """
    i = tl.arange(0, BK)[None, :]
    row = tl.arange(0, ROWS)[:, None] * (C // ROWS)
    quarter = tl.arange(0, 4)[:, None]
    since = ()
    for begin in tl.static_range(0, K, BK):
        shift = speed * tl.load(bias + begin + i)
        raw = ()
        for step in tl.static_range(C // ROWS):
            at = tl.minimum(t + row + step, tokens - 1)
            raw += (tl.load(decay + at.to(tl.int64) * decay_token + begin + i),)
        total = tl.zeros([ROWS, BK], tl.float32)
        sums = ()
        for step in tl.static_range(C // ROWS):
            root = tl.rsqrt(1.0 + tl.exp2(speed * raw[step].to(tl.float32) + shift))  # type: ignore[attr-defined]
            total += tl.where(t + row + step < tokens, floor, 0.0) * (root * root)
            sums += (total,)
        of_quarter = tl.reshape(total, [4, ROWS // 4, BK])
        whole = tl.sum(of_quarter, 1)
        tl.store(quarters + quarter * K + begin + i, tl.exp2(whole))
        before = tl.cumsum(of_quarter, 1) - tl.where(quarter % 2 == 0, whole, 0.0)[:, None, :]
        before = tl.reshape(before, [ROWS, BK]) - total
        for step in tl.static_range(C // ROWS):
            since += (sums[step] + before,)
    return since


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
    taps,
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
    befores,
    afters,
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
):
    """One chunk of one head up to where the state is needed.

    With ``quarters[0]`` times the state before the chunk, S [V, K], its writes [V, C] are ``writes - S @ reads.T``, its
    outputs ``S @ asks.T + (those) @ mixes.T``, and the state after it ``lasts * S + (those) @ keeps``. Pairs of tokens
    take their decay from a token in the middle of the half that the earlier one is in: REACH keeps both factors in the
    range of numbers. ``befores`` and ``afters`` [C, K] hold what only this program needs.
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
            taps + which * W * channels,
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
    since = _decays(decay, decay_token, decay_bias + channel, speed, LOG2E * floor, quarters, t, tokens, K, C, ROWS, BC)
    tl.debug_barrier()
    befores += slot * C * K
    afters += slot * C * K
    row = tl.arange(0, ROWS)[:, None] * (C // ROWS)
    late = row >= C // 2
    for begin in tl.static_range(0, K, BC):
        i = begin + tl.arange(0, BC)[None, :]
        second, third = tl.load(quarters + K + i), tl.load(quarters + 2 * K + i)
        fourth = tl.load(quarters + 3 * K + i)
        rest = second * third * fourth
        tl.store(lasts + slot * K + i, rest)
        # Each thread has written these itself, and writes there again.
        queries, keys = (), ()
        for step in tl.static_range(C // ROWS):
            queries += (tl.load(asks + (row + step) * K + i),)
            keys += (tl.load(keeps + (row + step) * K + i),)
        for step in tl.static_range(C // ROWS):
            own = since[begin // BC * (C // ROWS) + step]
            place = (row + step) * K + i
            before = keys[step] * tl.exp2(-own)  # type: ignore[operator]
            tl.store(befores + place, before.to(kind))
            tl.store(keeps + place, (before * tl.where(late, fourth, rest)).to(kind))
            up = tl.exp2(own)
            # Of the second half, for pairs within it: queries, then keys.
            tl.store(afters + place - C // 2 * K, (queries[step] * up).to(kind), mask=late)
            tl.store(afters + place, (keys[step] * up).to(kind), mask=late)
            # One after the other: their product may be too small for a number.
            up = up * tl.where(late, third, 1.0) * tl.where(late, second, 1.0)
            tl.store(asks + place, (queries[step] * up).to(kind))
            tl.store(reads + place, (keys[step] * up).to(kind))
    tl.debug_barrier()

    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    half, i = tl.arange(0, C // 2)[:, None], tl.arange(0, BK)[None, :]
    left, place = tl.trans(half), row * K + i
    earlier = tl.trans(tl.load(befores + half * K + i))
    P = _product(tl.load(reads + place), earlier)
    A = _product(tl.load(asks + place), earlier)
    both = _product(tl.load(afters + place), tl.trans(tl.load(befores + (half + C // 2) * K + i)))
    P = tl.reshape(tl.permute(tl.join(P, both), [0, 2, 1]), [C, C])
    mixes += slot * C * C
    tl.store(mixes + row * C + left, tl.where(row >= left, A, 0.0).to(kind))
    # The queries of the second half are the first rows of ``both``; the first half's take nothing from there.
    place = (row + C // 2) % C * C + C // 2 + left
    tl.store(mixes + place, tl.where((row < C // 2) & (row >= left), both, 0.0).to(kind))
    beta += b * beta_batch + t.to(tl.int64) * beta_token + head
    # Nothing is written after the last token.
    strength = _sigmoid(tl.load(beta + row * beta_token, mask=t + row < tokens, other=float("-inf")).to(tl.float32))
    o = tl.arange(0, BV)[None, :]
    value = tl.load(writes + row * V + o, mask=o < V, other=0.0)
    X = _inverse(tl.where(row > column, -strength * P, 0.0), row, LEVELS)
    X *= _sigmoid(tl.load(beta + column * beta_token, mask=t + column < tokens, other=float("-inf")).to(tl.float32))
    X = X.to(kind)
    tl.debug_barrier()
    i = tl.arange(0, BK)[None, :]
    tl.store(reads + row * K + i, _product(X, tl.load(reads + row * K + i)).to(kind))
    x = _product(X, value).to(kind)
    tl.store(writes + o * C + row, x, mask=o < V)


@_launched(do_not_specialize=["tokens", "start", "chunks"])
def _advance(
    reads,
    writes,
    asks,
    keeps,
    mixes,
    lasts,
    quarters,
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
        state *= tl.load(quarters + slot * 4 * K + i, mask=i < K, other=0.0)[None, :]
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
    reads, asks, keeps, befores, afters = q.new_empty(5, most, CHUNK, key, dtype=torch.bfloat16).unbind()
    writes = q.new_empty(most, value, CHUNK, dtype=torch.bfloat16)
    mixes = q.new_empty(most, CHUNK, CHUNK, dtype=torch.bfloat16)
    lasts = q.new_empty(most, key, dtype=torch.float32)
    quarters = q.new_empty(most, 4, key, dtype=torch.float32)
    scratch = (reads, writes, asks, keeps, mixes, lasts, quarters)
    sizes = {"K": key, "V": value, "BK": key, "BV": value, "C": CHUNK}
    strides = [stride for x in inputs[:5] for stride in x.stride()[:2]]
    # Of each tap all channels together: read in wide pieces.
    taps = torch.stack([x.t() for x in w[:3]]).mul_(-LOG2E.value)
    for start in range(0, tokens, SLICE):
        chunks = triton.cdiv(min(tokens - start, SLICE), CHUNK)
        _prepare[(chunks, heads, batch)](
            *inputs[:5],
            *strides,
            taps,
            w.decay_log,
            w.decay_bias,
            *s[:3],
            *scratch,
            befores,
            afters,
            tokens,
            start,
            floor or 0.0,
            key**-0.5,
            **sizes,
            W=w.q_conv.shape[1],
            LEVELS=CHUNK.bit_length() - 1,
            ROWS=ROWS,
            BC=CHANNELS,
            num_warps=4,
            num_stages=1,
            maxnreg=REGISTERS,
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
