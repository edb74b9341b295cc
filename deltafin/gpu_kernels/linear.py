"""Products of rows with stored weights on a GPU: ``linear``, ``linears``.

Few rows are decoding, which reads every weight once and does little else. A program takes some outputs; its threads
read 16 bytes of a weight's row at a time, unpack them in registers and multiply in float32. A row's sum has one order,
whatever the number of rows. Many rows are a matrix product on the tensor cores, over weights that are unpacked tile by
tile: a float32 input is there the sum of three bfloat16, and so are its products with bfloat16, int8 and E2M1 exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafin.gpu_kernels import digits, int8
from deltafin.gpu_kernels.early import early, wait
from deltafin.ops import has_halves, reference
from deltafin.weights import Weight

ROWS = 16
"""Up to this many rows are few: ``FEW`` tokens of a batch of two."""

F32, BF16, INT8, MX = 1, 2, 4, 8
"""Kinds of storage, named by how many numbers 4 bytes hold."""

PER = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: INT8, torch.uint8: MX}


class Stored(NamedTuple):
    """A weight as the kernels read it: numbers in 4 bytes, codes, scales (the codes again where it has none)."""

    per: int
    codes: Tensor
    scales: Tensor


def stored(weight: Weight) -> Stored | None:
    """See a weight as ``Stored``; None for storage that the kernels do not know."""
    plain = isinstance(weight, Tensor)
    codes, scales = (weight, weight) if plain else (weight.codes, weight.scales)
    if (
        codes.dtype not in PER
        or plain is not codes.is_floating_point()
        or not codes.is_contiguous()
        or not scales.is_contiguous()
    ):
        return None
    return Stored(PER[codes.dtype], codes, scales)


def few(x: Tensor) -> bool:
    """Whether the rows of x are few."""
    return x.numel() <= ROWS * x.shape[-1]


def rows_of(x: Tensor) -> Tensor:
    """See x as rows, one after the other; the first begins at a whole word."""
    xs = x.reshape(-1, x.shape[-1]).contiguous()
    return xs.clone() if xs.data_ptr() % 4 else xs


# A few rows ---------------------------------------------------------------------------------------------------------


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _halves(pair):
    """The two float16 of a word in float32, low one first."""
    if INTERPRETED:
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
    else:  # in words, because the compiler packs halves of neighbours together only to part them again
        return tl.inline_asm_elementwise(
            "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
            "=f,=f,r",
            [pair],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def numbers(word, PER: tl.constexpr):
    """The PER numbers that each word holds, in float32; of E2M1, 2^-14 times the numbers."""
    if PER == 1:
        return (word.to(tl.float32, bitcast=True),)
    elif PER == 2:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    elif PER == 4:
        out = ()
        for j in tl.static_range(4):
            # A code plus 128 stands in the last bits of 2^23, which is cheaper than a conversion.
            bits = ((word ^ -2139062144) >> (8 * j)) & 255 | 0x4B000000
            out = out + (bits.to(tl.float32, bitcast=True) - 8388736.0,)
        return out
    else:
        # Sign, exponent and mantissa of two codes move at once to where float16 has them, subnormals included.
        x0, x4 = _halves((word << 12) & -2147450880 | (word << 9) & 0x0E000E00)
        x1, x5 = _halves((word << 8) & -2147450880 | (word << 5) & 0x0E000E00)
        x2, x6 = _halves((word << 4) & -2147450880 | (word << 1) & 0x0E000E00)
        x3, x7 = _halves(word & -2147450880 | (word >> 3) & 0x0E000E00)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def planes(x, PER: tl.constexpr, QUADS: tl.constexpr):
    """Part QUADS * 4 * PER inputs by their place in a word: PER tensors [QUADS, 4]."""
    if PER == 1:
        return (x.reshape(QUADS, 4),)
    elif PER == 2:
        return tl.split(x.reshape(QUADS, 4, 2))
    elif PER == 4:
        even, odd = tl.split(x.reshape(QUADS, 4, 2, 2))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3
    else:
        even, odd = tl.split(x.reshape(QUADS, 4, 2, 2, 2))
        even0, even1 = tl.split(even)
        odd0, odd1 = tl.split(odd)
        x0, x4 = tl.split(even0)
        x2, x6 = tl.split(even1)
        x1, x5 = tl.split(odd0)
        x3, x7 = tl.split(odd1)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def words(codes, rows, start, COLUMNS: tl.constexpr, PER: tl.constexpr, QUADS: tl.constexpr, ALIGNED: tl.constexpr):
    """QUADS * 4 words of several rows from word ``start``: [rows, QUADS, 4] int32, zero beyond the end."""
    c = (start + tl.arange(0, QUADS) * 4)[:, None] + tl.arange(0, 4)[None, :]
    SIZE: tl.constexpr = COLUMNS * 4 // PER
    if ALIGNED:
        WORDS: tl.constexpr = SIZE // 4
        at = codes.to(tl.pointer_type(tl.int32)) + rows[:, None, None] * WORDS + c[None, :, :]
        return tl.load(at, mask=(c < WORDS)[None, :, :], other=0)
    else:
        word = tl.zeros((rows.shape[0], QUADS, 4), tl.int32)
        for b in tl.static_range(4):
            at = codes.to(tl.pointer_type(tl.uint8)) + rows[:, None, None] * SIZE + (4 * c + b)[None, :, :]
            byte = tl.load(at, mask=(4 * c + b < SIZE)[None, :, :], other=0).to(tl.int32)
            word |= byte << (8 * b)
        return word


@triton.jit
def powers(scales, rows, start, GROUPS: tl.constexpr, QUADS: tl.constexpr, ALIGNED: tl.constexpr):
    """The scales of the QUADS groups of MXFP4 from word ``start``, of several rows: [rows, QUADS] float32."""
    if ALIGNED and GROUPS % 4 == 0 and QUADS % 4 == 0:
        # Four scales a load: what has fewer elements than there are threads is loaded where it is needed.
        at = (start // 16 + tl.arange(0, QUADS // 4))[None, :]
        place = scales.to(tl.pointer_type(tl.int32)) + rows[:, None] * (GROUPS // 4) + at
        four = tl.load(place, mask=at < GROUPS // 4, other=0)
        shift = tl.arange(0, 4) * 8
        exponent = ((four[:, :, None] >> shift[None, None, :]) & 255).reshape(rows.shape[0], QUADS)
    else:
        group = (start // 4 + tl.arange(0, QUADS))[None, :]
        exponent = tl.load(scales + rows[:, None] * GROUPS + group, mask=group < GROUPS, other=0).to(tl.int32)
    return tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)  # 2^-127 is a subnormal


@triton.jit
def _weights(
    codes,
    scales,
    before,
    first,
    outputs,
    start,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BATCH blocks of a weight's rows from word ``start``: the words of each, then, with MXFP4, the scales of each."""
    ws = ()
    ss = ()
    for b in tl.static_range(BATCH):
        rows = before + tl.minimum(first + b * BLOCK + tl.arange(0, BLOCK), outputs - 1)
        ws = ws + (words(codes, rows, start, COLUMNS, PER, QUADS, ALIGNED),)
        if PER == 8:
            ss = ss + (powers(scales, rows, start, COLUMNS // 32, QUADS, ALIGNED) * 16384.0,)
    return ws + ss


@triton.jit
def _inputs(
    x,
    n,
    start,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Row n of x from word ``start`` of a weight, by place in a word: PER tensors [1 or BLOCK, QUADS, 4]."""
    if PER == 2 and x.dtype.element_ty == tl.bfloat16:
        # As the weight's rows are, once for each: then no number has to pass from thread to thread.
        return numbers(words(x, n + tl.zeros((BLOCK,), tl.int32), start, COLUMNS, PER, QUADS, ALIGNED), PER)
    else:
        column = start * PER + tl.arange(0, QUADS * 4 * PER)
        row = tl.load(x + n * COLUMNS + column, mask=column < COLUMNS, other=0.0)
        parts = planes(row.to(tl.float32), PER, QUADS)
        xs = ()
        for j in tl.static_range(PER):
            xs = xs + (parts[j][None, :, :],)
        return xs


@triton.jit
def _step(
    sums,
    ws,
    x,
    last,
    start,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """What ``dots`` has summed, and a step from word ``start``."""
    new = ()
    for n in tl.static_range(COUNT):
        xs = _inputs(x, tl.minimum(n, last), start, COLUMNS, PER, BLOCK, QUADS, ALIGNED)
        for b in tl.static_range(BATCH):
            values = numbers(ws[b], PER)
            part = values[0] * xs[0]
            for j in tl.static_range(1, PER):
                part = tl.fma(values[j], xs[j], part)
            if PER == 8:
                new = new + (tl.fma(tl.sum(part, 2), ws[BATCH + b], sums[n * BATCH + b]),)
            else:
                new = new + (sums[n * BATCH + b] + tl.sum(part, 2),)
    return new


@triton.jit
def dots(
    x,
    last,
    codes,
    scales,
    before,
    first,
    outputs,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of x times BATCH blocks of a weight's rows: BATCH * COUNT sums [BLOCK], without the scales of int8.

    Rows of x after ``last`` are that row again. Lanes lie along a weight's row and keep sums of their own to the end.
    STAGES are of the compiler's pipeline; with 0, a step's part of the weight is asked for one step ahead, and the
    first before x is there.
    """
    WIDTH: tl.constexpr = 4 * QUADS
    zero = tl.zeros((BLOCK, QUADS), tl.float32)
    sums = ()
    for _ in tl.static_range(BATCH * COUNT):
        sums = sums + (zero,)
    if STAGES == 0:
        ahead = _weights(codes, scales, before, first, outputs, 0, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED)
        wait(EARLY)
        for start in tl.range(0, tl.cdiv(COLUMNS, PER), WIDTH, num_stages=1):
            ws = ahead
            then = start + WIDTH
            ahead = _weights(codes, scales, before, first, outputs, then, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED)
            sums = _step(sums, ws, x, last, start, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED, COUNT)
    else:
        wait(EARLY)
        for start in tl.range(0, tl.cdiv(COLUMNS, PER), WIDTH, num_stages=STAGES):
            ws = _weights(codes, scales, before, first, outputs, start, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED)
            sums = _step(sums, ws, x, last, start, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED, COUNT)
    out = ()
    for i in tl.static_range(BATCH * COUNT):
        out = out + (tl.sum(sums[i], 1),)
    return out


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    x,
    count,
    codes,
    scales,
    outputs,
    y,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BATCH * BLOCK outputs of one of several weights, for COUNT rows; the weights' outputs lie side by side in y."""
    program, row = tl.program_id(0), tl.program_id(1) * COUNT
    left = count - row
    x += row * COLUMNS
    code, scale, size, before, blocks_before = codes[0], scales[0], outputs[0], 0, 0
    total, blocks = outputs[0], tl.cdiv(outputs[0], BATCH * BLOCK)
    for i in tl.static_range(1, len(codes)):
        here = program >= blocks
        code = tl.where(here, codes[i], code)
        scale = tl.where(here, scales[i], scale)
        size = tl.where(here, outputs[i], size)
        before = tl.where(here, total, before)
        blocks_before = tl.where(here, blocks, blocks_before)
        total += outputs[i]
        blocks += tl.cdiv(outputs[i], BATCH * BLOCK)
    first = (program - blocks_before) * BATCH * BLOCK
    zero = program.to(tl.int64) * 0
    sums = dots(
        x, left - 1, code, scale, zero, first, size, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED, COUNT, STAGES, EARLY
    )
    for n in tl.static_range(COUNT):
        for b in tl.static_range(BATCH):
            output = first + b * BLOCK + tl.arange(0, BLOCK)
            value = sums[n * BATCH + b]
            if PER == 4:
                value *= tl.load(scale + tl.minimum(output, size - 1))
            tl.store(y + (row + n) * total + before + output, value, mask=(output < size) & (n < left))


class Shape(NamedTuple):
    """How a weight is shared out: outputs of a block, blocks of a program, quads of a step, warps, ``dots``' stages."""

    block: int
    batch: int
    quads: int
    warps: int
    stages: int


def shape_of(per: int, columns: int, outputs: int, rows: int) -> Shape:
    """How a weight of this size is shared out; only ``quads`` and ``warps`` decide the order in which a sum is made.

    Measured on one H200. Few outputs: what counts is how soon the last program is done, so a row is read at once.
    Many: a kilobyte or more of a row at a time; with 256 bytes, int8 and bfloat16 take 1.4 times as long. MXFP4 does
    not: its rows are short. Two blocks share what is read of the input, where there are programs enough. bfloat16 is
    read ahead where a row is four steps: 7168 x 12288 takes 43 us and 2304 x 9216 12 (without, 46 and 13). Shorter rows
    have two blocks, and so do several inputs: 4096 x 2304 takes 6.6 us (one block, read ahead, 7.5), and eight inputs
    of 12288 x 7168 take 85 (one block 102).
    """
    row = triton.next_power_of_2(triton.cdiv(columns, 4 * per))
    many = outputs > 4096
    if outputs <= 1024:
        quads, warps = min(row, 512), 4
    elif per == MX:
        quads, warps = min(row, 16), 4
    elif per == BF16:
        quads, warps = min(row, 128), 4
    else:
        quads, warps = (min(row, 128), 8) if many and per != INT8 else (min(row, 64), 4)
    if per == BF16:
        ahead = rows == 1 and columns >= 32 * quads
        batch, stages = (1 if ahead or outputs <= 1024 else 2), (0 if ahead else 1)
    else:
        batch = 2 if rows == 1 and (many or per == MX) and outputs > 1024 else 1
        stages = 3 if rows > 1 and outputs > 1024 else 1
    return Shape(max(1, 64 * warps // quads), batch, quads, warps, stages)


def at_once(rows: int) -> int:
    """How many of a few rows a program takes: more than 8 do not fit in its registers."""
    return min(8, triton.next_power_of_2(rows))


def few_rows(xs: Tensor, weights: Sequence[Stored], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weights of one kind, in one launch; in one order of operations for any number of rows. Results in ``dtype``."""
    (rows, columns), per = xs.shape, weights[0].per
    sizes = [len(w.codes) for w in weights]
    y = torch.empty(rows, sum(sizes), dtype=dtype, device=xs.device)
    if in_digits(columns, *weights):
        codes, scales = (tuple(digits.words(w[i]) for w in weights) for i in (1, 2))
        if per == INT8:
            int8.launch(xs, codes, scales, sizes, y)
            return y.split(sizes, -1)
        tall = 2 if min(sizes) >= 32 else 1
        together = digits.at_once(rows, columns, xs.device)
        chunks = triton.cdiv(rows, together)
        tiles, programs = digits.shared_out(sizes, tall, chunks, xs.device)
        how = digits.options(xs.device, per, tall, 3)
        digits.few_rows[chunks, programs](
            xs, rows, codes, scales, tuple(sizes), y, tiles, COUNT=together, COLUMNS=columns, **how
        )
        return y.split(sizes, -1)
    shape = shape_of(per, columns, sum(sizes), rows)
    together = at_once(rows)
    blocks = sum(triton.cdiv(size, shape.block * shape.batch) for size in sizes)
    _few_rows[blocks, triton.cdiv(rows, together)](
        xs,
        rows,
        tuple(w.codes for w in weights),
        tuple(w.scales for w in weights),
        tuple(sizes),
        y,
        COLUMNS=columns,
        PER=per,
        BLOCK=shape.block,
        BATCH=shape.batch,
        QUADS=shape.quads,
        ALIGNED=aligned(weights[0]),
        COUNT=together,
        STAGES=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=False,
        **early(xs.device),
    )
    return y.split(sizes, -1)


def in_digits(columns: int, *weights: Stored) -> bool:
    """Whether a few rows are multiplied by the tensor cores, in whole numbers: see ``digits``."""
    tensors = [t for w in weights for t in (w.codes, w.scales)]
    per = weights[0].per
    return per in (INT8, MX) and digits.serves(per, columns, tensors)


def aligned(w: Stored) -> bool:
    """Whether every row of a weight begins at a whole word."""
    whole = w.codes.stride(-2) * w.codes.element_size() % 4 == 0
    return whole and w.codes.data_ptr() % 4 == 0 and w.scales.data_ptr() % 4 == 0


# Many rows ----------------------------------------------------------------------------------------------------------


@triton.jit
def tile(codes, scales, rows, k, start, COLUMNS: tl.constexpr, PER: tl.constexpr):
    """Columns k, from ``start`` on, of some rows of a weight: as stored or in float32, int8 without scales."""
    if PER == 8:
        PAIRS: tl.constexpr = k.shape[0] // 2
        GROUPS: tl.constexpr = k.shape[0] // 32
        pair = (start // 2 + tl.arange(0, PAIRS))[None, :]
        group = (start // 32 + tl.arange(0, GROUPS))[None, :]
        at = codes + rows[:, None] * (COLUMNS // 2) + pair
        byte = tl.load(at, mask=pair < COLUMNS // 2, other=0).to(tl.int16)
        low = (byte << 12) & -32768 | (byte & 7) << 9
        high = (byte << 8) & -32768 | (byte & 0x70) << 5
        half = tl.join(low, high).reshape(rows.shape[0], GROUPS, 32).to(tl.float16, bitcast=True)
        at = scales + rows[:, None] * (COLUMNS // 32) + group
        exponent = tl.load(at, mask=group < COLUMNS // 32, other=0).to(tl.int32)
        scale = tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)
        return (half.to(tl.float32) * 16384.0 * scale[:, :, None]).reshape(rows.shape[0], k.shape[0])
    else:
        w = tl.load(codes + rows[:, None] * COLUMNS + k[None, :], mask=(k < COLUMNS)[None, :], other=0)
        return w.to(tl.float32) if PER == 4 else w


@triton.jit
def _dot(x, w, sums):
    """Products of bfloat16, which the interpreter takes for whole numbers."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), sums)
    return tl.dot(x, w, sums)


@triton.jit
def product(x, w, sums, PIECES: tl.constexpr):
    """Add x [n, k] times w [o, k] to sums [n, o], x in so many bfloat16 pieces, or (0) everything in float32."""
    if PIECES == 0:
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), sums, input_precision="ieee")
    elif PIECES == 1:
        return _dot(x, tl.trans(w.to(tl.bfloat16)), sums)
    else:
        w = tl.trans(w.to(tl.bfloat16))
        high = _head(x)
        middle = _head(x - high)
        part = _dot(_bfloat16(_head(x - high - middle)), w, tl.zeros_like(sums))
        part = _dot(_bfloat16(middle), w, part)
        return sums + _dot(_bfloat16(high), w, part)  # the cores' own sums are cut off, not rounded: only short ones


@triton.jit
def _head(x):
    """What the sign, the exponent and the first 7 bits of the mantissa of float32 say; the rest of the rest has 8."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16(x):
    """The upper half of float32 as bfloat16."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _many_rows(
    x,
    count,
    codes,
    scales,
    outputs,
    y,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """ROWS rows of x times BLOCK rows of a weight."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.minimum(output, outputs - 1).to(tl.int64)
    here = x + tl.minimum(n, count - 1).to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, COLUMNS, STEP):
        k = start + tl.arange(0, STEP)
        xs = tl.load(here + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0)
        sums = product(xs, tile(codes, scales, rows, k, start, COLUMNS, PER), sums, PIECES)
    if PER == 4:
        sums *= tl.load(scales + rows)[None, :]
    at = y + n.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, sums, mask=(n < count)[:, None] & (output < outputs)[None, :])


def pieces(x: Tensor, w: Stored) -> int:
    """In how many bfloat16 pieces a product takes x; 0: in float32, as do devices without them, and float32 weights."""
    if w.per == F32 or not has_halves(x.device):
        return 0
    return 1 if x.dtype == torch.bfloat16 else 3


def _many(xs: Tensor, w: Stored) -> Tensor:
    rows, (outputs, columns) = len(xs), (w.codes.shape[0], xs.shape[1])
    y = torch.empty(rows, outputs, dtype=xs.dtype, device=xs.device)
    tall = 128 if rows > 64 else 64
    _many_rows[triton.cdiv(rows, tall), triton.cdiv(outputs, 128)](
        xs,
        rows,
        w.codes,
        w.scales,
        outputs,
        y,
        COLUMNS=columns,
        PER=w.per,
        PIECES=pieces(xs, w),
        ROWS=tall,
        BLOCK=128,
        STEP=64,
        num_warps=8,
    )
    return y


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See ``reference.linear``."""
    return linears(x, [weight])[0]


def linears(x: Tensor, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """See ``reference.linears``; a few rows take one launch for all weights that are stored alike."""
    about = [stored(weight) for weight in weights]
    if x.dtype not in (torch.float32, torch.bfloat16):
        return reference.linears(x, weights)
    xs = rows_of(x)
    out: list[Tensor] = [x] * len(weights)
    alike: dict[tuple[int, bool, bool], list[int]] = {}
    for i, w in enumerate(about):
        if w is None or (not few(x) and plain(x, w)):
            out[i] = reference.linear(xs, weights[i])
        elif few(x):
            alike.setdefault((w.per, aligned(w), in_digits(xs.shape[1], w)), []).append(i)
        else:
            out[i] = _many(xs, w)
    for places in alike.values():
        for i, y in zip(places, few_rows(xs, [about[i] for i in places], x.dtype), strict=True):  # type: ignore[misc]
            out[i] = y
    return tuple(y.view(*x.shape[:-1], -1) for y in out)


def plain(x: Tensor, w: Stored) -> bool:
    """Whether torch's own product serves many rows: nothing is to be unpacked or widened."""
    return w.per == F32 or w.codes.dtype == x.dtype
