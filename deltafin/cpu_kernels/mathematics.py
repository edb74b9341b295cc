"""Elementary functions in float32, each formula written once for one number and for the lanes of a vector.

The C library's are called one by one, which costs more than all the products of an activation. Whether a compiler
does a plain loop for many lanes at once, and for how many, is chance: exponentials took five times as long as they do
here. Errors are a few units in the last place; what is not a number stays so.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel

WHOLE = 1.5 * 2**23
"""A float32 that is added to this becomes a whole number, which its lowest bits then are."""


class Lanes:
    """One float32 or a vector of them, while code is written: arithmetic emits instructions."""

    def __init__(self, b: ir.IRBuilder, value: ir.Value) -> None:
        self.b, self.value = b, value

    def of(self, other: Any) -> "Lanes":
        """A constant of this kind; or what is such already."""
        return other if isinstance(other, Lanes) else Lanes(self.b, v.const(self.value.type, other))

    def __add__(self, other: Any) -> "Lanes":
        return Lanes(self.b, self.b.fadd(self.value, self.of(other).value))

    def __sub__(self, other: Any) -> "Lanes":
        return Lanes(self.b, self.b.fsub(self.value, self.of(other).value))

    def __mul__(self, other: Any) -> "Lanes":
        return Lanes(self.b, self.b.fmul(self.value, self.of(other).value))

    def __truediv__(self, other: Any) -> "Lanes":
        return Lanes(self.b, self.b.fdiv(self.value, self.of(other).value))

    def __neg__(self) -> "Lanes":
        return Lanes(self.b, self.b.fneg(self.value))

    def times(self, factor: Any, term: Any) -> "Lanes":
        """``self * factor + term``, fused where the CPU can."""
        return Lanes(self.b, v.fma(self.b, self.value, self.of(factor).value, self.of(term).value))

    def where(self, comparison: str, other: Any, yes: Any, no: Any) -> "Lanes":
        """``yes`` where the comparison holds; it does not for what is not a number."""
        holds = self.b.fcmp_ordered(comparison, self.value, self.of(other).value)
        return Lanes(self.b, self.b.select(holds, self.of(yes).value, self.of(no).value))

    def to_power(self, shifted: "Lanes") -> "Lanes":
        """Times two to the whole number that ``shifted`` is ``WHOLE`` more than; the result is a normal number."""
        kind = self.value.type
        whole = v.lanes(v.I32, kind.count) if isinstance(kind, ir.VectorType) else v.I32
        power = self.b.shl(self.b.bitcast(shifted.value, whole), v.const(whole, 23))
        return Lanes(self.b, self.b.bitcast(self.b.add(self.b.bitcast(self.value, whole), power), kind))


def _exp(x: Lanes) -> Lanes:
    """``e^x``: tiny below -87, capped above 88."""
    held = x.where("<", -87.3, -87.3, x.where(">", 88.7, 88.7, x))
    shifted = held.times(1.4426950408889634, WHOLE)
    n = shifted - WHOLE
    r = n.times(2.12194440e-4, n.times(-0.693359375, held))
    p = x.of(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = p.times(r, c)
    return x.where("==", x, p.to_power(shifted), x)


def _sigmoid(x: Lanes) -> Lanes:
    """``1 / (1 + e^-x)``."""
    return x.of(1.0) / (_exp(-x) + 1.0)


def _softplus(x: Lanes) -> Lanes:
    """``log(1 + e^x)``, without overflow: with u = e^-|x|, log(1 + u) is twice the area tangent of u / (2 + u)."""
    u = _exp(x.where("<", 0.0, x, -x))
    r = u / (u + 2.0)
    s = r * r
    p = x.of(2 / 13)
    for c in (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0):
        p = p.times(s, c)
    return r.times(p, x.where("<", 0.0, 0.0, x))


def _tanh(x: Lanes) -> Lanes:
    """The hyperbolic tangent; a series near 0, where the formula cancels."""
    s = x * x
    p = x.of(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = p.times(s, c)
    size = x.where("<", 0.0, -x, x)
    far = x.of(1.0) - x.of(2.0) / (_exp(size * 2.0) + 1.0)
    return size.where("<", 0.625, (x * s).times(p, x), x.where("<", 0.0, -far, far))


def _single(formula: Callable[[Lanes], Lanes]) -> Any:
    """A formula of one number, for kernels."""

    @v.intrinsic
    def single(context, x):
        def code(context, b, signature, arguments):
            return formula(Lanes(b, arguments[0])).value

        return types.float32(types.float32), code

    return single


exp, sigmoid, softplus, tanh = (_single(formula) for formula in (_exp, _sigmoid, _softplus, _tanh))


def _each(formula: Callable[..., Lanes]) -> Any:
    """A formula for every element of vectors at addresses, a tuple of them, and a tuple of numbers; to ``y`` [n]."""

    @v.intrinsic
    def each(context, sources, numbers, y, n):
        def code(context, b, signature, arguments):
            sources, numbers, y, n = arguments
            every, constants = (cgutils.unpack_tuple(b, t) for t in (sources, numbers))

            def body(at: ir.Value, kind: ir.Type) -> None:
                spread = [v.spread(b, c) if kind == v.F32x16 else c for c in constants]
                values = (v.load(b, b.add(x, at), kind) for x in every)
                v.store(b, formula(*(Lanes(b, x) for x in (*values, *spread))).value, b.add(y, at))

            v.all_lanes(b, n, body)
            return context.get_dummy_value()

        return types.void(sources, numbers, y, n), code

    return each


@v.intrinsic
def convolve(context, x, taps, tail, stride, before, y, n):
    """One token's convolution with the ``before`` inputs before it, oldest first in ``tail``, which moves on; SiLU.

    Of n channels, at addresses; rows of ``taps`` [before + 1] and ``tail`` [before] are ``stride`` bytes apart.
    """

    def code(context, b, signature, arguments):
        x, taps, tail, stride, before, y, n = arguments
        one = v.const(v.I64, 1)

        def body(at: ir.Value, kind: ir.Type) -> None:
            tap, old, now = b.add(taps, at), b.add(tail, at), v.load(b, b.add(x, at), kind)
            newest = v.load(b, b.add(tap, b.mul(stride, before)), kind)
            acc = cgutils.alloca_once(b, kind)
            b.store(b.fmul(now, newest), acc)
            with b.if_then(b.icmp_signed(">", before, v.const(v.I64, 0))):
                b.store(v.fma(b, v.load(b, old, kind), v.load(b, tap, kind), b.load(acc)), acc)
                with cgutils.for_range_slice(b, one, before, one) as (row, _):
                    place = b.add(old, b.mul(stride, row))
                    own, weight = v.load(b, place, kind), v.load(b, b.add(tap, b.mul(stride, row)), kind)
                    b.store(v.fma(b, own, weight, b.load(acc)), acc)
                    v.store(b, own, b.sub(place, stride))
                v.store(b, now, b.add(old, b.mul(stride, b.sub(before, one))))
            result = Lanes(b, b.load(acc))
            v.store(b, (result * _sigmoid(result)).value, b.add(y, at))

        v.all_lanes(b, n, body)
        return context.get_dummy_value()

    a = types.int64
    return types.void(a, a, a, a, a, a, a), code


_exps = _each(lambda x, most: _exp(x - most))
_sigmoids = _each(_sigmoid)
_gated = _each(lambda x, gate: x * _sigmoid(gate))
_silu_gated = _each(lambda gate, up: gate * _sigmoid(gate) * up)
_situ_gated = _each(lambda g, u, a, b: a * _tanh(g / a) * _sigmoid(g) * (b * _tanh(u / b)))
_floored = _each(lambda z, bias, speed, floor: floor * _sigmoid(speed * (z + bias)))
_unbounded = _each(lambda z, bias, speed: -speed * _softplus(z + bias))


@kernel()
def exps(x, most, y):
    """``y = e^(x - most)``; like the rest of these, of contiguous float32 vectors, and ``y`` may be one of them."""
    _exps((x.ctypes.data,), (most,), y.ctypes.data, len(y))


@kernel()
def sigmoids(x, y):
    """``y = sigmoid(x)``."""
    _sigmoids((x.ctypes.data,), (), y.ctypes.data, len(y))


@kernel()
def gated(x, gate, y):
    """``y = x * sigmoid(gate)``."""
    _gated((x.ctypes.data, gate.ctypes.data), (), y.ctypes.data, len(y))


@kernel()
def silus(x, y):
    """``y = x * sigmoid(x)``."""
    gated(x, x, y)


@kernel()
def silu_gated(gate, up, y):
    """``y = gate * sigmoid(gate) * up``: see ``reference.activate``."""
    _silu_gated((gate.ctypes.data, up.ctypes.data), (), y.ctypes.data, len(y))


@kernel()
def situ_gated(gate, up, gate_limit, up_limit, y):
    """Both bounded by their limits: see ``reference.activate``."""
    _situ_gated((gate.ctypes.data, up.ctypes.data), (gate_limit, up_limit), y.ctypes.data, len(y))


@kernel()
def log_decays(z, speed, bias, floor, g):
    """Log-decays of one token, from where ``z`` and ``bias`` begin; a floor of 0 is none."""
    if floor < 0:
        _floored((z.ctypes.data, bias.ctypes.data), (speed, floor), g.ctypes.data, len(g))
    else:
        _unbounded((z.ctypes.data, bias.ctypes.data), (speed,), g.ctypes.data, len(g))


@kernel()
def sum_of_products(x, y):
    """``sum(x * y)`` of two contiguous float32 vectors."""
    whole = len(x) & ~31
    s = v.dot_f32(x.ctypes.data, y.ctypes.data, whole)
    for i in range(whole, len(x)):
        s += x[i] * y[i]
    return s
