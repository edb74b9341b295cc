"""Few rows by the tensor cores, in Gluon: what ``linear.dots`` sums, of int8 and MXFP4 from compute capability 8.0 on.

A row of x becomes whole numbers of 30 bits relative to its largest; each is four digits of 8 bits. Products of digits
and codes are summed exactly. Weights are the cores' left operand, as they lie in memory: the order of columns within a
step is free, so a thread reads 16 bytes of a row, and no byte moves to another thread.

int8, which is here for experts alone (for others see ``int8``): right are the four digits, twice. MXFP4 must sum each
group of 32 columns for itself, and a thread reads one group: right are two digits of four groups, with zeros wherever a
group meets another one's digits. E2M1 times two is a byte of a table; as one look-up makes no negative bytes, what is
positive and what is negative are two products.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared,
    commit_group,
    wait_group,
)

from deltafin.gpu_kernels.early import early, wait
from deltafin.gpu_kernels.mathematics import activate

WARPS = gl.constexpr(4)
"""Warps of a program: each has every fourth piece of all rows. With eight, half as many programs wait for another."""

PIECE = gl.constexpr(128)
"""Columns of a warp's step."""

TALL = gl.constexpr(16)
"""Rows of a weight that the cores take at once."""

TABLES = gl.constexpr((0x04030200, 0x0D090705, 0xFDFEFF00 - (1 << 32), 0xF4F8FAFC - (1 << 32)))
"""Eight bytes for positive codes, eight for negative ones: see ``begin``."""

START = gl.constexpr(0x4B400000)
"""1.5 * 2^23 as float32. A sum of whole numbers that starts here is, read as float32, that much larger."""


