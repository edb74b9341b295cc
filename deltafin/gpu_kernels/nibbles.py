"""A few rows by the MXFP4 weights of their experts on the tensor cores, in Gluon: a row and an expert at a time.

The sums are those of ``digits``, made with less. Two look-ups give a code's number as 12 and twice it, a byte without
sign: where one has something, the other has zero. So there is one product where ``digits`` needs two, and 12 times a
group's digits is taken off at the start. What can be a product is one: look-ups keep the units busy that shift and
combine bits. Words come to registers two steps ahead, without shared memory's rings and their barriers, and what warps
have of a program's rows is added up once, at the end. Measured on one H200, 16 experts of Kimi K3: 87 to 89 us
instead of 101 for a row.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltafin.gpu_kernels.digits import (
    PIECE,
    START,
    TALL,
    WARPS,
    _along,
    _bytes,
    _digits,
    _operands,
    _parted,
    _span,
    _steps,
    add_up,
    is_last,
    none_arrived,
)
from deltafin.gpu_kernels.early import early, wait
from deltafin.gpu_kernels.mathematics import activate

DEEP = gl.constexpr(2)
"""Steps whose words are on their way. Each has its own registers: the loop is written out as many times."""

MOST = gl.constexpr(16)
"""Tiles of a program at most."""

TABLES = gl.constexpr((0x0F0E0D0C, 0x18141210, 0x090A0B0C, 0x00040608, 1, 256))
"""Of magnitudes, 12 and twice them in eight bytes; then 12 less twice them; factors of ``_numbers`` and ``_upper``."""

WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 4], [1, 4, 2, 4, 1], [WARPS.value, 1, 1, 1, 1], [4, 3, 2, 1, 0]))
"""How words lie in threads: warps, the 8 rows (or right columns) as two numbers, quarters, words."""

SCALES = gl.constexpr(gl.SliceLayout(4, WORDS.value))
"""How scales lie in threads: the word of four groups is that of four threads."""

SHARES = gl.constexpr(gl.BlockedLayout([1, WARPS.value, 1, 1], [4, 1, 8, 1], [2, 1, 1, 2], [3, 2, 1, 0]))
"""How all sums of a program lie in threads when they are added up: tiles, warps, rows g, and g or g + 8."""

ROWS = gl.constexpr(gl.SliceLayout(1, SHARES.value))


@gluon.jit
def _chain(f0, f1, f2, f3, first, second, sums):
    """Four products of 16 x 32 bytes without sign and 32 x 8 with, each added to the one before."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s<4>;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {s0, s1, s2, s3}, {$4, $8, $12, $16}, {$20, $24}, {$28, $29, $30, $31};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {s0, s1, s2, s3}, {$5, $9, $13, $17}, {$21, $25}, {s0, s1, s2, s3};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {s0, s1, s2, s3}, {$6, $10, $14, $18}, {$22, $26}, {s0, s1, s2, s3};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$7, $11, $15, $19}, {$23, $27}, {s0, s1, s2, s3};
        }""",  # noqa: E501 - an instruction stands in one line
        "=r,=r,=r,=r" + ",r" * 28,
        [f0, f1, f2, f3, first, second, sums],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _upper(word, table):
    """A word's upper half: a product, as look-ups keep the units busy that shift."""
    return gl.inline_asm_elementwise(
        "dp2a.lo.u32.u32 $0, $1, $2, 0;", "=r,r,r", [word, table[5]], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _numbers(selectors, turned, table):
    """Of the codes in a word's lower half 12 and twice their numbers; ``turned`` has all signs turned."""
    return gl.inline_asm_elementwise(
        "mad.lo.u32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [_bytes(selectors, table[0], table[1]), table[4], _bytes(turned, table[2], table[3])],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _right(memory, step):
    """A step's digits, with zeros where a group meets another one's."""
    own = _along(4, 1, 5, WORDS) == _along(4, 3, 5, WORDS)
    parts = _parted(memory.index(step).load(_operands(4, 8)), 4, _operands(1, 8))
    out = ()
    for k in gl.static_range(4):
        part = gl.convert_layout(gl.reshape(parts[k], [WARPS, 4, 2, 1, 4]), WORDS, assert_trivial=True)
        out = out + (gl.where(own, part, 0),)
    return out


@gluon.jit
def _added(word):
    """The sum of a word's four bytes with signs."""
    return gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, 0x01010101, 0;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _starts(memory, COLUMNS: gl.constexpr):
    """What sums start with, in shared memory: step by step, of two higher and two lower digits, for each group."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 1, 4], [4, 1, 4, 2, 1, 1], [1, WARPS, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    sums = ()
    for step in gl.static_range(_steps(COLUMNS)):
        part = gl.sum(gl.sum(_added(memory.index(step).load(L)), 5), 4)
        part = START - 12 * gl.sum(gl.reshape(part, [2, 2, WARPS, 4, 2]), 1)
        sums = sums + (gl.reshape(gl.permute(gl.join(part, part), (0, 1, 2, 4, 3)), [2, WARPS, 4, 4]),)
    starts = gl.allocate_shared_memory(
        gl.int32, [_steps(COLUMNS), 2, WARPS, 4, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    for step in gl.static_range(_steps(COLUMNS)):  # after all sums: a store is a barrier for what is read later
        starts.index(step).store(sums[step])
    return starts


@gluon.jit
def _start(starts, step):
    """What a step's sums start with, of the two higher digits and of the two lower ones: the same in all rows."""
    L: gl.constexpr = gl.BlockedLayout(
        [2, 1, 1, 1, 1, 4], [1, 1, 4, 2, 4, 1], [1, WARPS, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    halves = gl.split(gl.permute(starts.index(step).load(gl.SliceLayout(2, gl.SliceLayout(3, L))), (1, 2, 3, 0)))
    out = ()
    for k in gl.static_range(2):
        half = gl.convert_layout(halves[k], gl.SliceLayout(1, gl.SliceLayout(2, WORDS)), assert_trivial=True)
        zeros = gl.zeros([WARPS, 4, 2, 4, 4], gl.int32, layout=WORDS)
        out = out + (gl.broadcast(gl.expand_dims(gl.expand_dims(half, 1), 2), zeros)[0],)
    return out


@gluon.jit
def _begin(x, COLUMNS: gl.constexpr):
    """The row's digits in shared memory, what sums start with, two powers that scale sums, and tables."""
    memory, low, high = _digits(x, COLUMNS, 8)
    gl.thread_barrier()
    starts = _starts(memory, COLUMNS)
    gl.thread_barrier()
    # Of constants the compiler would make a copy for every use; of these it does not know that they are. (A row that
    # begins with this NaN has nothing but NaN for its sums.)
    never = gl.load(x + _along(4, 3, 5, WORDS)).to(gl.float32).to(gl.int32, bitcast=True) == 0x7FFFFFFF
    table = ()
    for word in gl.static_range(len(TABLES)):
        table = table + (gl.where(never, 0, TABLES[word]),)
    return memory, starts, low, high, table


@gluon.jit
def _fetch(codes, scales, span, flat, COLUMNS: gl.constexpr):
    """Of step ``flat`` of a program's tiles a thread's words of rows g and g + 8 and their scales, weight by weight."""
    first, tiles, last = span
    flat = gl.minimum(flat, tiles * _steps(COLUMNS) - 1)
    tall = gl.minimum((first + flat // _steps(COLUMNS)) * TALL, last)
    step = flat % _steps(COLUMNS)
    left = COLUMNS // PIECE - step * WARPS
    row = _along(4, 1, 5, WORDS) * 2 + _along(2, 2, 5, WORDS)
    warp, quarter = _along(WARPS, 0, 5, WORDS), _along(4, 3, 5, WORDS)
    word = row * (COLUMNS // 8) + warp * (PIECE // 8) + quarter * 4 + _along(4, 4, 5, WORDS)
    scale_row = _along(4, 1, 4, SCALES) * 2 + _along(2, 2, 4, SCALES)
    scale_warp = _along(WARPS, 0, 4, SCALES)
    four = scale_row * (COLUMNS // PIECE) + scale_warp + 0 * _along(4, 3, 4, SCALES)
    out = ()
    for m in gl.static_range(len(codes)):
        at = codes[m] + (tall * (COLUMNS // 8) + step * (WARPS * PIECE // 8)) + word
        about = scales[m] + (tall * (COLUMNS // PIECE) + step * WARPS) + four
        for half in gl.static_range(2):
            here, around = at + half * 8 * (COLUMNS // 8), about + half * 8 * (COLUMNS // PIECE)
            if COLUMNS % (WARPS * PIECE) == 0:
                out = out + (gl.load(here), gl.load(around))
            else:
                out = out + (gl.load(here, warp < left, 0), gl.load(around, scale_warp < left, 0))
    return out


@gluon.jit
def _ahead(codes, scales, span, COLUMNS: gl.constexpr):
    """What a program's first steps need of its weights."""
    out = ()
    for step in gl.static_range(DEEP):
        out = out + _fetch(codes, scales, span, gl.to_tensor(step), COLUMNS)
    return out


@gluon.jit
def _shares(COUNT: gl.constexpr) -> Any:
    """Memory for what each warp has of the sums of a program's rows, for several weights."""
    out = ()
    for _m in gl.static_range(COUNT):
        memory = gl.allocate_shared_memory(gl.float32, [MOST, WARPS, 8, 2], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        out = out + (memory,)
    return out


@gluon.jit
def _share(sums):
    """What a warp has of 16 rows: [WARPS, 8, 2]. A thread has right columns 2q and 2q + 1, of rows g and g + 8."""
    sums *= gl.where(_along(4, 4, 5, WORDS) % 2 == 0, 128.0, 0.5)  # a digit of the second half; codes count halves
    return gl.sum(gl.sum(gl.reshape(sums, [WARPS, 8, 4, 2, 2]), 4), 2)


@gluon.jit
def _dots(begun, ahead, codes, scales, span, COLUMNS: gl.constexpr) -> Any:
    """The row times all rows of a program, of several weights: for each sums [MOST, 8, 2]."""
    memory, starts, low, high, table = begun
    _first, tiles, _last = span
    MATRICES: gl.constexpr = len(codes)
    i = _along(4, 4, 5, WORDS)
    own = 0x4440 + _along(4, 3, 4, SCALES)  # selects a thread's scale among those of a word, and three zeros
    shares = _shares(MATRICES)
    zeros = gl.zeros([WARPS, 4, 2, 4, 4], gl.float32, layout=WORDS)
    sums = (zeros,) * MATRICES
    total = tiles * _steps(COLUMNS)
    for begin in range(0, total, DEEP):
        for place in gl.static_range(DEEP):
            flat = begin + place
            step = flat % _steps(COLUMNS)
            right = _right(memory, step)
            start = _start(starts, step)
            new = ()
            for m in gl.static_range(MATRICES):
                f0, s0, f1, s1 = ahead[4 * m], ahead[4 * m + 1], ahead[4 * m + 2], ahead[4 * m + 3]
                t0, t1 = f0 ^ -2004318072, f1 ^ -2004318072  # the signs turned
                p0, p1 = _numbers(f0, t0, table), _numbers(f1, t1, table)
                p2 = _numbers(_upper(f0, table), _upper(t0, table), table)
                p3 = _numbers(_upper(f1, table), _upper(t1, table), table)
                s0, s1 = _bytes(own, s0, 0), _bytes(own, s1, 0)
                bits = gl.where(i < 2, gl.expand_dims(s0, 4), gl.expand_dims(s1, 4)) << 23
                scale = gl.maximum(bits, 0x400000).to(gl.float32, bitcast=True)  # 2^-127 is a subnormal
                upper = _chain(p0, p1, p2, p3, right[0], right[1], start[0]).to(gl.float32, bitcast=True)
                lower = _chain(p0, p1, p2, p3, right[2], right[3], start[1]).to(gl.float32, bitcast=True)
                part = gl.fma(upper - 12582912.0, 65536.0, lower - 12582912.0)
                new = new + (gl.fma(part, scale * low, sums[m]),)
            ahead = ahead[4 * MATRICES :] + _fetch(codes, scales, span, flat + DEEP, COLUMNS)
            sums = new
            if (step == _steps(COLUMNS) - 1) & (flat < total):
                for m in gl.static_range(MATRICES):
                    shares[m].index(flat // _steps(COLUMNS)).store(_share(sums[m]))
                sums = (zeros,) * MATRICES
    gl.thread_barrier()
    out = ()
    for m in gl.static_range(MATRICES):
        every = shares[m]._reinterpret(gl.float32, [MOST, WARPS, 8, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
        out = out + (gl.sum(every.load(SHARES), 1) * high,)
    return out


@gluon.jit
def _rows(span):
    """The rows of a weight that a program's sums belong to, and which of them it has."""
    first, tiles, last = span
    tile, row = _along(MOST, 0, 3, ROWS), _along(2, 2, 3, ROWS) * 8 + _along(8, 1, 3, ROWS)
    row = gl.minimum((first + tile) * TALL, last) + row
    return row, (row >= 0) & (tile < tiles)  # all rows are 0 or more: that gives the shape


@gluon.jit(do_not_specialize=["tiles", "counters"])
def few_up(
    x,
    ids,
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
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    SATURATES: gl.constexpr,
):
    """Some inner channels of one (row, expert) pair: float32."""
    pair = gl.program_id(0)
    wait(EARLY)
    none_arrived(arrived, counters)
    expert = gl.load(ids + pair)
    if expert >= 0:
        x += pair // CHOSEN * COLUMNS
        span = _span(gl.program_id(1), tiles, WIDTH, 1)
        row = expert * WIDTH
        codes = (gate + row * (COLUMNS // 8), up + row * (COLUMNS // 8))
        scales = (gate_scales + row * (COLUMNS // PIECE), up_scales + row * (COLUMNS // PIECE))
        ahead = _ahead(codes, scales, span, COLUMNS)
        a, b = _dots(_begin(x, COLUMNS), ahead, codes, scales, span, COLUMNS)
        channel, mine = _rows(span)
        gl.store(h + pair * WIDTH + channel, activate(a, b, gate_limit, up_limit, SATURATES), mine)


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
):
    """Some outputs of one (row, expert) pair, weighted. ``few_up`` came before: ids are there already.

    The last of a row's programs for the same outputs adds them up.
    """
    pair = gl.program_id(0)
    expert = gl.load(ids + pair)
    span = _span(gl.program_id(1), tiles, OUTPUTS, 1)
    output, mine = _rows(span)
    if expert >= 0:
        row = expert * OUTPUTS
        codes, groups = (down + row * (COLUMNS // 8),), (scales + row * (COLUMNS // PIECE),)
        ahead = _ahead(codes, groups, span, COLUMNS)
        wait(EARLY)
        weight = gl.load(weights + pair).to(gl.float32)
        sums = _dots(_begin(h + pair * COLUMNS, COLUMNS), ahead, codes, groups, span, COLUMNS)[0]
        gl.store(parts + pair * OUTPUTS + output, sums * weight, mine)
    else:
        wait(EARLY)
    if is_last(arrived, CHOSEN):
        add_up(parts, ids, y, output, mine, OUTPUTS, CHOSEN)


def options(device: torch.device) -> dict[str, Any]:
    """What all launches say: with 128 registers, PROGRAMS share a multiprocessor."""
    return early(device) | {"num_warps": WARPS.value, "maxnreg": 128}
