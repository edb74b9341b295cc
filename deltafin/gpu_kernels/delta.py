"""A delta-rule layer between its projections, ``delta_net``: one launch for a few tokens, chunks of 64 for many."""

from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafin.gpu_kernels import prompt
from deltafin.gpu_kernels.early import early, wait
from deltafin.ops import FEW, DeltaState, DeltaWeights, has_halves, reference

CHUNK = 64
"""Tokens whose writes to the state are solved for together in prefill; half as many where products are of float32."""

AHEAD = tl.constexpr(3)
"""Tokens of a few whose inputs are on their way."""

BLOCK = 16
"""Tokens of a chunk whose triangular system is solved token by token; larger ones are put together from these."""

SLICE = 2048
"""Tokens of a prompt that are prepared at a time: 2.4 KB of scratch memory each and head of 128, float32 4.5 KB."""

CHANNELS = ("q", "k", "v", "decay", "beta", "gate")

_launched = cast("Callable[..., Any]", triton.jit)
"""What makes a kernel of a function, to be launched as kernel[grid](...)."""

# Offsets of tokens are taken in 64 bits: a prompt's projections may pass 2^31 numbers. Nothing about an activation
# is compiled in, neither its strides nor how its address is aligned: the same kernel serves every number of tokens.
_PLAIN = [f"{x}_{stride}" for x in CHANNELS for stride in ("batch", "token")] + ["tokens"]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """``log(1 + e^x)``; the series of 2 atanh(y / (2 + y)) keeps the digits that ``log(1 + y)`` loses."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
    return tl.where(x > 0, x, 0.0) + 2.0 * s * series


@triton.jit
def _log_decay(z, bias, log, floor, FLOORED: tl.constexpr):
    if FLOORED:
        return floor * _sigmoid(tl.exp(log) * (z + bias))
    else:
        return -tl.exp(log) * _softplus(z + bias)


@triton.jit
def _inputs(x, stride, tail, all_channels, channel, mask, at, early, W: tl.constexpr):
    """Inputs of a convolution at tokens ``at``; only if ``early`` some are before the first, in the tail."""
    new = tl.load(x + at * stride + channel, mask=mask & (at >= 0), other=0.0).to(tl.float32)
    if early:
        new += tl.load(tail + (at + W - 1) * all_channels + channel, mask=mask & (at < 0), other=0.0)
    return new


@triton.jit
def _convolved(x, stride, taps, tail, all_channels, channel, mask, at, early, W: tl.constexpr):
    """The short convolution [tokens, channels] at tokens ``at`` and its SiLU; ``taps`` [W, channels]."""
    y = tl.zeros(mask.shape, tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(taps + j * all_channels + channel, mask=channel < all_channels, other=0.0)
        y += tap * _inputs(x, stride, tail, all_channels, channel, mask, at - (W - 1 - j), early, W)
    return y * _sigmoid(y)


@triton.jit
def _one_of(role, q, k, v, decay):
    """What belongs to a role: 0 is a query, 1 a key, 2 a value, 3 a decay."""
    return tl.where(role == 0, q, tl.where(role == 1, k, tl.where(role == 2, v, decay)))


@triton.jit
def _over_keys(x):
    """Sum [values, pieces, LANES] to [values]."""
    return tl.sum(tl.sum(x, 1), 1)


@_launched(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=CHANNELS)
def _few_tokens(
    q,
    k,
    v,
    decay,
    beta,
    gate,
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
    gate_batch,
    gate_token,
    q_conv,
    k_conv,
    v_conv,
    decay_log,
    decay_bias,
    norm,
    q_tail,
    k_tail,
    v_tail,
    S,
    prepared,
    out,
    tokens,
    floor,
    eps,
    scale,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    FLOORED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One key head with all its value heads: nobody else reads or writes its state and tails.

    All that is read of memory is asked for at once; what a token takes of its inputs is made by threads that each have
    one channel of the query, the key, the value or the decay.
    """
    key_head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_heads = tl.num_programs(0)
    heads = key_heads * GROUPS
    C: tl.constexpr = max(BK, BV)
    place = tl.arange(0, 4 * C)
    role, c = place // C, place % C
    is_value, is_decay = role == 2, role == 3
    live = c < tl.where(is_value, V, K)
    is_input = live & (role < 3)
    channels = tl.where(is_value, heads * V, key_heads * K)
    taps_at = _one_of(role, q_conv, k_conv, v_conv, v_conv)
    tails_at = _one_of(role, q_tail, k_tail, v_tail, v_tail) + b * (W - 1) * channels
    inputs_at = _one_of(role, q + b * q_batch, k + b * k_batch, v + b * v_batch, decay + b * decay_batch)
    stride = _one_of(role, q_token, k_token, v_token, decay_token)
    # The state's keys are cut in pieces, [values, pieces, LANES]: a thread then holds the same place of all pieces of a
    # row, and sums over keys cross few threads.
    n = tl.arange(0, BK // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    m = tl.arange(0, BV)
    inside = (m < V)[:, None, None] & (n < K)
    row, o = tl.arange(0, ROWS)[:, None], tl.arange(0, BV)[None, :]
    is_output = (row < tokens) & (o < V)
    SIZE: tl.constexpr = 4 * C + BV + 4  # of which the last 3 only keep the next in whole pieces of 16 bytes
    tl.assume(tokens > 0)
    wait(EARLY)
    norms = tl.load(norm + o, mask=o < V, other=0.0)
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        channel = tl.where(is_value, head * V, key_head * K) + c
        # Numbers of a head's decay: K of them, or one that all its channels share.
        rate = head * K + c if PER_CHANNEL else head + c * 0
        x_at = inputs_at + tl.where(is_decay, rate, channel)
        ahead = ()
        for t in tl.static_range(AHEAD):
            ahead = ahead + (tl.load(x_at + t * stride, mask=live & (t < tokens), other=0.0),)
        window = ()
        for j in tl.static_range(W - 1):
            window = window + (tl.load(tails_at + j * channels + channel, mask=is_input, other=0.0),)
        taps = ()
        for j in tl.static_range(W):
            taps = taps + (tl.load(taps_at + channel * W + j, mask=is_input, other=0.0),)
        bias = tl.load(decay_bias + rate, mask=live & is_decay, other=0.0)
        log = tl.load(decay_log + head)
        gates = tl.load(gate + b * gate_batch + row * gate_token + head * V + o, mask=is_output, other=0.0)
        strength = tl.load(beta + b * beta_batch + row * beta_token + head, mask=row < tokens, other=0.0)
        cells = S + (b * heads + head) * V * K + m[:, None, None] * K + n
        state = tl.load(cells, mask=inside, other=0.0)
        # The prepared tokens pass through memory: each thread takes from there what its part of the state needs.
        to = prepared + (b * heads + head) * ROWS * SIZE
        tl.store(to + row * SIZE + 4 * C + o, norms * _sigmoid(gates.to(tl.float32)), mask=is_output)
        tl.store(to + row * SIZE + 4 * C + BV, _sigmoid(strength.to(tl.float32)), mask=row < tokens)
        for t in range(tokens):
            z = ahead[0].to(tl.float32)
            x_at += stride
            then = x_at + (AHEAD - 1) * stride
            ahead = ahead[1:] + (tl.load(then, mask=live & (t + AHEAD < tokens), other=0.0),)
            y = tl.zeros(z.shape, tl.float32)
            window = window + (z,)
            for j in tl.static_range(W):
                y += taps[j] * window[j]
            window = window[1:]
            y = tl.where(is_decay, tl.exp(_log_decay(z, bias, log, floor, FLOORED)), y * _sigmoid(y))
            tl.store(to + place, y, mask=live)
            to += SIZE
        tl.debug_barrier()
        # All threads have read the old tails as well; those of queries and keys are other groups' too.
        for j in tl.static_range(W - 1):
            done = is_input & (is_value | (group == GROUPS - 1))
            tl.store(tails_at + j * channels + channel, window[j], mask=done)
        token = prepared + (b * heads + head) * ROWS * SIZE
        for t in range(tokens):
            kt = tl.load(token + C + n, mask=n < K, other=0.0)
            qt = tl.load(token + n, mask=n < K, other=0.0)
            state *= tl.load(token + 3 * C + n, mask=n < K, other=0.0)
            vt = tl.load(token + 2 * C + m, mask=m < V, other=0.0)
            factor = tl.load(token + 4 * C + m, mask=m < V, other=0.0)
            write = tl.load(token + 4 * C + BV)
            k_norm = tl.rsqrt(_over_keys(tl.broadcast_to(kt * kt, state.shape)) + 1e-6)
            q_norm = tl.rsqrt(_over_keys(tl.broadcast_to(qt * qt, state.shape)) + 1e-6) * scale
            # What the state answers after its change is what it answers before, and what the change does.
            error = write * k_norm * (vt - k_norm * _over_keys(state * kt))
            y = q_norm * (_over_keys(state * qt) + error * _over_keys(tl.broadcast_to(kt * qt, state.shape)))
            state += error[:, None, None] * kt
            tl.store(cells, state, mask=inside & (t + 1 == tokens))
            y *= tl.rsqrt(tl.sum(y * y) / V + eps) * factor
            tl.store(out + ((b * tokens + t) * heads + head) * V + m, y, mask=m < V)
            token += SIZE


@triton.jit
def _product(a, b, FORM: tl.constexpr):
    """``a @ b`` with float32 sums: of bfloat16, or of float32 as exact as FORM says."""
    if FORM == "bfloat16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a, b, input_precision=FORM)


@triton.jit
def _running_sums(g, FORM: tl.constexpr, C: tl.constexpr):
    """Sums of ``g`` [C, N] down the rows, so exact that nearly equal ones can be subtracted."""
    if FORM == "bfloat16":
        # Two parts of 8 bits each are what products with ones take exactly; a scan moves far more data.
        ones = (tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]).to(tl.bfloat16)
        coarse = g.to(tl.bfloat16)
        return tl.dot(ones, (g - coarse.to(tl.float32)).to(tl.bfloat16), tl.dot(ones, coarse))
    else:
        return tl.cumsum(g.to(tl.float64), 0)


