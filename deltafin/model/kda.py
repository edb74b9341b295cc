"""Kimi Delta Attention: weights, state and forward."""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from deltafin import config
from deltafin.ops import DeltaState, DeltaWeights, Ops
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

    @cached_property
    def first(self) -> tuple[Weight, ...]:
        """The projections that read the layer's input: queries, keys, values, beta, decay, gate."""
        gate = self.gate_down if self.gate is None else self.gate
        assert gate is not None
        return (self.q, self.k, self.v, self.beta, self.decay_down, gate)

    @cached_property
    def between(self) -> DeltaWeights:
        """What stands between the projections."""
        return DeltaWeights(self.q_conv, self.k_conv, self.v_conv, self.decay_log, self.decay_bias, self.norm)


@dataclass
class State:
    """What the layer remembers: the last inputs of the convolutions, and one matrix a head that never grows.

    Tails BWC and ``S_BHVK`` are float32, or float64 in a float64 model: in a narrower type, what a token finds would
    depend on whether the one before it came in the same call.
    """

    q_tail: Tensor
    k_tail: Tensor
    v_tail: Tensor
    S_BHVK: Tensor
    length: int = 0

    @classmethod
    def empty(cls, c: config.KDA, batch: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return the state before the first token."""
        keys, values = c.heads * c.key_dim, c.heads * c.value_dim
        wider = torch.float64 if dtype == torch.float64 else torch.float32
        about: Any = {"dtype": wider, "device": device}
        q, k, v = (torch.zeros(batch, c.conv_width - 1, channels, **about) for channels in (keys, keys, values))
        return cls(q, k, v, torch.zeros(batch, c.heads, c.value_dim, c.key_dim, **about))

    def tensors(self) -> dict[str, Tensor]:
        """Everything worth saving, by name."""
        return {"q_tail": self.q_tail, "k_tail": self.k_tail, "v_tail": self.v_tail, "S_BHVK": self.S_BHVK}

    @property
    def parts(self) -> DeltaState:
        """The tensors as the operation takes them."""
        return DeltaState(self.q_tail, self.k_tail, self.v_tail, self.S_BHVK)

    def buffers(self) -> tuple[Tensor, ...]:
        """The memory that it lies in."""
        return self.parts

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


def forward(c: config.KDA, w: Weights, s: State, x_BTD: Tensor, eps: float, ops: Ops) -> Tensor:
    """Advance ``s`` by T tokens and return what the layer adds to the residual stream, BTD."""
    q, k, v, beta, decay, gate = ops.linears(x_BTD, w.first)
    decay = ops.linear(decay, w.decay_up)
    gate = gate if w.gate_up is None else ops.linear(gate, w.gate_up)
    o_BTC = ops.delta_net(q, k, v, decay, beta, gate, w.between, s.parts, c.decay_floor, eps)
    s.length += x_BTD.shape[1]
    return ops.linear(o_BTC, w.out)
