"""The residual stream: a plain sum, or attention residuals, behind the same verbs."""

from torch import Tensor

from deltafin.config import AttentionResidual, Plain
from deltafin.ops import Ops


class Sum:
    """The stream of most models: what a layer reads is the sum of everything added so far."""

    def __init__(self, x_BTD: Tensor) -> None:
        self.prefix = x_BTD

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

    def __init__(self, x_BTD: Tensor, block: int, eps: float) -> None:
        self.prefix = x_BTD
        self.blocks: list[Tensor] = []
        self.sublayers, self.per_block, self.eps = 0, 2 * block, eps

    def read(self, query_D: Tensor | None, ops: Ops) -> Tensor:
        """Return the mixture that the next sublayer sees (before its norm), BTD."""
        return ops.mix_depth([*self.blocks, self.prefix], query_D, self.eps) if self.blocks else self.prefix

    def add(self, y_BTD: Tensor) -> None:
        """Add a sublayer's output, or open a block with it."""
        if self.sublayers % self.per_block == 0:
            self.blocks.append(self.prefix)
            self.prefix = y_BTD
        else:
            self.prefix = self.prefix + y_BTD
        self.sublayers += 1


def start(kind: Plain | AttentionResidual, x_BTD: Tensor, eps: float) -> Sum | Mixture:
    """Begin a stream with the embedded tokens."""
    return Mixture(x_BTD, kind.block, eps) if isinstance(kind, AttentionResidual) else Sum(x_BTD)