@triton.jit
def _decayed_products(
    P,
    A,
    q,
    k,
    G,
    sums,
    n,
    SAFE: tl.constexpr,
    FORM: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Add what the channels ``n`` make of P and A (both lower) of a chunk, as ``ops.reference`` defines them.

    ``sums`` points to the chunk's G. A pair of tokens i, j takes its decay as e^(G_i - G_r) e^(G_r - G_j), from a
    token r in the middle of a block of rows. Where r lies between the two, both exponents are at most 0. So blocks
    are halved, later half against earlier half, until r is so near to all tokens of its block that both factors can
    be had for all pairs that remain.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    far = 1
    for level in range(LEVELS):
        size = C >> level
        if far > 0:
            middle = (i & -size) + ((size - 1) >> 1)
            since = (G - tl.load(sums + middle * K + n, mask=n < K, other=0.0)).to(tl.float32)
            # As a number: not one that is not, which then shows in the products.
            far = (tl.max(tl.abs(since)) > SAFE).to(tl.int32)
            # Of its block, a row takes the earlier half if it is in the later one, or where it may all up to itself.
            upto = tl.where(far > 0, tl.where(i > middle, middle, -1), i)
            taken = (j >= (i & -size)) & (j <= upto)
            before = tl.trans(k * tl.exp(-since))
            since = tl.exp(since)
            P += tl.where(taken, _product(k * since, before, FORM), 0.0)
            A += tl.where(taken, _product(q * since, before, FORM), 0.0)
    return P, A


@triton.jit
def _join(X, L, SIZE: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr):
    """Put the inverses of pairs of blocks together to blocks of SIZE rows."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    halves = (i // SIZE == j // SIZE) & (i % SIZE >= SIZE // 2) & (j % SIZE < SIZE // 2)
    return X - _product(_product(X, tl.load(L + i * C + j, mask=halves, other=0.0), EXACT), X, EXACT)


@triton.jit
def _inverse(L, EXACT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Invert I + L for the strictly lower matrix [C, C] at ``L``: blocks by substitution, then pairs by products."""
    # Turned, [columns, rows of their block]: then few threads share a column.
    column, row = tl.arange(0, C)[:, None], tl.arange(0, BLOCK)[None, :]
    corner = column // BLOCK * BLOCK
    X = tl.where(row == column % BLOCK, 1.0, 0.0)
    for step in range(BLOCK - 1):
        X -= tl.load(L + (corner + row) * C + corner + step) * tl.sum(tl.where(row == step, X, 0.0), 1)[:, None]
    own = (column // BLOCK)[:, :, None] == tl.arange(0, C // BLOCK)[None, :, None]
    X = tl.trans(tl.reshape(tl.where(own, X[:, None, :], 0.0), [C, C]))
    for level in tl.static_range(1, 6):
        if BLOCK << level <= C:
            X = _join(X, L, BLOCK << level, EXACT, C)
    return X


@_launched(do_not_specialize=["tokens", "start"])
def _normalise(
    x,
    x_batch,
    x_token,
    taps,
    tail,
    out,
    tokens,
    start,
    scale,
    K: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Convolved and normalised queries or keys of one key head, zero after the last token."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    row, i = block * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BK)[None, :]
    t = (start + row).to(tl.int64)
    mask, early = (t < tokens) & (i < K), start + block == 0
    tail += b * (W - 1) * heads * K
    y = _convolved(x + b * x_batch, x_token, taps, tail, heads * K, head * K + i, mask, t, early, W)
    y = tl.where(mask, y, 0.0)
    y *= (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * scale)[:, None]
    place = ((b * heads + head) * tl.num_programs(0) * ROWS + row) * K + i
    tl.store(out + place, y.to(out.dtype.element_ty), mask=i < K)


@_launched(do_not_specialize=["tokens", "start"])
def _decays(
    decay,
    decay_batch,
    decay_token,
    decay_log,
    decay_bias,
    sums,
    tokens,
    start,
    floor,
    K: tl.constexpr,
    BK: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    FLOORED: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
):
    """The running sums of the log-decays inside one chunk of one head."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, i = tl.arange(0, C)[:, None], tl.arange(0, BK)[None, :]
    t = (start + chunk * C + row).to(tl.int64)
    # Numbers of a head's decay: K of them, or one that all its channels share.
    rate = head * K + i if PER_CHANNEL else head + i * 0
    mask = (t < tokens) & (i < K)
    z = tl.load(decay + b * decay_batch + t * decay_token + rate, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(decay_bias + rate, mask=i < K, other=0.0)
    g = _log_decay(z, bias, tl.load(decay_log + head), floor, FLOORED)
    # e^-120 is 0: a larger step, even an infinite one, does the same.
    g = tl.where(mask, tl.where(g < -120.0, -120.0, g), 0.0)
    slot = (b * tl.num_programs(1) + head) * tl.num_programs(0) + chunk
    tl.store(sums + (slot * C + row) * K + i, _running_sums(g, FORM, C), mask=i < K)


@_launched(do_not_specialize=["tokens", "start"])
def _compare(
    queries,
    keys,
    sums,
    beta,
    beta_batch,
    beta_token,
    system,
    mixes,
    reads,
    asks,
    keeps,
    lasts,
    tokens,
    start,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    N: tl.constexpr,
    SAFE: tl.constexpr,
    FORM: tl.constexpr,
):
    """All tokens of one chunk of one head with each other, and the keys and queries as the state will meet them."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, heads = tl.num_programs(0), tl.num_programs(1)
    kind = mixes.dtype.element_ty
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    slot = (b * heads + head) * chunks + chunk
    shared = ((b * heads + head) // GROUPS * chunks + chunk) * C * K
    sums += slot * C * K
    t = (start + chunk * C + row).to(tl.int64)
    raw = tl.load(beta + b * beta_batch + t * beta_token + head, mask=t < tokens, other=0.0).to(tl.float32)
    strength = tl.where(t < tokens, _sigmoid(raw), 0.0)
    P = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for first in range(0, BK, N):
        i = first + tl.arange(0, N)[None, :]
        q = tl.load(queries + shared + row * K + i, mask=i < K, other=0.0)
        k = tl.load(keys + shared + row * K + i, mask=i < K, other=0.0)
        G = tl.load(sums + row * K + i, mask=i < K, other=0.0)
        last = tl.load(sums + (C - 1) * K + i, mask=i < K, other=0.0)
        place = (slot * C + row) * K + i
        tl.store(lasts + slot * K + i, tl.exp(last.to(tl.float32)), mask=i < K)
        tl.store(keeps + place, (k * tl.exp((last - G).to(tl.float32))).to(kind), mask=i < K)
        sofar = tl.exp(G.to(tl.float32))
        tl.store(asks + place, (q * sofar).to(kind), mask=i < K)
        tl.store(reads + place, (strength * k * sofar).to(kind), mask=i < K)
        P, A = _decayed_products(P, A, q, k, G, sums, i, SAFE, FORM, K, C, LEVELS)
    place = (slot * C + row) * C + column
    tl.store(system + place, tl.where(row > column, strength * P, 0.0))
    tl.store(mixes + place, A.to(kind))


@_launched(do_not_specialize=["tokens", "start"])
def _solve(
    v,
    beta,
    v_batch,
    v_token,
    beta_batch,
    beta_token,
    v_conv,
    v_tail,
    system,
    reads,
    writes,
    tokens,
    start,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One chunk of one head up to where the state is needed.

    The chunk's writes are ``writes - reads @ S``, its outputs ``asks @ S + mixes @ (those)``, and the state after it
    ``lasts * S + keeps.T @ (those)``.
    """
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    kind = reads.dtype.element_ty
    row = tl.arange(0, C)[:, None]
    slot = (b * heads + head) * tl.num_programs(0) + chunk
    X = _inverse(system + slot * C * C, EXACT, C, BLOCK).to(kind)
    for first in range(0, BK, N):
        i = first + tl.arange(0, N)[None, :]
        place = reads + (slot * C + row) * K + i
        tl.store(place, _product(X, tl.load(place, mask=i < K, other=0.0), FORM).to(kind), mask=i < K)
    t = (start + chunk * C + row).to(tl.int64)
    strength = _sigmoid(
        tl.load(beta + b * beta_batch + t * beta_token + head, mask=t < tokens, other=0.0).to(tl.float32)
    )
    tail, early = v_tail + b * (W - 1) * heads * V, start + chunk == 0
    for first in range(0, BV, N):
        o = first + tl.arange(0, N)[None, :]
        mask = (t < tokens) & (o < V)
        y = _convolved(v + b * v_batch, v_token, v_conv, tail, heads * V, head * V + o, mask, t, early, W)
        y = tl.where(mask, strength * y, 0.0)
        tl.store(writes + (slot * C + row) * V + o, _product(X, y, FORM).to(kind), mask=o < V)


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
    FORM: tl.constexpr,
):
    """One head's state through the chunks that are prepared, and their outputs with norm and gate."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    row, i, o = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    is_key, is_value = (i < K)[None, :], (o < V)[None, :]
    cells = S + (b * heads + head) * V * K + o[:, None] * K + i[None, :]
    inside = (o < V)[:, None] & is_key
    state = tl.trans(tl.load(cells, mask=inside, other=0.0))
    kind = reads.dtype.element_ty
    norms = tl.load(norm + o, mask=o < V, other=0.0)[None, :]
    first = (b * heads + head) * chunks
    for chunk in range(chunks):
        rows = ((first + chunk) * C + row)[:, None]
        keys, values = rows * K + i[None, :], rows * V + o[None, :]
        held = state.to(kind)
        u = tl.load(writes + values, mask=is_value, other=0.0).to(tl.float32)
        u -= _product(tl.load(reads + keys, mask=is_key, other=0.0), held, FORM)
        y = _product(tl.load(asks + keys, mask=is_key, other=0.0), held, FORM)
        u = u.to(kind)
        y += _product(tl.load(mixes + rows * C + row[None, :]), u, FORM)
        last = tl.load(lasts + (first + chunk) * K + i, mask=i < K, other=0.0)
        state *= last[:, None]
        state += _product(tl.trans(tl.load(keeps + keys, mask=is_key, other=0.0)), u, FORM)

        t = (start + chunk * C + row).to(tl.int64)[:, None]
        here = (t < tokens) & is_value
        value = head * V + o[None, :]
        y *= tl.rsqrt(tl.sum(y * y, 1) / V + eps)[:, None] * norms
        y *= _sigmoid(tl.load(gate + b * gate_batch + t * gate_token + value, mask=here, other=0.0).to(tl.float32))
        tl.store(out + (b * tokens + t) * heads * V + value, y, mask=here)
    tl.store(cells, tl.trans(state), mask=inside)


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
    """Advance a delta-rule layer by T tokens, all between its projections. Arguments as ``reference.delta_net``."""
    inputs = (q_BTC, k_BTC, v_BTC, decay_BTC, beta_BTH, gate_BTC)
    kept = (*w, *s)
    if (
        any(x.dtype not in (torch.float32, torch.bfloat16) or x.stride(-1) != 1 for x in inputs)
        or len({x.dtype for x in inputs}) > 1
        or any(x.dtype != torch.float32 or not x.is_contiguous() for x in kept)
    ):
        return reference.delta_net(*inputs, w, s, floor, eps)
    batch, tokens = q_BTC.shape[:2]
    out = q_BTC.new_empty(batch, tokens, v_BTC.shape[2])
    if tokens <= FEW:
        _few(inputs, w, s, floor, eps, out)
    else:
        many = prompt.delta_net if prompt.serves(inputs, w, s, floor) else _many
        many(inputs, w, s, floor, eps, out)
        _keep(inputs[:3], s[:3])
    return out


def _sizes(w: DeltaWeights, s: DeltaState, floor: float | None) -> dict[str, int]:
    """What the kernels are compiled for."""
    _, heads, value, key = s.S_BHVK.shape
    return {
        "GROUPS": heads * key // w.q_conv.shape[0],
        "K": key,
        "V": value,
        "W": w.q_conv.shape[1],
        "BK": max(16, triton.next_power_of_2(key)),
        "BV": max(16, triton.next_power_of_2(value)),
        "PER_CHANNEL": w.decay_bias.numel() > heads,
        "FLOORED": floor is not None,
    }


def _strides(inputs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(stride for x in inputs for stride in x.stride()[:2])


def _few(
    inputs: tuple[Tensor, ...], w: DeltaWeights, s: DeltaState, floor: float | None, eps: float, out: Tensor
) -> None:
    sizes = _sizes(w, s, floor)
    batch, heads, _, key = s.S_BHVK.shape
    size = 4 * max(sizes["BK"], sizes["BV"]) + sizes["BV"] + 4
    _few_tokens[(heads // sizes["GROUPS"], batch)](
        *inputs,
        *_strides(inputs),
        *w,
        *s,
        out.new_empty(batch, heads, FEW, size, dtype=torch.float32),
        out,
        inputs[0].shape[1],
        floor or 0.0,
        eps,
        key**-0.5,
        **sizes,
        ROWS=FEW,
        LANES=min(32, sizes["BK"]),
        num_warps=max(1, min(8, sizes["BK"] * sizes["BV"] // 1024)),
        **early(out.device),
    )


def _many(
    inputs: tuple[Tensor, ...], w: DeltaWeights, s: DeltaState, floor: float | None, eps: float, out: Tensor
) -> None:
    q, k, v, decay, beta, gate = inputs
    batch, heads, value, key = s.S_BHVK.shape
    tokens, sizes = q.shape[1], _sizes(w, s, floor)
    key_heads = heads // sizes["GROUPS"]
    form, exact = _precision(q, sizes)
    kind = torch.bfloat16 if form == "bfloat16" else torch.float32
    chunk = CHUNK if form == "bfloat16" else CHUNK // 2
    most = triton.cdiv(min(tokens, SLICE), chunk)
    queries, keys = (q.new_empty(batch * key_heads * most, chunk, key, dtype=kind) for _ in range(2))
    reads, asks, keeps = (q.new_empty(batch * heads * most, chunk, key, dtype=kind) for _ in range(3))
    writes = q.new_empty(batch * heads * most, chunk, value, dtype=kind)
    mixes = q.new_empty(batch * heads * most, chunk, chunk, dtype=kind)
    sums = q.new_empty(
        batch * heads * most, chunk, key, dtype=torch.float32 if kind == torch.bfloat16 else torch.float64
    )
    lasts = q.new_empty(batch * heads * most, key, dtype=torch.float32)
    system = q.new_empty(batch * heads * most, chunk, chunk, dtype=torch.float32)
    # Of each tap all channels together: read in wide pieces.
    taps = [x.t().contiguous() for x in w[:3]]
    scratch = (reads, writes, asks, keeps, mixes, lasts)
    for start in range(0, tokens, SLICE):
        chunks = triton.cdiv(min(tokens - start, SLICE), chunk)
        for x, tap, tail, y, scale in zip((q, k), taps[:2], s[:2], (queries, keys), (key**-0.5, 1.0), strict=True):
            _normalise[(chunks * chunk // BLOCK, key_heads, batch)](
                x,
                *_strides((x,)),
                tap,
                tail,
                y,
                tokens,
                start,
                scale,
                **{name: sizes[name] for name in ("K", "W", "BK")},
                ROWS=BLOCK,
            )
        _decays[(chunks, heads, batch)](
            decay,
            *_strides((decay,)),
            w.decay_log,
            w.decay_bias,
            sums,
            tokens,
            start,
            floor or 0.0,
            **{name: sizes[name] for name in ("K", "BK", "PER_CHANNEL", "FLOORED")},
            C=chunk,
            FORM=form,
        )
        _compare[(chunks, heads, batch)](
            queries,
            keys,
            sums,
            beta,
            *_strides((beta,)),
            system,
            mixes,
            reads,
            asks,
            keeps,
            lasts,
            tokens,
            start,
            **{name: sizes[name] for name in ("GROUPS", "K", "BK")},
            C=chunk,
            LEVELS=chunk.bit_length(),
            N=min(32, sizes["BK"]),
            SAFE=60 if form == "bfloat16" else 16,
            FORM=form,
            num_warps=4,
            num_stages=1,
        )
        _solve[(chunks, heads, batch)](
            v,
            beta,
            *_strides((v, beta)),
            taps[2],
            s.v_tail,
            system,
            reads,
            writes,
            tokens,
            start,
            **{name: sizes[name] for name in ("K", "V", "W", "BK", "BV")},
            C=chunk,
            BLOCK=BLOCK,
            N=min(64, sizes["BK"], sizes["BV"]),
            FORM=form,
            EXACT=exact,
            num_warps=4,
            num_stages=1,
        )
        _advance[(heads, batch)](
            *scratch,
            gate,
            *_strides((gate,)),
            w.norm,
            s.S_BHVK,
            out,
            tokens,
            start,
            chunks,
            eps,
            **{name: sizes[name] for name in ("K", "V", "BK", "BV")},
            C=chunk,
            FORM=form,
            num_warps=8,
            num_stages=2 if form == "bfloat16" else 1,
        )


def _keep(inputs: tuple[Tensor, ...], tails: tuple[Tensor, ...]) -> None:
    """Let the last inputs of the convolutions be what the next token meets."""
    for x, tail in zip(inputs, tails, strict=True):
        if x.shape[1] < tail.shape[1]:
            x = torch.cat([tail, x], 1)
        tail.copy_(x[:, x.shape[1] - tail.shape[1] :])


def _precision(x: Tensor, sizes: dict[str, int]) -> tuple[str, str]:
    """How products are taken: those of activations, and those that solve a chunk's system.

    Three TF32 products are one of float32 (on one H200, errors of 1.3e-6 at most in the cases of ``verify``); one is
    not. They hold a head's state twice in shared memory. The form for bfloat16 came out wrong there for heads of 24
    and 16 channels, right for 128: it is taken for multiples of 64.
    """
    if not x.is_cuda or not has_halves(x.device):
        return "ieee", "ieee"
    key, value = sizes["BK"], sizes["BV"]
    if x.dtype == torch.bfloat16 and sizes["K"] % 64 == 0 and sizes["V"] % 64 == 0:
        return "bfloat16", "bfloat16"
    memory = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
    exact = "tf32x3" if (key < 64 or value >= 64) and 8 * key * value <= memory else "ieee"
    return exact, exact
