"""Products of bfloat16 matrices for attention, by the tile registers (AMX) of processors that have them.

A tile is 16 rows of 64 bytes. One instruction adds to a tile of sums, float32 [16, 16], the product of a tile of 16
rows and 32 columns with one of 32 rows and 16 columns; the latter comes as pairs of rows, [16, 16, 2]. Tiles 0 to 3
are sums here, the others are operands. Addresses are int64; a thread says ``begin`` before, and ``end`` after.
"""

import ctypes
import functools
import struct
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils

from deltafin.cpu_kernels.compiling import FEATURES
from deltafin.cpu_kernels.vector import F32, I8, I16, I32, I64, call, const, intrinsic, lanes, load, store

KNOWN = sys.platform == "linux" and {"amx-bf16", "amx-tile"} <= FEATURES
"""Whether this machine has tiles, and we know how to ask for them."""

WIDTH = 16
"""Heads that are attended from at a time."""

POSITIONS = 64
"""Positions that are attended to at a time."""

RANK, COMMON = 64, 32
"""What the widths of latents and of shared keys must be multiples of."""


@functools.cache
def allowed() -> bool:
    """Whether this process may use tiles: Linux gives their registers' memory to those who ask for it."""
    if not KNOWN:
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def _tile(b: ir.IRBuilder, name: str, *operands: int | ir.Value) -> None:
    """An instruction over tiles, by their numbers, and over addresses and strides; nothing where it is not KNOWN.

    What calls it is compiled everywhere, and run where there are tiles.
    """
    if not KNOWN:
        return
    given = [ir.Constant(I8, o) if isinstance(o, int) else o for o in operands]
    call(b, f"llvm.x86.{name}", ir.VoidType(), *given)


