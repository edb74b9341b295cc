"""Elementary functions in float32 that the compiler can do for many lanes at once.

The C library's are called one by one, which costs more than all the products of an activation. Errors are a few units
in the last place.
"""

import numpy as np

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel


@kernel()
def exp(x):
    """``e^x``: 0 below -87, capped above 88; NaN stays."""
    x = min(max(x, np.float32(-87.3)), np.float32(88.7)) if x == x else x
    n = np.float32(np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * v.as_f32(np.uint32(np.int32(n) + 127) << np.uint32(23)) if x == x else x


@kernel()
def sigmoid(x):
    """``1 / (1 + e^-x)``."""
    return np.float32(1) / (np.float32(1) + exp(-x))


@kernel()
def softplus(x):
    """``log(1 + e^x)``, without overflow: with u = e^-|x|, log(1 + u) is twice the area tangent of u / (2 + u)."""
    u = exp(-abs(x))
    r = u / (u + np.float32(2))
    s = r * r
    p = np.float32(2 / 13)
    p = p * s + np.float32(2 / 11)
    p = p * s + np.float32(2 / 9)
    p = p * s + np.float32(2 / 7)
    p = p * s + np.float32(2 / 5)
    p = p * s + np.float32(2 / 3)
    p = p * s + np.float32(2)
    return max(x, np.float32(0)) + r * p


@kernel()
def tanh(x):
    """The hyperbolic tangent; a series near 0, where the formula cancels."""
    s = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * s + np.float32(2.06390887954e-2)
    p = p * s + np.float32(-5.37397155531e-2)
    p = p * s + np.float32(1.33314422036e-1)
    p = p * s + np.float32(-3.33332819422e-1)
    near = x + x * s * p
    far = np.float32(1) - np.float32(2) / (exp(np.float32(2) * abs(x)) + np.float32(1))
    return near if abs(x) < np.float32(0.625) else (far if x >= 0 else -far)


@kernel()
def sum_of_products(x, y):
    """``sum(x * y)`` of two contiguous float32 vectors."""
    whole = len(x) & ~31
    s = v.dot_f32(x.ctypes.data, y.ctypes.data, whole)
    for i in range(whole, len(x)):
        s += x[i] * y[i]
    return s
