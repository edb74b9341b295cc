"""One row by int8 weights on the tensor cores, in Gluon: the sums of ``digits``, bit for bit, with fewer instructions.

16 bytes of a row are the cores' left operand as they are. Words 0 and 2 stand in the place of one row, 1 and 3 in that
of another; right are the digits of the former's columns and those of the latter's, and half of the sums are of no use.
Up to eight steps are written out, which makes their addresses constants; the words of the next are on their way to
registers, without shared memory and its barriers. Measured on one H200, 12288 x 7168: 24.0 us, 88 % of what a copy
moves, where ``digits`` takes 26.8; 163840 x 7168: 281 us instead of 348.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltafin.gpu_kernels.digits import PIECE, TALL, WARPS, _along, _planes, _power, _steps
from deltafin.gpu_kernels.early import wait

MOST = 8192
"""Columns of a row at most: with 12,288 this form takes 44 us for 7168 outputs, ``digits`` 31 (one H200)."""

DEEP = gl.constexpr(2)
"""Steps whose words are on their way."""

WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 4], [1, 2, 4, 4, 1], [WARPS.value, 1, 1, 1, 1], [4, 3, 2, 1, 0]))
"""How words lie in threads: warps, the 8 rows (or right columns) as two numbers, quarters, words."""

ROWS = gl.constexpr(gl.BlockedLayout([1, 2], [8, 4], [1, WARPS.value], [1, 0]))
"""How the sums of a tile's rows lie in threads: [8, 2], of rows g and g + 8."""


@gluon.constexpr_function
def _block(columns):
    """Steps that are written out one after the other: all of a row, or as many as divide them, up to eight."""
    steps = _steps(columns)
    return max(n for n in range(1, min(steps, 8) + 1) if steps % n == 0)


