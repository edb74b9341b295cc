"""MXFP4 rounding that training can run through; packing is the package's own."""

from itertools import pairwise

import torch
from torch import Tensor

from deltafin.quant import GROUP, MAGNITUDES, MXFP4, pack_mxfp4

_MIDDLES = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))


def quantise(weight: Tensor) -> Tensor:
    """Round [.., C], C a multiple of 32, to values that MXFP4 holds; any device, float32 inside.

    A group's scale puts its largest magnitude between 3.5 and 7 units; a tie goes to the smaller magnitude.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = (largest.view(torch.int32) >> 23) - 127 - 2  # floor of the logarithm, read off the float's bits
    exponent = exponent + (largest > 7 * torch.exp2(exponent.float())).int()
    scale = torch.exp2(exponent.float())
    units = (groups / scale).abs()
    value = torch.zeros_like(units)
    for middle, low, high in zip(_MIDDLES, MAGNITUDES, MAGNITUDES[1:], strict=False):
        value = value + (units > middle) * (high - low)
    return (value * scale).copysign(groups).flatten(-2).to(weight.dtype)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return quantise(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def fake_quantise(weight: Tensor) -> Tensor:
    """Rounded on the way forward, untouched on the way back."""
    return _Straight.apply(weight)


def pack(weight: Tensor) -> MXFP4:
    """The rounded weight in packed form: what was trained is what is stored."""
    return pack_mxfp4(quantise(weight) + 0.0)  # + 0.0: no negative zeros
