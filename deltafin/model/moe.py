"""A mixture of experts with a shared one, optionally in a latent width: weights and forward."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deltafin import config
from deltafin.config import Activation
from deltafin.ops import Ops
from deltafin.weights import Weight, weight


class Experts(Protocol):
    """The routed experts of a layer, wherever they live."""

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        ...


@dataclass(frozen=True)
class Weights:
    """Tensors of one layer; the routed experts are behind ``experts``."""

    experts: Experts
    router: Weight = weight("X D")
    router_bias: Tensor = weight("X", float32=True)
    latent_down: Weight | None = weight("M D", when=lambda c: c.latent is not None)
    latent_norm: Tensor | None = weight("M", when=lambda c: c.latent_norm)
    latent_up: Weight | None = weight("D M", when=lambda c: c.latent is not None)
    shared_gate: Weight | None = weight("U D", when=lambda c: c.shared_width)
    shared_up: Weight | None = weight("U D", when=lambda c: c.shared_width)
    shared_down: Weight | None = weight("D U", when=lambda c: c.shared_width)


def forward(c: config.MoE, w: Weights, x_BTD: Tensor, eps: float, ops: Ops) -> Tensor:
    """Return what the layer adds to the residual stream, BTD.

    The router sees the full width; the experts may work in a latent one, entered once a token and left once for the
    weighted sum, which is normalised before it leaves.
    """
    x_ND = x_BTD.flatten(0, 1)
    ids_NE, weight_NE = ops.route(x_ND, w.router, w.router_bias, c.chosen, c.renormalize, c.scale)
    z_NM = x_ND if w.latent_down is None else ops.linear(x_ND, w.latent_down)
    y = w.experts(z_NM, ids_NE, weight_NE, c.activation, ops)
    if w.latent_norm is not None:
        y = ops.rms_norm(y, w.latent_norm, eps)
    if w.latent_up is not None:
        y = ops.linear(y, w.latent_up)
    if w.shared_gate is not None and w.shared_up is not None and w.shared_down is not None:
        y = y + ops.gated(x_ND, w.shared_gate, w.shared_up, w.shared_down, c.activation)
    return y.view_as(x_BTD)
