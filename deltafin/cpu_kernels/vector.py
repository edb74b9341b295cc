"""Vector code for dot products of stored weights, as Numba intrinsics over addresses.

Written as LLVM vectors of 16 lanes, which the compiler splits to what the CPU has; only the four-bit lookup is
written for particular instructions, chosen by the features that Numba compiles for. Addresses are int64; ``k`` is a
number of columns; whatever a vector step leaves over is done one by one by the functions at the end.

How an input vector is prepared for integer weights, ``digits``: it is scaled to 23 bits and a sign and cut in two
digits of 12 bits (int8 weights) or three of 8 (MXFP4), so that all products and sums are exact in int32, and the
result is as good as float32 multiplication gives. Or, coarsely, it is scaled to 15 bits and a sign: one digit for int8
weights (fewer bits for very wide ones), two for MXFP4.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from deltafin.cpu_kernels.compiling import FEATURES

BYTES = 64 if {"avx512bw", "avx512vnni"} <= FEATURES else 32 if "avx2" in FEATURES else 16 if "ssse3" in FEATURES else 0
"""Bytes that one four-bit lookup takes; 0: none, four-bit weights are decoded by arithmetic."""

FORM = {64: "AVX-512 VNNI", 32: "AVX2", 16: "SSSE3", 0: "portable"}[BYTES]
"""Which form of the four-bit lookup is used."""

intrinsic: Any = extending.intrinsic
"""Numba's, whose hints would keep the first parameter, which callers do not give."""

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def lanes(kind: ir.Type, n: int) -> ir.VectorType:
    """A vector type."""
    return ir.VectorType(kind, n)


F32x16, I32x16 = lanes(F32, 16), lanes(I32, 16)