def _place(b: ir.IRBuilder, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
    offset = const(I64, offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(address, offset), I8.as_pointer())


@intrinsic
def begin(context):
    """Lay all eight tiles out: 16 rows of 64 bytes."""

    def code(context, b, signature, arguments):
        layout = struct.pack("<BB14x8H16x8B8x", 1, 0, *[64] * 8, *[16] * 8)
        room = cgutils.alloca_once(b, ir.ArrayType(I8, 64))
        b.store(ir.Constant(ir.ArrayType(I8, 64), [ir.Constant(I8, n) for n in layout]), room)
        _tile(b, "ldtilecfg", b.bitcast(room, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def end(context):
    """Give the tiles back: an idle thread's need not be saved when another takes its core."""

    def code(context, b, signature, arguments):
        _tile(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def scores(context, latent, latent_stride, shared, shared_stride, q, rank, common, out):
    """Scores of POSITIONS rows of the cache, for WIDTH queries, to ``out`` float32 [POSITIONS, WIDTH].

    ``q`` bfloat16 [(rank + common) / 2, WIDTH, 2].
    """

    def code(context, b, signature, arguments):
        latent, latent_stride, shared, shared_stride, q, rank, common, out = arguments
        for part in range(4):
            _tile(b, "tilezero", part)
        after = b.add(q, b.mul(rank, const(I64, 2 * WIDTH)))
        for rows, stride, queries, width in ((latent, latent_stride, q, rank), (shared, shared_stride, after, common)):
            with cgutils.for_range(b, b.lshr(width, const(I64, 5))) as loop:
                at = b.shl(loop.index, const(I64, 6))
                _tile(b, "tileloadd64", 4, _place(b, queries, b.shl(loop.index, const(I64, 10))), const(I64, 64))
                for part in range(4):
                    own = 5 + part % 3
                    first = b.add(at, b.mul(stride, const(I64, 16 * part)))
                    _tile(b, "tileloadd64", own, _place(b, rows, first), stride)
                    _tile(b, "tdpbf16ps", part, own, 4)
        for part in range(4):
            _tile(b, "tilestored64", part, _place(b, out, 1024 * part), const(I64, 64))
        return context.get_dummy_value()

    return types.void(latent, latent_stride, shared, shared_stride, q, rank, common, out), code


@intrinsic
def weighted(context, p, pairs, y, rank):
    """Add ``p`` bfloat16 [WIDTH, POSITIONS] times the latents that ``pair`` wrote to ``y`` float32 [WIDTH, rank]."""

    def code(context, b, signature, arguments):
        p, pairs, y, rank = arguments
        stride = b.shl(rank, const(I64, 2))
        with cgutils.for_range(b, b.lshr(rank, const(I64, 6))) as loop:
            out, block = (b.add(base, b.shl(loop.index, const(I64, n))) for base, n in ((y, 8), (pairs, 13)))
            for part in range(4):
                _tile(b, "tileloadd64", part, _place(b, out, 64 * part), stride)
            for half in range(POSITIONS // 32):
                _tile(b, "tileloadd64", 4, _place(b, p, 64 * half), const(I64, 2 * POSITIONS))
                for part in range(4):
                    own = 5 + part % 3
                    _tile(b, "tileloadd64", own, _place(b, block, 2048 * part + 1024 * half), const(I64, 64))
                    _tile(b, "tdpbf16ps", part, 4, own)
            for part in range(4):
                _tile(b, "tilestored64", part, _place(b, out, 64 * part), stride)
        return context.get_dummy_value()

    return types.void(p, pairs, y, rank), code


@intrinsic
def pair(context, rows, stride, out, rank):
    """Write POSITIONS latents as ``weighted`` reads them: [rank / 16, POSITIONS / 2, 16, 2]."""

    def code(context, b, signature, arguments):
        rows, stride, out, rank = arguments
        kind = lanes(I16, 32)
        turns = [
            ir.Constant(lanes(I32, 32), [ir.Constant(I32, at + i // 2 + 32 * (i % 2)) for i in range(32)])
            for at in (0, 16)
        ]
        with cgutils.for_range(b, const(I64, POSITIONS // 2)) as loop:
            first = b.add(rows, b.mul(stride, b.shl(loop.index, const(I64, 1))))
            place = b.add(out, b.shl(loop.index, const(I64, 6)))
            with cgutils.for_range(b, b.lshr(rank, const(I64, 5))) as inner:
                at = b.add(first, b.shl(inner.index, const(I64, 6)))
                two = load(b, at, kind), load(b, b.add(at, stride), kind)
                for half, turn in enumerate(turns):
                    block = b.add(b.shl(inner.index, const(I64, 12)), const(I64, 2048 * half))
                    store(b, b.shuffle_vector(*two, turn), b.add(place, block))
        return context.get_dummy_value()

    return types.void(rows, stride, out, rank), code


def _rounded(b: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """float32 as the bits of the nearest bfloat16, the even one on a tie; numbers that are not NaN."""
    bits = b.bitcast(v, lanes(I32, v.type.count))
    odd = b.and_(b.lshr(bits, const(bits.type, 16)), const(bits.type, 1))
    bits = b.lshr(b.add(b.add(bits, const(bits.type, 0x7FFF)), odd), const(bits.type, 16))
    return b.trunc(bits, lanes(I16, v.type.count))


@intrinsic
def turn(context, p, out):
    """Write ``p`` float32 [POSITIONS, WIDTH] as bfloat16 [WIDTH, POSITIONS]."""

    def code(context, b, signature, arguments):
        p, out = arguments
        kind = lanes(F32, 16)
        with cgutils.for_range(b, const(I64, POSITIONS // 16)) as loop:
            first = b.add(p, b.shl(loop.index, const(I64, 10)))
            rows = [load(b, b.add(first, const(I64, 64 * i)), kind) for i in range(16)]
            for bit in (1, 2, 4, 8):  # of rows that differ in it, and of lanes: two quarters change places
                for i in (i for i in range(16) if not i & bit):
                    low = [ir.Constant(I32, 16 + j - bit if j & bit else j) for j in range(16)]
                    high = [ir.Constant(I32, 16 + j if j & bit else j + bit) for j in range(16)]
                    two = rows[i], rows[i | bit]
                    rows[i], rows[i | bit] = (
                        b.shuffle_vector(*two, ir.Constant(lanes(I32, 16), places)) for places in (low, high)
                    )
            place = b.add(out, b.shl(loop.index, const(I64, 5)))
            for i, row in enumerate(rows):
                store(b, _rounded(b, row), b.add(place, const(I64, 2 * POSITIONS * i)))
        return context.get_dummy_value()

    return types.void(p, out), code
