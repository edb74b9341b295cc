"""Few rows by int8 weights on the tensor cores, in Gluon: the sums of ``digits``, bit for bit, at the memory's speed.

Half of a program's memory is on its way before a row is there, and all of it while digits are made. It is fetched
in whole lines of 128 bytes: half lines, as operands lie, take a quarter longer where a row is 12,288 bytes. 16 bytes of
a row are the cores' left operand as they are: words 0 and 2 stand in the place of one row, 1 and 3 in that of another;
right are the digits of the former's columns and those of the latter's, and half of the sums are of no use.
Measured on one H200, with what a copy moves as 100 %: one row by 12288 x 7168 takes 22.8 us (91 %), by 7168 x 12288
23.3 (89 %), by 3584 x 7168 7.7 (79 %), by 163840 x 7168 268 (103 %). Two rows take 24, 25 and 9.4 us by the first
three, four 28, 30 and 13. With more, a weight is read once for every four rows, from 11,300 columns on for every two:
16 rows take 86, 99 and 29 us.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared,
    commit_group,
    wait_group,
)

from deltafin.gpu_kernels.digits import PIECE, TALL, _along, _planes, _power, weight_of
from deltafin.gpu_kernels.early import early, let_next, wait

MEMORY = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
"""How a step of a weight waits: 16 bytes of a row in an order of their own for each of 8 rows, so that banks differ."""


@gluon.constexpr_function
def _steps(columns, warps):
    return -(-columns // (PIECE * warps))


@gluon.constexpr_function
def _read(warps):
    """How a step of the row lies in threads: halves of a piece, warps, quarters, words, bytes of a word."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [2, 1, 4, 4, 1], [1, warps, 1, 1, 1], [4, 3, 2, 0, 1])


