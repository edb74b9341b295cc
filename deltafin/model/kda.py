"""Kimi Delta Attention: weights, state and forward."""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafin import config
from deltafin.ops import Ops
from deltafin.ops.reference import wide
from deltafin.weights import Weight, weight


@dataclass(frozen=True)
class Weights:
    """Tensors of one layer; the gate is one matrix (full rank) or two (low rank)."""

    q: Weight = weight("H*K D")
    k: Weight = weight("H*K D")
    v: Weight = weight("H*V D")
    q_conv: Tensor = weight("H*K W", float32=True)
    k_conv: Tensor = weight("H*K W", float32=True)
    v_conv: Tensor = weight("H*V W", float32=True)
    decay_down: Weight = weight("L D")
    decay_up: Weight = weight("H*K L")
    decay_log: Tensor = weight("H", float32=True)
    decay_bias: Tensor = weight("H*K", float32=True)
    beta: Weight = weight("H D")
    gate: Weight | None = weight("H*V D", when=lambda c: c.gate_rank is None)
    gate_down: Weight | None = weight("O D", when=lambda c: c.gate_rank is not None)
    gate_up: Weight | None = weight("H*V O", when=lambda c: c.gate_rank is not None)
    norm: Tensor = weight("V", float32=True)
    out: Weight = weight("D H*V")


@dataclass
class State:
    """What the layer remembers: the last inputs of the convolutions, and one matrix a head that never grows.

    Tails are BWC in the stream's type; ``S_BHVK`` is float32, or float64 in a float64 model.
    """

    q_tail: Tensor
    k_tail: Tensor
    v_tail: Tensor
    S_BHVK: Tensor
    length: int = 0

    @classmethod
    def empty(cls, c: config.KDA, batch: int, dtype: torch.dtype) -> Self:
        """Return the state before the first token."""
        keys, values = c.heads * c.key_dim, c.heads * c.value_dim
        q, k, v = (torch.zeros(batch, c.conv_width - 1, channels, dtype=dtype) for channels in (keys, keys, values))
        wider = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(q, k, v, torch.zeros(batch, c.heads, c.value_dim, c.key_dim, dtype=wider))

    def tensors(self) -> dict[str, Tensor]:
        """Everything worth saving, by name."""
        return {"q_tail": self.q_tail, "k_tail": self.k_tail, "v_tail": self.v_tail, "S_BHVK": self.S_BHVK}

    def keep(self) -> Self:
        """Return a copy that later tokens do not change: all of it is rewritten at every step."""
        return copy.deepcopy(self)

    def restore(self, saved: dict[str, Tensor], length: int) -> None:
        """Become a saved state; ``ValueError`` when the shapes are another model's."""
        for name, tensor in self.tensors().items():
            if saved[name].shape != tensor.shape:
                raise ValueError(f"{name} is {tuple(saved[name].shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(saved[name])
        self.length = length


def log_decay(c: config.KDA, z_BTC: Tensor, decay_log: Tensor, decay_bias: Tensor) -> Tensor:
    """Return g_BTHK, at most 0, in float32 or wider, from the raw projection [B, T, H * K].

    With a floor: ``floor * sigmoid(exp(A) (z + bias))`` (Kimi K3). Without: ``-exp(A) softplus(z + bias)`` (Kimi
    Linear). The bias is per channel and added first; A is per head.
    """
    z = (wide(z_BTC) + decay_bias).unflatten(-1, (c.heads, c.key_dim))
    speed = decay_log.to(z.dtype).exp().unsqueeze(-1)
    return -speed * F.softplus(z) if c.decay_floor is None else c.decay_floor * torch.sigmoid(speed * z)


def forward(c: config.KDA, w: Weights, s: State, x_BTD: Tensor, eps: float, ops: Ops) -> Tensor:
    """Advance ``s`` by T tokens and return what the layer adds to the residual stream, BTD."""
    q = ops.short_conv(ops.linear(x_BTD, w.q), w.q_conv, s.q_tail).unflatten(-1, (c.heads, c.key_dim))
    k = ops.short_conv(ops.linear(x_BTD, w.k), w.k_conv, s.k_tail).unflatten(-1, (c.heads, c.key_dim))
    v = ops.short_conv(ops.linear(x_BTD, w.v), w.v_conv, s.v_tail).unflatten(-1, (c.heads, c.value_dim))
    g = log_decay(c, ops.linear(ops.linear(x_BTD, w.decay_down), w.decay_up), w.decay_log, w.decay_bias)
    beta = torch.sigmoid(wide(ops.linear(x_BTD, w.beta)))
    o_BTHV = ops.rms_norm(ops.delta_rule(q, k, v, g, beta, s.S_BHVK), w.norm, eps)
    gate = ops.linear(x_BTD, w.gate) if c.gate_rank is None else ops.linear(ops.linear(x_BTD, w.gate_down), w.gate_up)
    s.length += x_BTD.shape[1]
    return ops.linear((o_BTHV.flatten(2) * torch.sigmoid(wide(gate))).to(x_BTD.dtype), w.out)
