"""Kimi Delta Attention (KDA) in chunk form, differentiable.

Per head, with keys and queries of width K and values of width V:

    S <- diag(exp(g_t)) S;   S <- S + k_t (x) beta_t (v_t - k_t^T S);   o_t = q_t^T S

A chunk of 16 tokens is handled with a few small matrix products, and only the
state passes from chunk to chunk.  K3 bounds the log decay at -5 a step, so 16
steps stay within e^-80; taken relative to the middle of the chunk both factors
stay within e^40, inside float32's range.

Documents.  Many documents share a row.  `docs` numbers them; every product
between tokens of different documents is masked, so that a document starts from
a zero state wherever in a chunk it begins.

Layout.  Everything here is flat: [tokens, heads, width].  Chunk tensors are
[chunks, heads, 16, width].  Rows only matter to the state recursion, which runs
over the chunks of all rows in parallel.
"""

import torch

CHUNK = 16

try:  # the GPU kernels; everything runs without them
    from training.kda_triton import recursion_backward, recursion_forward, unit_lower_inverse

    HAVE_TRITON = torch.cuda.is_available()
except ImportError:
    HAVE_TRITON = False


def to_chunks(x, size=CHUNK):
    """[tokens, heads, width] -> [chunks, heads, 16, width]."""
    n, h, d = x.shape
    return x.view(n // size, size, h, d).transpose(1, 2)


def chunk_terms(q, k, v, g, beta, docs, size=CHUNK):
    """Everything that needs no state, for all chunks at once.

    q, k: [tokens, heads, K]; v: [tokens, heads, V]; g: log decays like k;
    beta: [tokens, heads]; docs: [tokens] integers, never decreasing.
    Returns (A, att, VK, Q, Ke, last):
        A    [.., C, C]    strictly lower, beta_i <k_i e^(G_i - G_j), k_j>
        att  [.., C, C]    lower,          <q_i e^(G_i - G_j), k_j>
        VK   [.., C, V+K]  beta v, and beta k e^G (zero past a document start)
        Q    [.., C, K]    q e^G                  (likewise)
        Ke   [.., C, K]    k e^(G_last - G)       (zero before the last start)
        last [.., K]       decay of the whole chunk (zero if a document starts)
    """
    nc = q.shape[0] // size
    q, k, v, g = (to_chunks(x, size) for x in (q, k, v, g))
    beta = beta.view(nc, size, -1).transpose(1, 2).unsqueeze(-1)
    d = docs.view(nc, size)
    before = torch.cat([d.new_full((1,), -1), d[:-1, -1]])  # document of the token before the chunk
    carried = (d == before[:, None])[:, None, :, None]  # tokens that see the incoming state
    lasting = (d == d[:, -1:])[:, None, :, None]  # tokens that reach the outgoing state
    through = (d[:, -1] == before)[:, None, None]
    index = torch.arange(size, device=q.device)
    same = (d[:, :, None] == d[:, None, :])[:, None]  # [chunks, 1, C, C]
    below = same & (index[:, None] > index[None, :])
    upto = same & (index[:, None] >= index[None, :])

    G = g.cumsum(2)
    end = G[:, :, -1:]
    mid = G[:, :, size // 2 : size // 2 + 1]
    up, down = torch.exp(G - mid), torch.exp(mid - G)
    P = torch.cat([k * up, q * up], 2) @ (k * down).transpose(-1, -2)
    zero = P.new_zeros(())
    A = torch.where(below, P[:, :, :size] * beta, zero)
    att = torch.where(upto, P[:, :, size:], zero)
    decay = torch.where(carried, torch.exp(G), zero)
    VK = torch.cat([v * beta, k * decay * beta], -1)
    Q = q * decay
    Ke = torch.where(lasting, k * torch.exp(end - G), zero)
    last = torch.where(through, torch.exp(end[:, :, 0]), zero)
    return A, att, VK, Q.contiguous(), Ke.contiguous(), last.contiguous()


def inverse_reference(A):
    """(I + A)^-1 for strictly lower-triangular A of size 16: A^16 = 0, so
    (I - A)(I + A^2)(I + A^4)(I + A^8) is exact."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    X, P, n = eye - A, A, 1
    while 2 * n < A.shape[-1]:
        P = P @ P
        X = X + X @ P
        n *= 2
    return X


def recursion_forward_reference(att, UW, Q, Ke, last, S, rows):
    """The loop over chunks.  Returns output, new values, every chunk's incoming
    state, and the final state of each row."""
    nc, h, c, k = Q.shape
    vd = UW.shape[-1] - k

    def per_row(x):
        return x.view(rows, nc // rows, *x.shape[1:])

    U, W = per_row(UW[..., :vd]), per_row(UW[..., vd:])
    KeT, decay = per_row(Ke.transpose(-1, -2)), per_row(last.unsqueeze(-1))
    states = Q.new_empty(rows, nc // rows, h, k, vd)
    new = Q.new_empty(rows, nc // rows, h, c, vd)
    for n in range(nc // rows):
        states[:, n] = S
        new[:, n] = U[:, n] - W[:, n] @ S
        S = decay[:, n] * S + KeT[:, n] @ new[:, n]
    states, new = states.flatten(0, 1), new.flatten(0, 1)
    return Q @ states + att @ new, new, states, S


def recursion_backward_reference(dO, dS, att, UW, Q, Ke, last, new, states, rows):
    """Gradients of all inputs of the forward loop, from those of its output and final state."""
    nc, h, _, k = Q.shape
    vd = UW.shape[-1] - k

    def per_row(x):
        return x.view(rows, nc // rows, *x.shape[1:])

    dnew = per_row(att.transpose(-1, -2) @ dO).clone()
    from_out = per_row(Q.transpose(-1, -2) @ dO)
    WT, K_, decay = per_row(UW[..., vd:].transpose(-1, -2)), per_row(Ke), per_row(last.unsqueeze(-1))
    dstates = torch.empty_like(states).view(rows, nc // rows, h, k, vd)  # gradient of each outgoing state
    for n in reversed(range(nc // rows)):
        dstates[:, n] = dS
        dnew[:, n] += K_[:, n] @ dS
        dS = decay[:, n] * dS + from_out[:, n] - WT[:, n] @ dnew[:, n]
    dnew, dstates = dnew.flatten(0, 1), dstates.flatten(0, 1)
    datt = dO @ new.transpose(-1, -2)
    dUW = torch.cat([dnew, -(dnew @ states.transpose(-1, -2))], -1)
    dQ = dO @ states.transpose(-1, -2)
    dKe = new @ dstates.transpose(-1, -2)
    dlast = (states * dstates).sum(-1)
    return datt, dUW, dQ, dKe, dlast, dS


class ChunkRecursion(torch.autograd.Function):
    """(A, att, VK, Q, Ke, last, S0) -> output [chunks, heads, C, V], final state
    [rows, heads, K, V].  Written as one function so that the loop over chunks,
    forward and backward, is a plain loop (or one kernel) outside any compiler,
    and so that the triangular inverse needs two products backward, not twelve."""

    @staticmethod
    def forward(ctx, A, att, VK, Q, Ke, last, S0, rows):
        """Inverse, then the loop over chunks."""
        fast = HAVE_TRITON and A.is_cuda and A.dtype == torch.float32
        X = unit_lower_inverse(A) if fast else inverse_reference(A)
        UW = X @ VK
        if fast:
            out, new, states, S = recursion_forward(att, UW, Q, Ke, last, S0, rows)
        else:
            out, new, states, S = recursion_forward_reference(att, UW, Q, Ke, last, S0, rows)
        ctx.save_for_backward(X, att, VK, UW, Q, Ke, last, new, states)
        ctx.rows, ctx.fast = rows, fast
        return out, S

    @staticmethod
    def backward(ctx, dO, dS):
        """The loop backwards, then the inverse."""
        X, att, VK, UW, Q, Ke, last, new, states = ctx.saved_tensors
        run = recursion_backward if ctx.fast else recursion_backward_reference
        datt, dUW, dQ, dKe, dlast, dS0 = run(
            dO.contiguous(), dS.contiguous(), att, UW, Q, Ke, last, new, states, ctx.rows
        )
        XT = X.transpose(-1, -2)
        dVK = XT @ dUW
        dA = -(XT @ (dUW @ VK.transpose(-1, -2)) @ XT)  # the caller's mask keeps the lower part
        return dA, datt, dVK, dQ, dKe, dlast, dS0, None


def kda_chunked(q, k, v, g, beta, docs, rows=1, S0=None):
    """Whole operation.  Returns o [tokens, heads, V] and the final state of
    each row [rows, heads, K, V].  With S0, the first document continues it."""
    n, h, kd = q.shape
    pad = -n % (CHUNK * rows)
    if pad:  # one row only: zero keys, zero log decays, the last document's number
        assert rows == 1
        q, k, v, g, beta = (torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) for x in (q, k, v, g, beta))
        docs = torch.cat([docs, docs[-1:].expand(pad)])
    if S0 is None:
        S0 = q.new_zeros(rows, h, kd, v.shape[-1])
    else:
        assert rows == 1
        assert int(docs[0]) == 0
        docs = docs - 1  # the first document becomes -1, which is what precedes the first chunk
    out, S = ChunkRecursion.apply(*chunk_terms(q, k, v, g, beta, docs), S0, rows)
    return out.transpose(1, 2).reshape(-1, h, v.shape[-1])[:n], S


def kda_step(q, k, v, g, beta, S):
    """One token for each sequence: q, k, g [.., H, K], v [.., H, V], beta [.., H]."""
    S = S * g.exp().unsqueeze(-1)
    new = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * S).sum(-2))
    S = S + k.unsqueeze(-1) * new.unsqueeze(-2)
    return (q.unsqueeze(-1) * S).sum(-2), S


def kda_stepwise(q, k, v, g, beta, docs, S=None):
    """The definition, token by token: the reference for tests."""
    n, h, kd = q.shape
    S = q.new_zeros(h, kd, v.shape[-1]) if S is None else S
    out = []
    for t in range(n):
        if t and docs[t] != docs[t - 1]:
            S = torch.zeros_like(S)
        o, S = kda_step(q[t], k[t], v[t], g[t], beta[t], S)
        out.append(o)
    return torch.stack(out), S