def const(kind: ir.Type, value: Any) -> ir.Constant:
    """A constant, the same in every lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Load from any address, aligned or not."""
    loaded = b.load(b.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Store to any address, aligned or not."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def call(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """``x * y + z``, fused where the CPU can."""
    many = f"v{x.type.count}" if isinstance(x.type, ir.VectorType) else ""
    return call(b, f"llvm.fmuladd.{many}f32", x.type, x, y, z)


def spread(b: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """A float32 in sixteen lanes."""
    one = b.insert_element(ir.Constant(F32x16, ir.Undefined), number, const(I32, 0))
    return b.shuffle_vector(one, one, const(I32x16, 0))


AHEAD = 4096
"""Bytes that streams of weights and states are asked for before they are needed. By itself a processor reads ahead to
the end of a page, and has too little under way to use the memory's bandwidth: up to twice as fast, measured."""


def fetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at an address, which need not be ours."""
    place, whole = I8.as_pointer(), [const(I32, n) for n in (0, 3, 1)]  # to read, kept in all caches, data
    kind = ir.FunctionType(ir.VoidType(), [place, *(n.type for n in whole)])
    b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0"), [b.inttoptr(address, place), *whole])


def repeat(b: ir.IRBuilder, times: ir.Value, unroll: int, start: Sequence[ir.Value], body: Callable) -> list[ir.Value]:
    """Loop with ``unroll`` independent sets of running values; ``times`` is a multiple of it. Return the sets' sums."""
    slots = [[cgutils.alloca_once_value(b, value) for value in start] for _ in range(unroll)]
    with cgutils.for_range(b, b.udiv(times, const(I64, unroll))) as loop:
        first = b.mul(loop.index, const(I64, unroll))
        for u, own in enumerate(slots):
            values = body(b.add(first, const(I64, u)), [b.load(slot) for slot in own])
            for slot, value in zip(own, values, strict=True):
                b.store(value, slot)
    sums = [b.load(slot) for slot in slots[0]]
    for own in slots[1:]:
        for i, slot in enumerate(own):
            add = b.fadd if start[i].type.element == F32 else b.add
            sums[i] = add(sums[i], b.load(slot))
    return sums


def total(b: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """The sum of all lanes, floats pairwise."""
    if v.type.element != F32:
        kind = v.type.element
        return call(b, f"llvm.vector.reduce.add.v{v.type.count}i{kind.width}", kind, v)
    while v.type.count > 1:
        half = v.type.count // 2
        parts = [
            b.shuffle_vector(v, v, ir.Constant(lanes(I32, half), [ir.Constant(I32, at + i) for i in range(half)]))
            for at in (0, half)
        ]
        v = b.fadd(*parts)
    return b.extract_element(v, const(I32, 0))


def widened(b: ir.IRBuilder, kind: str, address: ir.Value, i: ir.Value) -> ir.Value:
    """Sixteen weights of a row as float32: those from column 16 i on."""
    if kind == "f32":
        return load(b, b.add(address, b.shl(i, const(I64, 6))), F32x16)
    if kind == "bf16":
        bits = b.zext(load(b, b.add(address, b.shl(i, const(I64, 5))), lanes(I16, 16)), I32x16)
        return b.bitcast(b.shl(bits, const(I32x16, 16)), F32x16)
    codes = load(b, b.add(address, b.shl(i, const(I64, 4))), lanes(I8, 16))
    return b.sitofp(b.sext(codes, I32x16), F32x16)


BLOCK = 4
"""Rows of weights that a dot product takes at a time: they share the loads of x, and memory has four streams."""


def _dots(kind: str, rows: int):
    """``sum(w * x)`` of ``rows`` rows of float32 or bfloat16, to ``out``; float32 ``x``, k a multiple of 32."""

    @intrinsic
    def dots(context, w, stride, x, out, k):
        def code(context, b, signature, arguments):
            w, stride, x, out, k = arguments
            every = [b.add(w, b.mul(stride, const(I64, r))) for r in range(rows)]
            below = b.mul(stride, const(I64, rows))

            def body(i, acc):
                for row in every:  # the next block's
                    fetch(b, b.add(b.add(row, below), b.shl(i, const(I64, {"f32": 6, "bf16": 5}[kind]))))
                some = load(b, b.add(x, b.shl(i, const(I64, 6))), F32x16)
                return [fma(b, widened(b, kind, row, i), some, a) for row, a in zip(every, acc, strict=True)]

            sums = repeat(b, b.lshr(k, const(I64, 4)), 1, [const(F32x16, 0.0)] * rows, body)
            for r, v in enumerate(sums):
                store(b, total(b, v), b.add(out, const(I64, 4 * r)))
            return context.get_dummy_value()

        return types.void(w, stride, x, out, k), code

    return dots


dots_f32, dots_bf16 = _dots("f32", BLOCK), _dots("bf16", BLOCK)


def _dot(kind: str):
    """``sum(w * x)`` of one row, in the same order."""

    @intrinsic
    def dot(context, w, x, k):
        def code(context, b, signature, arguments):
            w, x, k = arguments

            def body(i, acc):
                return [fma(b, widened(b, kind, w, i), load(b, b.add(x, b.shl(i, const(I64, 6))), F32x16), acc[0])]

            return total(b, repeat(b, b.lshr(k, const(I64, 4)), 1, [const(F32x16, 0.0)], body)[0])

        return types.float32(w, x, k), code

    return dot


dot_f32, dot_bf16 = _dot("f32"), _dot("bf16")


def _delta_rows(rows: int):
    """Advance ``rows`` rows of a delta-rule state, in place, by one token; n a multiple of 16.

    Of each row, ``p = row . decayed_k``, ``d = beta (v - p)``, ``row = decay * row + k * d``; the output is, of the row
    as it was, ``row . decayed_q + qk d``. ``v`` and ``out`` [rows]. Two rows share the loads of what they meet; with
    four a CPU has more streams of memory under way than it keeps apart.
    """

    @intrinsic
    def delta_rows(context, row, decay, k, decayed_k, decayed_q, beta, v, qk, out, n):
        def code(context, b, signature, arguments):
            row, decay, k, decayed_k, decayed_q, beta, v, qk, out, n = arguments
            times, every = b.lshr(n, const(I64, 4)), [row]
            for _ in range(rows - 1):
                every.append(b.add(every[-1], b.shl(n, const(I64, 2))))

            def products(i, acc):
                at = b.shl(i, const(I64, 6))
                sides, new = [load(b, b.add(side, at), F32x16) for side in (decayed_k, decayed_q)], []
                for r, own in enumerate(every):
                    fetch(b, b.add(own, b.add(at, const(I64, AHEAD))))
                    own = load(b, b.add(own, at), F32x16)
                    new += [fma(b, own, side, a) for side, a in zip(sides, acc[2 * r : 2 * r + 2], strict=True)]
                return new

            sums = [total(b, s) for s in repeat(b, times, 1, [const(F32x16, 0.0)] * (2 * rows), products)]
            many = []
            for r in range(rows):
                p, o = sums[2 * r : 2 * r + 2]
                d = b.fmul(beta, b.fsub(load(b, b.add(v, const(I64, 4 * r)), F32), p))
                store(b, b.fadd(o, b.fmul(qk, d)), b.add(out, const(I64, 4 * r)))
                many.append(spread(b, d))
            with cgutils.for_range(b, times) as loop:
                at = b.shl(loop.index, const(I64, 6))
                keep, key = (load(b, b.add(side, at), F32x16) for side in (decay, k))
                for own, d in zip(every, many, strict=True):
                    place = b.add(own, at)
                    store(b, fma(b, key, d, b.fmul(keep, load(b, place, F32x16))), place)
            return context.get_dummy_value()

        a, f = types.int64, types.float32
        return types.void(a, a, a, a, a, f, a, f, a, a), code

    return delta_rows


ROWS = 2
"""Rows of a state that are advanced at a time."""

delta_rows, delta_row = _delta_rows(ROWS), _delta_rows(1)


def all_lanes(b: ir.IRBuilder, n: ir.Value, body: Callable[[ir.Value, ir.Type], None]) -> None:
    """A loop over n float32: ``body`` gets where it is, in bytes, and whether it does sixteen or, at the end, one."""
    whole = b.and_(n, const(I64, ~15))
    for kind, first, last, step in ((F32x16, const(I64, 0), whole, 16), (F32, whole, n, 1)):
        with cgutils.for_range_slice(b, first, last, const(I64, step)) as (i, _):
            body(b.shl(i, const(I64, 2)), kind)


@intrinsic
def two_dots(context, row, x, y, out, k):
    """``sum(row * x)`` and ``sum(row * y)`` to ``out`` [2], all float32, k a multiple of 32."""

    def code(context, b, signature, arguments):
        row, x, y, out, k = arguments

        def body(i, acc):
            at = b.shl(i, const(I64, 6))
            own = load(b, b.add(row, at), F32x16)
            return [fma(b, own, load(b, b.add(o, at), F32x16), a) for o, a in zip((x, y), acc, strict=True)]

        for i, v in enumerate(repeat(b, b.lshr(k, const(I64, 4)), 2, [const(F32x16, 0.0)] * 2, body)):
            store(b, total(b, v), b.add(out, const(I64, 4 * i)))
        return context.get_dummy_value()

    return types.void(row, x, y, out, k), code


@intrinsic
def fade_two_dots(context, row, a, x, y, out, k):
    """``row *= a``, then ``two_dots`` of it."""

    def code(context, b, signature, arguments):
        row, a, x, y, out, k = arguments

        def body(i, acc):
            at = b.shl(i, const(I64, 6))
            own = b.fmul(load(b, b.add(row, at), F32x16), load(b, b.add(a, at), F32x16))
            store(b, own, b.add(row, at))
            return [fma(b, own, load(b, b.add(o, at), F32x16), a) for o, a in zip((x, y), acc, strict=True)]

        for i, v in enumerate(repeat(b, b.lshr(k, const(I64, 4)), 2, [const(F32x16, 0.0)] * 2, body)):
            store(b, total(b, v), b.add(out, const(I64, 4 * i)))
        return context.get_dummy_value()

    return types.void(row, a, x, y, out, k), code


def _axpy(kind: str):
    """``y += a * w`` for a row of weights and float32 ``y``, k a multiple of 16."""

    @intrinsic
    def axpy(context, a, w, y, k):
        def code(context, b, signature, arguments):
            a, w, y, k = arguments
            many = spread(b, a)
            with cgutils.for_range(b, b.lshr(k, const(I64, 4))) as loop:
                at = b.add(y, b.shl(loop.index, const(I64, 6)))
                store(b, fma(b, widened(b, kind, w, loop.index), many, load(b, at, F32x16)), at)
            return context.get_dummy_value()

        return types.void(a, w, y, k), code

    return axpy


axpy_f32, axpy_bf16, axpy_int8 = _axpy("f32"), _axpy("bf16"), _axpy("int8")


def _pairs(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """``acc`` [16 of int32] plus products of 32 int16, added in pairs: one instruction on most CPUs."""
    both = b.mul(b.sext(x, lanes(I32, 32)), b.sext(y, lanes(I32, 32)))
    even, odd = (
        b.shuffle_vector(both, both, ir.Constant(I32x16, [ir.Constant(I32, 2 * i + at) for i in range(16)]))
        for at in (0, 1)
    )
    return b.add(acc, b.add(even, odd))


def _ahead(b: ir.IRBuilder, stride: ir.Value, rows: int, least: int) -> ir.Value:
    """How far ahead weights are asked for: so many bytes, and of several rows at a time what comes after all of them.

    With less, the later ones' beginnings would be asked for by the row before, when they have been read already.
    """
    below, least = b.mul(stride, const(I64, rows)), const(I64, least)
    return b.select(b.icmp_unsigned(">", below, least), below, least) if rows > 1 else least


def _int8(rows: int, digits: int):
    """``sum(w * x)`` of ``rows`` rows of int8 and the digits of ``x``, one or two, k a multiple of 32.

    To ``out``, float32, times ``unit`` and the row's scale; or, without scales (address 0), to ``out`` as int64. The
    digits are int16, ``columns`` of each.
    """

    @intrinsic
    def dots(context, w, stride, s, scale_stride, x, unit, out, k, columns):
        def code(context, b, signature, arguments):
            w, stride, s, scale_stride, x, unit, out, k, columns = arguments
            every = [b.add(w, b.mul(stride, const(I64, r))) for r in range(rows)]
            ahead = _ahead(b, stride, rows, AHEAD)

            def body(i, acc):
                at = b.add(x, b.shl(i, const(I64, 6)))
                some = [load(b, b.add(at, b.mul(columns, const(I64, 2 * d))), lanes(I16, 32)) for d in range(digits)]
                new = []
                for r, row in enumerate(every):
                    here = b.add(row, b.shl(i, const(I64, 5)))
                    fetch(b, b.add(here, ahead))
                    codes = load(b, here, lanes(I8, 32))
                    weights = b.sext(codes, lanes(I16, 32))
                    new += [_pairs(b, acc[digits * r + d], weights, digit) for d, digit in enumerate(some)]
                return new

            sums = repeat(b, b.lshr(k, const(I64, 5)), 1, [const(I32x16, 0)] * (digits * rows), body)
            for r in range(rows):
                parts = sums[digits * r : digits * (r + 1)]
                if digits == 1:  # the lanes are as large as they can be, and their sum is larger
                    number = total(b, b.sext(parts[0], lanes(I64, 16)))
                else:
                    high, low = (b.sext(total(b, v), I64) for v in parts)
                    number = b.add(b.shl(high, const(I64, 12)), low)
                scaled = rows > 1
                if scaled:
                    scale = load(b, b.add(s, b.mul(scale_stride, const(I64, r))), F32)
                    number = b.fmul(b.fmul(b.sitofp(number, F32), unit), scale)
                store(b, number, b.add(out, const(I64, (4 if scaled else 8) * r)))
            return context.get_dummy_value()

        return types.void(w, stride, s, scale_stride, x, types.float32, out, k, columns), code

    return dots


AT_ONCE, COARSE_AT_ONCE = 2, BLOCK
"""Rows of integer weights at a time: they share the loads of x, which may be too long for the first-level cache, and
are sums that do not wait for each other."""

dots_int8, dot_int8 = _int8(AT_ONCE, 2), _int8(1, 2)
dots_int8_coarse, dot_int8_coarse = _int8(COARSE_AT_ONCE, 1), _int8(1, 1)


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of a four-bit code."""

OFFSET = 12
"""Added to twice a four-bit value, so that it is not negative: the lookup's products want one unsigned side."""


def _pair_digits(b: ir.IRBuilder, codes: list[ir.Value], sides: list[ir.Value], acc: ir.Value | None) -> ir.Value:
    """Products of both nibbles' values with one digit of even and odd columns, summed in lanes of int32."""
    words = lanes(I32, BYTES // 4)
    if BYTES == 64:
        acc = const(words, 0) if acc is None else acc
        for u, s in zip(codes, sides, strict=True):
            acc = call(b, "llvm.x86.avx512.vpdpbusd.512", words, acc, u, s)
        return acc
    halves = lanes(I16, BYTES // 2)
    multiply = {32: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.ssse3.pmadd.ub.sw.128"}[BYTES]
    both = b.add(*(call(b, multiply, halves, u, s) for u, s in zip(codes, sides, strict=True)))
    add = {32: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.sse2.pmadd.wd"}[BYTES]
    summed = call(b, add, words, both, const(halves, 1))
    return summed if acc is None else b.add(acc, summed)


def _whole_numbers(b: ir.IRBuilder, x: ir.Value, per: ir.Value) -> ir.Value:
    """``x * per`` of 16 columns, rounded to the nearest int32."""
    t = b.fmul(load(b, x, F32x16), spread(b, per))
    half = b.select(b.fcmp_ordered(">=", t, const(F32x16, 0.0)), const(F32x16, 0.5), const(F32x16, -0.5))
    return b.fptosi(b.fadd(t, half), I32x16)


@intrinsic
def digits_int8(context, x, per, high, low):
    """Write the two digits of 16 columns of ``x * per`` for ``dot_int8``."""

    def code(context, b, signature, arguments):
        x, per, high, low = arguments
        number = _whole_numbers(b, x, per)
        upper = b.ashr(b.add(number, const(I32x16, 2048)), const(I32x16, 12))
        store(b, b.trunc(upper, lanes(I16, 16)), high)
        store(b, b.trunc(b.sub(number, b.shl(upper, const(I32x16, 12))), lanes(I16, 16)), low)
        return context.get_dummy_value()

    return types.void(x, per, high, low), code


@intrinsic
def digit_int8(context, x, per, out):
    """Write the one digit of 16 columns of ``x * per`` for ``dot_int8_coarse``."""

    def code(context, b, signature, arguments):
        x, per, out = arguments
        store(b, b.trunc(_whole_numbers(b, x, per), lanes(I16, 16)), out)
        return context.get_dummy_value()

    return types.void(x, per, out), code


def _digits_mxfp4(digits: int):
    """Write the digits of 32 columns of ``x * per``, and their correction, where ``_mxfp4`` reads them."""

    @intrinsic
    def write(context, x, per, out):
        def code(context, b, signature, arguments):
            x, per, out = arguments
            parts = [_whole_numbers(b, address, per) for address in (x, b.add(x, const(I64, 64)))]
            at = [[ir.Constant(I32, 2 * i + odd) for i in range(16)] for odd in (0, 1)]
            sides = [b.shuffle_vector(*parts, ir.Constant(I32x16, places)) for places in at]
            pairs = b.add(*sides)
            eights = None
            for i in range(4):
                some = ir.Constant(lanes(I32, 4), [ir.Constant(I32, 4 * lane + i) for lane in range(4)])
                four = b.shuffle_vector(pairs, pairs, some)
                eights = four if eights is None else b.add(eights, four)
            correction = b.mul(eights, const(lanes(I32, 4), -OFFSET))
            store(b, correction, b.add(out, const(I64, 2 * digits * BYTES)))
            for odd, side in enumerate(sides):
                for digit in reversed(range(digits)):  # the smallest is the last of them
                    place = b.add(out, const(I64, (2 * digit + odd) * BYTES))
                    store(b, b.trunc(side, lanes(I8, 16)), place)
                    side = b.ashr(b.add(side, const(I32x16, 128)), const(I32x16, 8))
            return context.get_dummy_value()

        return types.void(x, per, out), code

    return write


digits_mxfp4, digits_mxfp4_coarse = _digits_mxfp4(3), _digits_mxfp4(2)


STEP = 128
"""Columns that all rows of integer weights are a multiple of, or else are read one by one."""


def _values(b: ir.IRBuilder, packed: ir.Value) -> list[ir.Value]:
    """Twice the values of a vector's low and high nibbles, less negative by OFFSET."""
    kind, halves = packed.type, lanes(I16, BYTES // 2)
    shifted = b.bitcast(b.lshr(b.bitcast(packed, halves), const(halves, 4)), kind)
    table = [OFFSET + v for v in E2M1] + [OFFSET - v for v in E2M1]
    table = ir.Constant(kind, [ir.Constant(I8, v) for v in table] * (BYTES // 16))
    if BYTES == 64 and "avx512vbmi" in FEATURES:  # its index has 6 bits: the upper two choose between equal tables
        return [call(b, "llvm.x86.avx512.permvar.qi.512", kind, table, n) for n in (packed, shifted)]
    name = {
        64: "llvm.x86.avx512.pshuf.b.512",
        32: "llvm.x86.avx2.pshuf.b",
        16: "llvm.x86.ssse3.pshuf.b.128",
    }[BYTES]
    return [call(b, name, kind, table, b.and_(n, const(kind, 15))) for n in (packed, shifted)]


def _mxfp4(rows: int, digits: int):
    """``sum(w * x)`` of ``rows`` rows of MXFP4 codes with their scales, and ``x`` as ``_digits_mxfp4`` lays it out.

    To ``out``, in units of half the digits' unit; k a multiple of STEP.
    """

    @intrinsic
    def dots(context, w, stride, s, scale_stride, x, out, k):
        def code(context, b, signature, arguments):
            w, stride, s, scale_stride, x, out, k = arguments
            words = lanes(I32, BYTES // 4)
            every = [b.add(w, b.mul(stride, const(I64, r))) for r in range(rows)]
            ahead = _ahead(b, stride, rows, 2 * AHEAD)
            scales = [b.add(s, b.mul(scale_stride, const(I64, r))) for r in range(rows)]

            def whole_numbers(i):
                """Products of one vector of codes of every row, summed in lanes of eight columns."""
                codes, numbers = [], [None] * rows
                for row in every:
                    here = b.add(row, b.mul(i, const(I64, BYTES)))
                    fetch(b, b.add(here, ahead))
                    codes.append(_values(b, load(b, here, lanes(I8, BYTES))))
                at = b.add(x, b.mul(i, const(I64, (2 * digits + 1) * BYTES)))
                for digit in range(digits):  # the largest first
                    sides = [load(b, b.add(at, const(I64, (2 * digit + o) * BYTES)), lanes(I8, BYTES)) for o in (0, 1)]
                    for r, before in enumerate(numbers):
                        higher = None if before is None else b.shl(before, const(words, 8))
                        numbers[r] = _pair_digits(b, codes[r], sides, higher)
                correction = load(b, b.add(at, const(I64, 2 * digits * BYTES)), words)
                return [b.sitofp(b.add(number, correction), lanes(F32, words.count)) for number in numbers]

            def groups(first, count):
                """The turns of a loop from group ``first`` on, so many groups at a time."""
                kind, least = lanes(I32, count), const(lanes(I32, count), 1 << 22)  # 2^-127, which is subnormal

                def body(i, acc):
                    group, widened_scales = b.add(first, b.mul(i, const(I64, count))), []
                    for address in scales:
                        bits = b.zext(load(b, b.add(address, group), lanes(I8, count)), kind)
                        bits = b.shl(bits, const(kind, 23))
                        bits = b.select(b.icmp_unsigned(">", bits, least), bits, least)
                        widened_scales.append(b.bitcast(bits, lanes(F32, count)))
                    acc, vector = list(acc), b.udiv(group, const(I64, BYTES // 16))
                    for part in range(16 * count // BYTES):
                        numbers = whole_numbers(b.add(vector, const(I64, part)))
                        spread = [ir.Constant(I32, (part * words.count + j) // 4) for j in range(words.count)]
                        spread = ir.Constant(words, spread)
                        for r, v in enumerate(widened_scales):
                            acc[r] = fma(b, numbers[r], b.shuffle_vector(v, v, spread), acc[r])
                    return acc

                return body

            # As many groups as a vector has lanes share the widening of their scales; what is left goes by STEP.
            total_groups, at_once = b.udiv(k, const(I64, 32)), words.count
            whole = b.udiv(total_groups, const(I64, at_once))
            done = b.mul(whole, const(I64, at_once))
            rest = b.udiv(b.sub(total_groups, done), const(I64, STEP // 32))
            start = [const(lanes(F32, words.count), 0.0)] * rows
            sums = repeat(b, whole, 1, start, groups(const(I64, 0), at_once))
            sums = repeat(b, rest, 1, sums, groups(done, STEP // 32))
            for r, v in enumerate(sums):
                store(b, total(b, v), b.add(out, const(I64, 4 * r)))
            return context.get_dummy_value()

        return types.void(w, stride, s, scale_stride, x, out, k), code

    return dots


dots_mxfp4, dot_mxfp4 = _mxfp4(AT_ONCE, 3), _mxfp4(1, 3)
dots_mxfp4_coarse, dot_mxfp4_coarse = _mxfp4(COARSE_AT_ONCE, 2), _mxfp4(1, 2)


def _code_value(b: ir.IRBuilder, code: ir.Value) -> ir.Value:
    """Twice the values of 16 codes, float32: a magnitude m is m + max(m - 4, 0), and 2 more for 7."""
    kind = code.type
    m = b.and_(code, const(kind, 7))
    above = b.sub(b.select(b.icmp_unsigned(">", m, const(kind, 4)), m, const(kind, 4)), const(kind, 4))
    seven = b.and_(b.lshr(b.add(m, const(kind, 1)), const(kind, 2)), const(kind, 2))
    m = b.add(b.add(m, above), seven)
    signed = b.select(b.icmp_unsigned(">", code, const(kind, 7)), b.neg(m), m)
    return b.sitofp(b.sext(signed, I32x16), F32x16)


def _group(b: ir.IRBuilder, w: ir.Value, s: ir.Value, i: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Twice the values of a group's even and odd columns, and its scale in every lane."""
    packed = load(b, b.add(w, b.shl(i, const(I64, 4))), lanes(I8, 16))
    bits = b.shl(b.zext(load(b, b.add(s, i), I8), I32), const(I32, 23))
    bits = b.select(b.icmp_unsigned(">", bits, const(I32, 1 << 22)), bits, const(I32, 1 << 22))
    scale = b.insert_element(ir.Constant(F32x16, ir.Undefined), b.bitcast(bits, F32), const(I32, 0))
    low, high = b.and_(packed, const(packed.type, 15)), b.lshr(packed, const(packed.type, 4))
    return _code_value(b, low), _code_value(b, high), b.shuffle_vector(scale, scale, const(I32x16, 0))


@intrinsic
def widen_mxfp4(context, w, s, out, k):
    """Write a row of MXFP4 as float32, k a multiple of 32."""

    def code(context, b, signature, arguments):
        w, s, out, k = arguments
        with cgutils.for_range(b, b.lshr(k, const(I64, 5))) as loop:
            *sides, scale = _group(b, w, s, loop.index)
            low, high = (b.fmul(side, b.fmul(scale, const(F32x16, 0.5))) for side in sides)
            at = b.add(out, b.shl(loop.index, const(I64, 7)))
            for half in (0, 8):
                turns = [ir.Constant(I32, half + i // 2 + 16 * (i % 2)) for i in range(16)]
                store(b, b.shuffle_vector(low, high, ir.Constant(I32x16, turns)), b.add(at, const(I64, 8 * half)))
        return context.get_dummy_value()

    return types.void(w, s, out, k), code


@intrinsic
def dot_mxfp4_portable(context, w, s, x, k):
    """``sum(w * x)`` of a row of MXFP4 codes with its scales; ``x`` is float32, all even columns, then all odd."""

    def code(context, b, signature, arguments):
        w, s, x, k = arguments
        odd = b.add(x, b.shl(k, const(I64, 1)))

        def body(i, acc):
            low, high, scale = _group(b, w, s, i)
            at = b.shl(i, const(I64, 6))
            part = b.fmul(low, load(b, b.add(x, at), F32x16))
            part = fma(b, high, load(b, b.add(odd, at), F32x16), part)
            return [fma(b, part, scale, acc[0])]

        return total(b, repeat(b, b.lshr(k, const(I64, 5)), 1, [const(F32x16, 0.0)], body)[0])

    return types.float32(w, s, x, k), code


HEADS, POSITIONS = 4, 2
"""Heads and positions of one tile of attention scores: as many sums as a CPU of 16 registers can hold."""


def _scores(kind: str):
    """Dot products of HEADS queries (rows of ``stride`` bytes) with two cached rows, added to ``out`` [HEADS, 2]."""

    @intrinsic
    def scores(context, q, stride, first, second, out, k):
        def code(context, b, signature, arguments):
            q, stride, first, second, out, k = arguments
            queries = [b.add(q, b.mul(stride, const(I64, h))) for h in range(HEADS)]

            def body(i, acc):
                rows = [widened(b, kind, row, i) for row in (first, second)]
                offset, new = b.shl(i, const(I64, 6)), []
                for h, query in enumerate(queries):
                    x = load(b, b.add(query, offset), F32x16)
                    new += [fma(b, x, row, acc[2 * h + j]) for j, row in enumerate(rows)]
                return new

            sums = repeat(b, b.lshr(k, const(I64, 4)), 1, [const(F32x16, 0.0)] * (2 * HEADS), body)
            for i, v in enumerate(sums):
                at = b.add(out, const(I64, 4 * i))
                store(b, b.fadd(total(b, v), load(b, at, F32)), at)
            return context.get_dummy_value()

        return types.void(q, stride, first, second, out, k), code

    return scores


scores_f32, scores_bf16 = _scores("f32"), _scores("bf16")


def _weighted(kind: str):
    """Add ``sum_s p[h, s] * row_s`` to ``y`` [HEADS rows of ``y_stride`` bytes], k a multiple of 16."""

    @intrinsic
    def weighted(context, p, p_stride, rows, row_stride, count, y, y_stride, k):
        def code(context, b, signature, arguments):
            p, p_stride, rows, row_stride, count, y, y_stride, k = arguments
            with cgutils.for_range(b, b.lshr(k, const(I64, 4))) as block:
                outs = [
                    b.add(b.add(y, b.mul(y_stride, const(I64, h))), b.shl(block.index, const(I64, 6)))
                    for h in range(HEADS)
                ]

                def body(s, acc):
                    row = widened(b, kind, b.add(rows, b.mul(s, row_stride)), block.index)
                    new = []
                    for h in range(HEADS):
                        at = b.add(b.add(p, b.mul(p_stride, const(I64, h))), b.shl(s, const(I64, 2)))
                        new.append(fma(b, spread(b, load(b, at, F32)), row, acc[h]))
                    return new

                start = [const(F32x16, 0.0)] * HEADS
                for out, value in zip(outs, repeat(b, count, 1, start, body), strict=True):
                    store(b, b.fadd(load(b, out, F32x16), value), out)
            return context.get_dummy_value()

        return types.void(p, p_stride, rows, row_stride, count, y, y_stride, k), code

    return weighted


weighted_f32, weighted_bf16 = _weighted("f32"), _weighted("bf16")


def _peek(kind: ir.Type, result: types.Type):
    @intrinsic
    def peek(context, address):
        def code(context, b, signature, arguments):
            return load(b, arguments[0], kind)

        return result(address), code

    return peek


def _poke(kind: types.Type):
    @intrinsic
    def poke(context, address, value):
        def code(context, b, signature, arguments):
            store(b, arguments[1], arguments[0])
            return context.get_dummy_value()

        return types.void(address, kind), code

    return poke


peek_f32, peek_i8, peek_i64 = _peek(F32, types.float32), _peek(I8, types.int8), _peek(I64, types.int64)
peek_u8, peek_u16 = _peek(I8, types.uint8), _peek(I16, types.uint16)
poke_f32 = _poke(types.float32)


@intrinsic
def as_f32(context, bits):
    """The float32 with these 32 bits."""

    def code(context, b, signature, arguments):
        return b.bitcast(arguments[0], F32)

    return types.float32(types.uint32), code


@intrinsic
def as_u32(context, value):
    """The 32 bits of a float32."""

    def code(context, b, signature, arguments):
        return b.bitcast(arguments[0], I32)

    return types.uint32(types.float32), code


@intrinsic
def pointer(context, address):
    """An address as ``numba.carray`` wants it."""

    def code(context, b, signature, arguments):
        return b.inttoptr(arguments[0], I8.as_pointer())

    return types.voidptr(address), code


@intrinsic
def call_at(context, function, plan, i, t):
    """Call a function of three int64 by its address."""

    def code(context, b, signature, arguments):
        function, *given = arguments
        given = [context.cast(b, x, kind, types.int64) for x, kind in zip(given, signature.args[1:], strict=True)]
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        b.call(b.inttoptr(function, kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(function, plan, i, t), code


@intrinsic
def ask(context, address):
    """``fetch`` for loops that are written in Python."""

    def code(context, b, signature, arguments):
        fetch(b, *arguments)
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def copy(context, source, target, count):
    """Copy so many bytes."""

    def code(context, b, signature, arguments):
        source, target, count = arguments
        source, target = (b.inttoptr(address, I8.as_pointer()) for address in (source, target))
        cgutils.raw_memcpy(b, target, source, count, 1)
        return context.get_dummy_value()

    return types.void(source, target, count), code
