"""Multi-head latent attention without rotation: weights, state and forward."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from deltafin import config
from deltafin.ops import Ops
from deltafin.ops.reference import wide
from deltafin.weights import Weight, weight

ROOM = 1 << 16
"""Positions that a cache has addresses for. Memory that was never written to takes no room, so that it grows without
being copied; only beyond are there copies, each four times as long."""

GPU_ROOM = 4096
"""The same on a GPU, where all of it is memory; beyond, each copy is twice as long."""


@dataclass(frozen=True)
class Weights:
    """Tensors of one layer; the query is one matrix, or two with a norm between them."""

    q: Weight | None = weight("H*P+H*J D", when=lambda c: c.query_rank is None)
    q_down: Weight | None = weight("L D", when=lambda c: c.query_rank is not None)
    q_norm: Tensor | None = weight("L", when=lambda c: c.query_rank is not None)
    q_up: Weight | None = weight("H*P+H*J L", when=lambda c: c.query_rank is not None)
    latent_down: Weight = weight("R+J D")
    latent_norm: Tensor = weight("R")
    latent_up: Weight = weight("H*P+H*V R")
    gate: Weight | None = weight("H*V D", when=lambda c: c.gate)
    out: Weight = weight("D H*V")

    @cached_property
    def first(self) -> tuple[Weight, ...]:
        """The projections that read the layer's input: queries (or their first half), latent, and gate if any."""
        every = (self.q if self.q_down is None else self.q_down, self.latent_down, self.gate)
        return tuple(w for w in every if w is not None)


@dataclass
class State:
    """What the layer remembers: one latent (after its norm) and one shared key (as projected) a token.

    The buffers are larger than what they hold; only ``[:, :length]`` means anything.
    """

    latent_BSR: Tensor
    shared_BSJ: Tensor
    length: int = 0
    position: Tensor | None = None
    """How many there are with the tokens of this call, int32 [1] on a GPU; set while steps are captured alone."""

    @classmethod
    def empty(cls, c: config.MLA, batch: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return the state before the first token."""
        room, about = ROOM if device.type == "cpu" else GPU_ROOM, {"dtype": dtype, "device": device}
        return cls(
            torch.empty(batch, room, c.latent_rank, **about),  # type: ignore[call-overload]
            torch.empty(batch, room, c.shared_dim, **about),  # type: ignore[call-overload]
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything worth saving, by name: the valid part of the buffers."""
        return {"latent_BSR": self.latent_BSR[:, : self.length], "shared_BSJ": self.shared_BSJ[:, : self.length]}

    def buffers(self) -> tuple[Tensor, ...]:
        """The memory that it lies in."""
        return self.latent_BSR, self.shared_BSJ

    def keep(self) -> Self:
        """Return the state as it is, at no cost: later tokens are written behind ``length``, never before it.

        The copy shares the buffers, so it holds only as long as nothing goes back behind it and writes anew.
        """
        return replace(self)

    def restore(self, saved: dict[str, Tensor], length: int) -> None:
        """Become a saved state; ``ValueError`` when the shapes are another model's."""
        for name, tensor in self.tensors().items():
            if saved[name].shape != (len(tensor), length, tensor.shape[2]):
                raise ValueError(f"{name} is {tuple(saved[name].shape)}, not {length} positions of {tensor.shape[2]}")
        self.length = 0
        self.append(saved["latent_BSR"], saved["shared_BSJ"])

    def append(self, latent_BTR: Tensor, shared_BTJ: Tensor) -> None:
        """Store T more positions."""
        end = self.reserve(latent_BTR.shape[1])
        self.latent_BSR[:, self.length : end] = latent_BTR
        self.shared_BSJ[:, self.length : end] = shared_BTJ
        self.length = end

    def reserve(self, tokens: int) -> int:
        """Have room for so many more positions; return how many there are with them."""
        end = self.length + tokens
        if end > self.latent_BSR.shape[1]:
            size = end * (4 if self.latent_BSR.device.type == "cpu" else 2)
            self.latent_BSR = _grown(self.latent_BSR, self.length, size)
            self.shared_BSJ = _grown(self.shared_BSJ, self.length, size)
        return end


def _grown(buffer: Tensor, used: int, size: int) -> Tensor:
    larger = buffer.new_empty(buffer.shape[0], size, buffer.shape[2])
    larger[:, :used] = buffer[:, :used]
    return larger


def forward(c: config.MLA, w: Weights, s: State, x_BTD: Tensor, eps: float, ops: Ops) -> Tensor:
    """Advance ``s`` by T tokens and return what the layer adds to the residual stream, BTD.

    The two inner norms have the epsilon of their own class (``c.eps``), not the model's.
    """
    q, latent_shared, *gate = ops.linears(x_BTD, w.first)
    if w.q_up is not None:
        q = ops.linear(ops.rms_norm(q, w.q_norm, c.eps), w.q_up)
    latent, shared = latent_shared.split([c.latent_rank, c.shared_dim], -1)
    s.append(ops.rms_norm(latent, w.latent_norm, c.eps), shared)
    cache = s.tensors()
    o_BTHV = ops.attention(
        q.unflatten(-1, (c.heads, -1)), cache["latent_BSR"], cache["shared_BSJ"], w.latent_up, c.value_dim
    )
    o_BTC = o_BTHV.flatten(2)
    if gate:
        o_BTC = (wide(o_BTC) * torch.sigmoid(wide(gate[0]))).to(x_BTD.dtype)
    return ops.linear(o_BTC, w.out)
