"""GPU kernels for ``training.kda``: the 16 x 16 triangular inverse and the state recursion.

One program handles one row and head and walks over its chunks with the state
(64 x 64, float32) in registers.  Same results as the *_reference functions.
"""

import torch
import triton
import triton.language as tl

PRECISION = "tf32"


@triton.jit
def _inverse(A, X, C: tl.constexpr):
    """Forward substitution: row i of X is e_i - sum_j<i A_ij X_j."""
    base = tl.program_id(0).to(tl.int64) * C * C
    r = tl.arange(0, C)
    x = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, C):
        a = tl.load(A + base + i * C + r)  # row i, zero from column i on
        row = tl.sum(tl.where(r[:, None] < i, a[:, None] * x, 0.0), 0)
        x = tl.where(r[:, None] == i, x - row[None, :], x)
    tl.store(X + base + r[:, None] * C + r[None, :], x)


def unit_lower_inverse(A):
    """(I + A)^-1 of strictly lower-triangular A [.., 16, 16]."""
    A = A.contiguous()
    X = torch.empty_like(A)
    _inverse[(A.numel() // (A.shape[-1] ** 2),)](A, X, A.shape[-1], num_warps=1)
    return X


@triton.jit
def _forward(
    ATT,
    UW,
    Q,
    KE,
    LAST,
    S0,
    OUT,
    NEW,
    STATES,
    SEND,
    N,
    H,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
):
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    rc, rk, rv = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    kv = rk[:, None] * V + rv[None, :]
    s = tl.load(S0 + tl.program_id(0).to(tl.int64) * K * V + kv)
    for n in range(N):
        i = (row * N + n).to(tl.int64) * H + h
        tl.store(STATES + i * K * V + kv, s)
        uw = UW + i * C * (K + V) + rc[:, None] * (K + V)
        u = tl.load(uw + rv[None, :])
        w = tl.load(uw + V + rk[None, :])
        q = tl.load(Q + i * C * K + rc[:, None] * K + rk[None, :])
        keT = tl.load(KE + i * C * K + rc[None, :] * K + rk[:, None])
        att = tl.load(ATT + i * C * C + rc[:, None] * C + rc[None, :])
        last = tl.load(LAST + i * K + rk)
        new = u - tl.dot(w, s, input_precision=P)
        o = tl.dot(q, s, input_precision=P) + tl.dot(att, new, input_precision=P)
        s = s * last[:, None] + tl.dot(keT, new, input_precision=P)
        cv = i * C * V + rc[:, None] * V + rv[None, :]
        tl.store(OUT + cv, o)
        tl.store(NEW + cv, new)
    tl.store(SEND + tl.program_id(0).to(tl.int64) * K * V + kv, s)


def recursion_forward(att, UW, Q, Ke, last, S0, rows):
    """See ``kda.recursion_forward_reference``."""
    nc, h, c, k = Q.shape
    v = UW.shape[-1] - k
    att, UW, S0 = att.contiguous(), UW.contiguous(), S0.contiguous()
    out, new = Q.new_empty(nc, h, c, v), Q.new_empty(nc, h, c, v)
    states, S = Q.new_empty(nc, h, k, v), torch.empty_like(S0)
    _forward[(rows * h,)](att, UW, Q, Ke, last, S0, out, new, states, S, nc // rows, h, c, k, v, PRECISION, num_warps=4)
    return out, new, states, S


@triton.jit
def _backward(
    DO,
    DSEND,
    ATT,
    UW,
    Q,
    KE,
    LAST,
    NEW,
    STATES,
    DATT,
    DUW,
    DQ,
    DKE,
    DLAST,
    DS0,
    N,
    H,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
):
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    rc, rk, rv = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    kv = rk[:, None] * V + rv[None, :]
    ds = tl.load(DSEND + tl.program_id(0).to(tl.int64) * K * V + kv)
    for m in range(N):
        i = (row * N + N - 1 - m).to(tl.int64) * H + h
        cv = i * C * V + rc[:, None] * V + rv[None, :]
        ck = i * C * K + rc[:, None] * K + rk[None, :]
        cc = i * C * C + rc[:, None] * C + rc[None, :]
        uw = i * C * (K + V) + rc[:, None] * (K + V)
        do = tl.load(DO + cv)
        new = tl.load(NEW + cv)
        s = tl.load(STATES + i * K * V + kv)
        ke = tl.load(KE + ck)
        last = tl.load(LAST + i * K + rk)
        attT = tl.load(ATT + i * C * C + rc[None, :] * C + rc[:, None])
        qT = tl.load(Q + i * C * K + rc[None, :] * K + rk[:, None])
        wT = tl.load(UW + i * C * (K + V) + rc[None, :] * (K + V) + V + rk[:, None])
        dnew = tl.dot(attT, do, input_precision=P) + tl.dot(ke, ds, input_precision=P)
        sT = tl.trans(s)
        tl.store(DKE + ck, tl.dot(new, tl.trans(ds), input_precision=P))
        tl.store(DLAST + i * K + rk, tl.sum(s * ds, 1))
        tl.store(DATT + cc, tl.dot(do, tl.trans(new), input_precision=P))
        tl.store(DQ + ck, tl.dot(do, sT, input_precision=P))
        tl.store(DUW + uw + rv[None, :], dnew)
        tl.store(DUW + uw + V + rk[None, :], -tl.dot(dnew, sT, input_precision=P))
        ds = ds * last[:, None] + tl.dot(qT, do, input_precision=P) - tl.dot(wT, dnew, input_precision=P)
    tl.store(DS0 + tl.program_id(0).to(tl.int64) * K * V + kv, ds)


def recursion_backward(dO, dS, att, UW, Q, Ke, last, new, states, rows):
    """See ``kda.recursion_backward_reference``."""
    nc, h, c, k = Q.shape
    v = UW.shape[-1] - k
    att, UW = att.contiguous(), UW.contiguous()
    datt, dUW, dQ, dKe, dlast, dS0 = (torch.empty_like(x) for x in (att, UW, Q, Ke, last, dS))
    _backward[(rows * h,)](
        dO,
        dS,
        att,
        UW,
        Q,
        Ke,
        last,
        new,
        states,
        datt,
        dUW,
        dQ,
        dKe,
        dlast,
        dS0,
        nc // rows,
        h,
        c,
        k,
        v,
        PRECISION,
        num_warps=4,
    )
    return datt, dUW, dQ, dKe, dlast, dS0
