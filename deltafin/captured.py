"""Decoding as one captured CUDA graph, where all of a token runs on one GPU.

A graph repeats the launches of one step on the same memory. What changes from token to token stands in that memory:
the embedded token, and how many positions there are. A graph belongs to the memory of the state that it advances, so
a session that goes back, is forked, or whose caches have grown gets another one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltafin.config import MoE
from deltafin.experts import StackedExperts
from deltafin.model import mla
from deltafin.model.decoder import Block, Decoder, State, embedded, predict
from deltafin.model.decoder import forward as plain

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
    """Return room for the graphs of a decoder; None where not all of a token runs on one GPU."""
    tables = {ops.device for block in blocks for ops in block.tables} | {head}
    stacked = all(isinstance(b.ffn.experts, StackedExperts) for b in blocks if isinstance(b.layer.ffn, MoE))
    return Graphs() if tables == {head} and head.type == "cuda" and stacked else None


def forward(m: Decoder, state: list[State], tokens_BT: Tensor, last: int = 1) -> Tensor:
    """Do what the decoder's ``forward`` does; one token by a graph where that can be."""
    if m.graphs is None or tokens_BT.shape != (1, 1):
        return plain(m, state, tokens_BT, last)
    for s in state:
        if isinstance(s, mla.State):
            s.reserve(1)
    return m.graphs.step(m, state)(m, state, embedded(m, tokens_BT))


class Step:
    """One step of a decoder on the memory of one state: run as it is the first time, then captured.

    A graph also fetches its inputs from, and brings the logits to, memory of the processor that a GPU can reach.
    """

    def __init__(self, m: Decoder) -> None:
        there, width = m.ops.device, m.config.width
        self.x_here = torch.empty(1, 1, width, dtype=m.dtype, pin_memory=True)
        self.position_here = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self.logits_here = torch.empty(1, 1, m.config.vocab, pin_memory=True)
        self.x, self.position = (torch.empty_like(t, device=there) for t in (self.x_here, self.position_here))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.used = False

    def __call__(self, m: Decoder, state: list[State], x_BTD: Tensor) -> Tensor:
        """Advance ``state`` by one embedded token; return the logits [1, 1, Z]."""
        length = state[0].length + 1
        self.x_here.copy_(x_BTD)
        self.position_here.fill_(length)
        if self.used and self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run(m, state)
        if self.graph is None:  # compiles what was never compiled, which cannot be captured
            self._run(m, state)
        else:
            self.graph.replay()
        self.used = True
        for s in state:
            s.length = length
        torch.cuda.current_stream(m.ops.device).synchronize()
        return self.logits_here.clone()

    def _run(self, m: Decoder, state: list[State]) -> None:
        caches = [s for s in state if isinstance(s, mla.State)]
        self.x.copy_(self.x_here, non_blocking=True)
        self.position.copy_(self.position_here, non_blocking=True)
        try:
            for s in caches:
                s.position = self.position
            self.logits_here.copy_(predict(m, state, self.x), non_blocking=True)
        finally:
            for s in caches:
                s.position = None