@gluon.constexpr_function
def _steps(columns):
    return -(-columns // (PIECE * WARPS))


@gluon.constexpr_function
def _parts(per):
    """16 bytes that a thread reads of a tile in a step: of rows g and g + 8, and with int8 of two places."""
    return 4 if per == 4 else 2


@gluon.constexpr_function
def _operands(parts, per):
    """How words lie in threads: parts, warps, the 8 rows (or right columns) as two numbers, quarters, words."""
    a = 2 if per == 4 else 4
    return gl.BlockedLayout([parts, 1, 1, 1, 1, 4], [1, 1, a, 8 // a, 4, 1], [1, WARPS, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])


@gluon.constexpr_function
def _pairs(tiles, per):
    """How scales lie in threads: tiles, warps, the 8 rows as two numbers, a row and the one 8 below, quarters."""
    a = 2 if per == 4 else 4
    return gl.BlockedLayout([tiles, 1, 1, 1, 2, 1], [1, 1, a, 8 // a, 1, 4], [1, WARPS, 1, 1, 1, 1], [4, 5, 3, 2, 1, 0])


@gluon.constexpr_function
def _line(layout, dim, rank):
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(SIZE: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to SIZE - 1 along one dimension of a layout, ready to be broadcast along the others."""
    x = gl.arange(0, SIZE, layout=_line(LAYOUT, DIM, RANK))
    for other in gl.static_range(RANK):
        if other != DIM:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def _power(exponent):
    """2^exponent for -126 to 127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _chain(f0, f1, f2, f3, first, second, sums):
    """Four products of 16 x 32 and 32 x 8 bytes, each added to the one before."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s<4>;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, {$4, $8, $12, $16}, {$20, $24}, {$28, $29, $30, $31};
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, {$5, $9, $13, $17}, {$21, $25}, {s0, s1, s2, s3};
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, {$6, $10, $14, $18}, {$22, $26}, {s0, s1, s2, s3};
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$7, $11, $15, $19}, {$23, $27}, {s0, s1, s2, s3};
        }""",  # noqa: E501 - an instruction stands in one line
        "=r,=r,=r,=r" + ",r" * 28,
        [f0, f1, f2, f3, first, second, sums],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _bytes(selectors, low, high):
    """Of the codes in a word's lower half the bytes of a table; where bit 3 is set, all bits are the byte's sign."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, $1;", "=r,r,r,r", [selectors, low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _planes(numbers):
    """The digits of four numbers each, the highest first: a square of bytes, turned."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x7362;
        prmt.b32 b, $6, $7, 0x7362;
        prmt.b32 c, $4, $5, 0x5140;
        prmt.b32 d, $6, $7, 0x5140;
        prmt.b32 $0, a, b, 0x7632;
        prmt.b32 $1, a, b, 0x5410;
        prmt.b32 $2, c, d, 0x7632;
        prmt.b32 $3, c, d, 0x5410;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [numbers],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _digits(x, COLUMNS: gl.constexpr, PER: gl.constexpr):
    """A row's digits in shared memory, step by step as ``_chain`` takes them, and two powers that scale its sums.

    A row with a number that is not finite has NaN for a power.
    """
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [2, 1, 4, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 0, 1])
    half, warp = _along(2, 0, 5, READ), _along(WARPS, 1, 5, READ)
    quarter, word, byte = _along(4, 2, 5, READ), _along(4, 3, 5, READ), _along(4, 4, 5, READ)
    if PER == 4:
        column = warp * PIECE + half * 64 + quarter * 16 + word * 4 + byte
    else:
        column = warp * PIECE + quarter * 32 + word * 8 + half * 4 + byte
    largest = gl.zeros([2, WARPS, 4, 4, 4], gl.int32, layout=READ)
    xs = ()
    for step in gl.static_range(_steps(COLUMNS)):
        here = column + step * (PIECE * WARPS)
        v = gl.load(x + here, here < COLUMNS, 0).to(gl.float32)
        largest = gl.maximum(largest, v.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
        xs = xs + (v,)
    # The largest is below 2^(top - 126): times 2^(156 - top), in two factors as that may be too large for one, 2^30.
    top = gl.maximum(gl.max(gl.ravel(largest), 0) >> 23, 1)
    one = (156 - top) >> 1
    two = 156 - top - one
    SHAPE: gl.constexpr = [2, WARPS, 1, 4, 4, 4] if PER == 4 else [4, WARPS, 4, 2, 1, 4]
    memory = gl.allocate_shared_memory(
        gl.int32, [_steps(COLUMNS)] + SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    )
    for step in gl.static_range(_steps(COLUMNS)):
        whole = (xs[step] * _power(one) * _power(two)).to(gl.int32)
        planes = _planes((whole + 0x808080) ^ 0x808080)  # from -128 to 127: 128 and more are one more of the next
        if PER == 4:
            planes = gl.permute(planes, (0, 1, 4, 2, 3))
        else:
            planes = gl.permute(gl.reshape(planes, [2, WARPS, 4, 4, 2, 2]), (4, 0, 1, 2, 5, 3))
        memory.index(step).store(gl.reshape(planes, SHAPE))
    return memory, gl.where(top == 255, float("nan"), _power(-one)), _power(-two)


@gluon.jit
def _places(COLUMNS: gl.constexpr, PER: gl.constexpr, TILES: gl.constexpr):
    """Which words of TILES tiles in a step a thread fetches, and which scales; and of which warps' pieces these are."""
    L: gl.constexpr = _operands(_parts(PER) * TILES, PER)
    A: gl.constexpr = 2 if PER == 4 else 4
    part, warp = _along(_parts(PER) * TILES, 0, 6, L), _along(WARPS, 1, 6, L)
    row = part % TILES * TALL + part // TILES % 2 * 8 + _along(A, 2, 6, L) * (8 // A) + _along(8 // A, 3, 6, L)
    word = part // TILES // 2 * 16 + warp * (PIECE // PER) + _along(4, 4, 6, L) * 4 + _along(4, 5, 6, L)
    S: gl.constexpr = gl.BlockedLayout([1, 1, 4], [2, 16, 1], [WARPS, 1, 1], [2, 1, 0])
    scale_row = _along(2 * TILES, 0, 3, S) * 8 + _along(8, 1, 3, S)
    scale_warp = _along(WARPS, 2, 3, S)
    return row * (COLUMNS // PER) + word, warp, scale_row * (COLUMNS // PIECE) + scale_warp, scale_warp


@gluon.jit
def _fetch(
    rings,
    codes,
    scales,
    places,
    span,
    flat,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Ask for what step ``flat`` of a program's tiles needs of its weights."""
    first, tiles, last = span
    words, warp, scale_words, scale_warp = places
    step = flat % _steps(COLUMNS)
    row = gl.minimum((first + flat // _steps(COLUMNS)) * (TALL * TILES), last)
    left = gl.where(flat < tiles * _steps(COLUMNS), COLUMNS // PIECE, 0) - step * WARPS
    for m in gl.static_range(len(codes)):
        at = row * (COLUMNS // PER) + step * (WARPS * PIECE // PER)
        async_copy_global_to_shared(rings[m][0].index(flat % SLOTS), codes[m] + (at + words), warp < left)
        if PER == 8:
            at = row * (COLUMNS // PIECE) + step * WARPS
            async_copy_global_to_shared(
                rings[m][1].index(flat % SLOTS), scales[m] + (at + scale_words), scale_warp < left
            )
    commit_group()


@gluon.jit
def _parted(both, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Two or four tensors that lie one after the other along the first dimension, in every thread."""
    SHAPE: gl.constexpr = both.shape
    if PARTS == 2:
        both = gl.reshape(both, [2, SHAPE[0] // 2] + SHAPE[1:])
        parts = gl.split(gl.permute(both, [1, 2, 3, 4, 5, 6, 0]))
    else:
        both = gl.reshape(both, [2, 2, SHAPE[0] // 4] + SHAPE[1:])
        even, odd = gl.split(gl.permute(both, [2, 3, 4, 5, 6, 7, 0, 1]))
        p0, p2 = gl.split(even)
        p1, p3 = gl.split(odd)
        parts = (p0, p1, p2, p3)
    out = ()
    for p in gl.static_range(PARTS):
        out = out + (gl.convert_layout(parts[p], LAYOUT, assert_trivial=True),)
    return out


@gluon.jit
def begin(
    x,
    last,
    codes,
    scales,
    span,
    EARLY: gl.constexpr,
    COUNT: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Have weights fetched, then make the digits of COUNT rows; rows of x after ``last`` are that row again."""
    A: gl.constexpr = 2 if PER == 4 else 4
    rings = ()
    for _m in gl.static_range(len(codes)):
        ring = gl.allocate_shared_memory(
            gl.int32,
            [SLOTS, _parts(PER) * TILES, WARPS, A, 8 // A, 4, 4],
            gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0]),
        )
        about = ring
        if PER == 8:
            about = gl.allocate_shared_memory(
                gl.int32, [SLOTS, 2 * TILES, 8, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
            )
        rings = rings + ((ring, about),)
    places = _places(COLUMNS, PER, TILES)
    for ahead in gl.static_range(SLOTS - 1):
        _fetch(rings, codes, scales, places, span, gl.to_tensor(ahead), COLUMNS, PER, TILES, SLOTS)
    wait(EARLY)
    right = ()
    for n in gl.static_range(COUNT):
        right = right + (_digits(x + gl.minimum(n, last) * COLUMNS, COLUMNS, PER),)
    gl.thread_barrier()
    # Of constants the compiler would make a copy for every use; of these it does not know that they are. (A row that
    # begins with this NaN has nothing but NaN for its sums.)
    L: gl.constexpr = _operands(TILES, PER)
    never = gl.load(x + _along(4, 4, 6, L)).to(gl.float32).to(gl.int32, bitcast=True) == 0x7FFFFFFF
    start = gl.full([TILES, WARPS, A, 8 // A, 4, 4], 0, gl.int32, layout=L) + gl.where(never, 0, START)
    # Twice the magnitudes, one more each but zero; and less twice the magnitudes. Of a positive code the second look-up
    # makes -1, of a negative one the first makes 0: their sum is twice the number.
    table = ()
    for bytes in gl.static_range(4):
        table = table + (gl.where(never, 0, TABLES[bytes]),)
    return rings, places, right, start, table


@gluon.jit
def dots(
    begun,
    codes,
    scales,
    span,
    tile,
    COUNT: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """COUNT rows of x times TALL * TILES rows of several weights: sums [TILES, 8, 2], int8 without its scales."""
    rings, places, digits, start, table = begun
    MATRICES: gl.constexpr = len(codes)
    A: gl.constexpr = 2 if PER == 4 else 4
    SHAPE: gl.constexpr = [TILES, WARPS, A, 8 // A, 4, 4]
    L: gl.constexpr = _operands(TILES, PER)
    S: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, L))
    quarter, i = _along(4, 4, 6, L), _along(4, 5, 6, L)
    own = _along(A, 2, 6, L) == quarter
    sums = ()
    for _each in gl.static_range(COUNT * MATRICES):
        sums = sums + (gl.zeros(SHAPE, gl.int32 if PER == 4 else gl.float32, layout=L),)
    for step in range(_steps(COLUMNS)):
        flat = tile * _steps(COLUMNS) + step
        wait_group(SLOTS - 2)
        right = ()
        for n in gl.static_range(COUNT):
            parts = _parted(digits[n][0].index(step).load(_operands(6 - _parts(PER), PER)), 6 - _parts(PER), L)
            if PER == 8:
                masked = ()
                for k in gl.static_range(4):
                    masked = masked + (gl.where(own, parts[k], 0),)
                parts = masked
            right = right + (parts,)
        new = ()
        for m in gl.static_range(MATRICES):
            words = _parted(rings[m][0].index(flat % SLOTS).load(_operands(_parts(PER) * TILES, PER)), _parts(PER), L)
            if PER == 4:
                for n in gl.static_range(COUNT):
                    chain = _chain(
                        words[0], words[1], words[2], words[3], right[n][0], right[n][1], sums[m * COUNT + n]
                    )
                    new = new + (chain,)
            else:
                four = rings[m][1].index(flat % SLOTS).reshape([TILES, 2, A, 8 // A, WARPS]).permute((0, 4, 2, 3, 1))
                s0, s1 = gl.split(four.load(gl.SliceLayout(5, _pairs(TILES, PER))))
                s0 = gl.expand_dims(gl.expand_dims(gl.convert_layout(s0, S, assert_trivial=True), 4), 5)
                s1 = gl.expand_dims(gl.expand_dims(gl.convert_layout(s1, S, assert_trivial=True), 4), 5)
                bits = gl.where(i < 2, s0 >> (8 * quarter), s1 >> (8 * quarter)) << 23 & 0x7F800000
                scale = gl.maximum(bits, 0x400000).to(gl.float32, bitcast=True)  # 2^-127 is a subnormal
                f0, f1 = words[0], words[1]
                p0, p1 = _bytes(f0, table[0], table[1]), _bytes(f1, table[0], table[1])
                p2, p3 = _bytes(f0 >> 16, table[0], table[1]), _bytes(f1 >> 16, table[0], table[1])
                f0, f1 = f0 ^ -2004318072, f1 ^ -2004318072  # the signs turned
                n0, n1 = _bytes(f0, table[2], table[3]), _bytes(f1, table[2], table[3])
                n2, n3 = _bytes(f0 >> 16, table[2], table[3]), _bytes(f1 >> 16, table[2], table[3])
                for n in gl.static_range(COUNT):
                    upper = _chain(p0, p1, p2, p3, right[n][0], right[n][1], start)
                    lower = _chain(p0, p1, p2, p3, right[n][2], right[n][3], start)
                    upper = _chain(n0, n1, n2, n3, right[n][0], right[n][1], upper).to(gl.float32, bitcast=True)
                    lower = _chain(n0, n1, n2, n3, right[n][2], right[n][3], lower).to(gl.float32, bitcast=True)
                    part = gl.fma(upper - 12582912.0, 65536.0, lower - 12582912.0)
                    new = new + (gl.fma(part, scale * digits[n][1], sums[m * COUNT + n]),)
        _fetch(rings, codes, scales, places, span, flat + (SLOTS - 1), COLUMNS, PER, TILES, SLOTS)
        sums = new
    out = ()
    for m in gl.static_range(MATRICES):
        for n in gl.static_range(COUNT):
            out = out + (_total(sums[m * COUNT + n], digits[n][1], digits[n][2], PER, TILES),)
    return out


@gluon.jit
def _total(sums, low, high, PER: gl.constexpr, TILES: gl.constexpr):
    """Add up what digits and warps have. A thread has right columns 2q and 2q + 1, of rows g and g + 8."""
    SHAPE: gl.constexpr = [TILES, WARPS, 8, 4, 2, 2]
    if PER == 4:
        c = gl.reshape(sums, SHAPE).to(gl.int64)
        C: gl.constexpr = c.type.layout
        quarter, odd = _along(4, 3, 6, C), _along(2, 5, 6, C)
        c = gl.where(quarter < 2, c << (24 - 16 * quarter - 8 * odd).to(gl.int64), 0)  # the others are the same again
        value = gl.sum(gl.sum(gl.sum(c, 5), 3), 1).to(gl.float32) * low
    else:
        c = gl.reshape(sums, SHAPE)
        C: gl.constexpr = c.type.layout
        c *= gl.where(_along(2, 5, 6, C) == 0, 128.0, 0.5)  # a digit of the second half; codes count halves
        value = gl.sum(gl.sum(gl.sum(c, 5), 3), 1)
    return gl.convert_layout(value * high, gl.BlockedLayout([1, 1, 2], [1, 8, 4], [1, 1, WARPS], [2, 1, 0]))


@gluon.jit
def _rows(span, tile, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of a weight that the sums of a tile belong to; the last tile begins early, to end with the last row."""
    first, _tiles, last = span
    row = _along(TILES, 0, 3, LAYOUT) * TALL + _along(2, 2, 3, LAYOUT) * 8 + _along(8, 1, 3, LAYOUT)
    return gl.minimum((first + tile) * (TALL * TILES), last) + row


@gluon.jit
def _span(program, tiles, rows, TILES: gl.constexpr):
    """A program's first tile, how many it has, and where the last begins at the latest."""
    first = program * tiles
    return first, gl.minimum(tiles, gl.cdiv(rows, TALL * TILES) - first), rows - TALL * TILES


@gluon.jit
def weight_of(program, codes, scales, outputs, each):
    """Which of several weights a program has, whose programs have ``each`` rows: its codes, scales, and rows.

    Then which of its programs this is, the rows of the weights before it, and of all.
    """
    code, scale, size, before, programs_before = codes[0], scales[0], outputs[0], 0, 0
    total, programs = outputs[0], gl.cdiv(outputs[0], each)
    for i in gl.static_range(1, len(codes)):
        here = program >= programs
        code = gl.where(here, codes[i], code)
        scale = gl.where(here, scales[i], scale)
        size = gl.where(here, outputs[i], size)
        before = gl.where(here, total, before)
        programs_before = gl.where(here, programs, programs_before)
        total += outputs[i]
        programs += gl.cdiv(outputs[i], each)
    return code, scale, size, program - programs_before, before, total


@gluon.jit(do_not_specialize=["count", "tiles"])
def few_rows(
    x,
    count,
    codes,
    scales,
    outputs,
    y,
    tiles,
    EARLY: gl.constexpr,
    COUNT: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """``tiles`` tiles of one of several weights of MXFP4, for COUNT rows; their outputs lie side by side in y."""
    row, program = gl.program_id(0) * COUNT, gl.program_id(1)
    left = count - row
    x += row * COLUMNS
    code, scale, size, program, before, total = weight_of(program, codes, scales, outputs, TALL * TILES * tiles)
    span = _span(program, tiles, size, TILES)
    begun = begin(x, left - 1, (code,), (scale,), span, EARLY, COUNT, COLUMNS, PER, TILES, SLOTS)
    for tile in range(span[1]):
        values = dots(begun, (code,), (scale,), span, tile, COUNT, COLUMNS, PER, TILES, SLOTS)
        LAYOUT: gl.constexpr = values[0].type.layout
        output = _rows(span, tile, TILES, LAYOUT)
        for n in gl.static_range(COUNT):
            gl.store(y + (row + n) * total + before + output, values[n], n < left)


@gluon.jit
def none_arrived(arrived, count):
    """Set counters to zero for ``is_last`` in the kernel that comes next: nobody else uses them by now."""
    mine = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    for i in range(mine, count, gl.num_programs(0) * gl.num_programs(1)):
        gl.store(arrived + i, 0)


@gluon.jit
def is_last(arrived, CHOSEN: gl.constexpr):
    """Whether all of a row's pairs have written their parts of the outputs that this program has written."""
    gl.thread_barrier()
    at = arrived + gl.program_id(0) // CHOSEN * gl.num_programs(1) + gl.program_id(1)
    return gl.atomic_add(at, 1, sem="acq_rel") == CHOSEN - 1


@gluon.jit
def add_up(parts, ids, y, output, mine, OUTPUTS: gl.constexpr, CHOSEN: gl.constexpr):
    """Some outputs of a row: the sum of its parts, place by place, whoever was the last to write one."""
    row = (gl.program_id(0) // CHOSEN).to(gl.int64)
    values = ()
    for place in gl.static_range(CHOSEN):  # all are asked for before the first is needed
        pair = row * CHOSEN + place
        values = values + (gl.load(parts + pair * OUTPUTS + output, mine & (gl.load(ids + pair) >= 0), 0),)
    total = values[0]
    for place in gl.static_range(1, CHOSEN):
        total += values[place]
    gl.store(y + row * OUTPUTS + output, total, mine)


@gluon.jit(do_not_specialize=["count", "tiles", "counters"])
def few_up(
    x,
    ids,
    count,
    gate,
    gate_scales,
    up,
    up_scales,
    h,
    arrived,
    counters,
    gate_limit,
    up_limit,
    tiles,
    EARLY: gl.constexpr,
    CHOSEN: gl.constexpr,
    COUNT: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    SATURATES: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Some inner channels of one (row, expert) pair, or with CHOSEN 0 of the one expert for COUNT rows: float32."""
    pair = gl.program_id(0) * COUNT
    left = count - pair
    expert = pair.to(gl.int64)
    if CHOSEN:
        wait(EARLY)
        none_arrived(arrived, counters)
        expert = gl.load(ids + pair)
        x += pair // CHOSEN * COLUMNS
    else:
        expert = expert * 0
        x += pair * COLUMNS
    if expert >= 0:
        span = _span(gl.program_id(1), tiles, WIDTH, TILES)
        scale_stride: gl.constexpr = COLUMNS // PIECE if PER == 8 else 1
        row = expert * WIDTH
        gate_scales += row * scale_stride
        up_scales += row * scale_stride
        codes = (gate + row * (COLUMNS // PER), up + row * (COLUMNS // PER))
        scales = (gate_scales, up_scales)
        begun = begin(x, left - 1, codes, scales, span, EARLY, COUNT, COLUMNS, PER, TILES, SLOTS)
        for tile in range(span[1]):
            values = dots(begun, codes, scales, span, tile, COUNT, COLUMNS, PER, TILES, SLOTS)
            LAYOUT: gl.constexpr = values[0].type.layout
            channel = _rows(span, tile, TILES, LAYOUT)
            for n in gl.static_range(COUNT):
                a, b = values[n], values[COUNT + n]
                if PER == 4:
                    a *= gl.load(gate_scales + channel)
                    b *= gl.load(up_scales + channel)
                value = activate(a, b, gate_limit, up_limit, SATURATES)
                gl.store(h + (pair + n) * WIDTH + channel, value, n < left)


@gluon.jit(do_not_specialize=["tiles"])
def few_down(
    h,
    ids,
    weights,
    down,
    scales,
    parts,
    arrived,
    y,
    tiles,
    EARLY: gl.constexpr,
    CHOSEN: gl.constexpr,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Some outputs of one (row, expert) pair, weighted, of int8. ``few_up`` came before: ids are there already.

    The last of a row's programs for the same outputs adds them up.
    """
    pair = gl.program_id(0)
    expert = gl.load(ids + pair)
    span = _span(gl.program_id(1), tiles, OUTPUTS, TILES)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [1, 1, WARPS], [2, 1, 0])
    if expert >= 0:
        row = expert * OUTPUTS
        down += row * (COLUMNS // PER)
        scales += row
        begun = begin(h + pair * COLUMNS, 0, (down,), (scales,), span, EARLY, 1, COLUMNS, PER, TILES, SLOTS)
        weight = gl.load(weights + pair).to(gl.float32)
        for tile in range(span[1]):
            value = dots(begun, (down,), (scales,), span, tile, 1, COLUMNS, PER, TILES, SLOTS)[0] * weight
            output = _rows(span, tile, TILES, LAYOUT)
            gl.store(parts + pair * OUTPUTS + output, value * gl.load(scales + output))
    else:
        wait(EARLY)
    if is_last(arrived, CHOSEN):
        for tile in range(span[1]):
            output = _rows(span, tile, TILES, LAYOUT)
            add_up(parts, ids, y, output, output >= 0, OUTPUTS, CHOSEN)


# Launches -----------------------------------------------------------------------------------------------------------

PROGRAMS = 4
"""Programs that share a multiprocessor, all at once."""

ROOM, RINGS = 64 << 10, 52 << 10
"""Bytes of a program's shared memory: the most for digits, four of each column, and the most that weights take."""


@cache
def _chip(device: torch.device) -> tuple[bool, int, int]:
    """Return whether a device has the cores, its multiprocessors, and columns that fit."""
    about = torch.cuda.get_device_properties(device)
    room = min(ROOM, about.shared_memory_per_block_optin - RINGS)
    return about.major >= 8, about.multi_processor_count, room // 4


def serves(per: int, columns: int, weights: Sequence[Tensor]) -> bool:
    """Whether few rows are multiplied here: codes and scales lie on a chip that can, in whole and aligned pieces."""
    there = all(t.device.type == "cuda" and t.data_ptr() % 16 == 0 for t in weights)
    rows = min(codes.shape[-2] for codes in weights[::2])
    if not there or per not in (4, 8) or columns % PIECE.value or rows < TALL.value:
        return False
    able, _, most = _chip(weights[0].device)
    return able and columns <= most


def words(codes: Tensor) -> Tensor:
    """See codes, or scales of MXFP4, as the words that are fetched."""
    return codes if codes.dtype == torch.float32 else codes.view(torch.int32)


def options(device: torch.device, per: int, tall: int, slots: int) -> dict[str, Any]:
    """What all launches say."""
    return early(device) | {"PER": per, "TILES": tall, "SLOTS": slots, "num_warps": WARPS.value}


def at_once(rows: int, columns: int, device: torch.device) -> int:
    """How many of a few rows a program takes: their digits share its memory."""
    return min(4, 1 << (rows - 1).bit_length(), 1 << (_chip(device)[2] // columns).bit_length() - 1)


def shared_out(
    outputs: Sequence[int], tall: int, others: int, device: torch.device, most: int = 1 << 20
) -> tuple[int, int]:
    """How many tiles a program has, and how many programs that makes; ``others`` do the same for other rows."""
    tiles = sum(-(-n // (TALL.value * tall)) for n in outputs)
    each = min(most, -(-tiles // max(1, PROGRAMS * _chip(device)[1] // others)))
    return each, sum(-(-n // (TALL.value * tall * each)) for n in outputs)
