"""The whole model on one page: frozen weights, the state of every layer, and forward."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltafin.config import Layer, ModelConfig
from deltafin.model import FEED_FORWARDS, MIXERS, kda, mla, residual
from deltafin.model.residual import Stream
from deltafin.ops import FEW, Ops
from deltafin.ops.reference import wide
from deltafin.transfer import moved, on
from deltafin.weights import Weight, specs, weight

State = kda.State | mla.State

SLICE = 512
"""Tokens that a mixer takes at a time, which bounds the memory of its activations."""


@dataclass(frozen=True)
class Edges:
    """What stands before the first layer and after the last; ``read`` is the last mixture's query."""

    embed: Tensor = weight("Z D")
    norm: Tensor = weight("D")
    head: Weight = weight("Z D")
    read: Tensor | None = weight("D", float32=True, when=lambda c: c.mixes)


@dataclass(frozen=True)
class Norms:
    """What stands before a layer's two sublayers: norms, and queries where the stream is a mixture."""

    mixer: Tensor = weight("D")
    ffn: Tensor = weight("D")
    mixer_read: Tensor | None = weight("D", float32=True, when=lambda c: c.mixes)
    ffn_read: Tensor | None = weight("D", float32=True, when=lambda c: c.mixes)


@dataclass(frozen=True)
class Part:
    """A group of tensors that are declared together: ``layers.3.mixer.*`` and the like."""

    prefix: str
    weights: type
    config: Any
    sizes: Mapping[str, int]

    @property
    def layer(self) -> int | None:
        """The layer that they belong to; None for what stands before the first and after the last."""
        return int(self.prefix.split(".")[1]) if "." in self.prefix else None

    def names(self) -> list[str]:
        """Return our names of its tensors."""
        return [f"{self.prefix}.{name}" for name, _ in specs(self.weights, self.config)]


def parts(c: ModelConfig) -> Iterator[Part]:
    """List everything a model of this config needs, except the routed experts."""
    yield Part("edges", Edges, c, c.sizes())
    for i, layer in enumerate(c.layers):
        yield Part(f"layers.{i}.norms", Norms, c, c.sizes())
        yield Part(f"layers.{i}.mixer", MIXERS[type(layer.mixer)].Weights, layer.mixer, c.sizes() | layer.mixer.sizes())
        yield Part(f"layers.{i}.ffn", FEED_FORWARDS[type(layer.ffn)].Weights, layer.ffn, c.sizes() | layer.ffn.sizes())


@dataclass(frozen=True)
class Block:
    """One layer with its weights, and the operations of the device it lives on."""

    layer: Layer
    norms: Norms
    mixer: Any
    ffn: Any
    ops: Ops
    mixer_ops: Ops | None = field(default=None, kw_only=True)
    """Those of the mixer, where it lives on another device than the rest."""
    ahead: Callable[[Tensor], None] | None = field(default=None, kw_only=True)
    """Is shown what the feed-forward will read, to prepare for it."""

    @property
    def tables(self) -> tuple[Ops, Ops]:
        """The operations of the mixer and of the feed-forward."""
        return self.mixer_ops or self.ops, self.ops

    def mix(self, s: State, stream: Stream) -> None:
        """Add to the stream what the mixer makes of its tokens, norm first; ``s`` is advanced."""
        (ops, rest), query = self.tables, self.norms.mixer_read
        if ops is rest:
            return self._mix(s, stream, query, ops)
        there = Stream(moved(stream.read(query, rest), ops.device), stream.eps, block=1)  # of this sublayer alone
        there.to(ops)
        self._mix(s, there, None, ops)
        stream.add(moved(there.prefix.to(stream.dtype), rest.device))

    def _mix(self, s: State, stream: Stream, query: Tensor | None, ops: Ops) -> None:
        kind, w, norm = self.layer.mixer, self.mixer, self.norms.mixer
        whole = ops.whole.get(type(kind)) if stream.few else None
        if whole is None or not whole(kind, w, s, stream, norm, query, ops):
            x, eps = stream.read(query, ops).split(SLICE, 1), stream.eps
            y = [MIXERS[type(kind)].forward(kind, w, s, ops.rms_norm(part, norm, eps), eps, ops) for part in x]
            stream.add(torch.cat(y, 1) if len(y) > 1 else y[0])

    def feed(self, stream: Stream) -> None:
        """Add to the stream what the feed-forward makes of its tokens, norm first."""
        kind, w, norm, query, ops = self.layer.ffn, self.ffn, self.norms.ffn, self.norms.ffn_read, self.ops
        if self.ahead is not None:
            self.ahead(stream.read(query, ops))
        whole = ops.whole.get(type(kind)) if stream.few else None
        if whole is None or not whole(kind, w, stream, norm, query, ops):
            x = ops.rms_norm(stream.read(query, ops), norm, stream.eps)
            stream.add(FEED_FORWARDS[type(kind)].forward(kind, w, x, stream.eps, ops))