@gluon.constexpr_function
def _lines(warps):
    """How a step of a weight is fetched: warps, TALL rows, the words of a piece."""
    return gl.BlockedLayout([1, 1, 4], [1, 4, 8], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _taken(warps):
    """How it is taken from memory, for ``_words``: a thread has rows g and g + 8 at two places, the next g + 4."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 8, 0]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]]
    pieces = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, pieces, [], [warps, 16, 32])


@gluon.constexpr_function
def _words(warps):
    """How operands lie in threads: warps, 8 rows as g and 4 or not (or digits, and whose they are), quarters, words."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 4, 2, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _sums(warps):
    """How the sums of TALL rows lie in threads: g, 4 or not, 8 or not."""
    return gl.BlockedLayout([1, 1, 2], [4, 2, 4], [1, 1, warps], [2, 1, 0])


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
def _row(x, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """Ask for the row, step by step."""
    L: gl.constexpr = _read(WARPS)
    piece = _along(WARPS, 1, 5, L) * PIECE + _along(2, 0, 5, L) * 64 + _along(4, 2, 5, L) * 16
    column = piece + _along(4, 3, 5, L) * 4 + _along(4, 4, 5, L)
    row = ()
    for step in gl.static_range(_steps(COLUMNS, WARPS)):
        here = column + step * (PIECE * WARPS)
        row = row + (gl.load(x + here, here < COLUMNS, 0),)
    return row


@gluon.jit
def _digits(row, WARPS: gl.constexpr):
    """The row's digits in shared memory, step by step as ``_pair`` takes them, and two powers that scale its sums.

    A row with a number that is not finite has NaN for a power.
    """
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    xs = ()
    largest = gl.zeros([2, WARPS, 4, 4, 4], gl.float32, layout=_read(WARPS))
    for step in gl.static_range(len(row)):
        xs = xs + (row[step].to(gl.float32),)
        largest = gl.maximum(largest, gl.abs(xs[step]), propagate_nan=tl.PropagateNan.ALL)
    # The largest is below 2^(top - 126): times 2^(156 - top), in two factors where that is too large for one, 2^30.
    top = gl.maximum(gl.max(gl.ravel(largest.to(gl.int32, bitcast=True)), 0) >> 23, 1)
    if top < 29:
        larger = ()
        for step in gl.static_range(len(row)):
            larger = larger + (xs[step] * _power(29 - top),)
        xs = larger
    digits = ()
    for step in gl.static_range(len(row)):
        whole = (xs[step] * _power(156 - gl.maximum(top, 29))).to(gl.int32)
        planes = _planes((whole + 0x808080) ^ 0x808080)  # from -128 to 127: 128 and more are one more of the next
        planes = gl.permute(gl.reshape(planes, [2, WARPS, 4, 2, 2, 4]), (1, 5, 4, 2, 0, 3))
        planes = gl.reshape(planes, [WARPS, 4, 2, 4, 4])
        digits = digits + (gl.allocate_shared_memory(gl.int32, planes.shape, MEMORY, planes),)
    one = (156 - top) >> 1
    return digits, gl.where(top == 255, float("nan"), _power(-one)), _power(one + top - 156)


@gluon.jit
def _fetch(ring, codes, span, flat, COLUMNS: gl.constexpr, WARPS: gl.constexpr, SLOTS: gl.constexpr):
    """Ask for step ``flat`` of a program's tiles."""
    first, tiles, last, height = span
    L: gl.constexpr = _lines(WARPS)
    STEPS: gl.constexpr = _steps(COLUMNS, WARPS)
    step = flat % STEPS
    row = gl.minimum(first + flat // STEPS * height, last)
    warp, down = _along(WARPS, 0, 3, L), _along(TALL, 1, 3, L)
    word = down * (COLUMNS // 4) + warp * (PIECE // 4) + _along(PIECE // 4, 2, 3, L)
    left = gl.where(flat < tiles * STEPS, COLUMNS // PIECE, 0) - step * WARPS
    at = codes + (row * (COLUMNS // 4) + step * (WARPS * PIECE // 4))
    async_copy_global_to_shared(ring.index(flat % SLOTS), at + word, (warp < left) & (down < height))
    commit_group()


@gluon.jit
def _take(slot, WARPS: gl.constexpr):
    """A step as left operands: rows g at two places, then rows g + 8."""
    L: gl.constexpr = _words(WARPS)
    words = gl.reshape(slot.load(_taken(WARPS)), [WARPS, 2, 2, 4, 2, 4, 4])
    both = gl.split(gl.permute(words, [0, 3, 2, 5, 6, 4, 1]))
    out = ()
    for half in gl.static_range(2):
        first, second = gl.split(both[half])
        out = out + (
            gl.convert_layout(first, L, assert_trivial=True),
            gl.convert_layout(second, L, assert_trivial=True),
        )
    return out


@gluon.jit
def _total(upper, lower, low, high, WARPS: gl.constexpr):
    """The sums of TALL rows as ``_sums`` says, without the weight's scales."""
    # Words 1 and 3 were in the place of another row: to them belong every second one of the right columns.
    c = gl.reshape(gl.join(upper, lower), [WARPS, 4, 2, 4, 2, 2, 2])
    C: gl.constexpr = c.type.layout
    c = gl.sum(gl.sum(gl.where(_along(2, 4, 7, C) == _along(2, 5, 7, C), c, 0), 5), 4).to(gl.int64)
    D: gl.constexpr = c.type.layout
    c = c << (24 - 8 * _along(4, 3, 5, D)).to(gl.int64)
    value = gl.sum(gl.sum(c, 3), 0).to(gl.float32) * low
    return gl.convert_layout(value * high, _sums(WARPS))


@gluon.jit
def _dots(ring, codes, digits, span, tile, COLUMNS: gl.constexpr, WARPS: gl.constexpr, SLOTS: gl.constexpr) -> Any:
    """Rows of x times TALL rows of a weight: for each of the former see ``_total``."""
    STEPS: gl.constexpr = _steps(COLUMNS, WARPS)
    sums = ()
    for _each in gl.static_range(2 * len(digits)):
        sums = sums + (gl.zeros([WARPS, 4, 2, 4, 4], gl.int32, layout=_words(WARPS)),)
    for step in gl.static_range(STEPS):
        flat = tile * STEPS + step
        wait_group(SLOTS - 1)
        words = _take(ring.index(flat % SLOTS), WARPS)
        rights = ()
        for n in gl.static_range(len(digits)):
            rights = rights + (digits[n][0][step].load(_words(WARPS)),)
        _fetch(ring, codes, span, flat + SLOTS, COLUMNS, WARPS, SLOTS)
        new = ()
        for n in gl.static_range(len(digits)):
            new = new + (
                _pair(words[0], words[1], rights[n], sums[2 * n]),
                _pair(words[2], words[3], rights[n], sums[2 * n + 1]),
            )
        sums = new
    out = ()
    for n in gl.static_range(len(digits)):
        out = out + (_total(sums[2 * n], sums[2 * n + 1], digits[n][1], digits[n][2], WARPS),)
    return out


@gluon.jit(do_not_specialize=["count", "tiles", "height"])
def few_rows(
    x,
    count,
    codes,
    scales,
    outputs,
    y,
    tiles,
    height,
    EARLY: gl.constexpr,
    COUNT: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """``tiles`` times ``height`` rows of one of several weights, for COUNT rows of x; outputs lie side by side in y.

    ``height`` is at most TALL: the cores then multiply what nobody has asked for.
    """
    row, program = gl.program_id(0) * COUNT, gl.program_id(1)
    left = count - row
    x += row * COLUMNS
    code, scale, size, program, before, total = weight_of(program, codes, scales, outputs, height * tiles)
    # What would go beyond the last row begins early, to end with it.
    first, last = program * (tiles * height), size - height
    span = (first, tiles, last, height)
    ring = gl.allocate_shared_memory(gl.int32, [SLOTS, WARPS, TALL, PIECE // 4], MEMORY)
    # Not all of the ring, as a row is behind what was asked for before it: with all, 3584 x 7168 takes 0.8 us more, and
    # 4096 x 2304 takes 3.8 us with one step, 4.4 with three of five.
    EAGER: gl.constexpr = 1 if WARPS == 4 else (SLOTS + 1) // 2
    for flat in gl.static_range(EAGER):
        _fetch(ring, code, span, gl.to_tensor(flat), COLUMNS, WARPS, SLOTS)
    L: gl.constexpr = _sums(WARPS)
    within = _along(4, 0, 3, L) + _along(2, 1, 3, L) * 4 + _along(2, 2, 3, L) * 8
    output = gl.minimum(first, last) + within
    factor = gl.load(scale + output, within < height, 0)
    wait(EARLY)
    rows = ()
    for n in gl.static_range(COUNT):
        rows = rows + (_row(x + gl.minimum(n, left - 1) * COLUMNS, COLUMNS, WARPS),)
    for flat in gl.static_range(EAGER, SLOTS):
        _fetch(ring, code, span, gl.to_tensor(flat), COLUMNS, WARPS, SLOTS)
    digits = ()
    for n in gl.static_range(COUNT):
        digits = digits + (_digits(rows[n], WARPS),)
    gl.thread_barrier()
    let_next(EARLY)
    for tile in range(tiles):
        values = _dots(ring, code, digits, span, tile, COLUMNS, WARPS, SLOTS)
        for n in gl.static_range(COUNT):
            gl.store(y + (row + n) * total + before + output, values[n] * factor, (within < height) & (n < left))
        output = gl.minimum(first + (tile + 1) * height, last) + within
        factor = gl.load(scale + output, within < height, 0)  # a tile ahead: it takes long to come


@cache
def _room(rows: int, columns: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return rows of a program, its warps, how many programs all multiprocessors hold, and steps with room in each.

    One row: 16 warps share a multiprocessor. Eight in a program make digits half as often, four of them suit short
    rows. Several: their digits take most of the room of one program of eight; up to four rows then share what is read.
    """
    about = torch.cuda.get_device_properties(device)
    warps, count = 4 if columns <= 4096 else 8, min(4, 1 << (rows - 1).bit_length())
    programs = (16 if rows == 1 else 8) // warps
    while True:
        room = min(about.shared_memory_per_block_optin, about.shared_memory_per_multiprocessor // programs - 1024)
        # Besides the ring: four digits of each column in whole steps, and a little for sums.
        slots = (room - 1024 - 512 * warps * count * triton.cdiv(columns, 128 * warps)) // (2048 * warps)
        if slots >= 3 or programs == count == 1:
            return count, warps, programs * about.multi_processor_count, min(8, slots)
        programs, count = (programs // 2, count) if programs > 1 else (1, count // 2)


@cache
def _shared_out(sizes: tuple[int, ...], places: int) -> tuple[int, int, int]:
    """Return how many tiles a program has, rows of one, and how many programs that makes.

    Where a program has several tiles, each has as many rows as all programs need to have work: 7168 x 12288 takes 23.4
    us with 2 times 14 rows, with 2 times 16 and fewer programs 24.6. With one tile more programs take longer: all of
    them want the same row of x.
    """
    tiles = triton.cdiv(sum(triton.cdiv(n, TALL.value) for n in sizes), places)

    def programs(height: int) -> int:
        return sum(triton.cdiv(n, height * tiles) for n in sizes)

    height = next((h for h in range(8, TALL.value) if tiles > 1 and programs(h) <= places), TALL.value)
    return tiles, height, programs(height)


def launch(x: Tensor, codes: tuple[Tensor, ...], scales: tuple[Tensor, ...], sizes: Sequence[int], y: Tensor) -> None:
    """Multiply few rows by several weights (codes as words), whose outputs are to lie side by side in y."""
    rows, columns = x.shape
    count, warps, places, slots = _room(rows, columns, x.device)
    chunks = triton.cdiv(rows, count)
    tiles, height, programs = _shared_out(tuple(sizes), max(1, places // chunks))
    how = early(x.device) | {"COUNT": count, "COLUMNS": columns, "WARPS": warps, "SLOTS": slots, "num_warps": warps}
    few_rows[chunks, programs](x, rows, codes, scales, tuple(sizes), y, tiles, height, **how)