@gluon.jit
def _pair(first, second, right, sums):
    """Two products: 16 bytes of a row are a left operand as they are, words 1 and 3 in the place of another row's."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s<4>;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, {$4, $5, $6, $7}, {$12, $13}, {$16, $17, $18, $19};
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$14, $15}, {s0, s1, s2, s3};
        }""",  # noqa: E501
        "=r,=r,=r,=r" + ",r" * 16,
        [first, second, right, sums],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _digits(x, COLUMNS: gl.constexpr):
    """The row's digits in shared memory, step by step as ``_pair`` takes them, and two powers that scale its sums.

    A row with a number that is not finite has NaN for a power.
    """
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [2, 1, 4, 4, 1], [1, WARPS, 1, 1, 1], [4, 3, 2, 0, 1])
    half, warp = _along(2, 0, 5, READ), _along(WARPS, 1, 5, READ)
    quarter, word, byte = _along(4, 2, 5, READ), _along(4, 3, 5, READ), _along(4, 4, 5, READ)
    column = warp * PIECE + half * 64 + quarter * 16 + word * 4 + byte
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
    memory = gl.allocate_shared_memory(
        gl.int32, [_steps(COLUMNS), WARPS, 2, 4, 4, 4], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    for step in gl.static_range(_steps(COLUMNS)):
        whole = (xs[step] * _power(one) * _power(two)).to(gl.int32)
        planes = _planes((whole + 0x808080) ^ 0x808080)  # from -128 to 127: 128 and more are one more of the next
        planes = gl.permute(gl.reshape(planes, [2, WARPS, 4, 2, 2, 4]), (1, 4, 5, 2, 0, 3))
        memory.index(step).store(gl.reshape(planes, [WARPS, 2, 4, 4, 4]))
    return memory, gl.where(top == 255, float("nan"), _power(-one)), _power(-two)


@gluon.jit
def _at(codes, span, flat, COLUMNS: gl.constexpr):
    """Where a thread's words begin of a program's block ``flat`` of steps, and whether its warp has some in all."""
    first, tiles, last = span
    BLOCKS: gl.constexpr = _steps(COLUMNS) // _block(COLUMNS)
    flat = gl.minimum(flat, tiles * BLOCKS - 1)
    tall = gl.minimum((first + flat // BLOCKS) * TALL, last)
    column = flat % BLOCKS * (_block(COLUMNS) * WARPS * PIECE)
    row = _along(2, 1, 5, WORDS) * 4 + _along(4, 2, 5, WORDS)
    warp, quarter = _along(WARPS, 0, 5, WORDS), _along(4, 3, 5, WORDS)
    word = row * (COLUMNS // 4) + (warp * (PIECE // 4) + quarter * 4 + _along(4, 4, 5, WORDS))
    # Of the last piece of rows that are no whole steps, some warps have nothing.
    inside = warp < gl.where(flat % BLOCKS == BLOCKS - 1, (COLUMNS // PIECE - 1) % WARPS + 1, WARPS)
    return (codes + (tall * (COLUMNS // 4) + column // 4)) + word, inside


@gluon.jit
def _load(at, STEP: gl.constexpr, COLUMNS: gl.constexpr):
    """Step STEP of a block: a thread's words of rows g and g + 8, at two places."""
    PARTIAL: gl.constexpr = _block(COLUMNS) == STEP + 1 and COLUMNS % (WARPS * PIECE) != 0
    words, inside = at
    parts = ()
    for part in gl.static_range(4):
        where = words + (part % 2 * 8 * (COLUMNS // 4) + part // 2 * 16 + STEP * (WARPS * PIECE // 4))
        parts = parts + ((gl.load(where, inside) if PARTIAL else gl.load(where)),)
    return parts


@gluon.jit
def _dots(codes, digits, coming, span, tile, COLUMNS: gl.constexpr) -> Any:
    """The row times TALL rows of a weight: sums [8, 2], without its scales."""
    memory, low, high = digits
    at, ahead = coming
    BLOCK: gl.constexpr = _block(COLUMNS)
    BLOCKS: gl.constexpr = _steps(COLUMNS) // BLOCK
    AHEAD: gl.constexpr = min(DEEP, BLOCK)
    upper = gl.zeros([WARPS, 2, 4, 4, 4], gl.int32, layout=WORDS)
    lower = upper
    for block in range(BLOCKS):
        then = _at(codes, span, tile * BLOCKS + block + 1, COLUMNS)
        for step in gl.static_range(BLOCK):
            if step + AHEAD < BLOCK:
                ahead = ahead + (_load(at, step + AHEAD, COLUMNS),)
            else:
                ahead = ahead + (_load(then, step + AHEAD - BLOCK, COLUMNS),)
            words = ahead[0]
            ahead = ahead[1:]
            right = memory.index(block * BLOCK + step).load(WORDS)
            upper = _pair(words[0], words[2], right, upper)
            lower = _pair(words[1], words[3], right, lower)
        at = then
    # Words 1 and 3 were in the place of another row: left rows g + 8 and right columns 4 to 7 belong to them.
    c = gl.reshape(gl.join(upper, lower), [WARPS, 8, 4, 2, 2, 2]).to(gl.int64)
    C: gl.constexpr = c.type.layout
    quarter, place, odd = _along(4, 2, 6, C), _along(2, 3, 6, C), _along(2, 4, 6, C)
    c = gl.where(quarter // 2 == place, c << (24 - 16 * (quarter % 2) - 8 * odd).to(gl.int64), 0)
    value = gl.sum(gl.sum(gl.sum(gl.sum(c, 4), 3), 2), 0).to(gl.float32) * low
    return gl.convert_layout(value * high, ROWS), (at, ahead)


@gluon.jit(do_not_specialize=["tiles"])
def one_row(x, codes, scales, outputs, y, tiles, EARLY: gl.constexpr, COLUMNS: gl.constexpr):
    """``tiles`` tiles of one of several weights; the weights' outputs lie side by side in y."""
    program = gl.program_id(0)
    code, scale, size, before, programs_before = codes[0], scales[0], outputs[0], 0, 0
    total, programs = outputs[0], gl.cdiv(outputs[0], TALL * tiles)
    for i in gl.static_range(1, len(codes)):
        here = program >= programs
        code = gl.where(here, codes[i], code)
        scale = gl.where(here, scales[i], scale)
        size = gl.where(here, outputs[i], size)
        before = gl.where(here, total, before)
        programs_before = gl.where(here, programs, programs_before)
        total += outputs[i]
        programs += gl.cdiv(outputs[i], TALL * tiles)
    first = (program - programs_before) * tiles
    # The last tile begins early, to end with the last row.
    span = (first, gl.minimum(tiles, gl.cdiv(size, TALL) - first), size - TALL)
    at = _at(code, span, gl.to_tensor(0), COLUMNS)
    ahead = ()
    for step in gl.static_range(min(DEEP, _block(COLUMNS))):
        ahead = ahead + (_load(at, step, COLUMNS),)
    wait(EARLY)
    digits = _digits(x, COLUMNS)
    gl.thread_barrier()
    coming = (at, ahead)
    for tile in range(span[1]):
        output = gl.minimum((first + tile) * TALL, span[2]) + _along(8, 0, 2, ROWS) + _along(2, 1, 2, ROWS) * 8
        factor = gl.load(scale + output)  # asked for before it is needed: it takes long to come
        value, coming = _dots(code, digits, coming, span, tile, COLUMNS)
        gl.store(y + before + output, value * factor)