@dataclass(frozen=True)
class Decoder:
    """A model that is ready to run; ``dtype`` is the type of its activations, ``ops`` are those of the head."""

    config: ModelConfig
    edges: Edges
    blocks: tuple[Block, ...]
    ops: Ops
    dtype: torch.dtype
    graphs: Any = field(default=None, compare=False, repr=False)
    """Where steps can be captured, those that were (``captured.Graphs``)."""

    def empty_state(self, batch: int = 1) -> list[State]:
        """Return the state before the first token, one entry a layer."""
        homes = ((b.layer.mixer, b.tables[0].device) for b in self.blocks)
        return [MIXERS[type(kind)].State.empty(kind, batch, self.dtype, device) for kind, device in homes]

    @cached_property
    def tables(self) -> tuple[Ops, ...]:
        """The operations in use, the head's first, each once."""
        every = (self.ops, *(ops for block in self.blocks for ops in block.tables))
        return tuple({id(ops): ops for ops in every}.values())


def advance(m: Decoder, state: list[State], x_BTD: Tensor) -> Iterator[Stream]:
    """Advance ``state`` by T embedded tokens, layer by layer; yield the residual stream after every layer."""
    stream = residual.start(m.config.residual, x_BTD, len(m.blocks), m.config.eps)
    for b, s in zip(m.blocks, state, strict=True):
        stream.to(b.ops)
        with on(b.ops.device):
            b.mix(s, stream)
            b.feed(stream)
        yield stream


def embedded(m: Decoder, tokens_BT: Tensor) -> Tensor:
    """Return the embedding of tokens, BTD."""
    return m.edges.embed[tokens_BT].to(m.dtype)


def logits(m: Decoder, stream: Stream, last: int = 1) -> Tensor:
    """Return what the head makes of the stream after the last layer: see ``forward``."""
    stream.to(m.ops)
    with on(m.ops.device):
        x_BTD = m.ops.rms_norm(stream.read(m.edges.read, m.ops)[:, -last:], m.edges.norm, m.config.eps)
        return wide(m.ops.linear(x_BTD, m.edges.head))


def forward(m: Decoder, state: list[State], tokens_BT: Tensor, last: int = 1) -> Tensor:
    """Advance ``state`` by T tokens; return the logits after the ``last`` of them, [B, last, Z] in float32 or wider.

    Decode is row-invariant: up to ``FEW`` tokens at once give the same bits as one by one, and are read so where an
    operation cannot promise that.
    """
    if 1 < tokens_BT.shape[1] <= FEW and not all(ops.together for ops in m.tables):
        return torch.cat([forward(m, state, token) for token in tokens_BT.split(1, 1)], 1)[:, -last:]
    *_, stream = advance(m, state, embedded(m, tokens_BT))
    return moved(logits(m, stream, last), tokens_BT.device)
