"""The residual stream: a plain sum, or attention residuals, behind the same verbs."""

import torch
from torch import Tensor

from deltafin.config import AttentionResidual, Plain
from deltafin.ops import Ops
from deltafin.transfer import moved


class Sum:
    """The stream of most models: what a layer reads is the sum of everything added so far."""

    def __init__(self, x_BTD: Tensor) -> None:
        self.prefix = x_BTD

    def to(self, device: torch.device) -> None:
        """Go on in another device's memory."""
        self.prefix = moved(self.prefix, device)

    def read(self, query_D: Tensor | None, ops: Ops) -> Tensor:
        """Return what the next sublayer sees (before its norm), BTD."""
        return self.prefix

    def add(self, y_BTD: Tensor) -> None:
        """Add a sublayer's output."""
        self.prefix = self.prefix + y_BTD


class Mixture:
    """Kimi K3's block attention residuals: what a layer reads is a learned mixture over the sums of blocks.

    Mixers and feed-forwards add in turn. The mixer of a layer that opens a block stores the sum so far and starts a
    new one with its own output; so the first stored sum is the embedding. The mixture is only read, never added.
    """

    def __init__(self, x_BTD: Tensor, block: int, layers: int, eps: float) -> None:
        self.sums = x_BTD.new_empty(2 + (layers - 1) // block, *x_BTD.shape)  # finished blocks', then the running one
        self.sums[0] = x_BTD
        self.finished, self.sublayers, self.per_block, self.eps = 0, 0, 2 * block, eps

    @property
    def prefix(self) -> Tensor:
        """The sum that is still running."""
        return self.sums[self.finished]

    def to(self, device: torch.device) -> None:
        """Go on in another device's memory."""
        self.sums = moved(self.sums, device)

    def read(self, query_D: Tensor | None, ops: Ops) -> Tensor:
        """Return the mixture that the next sublayer sees (before its norm), BTD."""
        return ops.mix_depth(self.sums[: self.finished + 1], query_D, self.eps) if self.finished else self.prefix

    def add(self, y_BTD: Tensor) -> None:
        """Add a sublayer's output, or open a block with it."""
        if self.sublayers % self.per_block == 0:
            self.finished += 1
            self.sums[self.finished] = y_BTD
        else:
            self.sums[self.finished] += y_BTD
        self.sublayers += 1


def start(kind: Plain | AttentionResidual, x_BTD: Tensor, layers: int, eps: float) -> Sum | Mixture:
    """Begin a stream with the embedded tokens."""
    return Mixture(x_BTD, kind.block, layers, eps) if isinstance(kind, AttentionResidual) else Sum(x_BTD)
