"""Every operation in plain torch: short, slow, right by definition.

Shapes carry a suffix: B batch, T tokens of this call, S cached positions, N = B * T rows, D width, H heads, G key
heads, K key and V value channels of a head, W convolution width, C convolution channels, R latent rank, J shared key
channels, P a head's own key channels, X experts, E experts of a row, M an expert's input, F its width.

The state of the delta rule is ``S_BHVK``, value-major, so that a step reads and writes rows of contiguous keys
(papers write it key-major). Gates ``g`` are log-decays, at most 0; ``beta`` is the write strength in [0, 1].

Statistics, gates, softmax and state are float32, or float64 where the input is: ``wide`` says where.

A call of one row is decoding and takes the form that moves the fewest bytes; a call of more is prefill and takes the
form with the largest matrix products. The two agree within a tolerance, not bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafin.config import Activation, SiTU
from deltafin.weights import Weight

CHUNK = 64
"""Tokens that the chunkwise delta rule advances at once; any number gives the same answer up to rounding."""

BLOCK = 16
"""Tokens inside a chunk whose decays are compared pair by pair."""

LARGEST_COPY = 1 << 24
"""Elements of a weight that are widened at a time, so that no copy has the size of an embedding."""


class Expert(NamedTuple):
    """One routed expert: gate and up [F, M], down [M, F]."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Stack:
    """Experts that lie side by side: gate and up [X, F, M], down [X, M, F]. Called with a number, one of them."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, x: int) -> Expert:
        """Return an expert, as views."""
        return Expert(*(_one(weight, x) for weight in (self.gate, self.up, self.down)))


def _one(weight: Weight, x: int) -> Weight:
    return weight[x] if isinstance(weight, Tensor) else type(weight)(weight.codes[x], weight.scales[x])


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return ``x @ weight.T`` for x [.., I] and weight [O, I]: [.., O] in x's type, sums in float32 or wider.

    A packed weight is unpacked exactly; a weight stored in fewer bits than ``x`` is widened, never the other way.
    """
    outputs, inputs = weight.shape
    step = max(1, LARGEST_COPY // inputs)
    parts = [F.linear(x, _dense(weight, start, start + step, x.dtype)) for start in range(0, outputs, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _dense(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[start:stop].to(dtype)
    return type(weight)(weight.codes[start:stop], weight.scales[start:stop]).unpack(dtype)


def linears(x: Tensor, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """Return ``linear(x, w)`` for each of several weights that share an input."""
    return tuple(linear(x, weight) for weight in weights)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in x's type."""
    y = wide(x)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight.to(x.dtype)


def short_conv(x_BTC: Tensor, weight_CW: Tensor, tail_BWC: Tensor) -> Tensor:
    """Convolve each channel causally over its last W inputs, then SiLU; keep the last W - 1 inputs in ``tail``.

    The last tap meets the current token. ``tail_BWC`` [B, W - 1, C] is what came before and is updated in place.
    """
    width = weight_CW.shape[1]
    inputs = torch.cat([tail_BWC.to(x_BTC.dtype), x_BTC], 1)
    tokens = x_BTC.shape[1]
    y = torch.zeros_like(wide(x_BTC))
    for j in range(width):
        y += inputs[:, j : j + tokens] * weight_CW[:, j]
    tail_BWC.copy_(inputs[:, tokens:])
    return F.silu(y).to(x_BTC.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """Return ``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension: epsilon on the sum, not on the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, S_BHVK: Tensor
) -> Tensor:
    """Advance the state by T tokens of the gated delta rule and return o_BTHV, in the state's type.

    Queries and keys come raw: they are l2-normalised here and the query is scaled by K^-0.5. Value head h reads key
    head h // (H / G). The gate's last dimension is K (KDA) or 1 (gated DeltaNet). Per head and token::

        S = S * exp(g);  S = S + beta (v - S k) k^T;  o = S q

    ``S_BHVK`` is updated in place. One token by the recurrence, more chunk by chunk.
    Source: Kimi Linear technical report (KDA), section on the chunkwise form.
    """
    form = delta_rule_recurrent if v_BTHV.shape[1] == 1 else delta_rule_chunkwise
    return form(q_BTGK, k_BTGK, v_BTHV, g_BTHK, beta_BTH, S_BHVK)


def _per_value_head(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return all five in the state's type, with queries and keys normalised, scaled and repeated per value head."""
    groups = v_BTHV.shape[2] // q_BTGK.shape[2]
    q = l2_norm(q_BTGK.to(dtype)).repeat_interleave(groups, 2) * q_BTGK.shape[-1] ** -0.5
    k = l2_norm(k_BTGK.to(dtype)).repeat_interleave(groups, 2)
    return q, k, v_BTHV.to(dtype), g_BTHK.to(dtype), beta_BTH.to(dtype)


def delta_rule_recurrent(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, S_BHVK: Tensor
) -> Tensor:
    """Advance the state token by token: the definition. Arguments as ``delta_rule``."""
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = _per_value_head(q_BTGK, k_BTGK, v_BTHV, g_BTHK, beta_BTH, S_BHVK.dtype)
    o_BTHV = torch.empty_like(v_BTHV)
    for t in range(v_BTHV.shape[1]):
        k, v, beta = k_BTHK[:, t], v_BTHV[:, t], beta_BTH[:, t]
        S_BHVK *= g_BTHK[:, t].exp().unsqueeze(-2)
        error = v - (S_BHVK * k.unsqueeze(-2)).sum(-1)
        S_BHVK += (beta.unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(-2)
        o_BTHV[:, t] = (S_BHVK * q_BTHK[:, t].unsqueeze(-2)).sum(-1)
    return o_BTHV


def delta_rule_chunkwise(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, S_BHVK: Tensor
) -> Tensor:
    """Advance the state chunk by chunk: the same answer as token by token, with matrix products.

    Arguments as ``delta_rule``; queries and keys stand below for the normalised, scaled ones.
    With G the running sum of g inside a chunk, and P, A below, a chunk of C tokens is::

        P_ij = sum_d k_id k_jd exp(G_id - G_jd)  (j < i);   A_ij = sum_d q_id k_jd exp(G_id - G_jd)  (j <= i)
        (I + diag(beta) P) U = diag(beta) (V - (K * e^G) S);   O = (Q * e^G) S + A U
        S = diag(e^{G_C}) S + sum_j (k_j * e^{G_C - G_j}) U_j

    The unit triangular system is solved by substitution (a power series of P loses all digits to cancellation).
    """
    q, k, v, g, beta = (
        x.transpose(1, 2) for x in _per_value_head(q_BTGK, k_BTGK, v_BTHV, g_BTHK, beta_BTH, S_BHVK.dtype)
    )
    beta, g = beta.unsqueeze(-1), g.expand_as(k)
    outputs = []
    for start in range(0, v.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc, bc = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part]
        # Sums in float64: two nearly equal sums of steps down to -30 are subtracted below.
        G = g[:, :, part].double().cumsum(2)
        P, A = _decayed_products(qc, kc, G)
        decay = G.exp().to(vc.dtype)
        system = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) + bc * P
        S_KV = S_BHVK.transpose(-1, -2)
        U = torch.linalg.solve_triangular(system, bc * (vc - (kc * decay) @ S_KV), upper=False, unitriangular=True)
        outputs.append((qc * decay) @ S_KV + A @ U)
        lasting = kc * (G[:, :, -1:] - G).exp().to(vc.dtype)
        S_BHVK *= decay[:, :, -1].unsqueeze(-2)
        S_BHVK += U.transpose(-1, -2) @ lasting
    return torch.cat(outputs, 2).transpose(1, 2)


def _decayed_products(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return P (strictly lower) and A (lower) of one chunk; every exponent taken is at most 0.

    Inside a block of tokens the sums are subtracted pair by pair. Between blocks both factors refer to the sum just
    before the later block, which lies between the two, so neither e^(G_i - ref) nor e^(ref - G_j) can overflow.
    """
    tokens = k.shape[2]
    P = k.new_zeros(*k.shape[:2], tokens, tokens)
    A = torch.zeros_like(P)
    for start in range(0, tokens, BLOCK):
        rows, before = slice(start, min(start + BLOCK, tokens)), slice(0, start)
        Gr = G[:, :, rows]
        pairs = (Gr.unsqueeze(3) - Gr.unsqueeze(2)).clamp(max=0).exp().to(k.dtype) * k[:, :, rows].unsqueeze(2)
        P[:, :, rows, rows] = (pairs * k[:, :, rows].unsqueeze(3)).sum(-1).tril(-1)
        A[:, :, rows, rows] = (pairs * q[:, :, rows].unsqueeze(3)).sum(-1).tril()
        if start:
            reference = G[:, :, start - 1 : start]
            later = (Gr - reference).exp().to(k.dtype)
            earlier = (k[:, :, before] * (reference - G[:, :, before]).exp().to(k.dtype)).transpose(-1, -2)
            P[:, :, rows, before] = (k[:, :, rows] * later) @ earlier
            A[:, :, rows, before] = (q[:, :, rows] * later) @ earlier
    return P, A


class DeltaWeights(NamedTuple):
    """What a delta-rule layer applies between its projections; all float32.

    Convolutions [C, W] of queries, keys and values; ``decay_log`` [H] and ``decay_bias`` [H * K], or [H] where the
    decay is one number a head; ``norm`` [V] of the output.
    """

    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
    decay_log: Tensor
    decay_bias: Tensor
    norm: Tensor


class DeltaState(NamedTuple):
    """What a delta-rule layer remembers: the last inputs of its convolutions [B, W - 1, C], and the matrix."""

    q_tail: Tensor
    k_tail: Tensor
    v_tail: Tensor
    S_BHVK: Tensor


def log_decay(z: Tensor, decay_log_H: Tensor, decay_bias: Tensor, floor: float | None) -> Tensor:
    """Return the log-decay, at most 0, in float32 or wider: [.., H, K], or [.., H, 1] where z has one number a head.

    With a floor: ``floor * sigmoid(exp(A) (z + bias))`` (Kimi K3). Without: ``-exp(A) softplus(z + bias)`` (Kimi
    Linear, gated DeltaNet). The bias is added first; A is per head.
    """
    z = (wide(z) + decay_bias).unflatten(-1, (len(decay_log_H), -1))
    speed = decay_log_H.to(z.dtype).exp().unsqueeze(-1)
    return -speed * F.softplus(z) if floor is None else floor * torch.sigmoid(speed * z)


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
    """Advance a delta-rule layer by T tokens, all between its projections; return [B, T, H V] in the input's type.

    Short convolutions with SiLU, decay, write strength, the delta rule, the norm of a head's output, and the output
    gate. All inputs are raw projections; the state is updated in place. ``floor``: see ``log_decay``.
    """
    heads, key = s.S_BHVK.shape[1], s.S_BHVK.shape[3]
    q = short_conv(q_BTC, w.q_conv, s.q_tail).unflatten(-1, (-1, key))
    k = short_conv(k_BTC, w.k_conv, s.k_tail).unflatten(-1, (-1, key))
    v = short_conv(v_BTC, w.v_conv, s.v_tail).unflatten(-1, (heads, -1))
    g = log_decay(decay_BTC, w.decay_log, w.decay_bias, floor)
    o_BTHV = rms_norm(delta_rule(q, k, v, g, torch.sigmoid(wide(beta_BTH)), s.S_BHVK), w.norm, eps)
    return (o_BTHV.flatten(2) * torch.sigmoid(wide(gate_BTC))).to(q_BTC.dtype)


def attention(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """Attend causally from the last T of S cached positions; return BTHV in the query's type.

    A query is P channels for the head's own key and J for the shared key. ``up`` [H (P + V), R] makes a head's P key
    rows and V value rows from the latent. Scores are scaled by (P + J)^-0.5; nothing is rotated; softmax in float32.
    One token in absorbed form (the query moves into the latent space, the cache is read as it is), more in expanded
    form (keys and values are made for every position). Source: DeepSeek-V2 report, section 2.1.
    """
    form = attention_absorbed if q_BTHC.shape[1] == 1 else attention_expanded
    return form(q_BTHC, latent_BSR, shared_BSJ, up, value_dim)


def _scaled_and_split(
    q_BTHC: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a query's own and shared part, scaled, and the up projections of keys HPR and values HVR."""
    heads, channels = q_BTHC.shape[2:]
    plain = channels - shared_BSJ.shape[-1]
    q = wide(q_BTHC) * channels**-0.5
    up_HCR = _dense(up, 0, up.shape[0], q.dtype).view(heads, plain + value_dim, -1)
    return q[..., :plain], q[..., plain:], up_HCR[:, :plain], up_HCR[:, plain:]


def attention_absorbed(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """Attend in the latent space, row by row. Arguments as ``attention``."""
    own, common, key_up, value_up = _scaled_and_split(q_BTHC, shared_BSJ, up, value_dim)
    latent, shared = latent_BSR.to(own.dtype), shared_BSJ.to(own.dtype)
    batch, tokens, heads, _ = own.shape
    out = own.new_empty(batch, tokens, heads, value_dim)
    for b in range(batch):
        for t in range(tokens):
            seen = latent.shape[1] - tokens + t + 1
            c, s = latent[b, :seen], shared[b, :seen]
            q_HR = torch.einsum("hp,hpr->hr", own[b, t], key_up)
            p_HS = torch.softmax(q_HR @ c.T + common[b, t] @ s.T, -1)
            out[b, t] = torch.einsum("hr,hvr->hv", p_HS @ c, value_up)
    return out.to(q_BTHC.dtype)


def attention_expanded(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """Attend with every position's keys and values made from its latent. Arguments as ``attention``."""
    own, common, key_up, value_up = _scaled_and_split(q_BTHC, shared_BSJ, up, value_dim)
    latent, shared = latent_BSR.to(own.dtype), shared_BSJ.to(own.dtype)
    tokens, positions = own.shape[1], latent.shape[1]
    k_BHSP = torch.einsum("bsr,hpr->bhsp", latent, key_up)
    v_BHSV = torch.einsum("bsr,hvr->bhsv", latent, value_up)
    scores = own.transpose(1, 2) @ k_BHSP.transpose(-1, -2)
    scores += common.transpose(1, 2) @ shared.transpose(-1, -2).unsqueeze(1)
    later = torch.ones(tokens, positions, dtype=torch.bool, device=own.device).triu(positions - tokens + 1)
    p_BHTS = torch.softmax(scores.masked_fill_(later, -torch.inf), -1)
    return (p_BHTS @ v_BHSV).transpose(1, 2).to(q_BTHC.dtype)


def route(
    x_ND: Tensor, gate_XD: Weight, bias_X: Tensor, chosen: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts: ids_NE (int64, increasing) and their weights_NE.

    Scores are sigmoids of float32 logits. The ``chosen`` largest of score + bias win, the lower index on a tie; the
    bias decides who is chosen, never the weight.
    """
    scores = torch.sigmoid(linear(wide(x_ND), gate_XD))
    order = torch.sort(scores + bias_X.to(scores.dtype), dim=-1, descending=True, stable=True).indices
    ids = order[:, :chosen].sort(-1).values
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def activate(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """Return ``kind`` of gate and up in float32 or wider, cast to the gate's type."""
    a, b = wide(gate), wide(up)
    if isinstance(kind, SiTU):
        a = kind.gate_limit * torch.tanh(a / kind.gate_limit) * torch.sigmoid(a)
        return (a * (kind.up_limit * torch.tanh(b / kind.up_limit))).to(gate.dtype)
    return (F.silu(a) * b).to(gate.dtype)


def gated(x: Tensor, gate: Weight, up: Weight, down: Weight, kind: Activation) -> Tensor:
    """Return ``down(activate(gate x, up x))``: a gated feed-forward."""
    return linear(activate(linear(x, gate), linear(x, up), kind), down)


def experts(
    x_NM: Tensor,
    ids_NE: Tensor,
    weight_NE: Tensor,
    expert: Callable[[int], Expert],
    activation: Activation,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the weighted sum over each row's experts, NM, summed in float32 or wider by increasing id.

    ``expert`` gives one by its number, and may be a ``Stack``; -1 stands for one that is not here, and adds nothing.
    The result is in ``dtype``, or else in x's type: sums that others are added to are not rounded before.
    """
    y_NM = torch.zeros_like(wide(x_NM))
    for x in ids_NE[ids_NE >= 0].unique().tolist():
        rows, place = (ids_NE == x).nonzero(as_tuple=True)
        gate, up, down = expert(x)
        h = activate(linear(x_NM[rows], gate), linear(x_NM[rows], up), activation)
        y_NM[rows] += weight_NE[rows, place].unsqueeze(-1).to(y_NM.dtype) * wide(linear(h, down))
    return y_NM.to(dtype or x_NM.dtype)


def mix_depth(sources: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """Mix the vectors of several depths, [depths, B, T, D], by softmax, token by token: BTD in the sources' type.

    A source is scored by its RMS-normalised form times ``query_D`` and mixed raw (Kimi K3's attention residuals).
    """
    stack = wide(sources)
    scores = (stack * query_D.to(stack.dtype)).sum(-1) * torch.rsqrt(stack.square().mean(-1) + eps)
    return (torch.softmax(scores, 0).unsqueeze(-1) * stack).sum(0).to(sources.dtype)
