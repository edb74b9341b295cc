"""Functions of a number that kernels share."""

import triton
import triton.language as tl


@triton.jit
def counted(length):
    """Return how many positions there are: a number, or a pointer to one that changes between a graph's replays."""
    return tl.load(length) if length.dtype.is_ptr() else length


@triton.jit
def sigmoid(x):
    """``1 / (1 + e^-x)``, by the exponential of what is not positive."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(x):
    """By the exponential of what is not positive; near zero, where that would cancel, by an odd polynomial."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = a * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    y = tl.where(a < 0.25, small, large)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(gate, up, gate_limit, up_limit, SATURATES: tl.constexpr):
    """See ``reference.activate``."""
    if SATURATES:
        return gate_limit * _tanh(gate / gate_limit) * sigmoid(gate) * (up_limit * _tanh(up / up_limit))
    return gate * sigmoid(gate) * up
