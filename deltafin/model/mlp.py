"""A gated feed-forward: weights and forward."""

from dataclasses import dataclass

from torch import Tensor

from deltafin import config
from deltafin.ops import Ops
from deltafin.weights import Weight, weight


@dataclass(frozen=True)
class Weights:
    """Tensors of one layer."""

    gate: Weight = weight("F D")
    up: Weight = weight("F D")
    down: Weight = weight("D F")


def forward(c: config.MLP, w: Weights, x_BTD: Tensor, eps: float, ops: Ops) -> Tensor:
    """Return what the layer adds to the residual stream, BTD."""
    return ops.gated(x_BTD, w.gate, w.up, w.down, c.activation)
