"""Decoding as one captured CUDA graph, where all of a token runs on a GPU; on several, one graph each.

A graph repeats the launches of one step on the same memory. What changes from token to token stands in that memory:
the embedded token, and how many positions there are. A graph belongs to the memory of the state that it advances, so
a session that goes back, is forked, or whose caches have grown gets another one.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from deltafin.config import MoE
from deltafin.experts import StackedExperts
from deltafin.model import mla
from deltafin.model.decoder import Block, Decoder, State, Stream, advance, embedded, logits
from deltafin.model.decoder import forward as plain
from deltafin.transfer import count, on

KEPT = 4
"""Graphs that are kept: those of the states that were advanced last."""


class Graphs:
    """The captured steps of a decoder, by the memory that they change."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, ...], Step] = {}

    def step(self, m: Decoder, state: Sequence[State]) -> "Step":
        """Return the step that advances this memory."""
        key = tuple(t.data_ptr() for s in state for t in s.buffers())
        self.steps[key] = step = self.steps.pop(key, None) or Step(m)
        if len(self.steps) > KEPT:
            del self.steps[next(iter(self.steps))]
        return step


def graphs_for(blocks: Sequence[Block], head: torch.device) -> Graphs | None:
    """Return room for the graphs of a decoder; None where not all of a token runs on GPUs."""
    devices = [head, *(ops.device for block in blocks for ops in block.tables)]
    stacked = all(isinstance(b.ffn.experts, StackedExperts) for b in blocks if isinstance(b.layer.ffn, MoE))
    return Graphs() if stacked and all(device.type == "cuda" for device in devices) else None


def forward(m: Decoder, state: list[State], tokens_BT: Tensor, last: int = 1) -> Tensor:
    """Do what the decoder's ``forward`` does; one token by a graph where that can be."""
    if m.graphs is None or tokens_BT.shape != (1, 1):
        return plain(m, state, tokens_BT, last)
    for s in state:
        if isinstance(s, mla.State):
            s.reserve(1)
    return m.graphs.step(m, state)(m, state, embedded(m, tokens_BT))


class Leg(NamedTuple):
    """What one GPU has of a step; where it leaves the stream, and where the next GPU takes it up, if there is one."""

    graph: torch.cuda.CUDAGraph
    left: Tensor
    taken: Tensor


class Step:
    """One step of a decoder on the memory of one state: run as it is the first time, then captured.

    The graphs also fetch their inputs from, and bring the logits to, memory of the processor that GPUs can reach.
    Between two graphs the stream is copied from one GPU to the next.
    """

    def __init__(self, m: Decoder) -> None:
        self.devices = [*(block.ops.device for block in m.blocks), m.ops.device]
        self.x_here = torch.empty(1, 1, m.config.width, dtype=m.dtype, pin_memory=True)
        self.length_here = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self.logits_here = torch.empty(1, 1, m.config.vocab, pin_memory=True)
        self.x = torch.empty_like(self.x_here, device=self.devices[0])
        self.lengths = {device: torch.empty_like(self.length_here, device=device) for device in set(self.devices)}
        self.legs: list[Leg] = []
        self.used = False

    def __call__(self, m: Decoder, state: list[State], x_BTD: Tensor) -> Tensor:
        """Advance ``state`` by one embedded token; return the logits [1, 1, Z]."""
        length = state[0].length + 1
        self.x_here.copy_(x_BTD)
        self.length_here.fill_(length)
        if self.used and not self.legs:
            self.legs = self._run(m, state, capture=True)
        if not self.used:  # compiles what was never compiled, which cannot be captured
            self._run(m, state, capture=False)
        for leg in self.legs:
            leg.graph.replay()
            if leg.taken is not leg.left:
                count(leg.left)
                leg.taken.copy_(leg.left, non_blocking=True)
        self.used = True
        for s in state:
            s.length = length
        torch.cuda.current_stream(m.ops.device).synchronize()
        return self.logits_here.clone()

    def _run(self, m: Decoder, state: list[State], capture: bool) -> list[Leg]:
        """Run the step, GPU by GPU; or capture what would, and return it."""
        tables = [*(block.ops for block in m.blocks), m.ops]
        legs, layers, stream = list[Leg](), advance(m, state, self.x), cast(Stream, None)
        for s, device in zip(state, self.devices, strict=False):
            if isinstance(s, mla.State):
                s.position = self.lengths[device]
        try:
            for device, units in groupby(range(len(self.devices)), self.devices.__getitem__):
                graph, following = torch.cuda.CUDAGraph(), m.ops
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)) if capture else on(device):
                    self.lengths[device].copy_(self.length_here, non_blocking=True)
                    for i in units:
                        if i == 0:
                            self.x.copy_(self.x_here, non_blocking=True)
                        if i < len(state):
                            stream, following = next(layers), tables[i + 1]
                        else:
                            self.logits_here.copy_(logits(m, stream), non_blocking=True)
                left = stream.sums
                stream.to(following)
                legs.append(Leg(graph, left, stream.sums))
        finally:
            for s in state:
                if isinstance(s, mla.State):
                    s.position = None
        return legs
