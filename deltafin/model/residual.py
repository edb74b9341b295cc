"""The residual stream: a plain sum, or attention residuals, behind the same verbs."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltafin.config import AttentionResidual, Plain
from deltafin.ops import FEW, Ops
from deltafin.transfer import moved


class Stream:
    """What sublayers read and add to; ``dtype`` is the type of the activations, which ``sums`` may be wider than.

    With ``blocks`` of so many layers it is Kimi K3's block attention residuals: what a layer reads is a learned mixture
    over the sums of blocks. Mixers and feed-forwards add in turn. The mixer of a layer that opens a block begins a new
    sum with its own output; so the first sum is the embedding. The mixture is only read, never added. Without blocks
    there is one sum, which ``x_BTD`` becomes.
    """

    def __init__(self, x_BTD: Tensor, eps: float, block: int | None = None, layers: int = 1) -> None:
        self.sums, self.dtype, self.eps = x_BTD[None], x_BTD.dtype, eps
        self.batch, self.tokens = x_BTD.shape[:2]
        self.finished, self.sublayers, self.per_block = 0, 0, 2 * block if block else None
        if block:
            self.sums = x_BTD.new_empty(2 + (layers - 1) // block, *x_BTD.shape)  # finished ones, then the running one
            self.sums[0] = x_BTD
        self._ops: Ops | None = None
        self.rows: Any = None
        """A few tokens' sums as numpy sees them, [S, N, D], where they are widened: made once, for all sublayers."""

    @property
    def prefix(self) -> Tensor:
        """The sum that is still running, BTD."""
        return self.sums[self.finished]

    @cached_property
    def few(self) -> bool:
        """Whether it is of few tokens, which are decoded."""
        return self.tokens <= FEW and self.dtype != torch.float64

    def to(self, ops: Ops) -> None:
        """Go on where the operations are, and in the type that they have a few tokens in."""
        if ops is self._ops:
            return
        widens, self._ops = self.few and ops.widens, ops
        self.sums = moved(self.sums, ops.device).to(torch.float32 if widens else self.dtype)
        self.rows = self.sums.view(len(self.sums), -1, self.sums.shape[-1]).numpy() if widens else None

    def read(self, query_D: Tensor | None, ops: Ops) -> Tensor:
        """Return what the next sublayer sees (before its norm), BTD."""
        sums = self.sums[: self.finished + 1]
        return (ops.mix_depth(sums, query_D, self.eps) if self.finished else sums[0]).to(self.dtype)

    def next(self) -> tuple[int, bool]:
        """Return which sum the next sublayer adds to, and whether it begins it."""
        opens = self.per_block is not None and self.sublayers % self.per_block == 0
        self.finished += opens
        self.sublayers += 1
        return self.finished, opens

    def add(self, y_BTD: Tensor) -> None:
        """Add a sublayer's output, or open a block with it."""
        place, opens = self.next()
        if opens:
            self.sums[place] = y_BTD
        else:
            self.sums[place] += y_BTD


def start(kind: Plain | AttentionResidual, x_BTD: Tensor, layers: int, eps: float) -> Stream:
    """Begin a stream with the embedded tokens."""
    return Stream(x_BTD, eps, kind.block if isinstance(kind, AttentionResidual) else None, layers)
