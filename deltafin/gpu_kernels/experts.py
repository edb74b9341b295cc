"""Gated feed-forwards on a GPU: ``experts``, all routed experts of a layer at once, and ``gated``."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafin.config import Activation, SiTU
from deltafin.gpu_kernels import digits, nibbles
from deltafin.gpu_kernels.early import early, wait
from deltafin.gpu_kernels.linear import (
    MX,
    ROWS,
    Stored,
    aligned,
    at_once,
    dots,
    few,
    few_rows,
    in_digits,
    linear,
    pieces,
    product,
    rows_of,
    shape_of,
    stored,
    tile,
)
from deltafin.gpu_kernels.mathematics import activate
from deltafin.ops import reference
from deltafin.ops.reference import Expert, Stack
from deltafin.weights import Weight

# A few rows ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def _few_up(
    x,
    ids,
    count,
    gate,
    gate_scales,
    up,
    up_scales,
    h,
    gate_limit,
    up_limit,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    SATURATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some inner channels of one (row, expert) pair, or with CHOSEN 0 of the one expert for all rows: float32."""
    pair = tl.program_id(1) * COUNT
    left = count - pair
    expert = pair.to(tl.int64)
    if CHOSEN:
        wait(EARLY)
        expert = tl.load(ids + pair)
        x += pair // CHOSEN * COLUMNS
    else:
        expert = expert * 0
        x += pair * COLUMNS
    if expert >= 0:
        first = tl.program_id(0) * BATCH * BLOCK
        row = expert * WIDTH
        last = left - 1
        gates = dots(
            x,
            last,
            gate,
            gate_scales,
            row,
            first,
            WIDTH,
            COLUMNS,
            PER,
            BLOCK,
            BATCH,
            QUADS,
            ALIGNED,
            COUNT,
            STAGES,
            EARLY,
        )
        ups = dots(
            x, last, up, up_scales, row, first, WIDTH, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED, COUNT, STAGES, EARLY
        )
        for n in tl.static_range(COUNT):
            for i in tl.static_range(BATCH):
                channel = first + i * BLOCK + tl.arange(0, BLOCK)
                a, b = gates[n * BATCH + i], ups[n * BATCH + i]
                if PER == 4:
                    rows = row + tl.minimum(channel, WIDTH - 1)
                    a *= tl.load(gate_scales + rows)
                    b *= tl.load(up_scales + rows)
                value = activate(a, b, gate_limit, up_limit, SATURATES)
                tl.store(h + (pair + n) * WIDTH + channel, value, mask=(channel < WIDTH) & (n < left))


@triton.jit
def _few_down(
    h,
    ids,
    weights,
    down,
    scales,
    parts,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs of one (row, expert) pair, weighted. ``_few_up`` came before: ids are there already."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    if expert >= 0:
        first = tl.program_id(0) * BATCH * BLOCK
        row = expert * OUTPUTS
        h += pair * COLUMNS
        sums = dots(
            h, 0, down, scales, row, first, OUTPUTS, COLUMNS, PER, BLOCK, BATCH, QUADS, ALIGNED, 1, STAGES, EARLY
        )
        weight = tl.load(weights + pair).to(tl.float32)
        for i in tl.static_range(BATCH):
            output = first + i * BLOCK + tl.arange(0, BLOCK)
            value = sums[i] * weight
            if PER == 4:
                value *= tl.load(scales + row + tl.minimum(output, OUTPUTS - 1))
            tl.store(parts + pair * OUTPUTS + output, value, mask=output < OUTPUTS)
    else:
        wait(EARLY)


def limits(activation: Activation) -> tuple[float, float]:
    """Limits of gate and up; zeros where they have none."""
    return (activation.gate_limit, activation.up_limit) if isinstance(activation, SiTU) else (0.0, 0.0)


def _inner(xs: Tensor, ids: Tensor | None, gate: Stored, up: Stored, activation: Activation) -> Tensor:
    """The activated inner channels of every (row, expert) pair, or of the one expert for every row: float32."""
    (rows, columns), width = xs.shape, gate.codes.shape[-2]
    chosen = 0 if ids is None else ids.shape[1]
    if ids is None and in_digits(columns, gate, up):
        return _inner_in_digits(xs, None, gate, up, activation)
    together = at_once(rows) if ids is None else 1
    shape = shape_of(gate.per, columns, width * max(1, chosen), together)
    h = torch.empty(rows * max(1, chosen), width, device=xs.device)
    _few_up[triton.cdiv(width, shape.block * shape.batch), triton.cdiv(len(h), together)](
        xs,
        xs if ids is None else ids,
        len(h),
        gate.codes,
        gate.scales,
        up.codes,
        up.scales,
        h,
        *limits(activation),
        CHOSEN=chosen,
        WIDTH=width,
        COLUMNS=columns,
        PER=gate.per,
        SATURATES=isinstance(activation, SiTU),
        BLOCK=shape.block,
        BATCH=shape.batch,
        QUADS=shape.quads,
        ALIGNED=aligned(gate) and aligned(up),
        COUNT=together,
        STAGES=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=False,
        **early(xs.device),
    )
    return h


def _inner_in_digits(
    xs: Tensor, ids: Tensor | None, gate: Stored, up: Stored, activation: Activation, arrived: Tensor | None = None
) -> Tensor:
    """See ``_inner``; with ids, and with counters that are set to zero."""
    (rows, columns), width = xs.shape, gate.codes.shape[-2]
    chosen = 0 if ids is None else ids.shape[1]
    h = torch.empty(rows * max(1, chosen), width, device=xs.device)
    weights = [digits.words(t) for t in (gate.codes, gate.scales, up.codes, up.scales)]
    counters = (xs, 0) if arrived is None else (arrived, arrived.numel())
    shapes = {"CHOSEN": chosen, "WIDTH": width, "COLUMNS": columns, "SATURATES": isinstance(activation, SiTU)}
    if ids is not None and gate.per == MX:
        tiles, programs = digits.shared_out([width], 1, len(h), xs.device, nibbles.MOST.value)
        nibbles.few_up[len(h), programs](
            *(xs, ids, *weights, h, *counters, *limits(activation), tiles), **shapes, **nibbles.options(xs.device)
        )
        return h
    together = 1 if chosen else digits.at_once(rows, columns, xs.device)
    chunks = triton.cdiv(len(h), together)
    tiles, programs = digits.shared_out([width], 1, chunks, xs.device)
    digits.few_up[chunks, programs](
        *(xs, xs if ids is None else ids, len(h), *weights, h, *counters, *limits(activation), tiles),
        COUNT=together,
        **shapes,
        **digits.options(xs.device, gate.per, 1, 3),
    )
    return h


def _few(
    xs: Tensor, ids: Tensor, weights: Tensor, stack: list[Stored], activation: Activation, dtype: torch.dtype
) -> Tensor:
    gate, up, down = stack
    (rows, chosen), outputs, width = ids.shape, down.codes.shape[1], gate.codes.shape[1]
    parts = torch.empty(rows * chosen, outputs, device=xs.device)
    y = torch.empty(rows, outputs, dtype=dtype, device=xs.device)
    if in_digits(xs.shape[1], gate, up) and in_digits(width, down):
        if down.per == MX:
            form, how, most = nibbles.few_down, nibbles.options(xs.device), {"most": nibbles.MOST.value}
        else:
            form, how, most = digits.few_down, digits.options(xs.device, down.per, 1, 4), {}
        tiles, programs = digits.shared_out([outputs], 1, len(parts), xs.device, **most)
        arrived = torch.empty(rows, programs, dtype=torch.int32, device=xs.device)
        h = _inner_in_digits(xs, ids, gate, up, activation, arrived)
        form[len(h), programs](
            *(h, ids, weights, digits.words(down.codes), digits.words(down.scales), parts, arrived, y, tiles),
            CHOSEN=chosen,
            OUTPUTS=outputs,
            COLUMNS=width,
            **how,
        )
        return y
    h = _inner(xs, ids, gate, up, activation)
    shape = shape_of(down.per, width, outputs * chosen, 1)
    _few_down[triton.cdiv(outputs, shape.block * shape.batch), len(h)](
        h,
        ids,
        weights,
        down.codes,
        down.scales,
        parts,
        OUTPUTS=outputs,
        COLUMNS=width,
        PER=down.per,
        BLOCK=shape.block,
        BATCH=shape.batch,
        QUADS=shape.quads,
        ALIGNED=aligned(down),
        STAGES=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=False,
        **early(xs.device),
    )
    _sum_places[triton.cdiv(outputs, 128), rows](*(parts, ids, y, 0, outputs, chosen, outputs, 128), **early(xs.device))
    return y


# Many rows ----------------------------------------------------------------------------------------------------------


@triton.jit
def _block(ends, first, block, experts, TALL: tl.constexpr):
    """Which expert a block of rows is for, and where in the sorted pairs it begins and its expert's pairs end.

    ``ends`` [X] counts the blocks up to and with each expert's, ``first`` [X + 1] the pairs before each expert's.
    """
    low, high = 0, experts
    while low < high:
        middle = (low + high) // 2
        later = tl.load(ends + middle) <= block
        low = tl.where(later, middle + 1, low)
        high = tl.where(later, high, middle)
    expert = tl.minimum(low, experts - 1)
    end = tl.load(first + expert + 1)
    blocks = tl.load(ends + expert)
    begin = tl.load(first + expert)
    begin += (block - blocks + tl.cdiv(end - begin, TALL)) * TALL
    return expert.to(tl.int64), begin, tl.where(low < experts, end, begin)


@triton.jit(do_not_specialize=["experts"])
def _many_up(
    x,
    order,
    ends,
    first,
    experts,
    gate,
    gate_scales,
    up,
    up_scales,
    h,
    gate_limit,
    up_limit,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    SATURATES: tl.constexpr,
    PIECES: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """BLOCK inner channels of TALL pairs with one expert, in the order of the sorted pairs."""
    expert, begin, end = _block(ends, first, tl.program_id(1), experts, TALL)
    if begin < end:
        place = begin + tl.arange(0, TALL)
        pair = tl.load(order + tl.minimum(place, end - 1))
        here = x + (pair // CHOSEN)[:, None] * COLUMNS
        output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        rows = expert * WIDTH + tl.minimum(output, WIDTH - 1)
        gates = tl.zeros((TALL, BLOCK), tl.float32)
        ups = tl.zeros((TALL, BLOCK), tl.float32)
        for start in tl.range(0, COLUMNS, STEP):
            k = start + tl.arange(0, STEP)
            xs = tl.load(here + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0)
            gates = product(xs, tile(gate, gate_scales, rows, k, start, COLUMNS, PER), gates, PIECES)
            ups = product(xs, tile(up, up_scales, rows, k, start, COLUMNS, PER), ups, PIECES)
        if PER == 4:
            gates *= tl.load(gate_scales + rows)[None, :]
            ups *= tl.load(up_scales + rows)[None, :]
        value = activate(gates, ups, gate_limit, up_limit, SATURATES)
        at = h + place.to(tl.int64)[:, None] * WIDTH + output[None, :]
        tl.store(at, value, mask=(place < end)[:, None] & (output < WIDTH)[None, :])


@triton.jit(do_not_specialize=["experts"])
def _many_down(
    h,
    order,
    ends,
    first,
    experts,
    weights,
    down,
    scales,
    parts,
    begin_output,
    width,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr,
    PIECES: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """BLOCK outputs of TALL pairs with one expert, weighted: each pair's at its own place in ``parts``."""
    expert, begin, end = _block(ends, first, tl.program_id(1), experts, TALL)
    if begin < end:
        place = begin + tl.arange(0, TALL)
        pair = tl.load(order + tl.minimum(place, end - 1))
        here = h + tl.minimum(place, end - 1).to(tl.int64)[:, None] * COLUMNS
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        rows = expert * OUTPUTS + tl.minimum(begin_output + column, OUTPUTS - 1)
        sums = tl.zeros((TALL, BLOCK), tl.float32)
        for start in tl.range(0, COLUMNS, STEP):
            k = start + tl.arange(0, STEP)
            hs = tl.load(here + k[None, :], mask=(k < COLUMNS)[None, :], other=0.0)
            sums = product(hs, tile(down, scales, rows, k, start, COLUMNS, PER), sums, PIECES)
        if PER == 4:
            sums *= tl.load(scales + rows)[None, :]
        sums *= tl.load(weights + pair).to(tl.float32)[:, None]
        at = parts + pair[:, None] * width + column[None, :]
        tl.store(at, sums, mask=(place < end)[:, None] & (column < width)[None, :])


@triton.jit
def _sum_places(
    parts,
    ids,
    y,
    begin_output,
    width,
    CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum of a row's parts, place by place."""
    wait(EARLY)
    n = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for place in tl.range(CHOSEN):
        pair = n * CHOSEN + place
        here = (column < width) & (tl.load(ids + pair) >= 0)
        sums += tl.load(parts + pair * width + column, mask=here, other=0.0)
    tl.store(y + n * OUTPUTS + begin_output + column, sums, mask=column < width)


PARTS = 64 << 20
"""Bytes of scratch for the outputs of pairs before they are summed: outputs are made slice by slice."""


def _many(
    xs: Tensor, ids: Tensor, weights: Tensor, stack: list[Stored], activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Pairs of rows and experts, sorted by expert on the device, in blocks that each have one expert."""
    gate, up, down = stack
    (count, width, columns), (rows, chosen) = gate.codes.shape, ids.shape
    columns, outputs = xs.shape[1], down.codes.shape[1]
    pairs = rows * chosen
    held, order = torch.sort(ids.flatten(), stable=True)
    first = torch.searchsorted(held, torch.arange(count + 1, device=xs.device))
    average = pairs / count
    tall = 16 if average <= 16 else 32 if average <= 32 else 64
    ends = ((first.diff() + (tall - 1)) // tall).cumsum(0)
    blocks = min(pairs, pairs // tall + count)
    h = torch.empty(pairs, width, dtype=xs.dtype, device=xs.device)
    common = {"TALL": tall, "STEP": 64, "num_warps": 4}
    _many_up[triton.cdiv(width, 64), blocks](
        *(xs, order, ends, first, count, gate.codes, gate.scales, up.codes, up.scales, h, *limits(activation)),
        CHOSEN=chosen,
        WIDTH=width,
        COLUMNS=columns,
        PER=gate.per,
        SATURATES=isinstance(activation, SiTU),
        PIECES=pieces(xs, gate),
        BLOCK=64,
        **common,
    )
    y = torch.empty(rows, outputs, dtype=dtype, device=xs.device)
    step = min(outputs, max(128, PARTS // (4 * pairs) // 128 * 128))
    parts = torch.empty(pairs, step, device=xs.device)
    for begin in range(0, outputs, step):
        slice_ = min(step, outputs - begin)
        _many_down[triton.cdiv(slice_, 128), blocks](
            *(h, order, ends, first, count, weights, down.codes, down.scales, parts, begin, slice_),
            OUTPUTS=outputs,
            COLUMNS=width,
            PER=down.per,
            PIECES=pieces(xs, down),
            BLOCK=128,
            **common,
        )
        _sum_places[triton.cdiv(slice_, 512), rows](
            *(parts, ids, y, begin, slice_, chosen, outputs, 512), **early(xs.device)
        )
    return y


def experts(
    x_NM: Tensor,
    ids_NE: Tensor,
    weight_NE: Tensor,
    expert: Callable[[int], Expert],
    activation: Activation,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See ``reference.experts``; of a ``Stack`` without asking the device, and an id of -1 is not here."""
    if x_NM.dtype not in (torch.float32, torch.bfloat16):
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation, dtype)
    if not isinstance(expert, Stack):
        if not bool((ids_NE >= 0).any()):
            return torch.zeros_like(x_NM, dtype=dtype)
        expert, ids_NE = gathered(ids_NE, expert)
    about = [stored(w) for w in (expert.gate, expert.up, expert.down)]
    if None in about or about[0].per != about[1].per:  # type: ignore[union-attr]
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation, dtype)
    args = (rows_of(x_NM), ids_NE.contiguous(), weight_NE.contiguous(), about, activation, dtype or x_NM.dtype)
    return _few(*args) if len(x_NM) <= ROWS else _many(*args)  # type: ignore[arg-type]


def gathered(ids_NE: Tensor, expert: Callable[[int], Expert]) -> tuple[Stack, Tensor]:
    """The experts that ids ask for as a stack of their own, and the ids of them there."""
    used, places = torch.unique(ids_NE, return_inverse=True)
    absent = int(used[0] < 0)
    held = [expert(x) for x in used.tolist()[absent:]]
    return Stack(*(_stacked([e[i] for e in held]) for i in range(3))), places - absent


def _stacked(weights: list[Weight]) -> Weight:
    first = weights[0]
    if isinstance(first, Tensor):
        return torch.stack(weights)  # type: ignore[arg-type]
    return type(first)(*(torch.stack([getattr(w, part) for w in weights]) for part in ("codes", "scales")))


def gated(x: Tensor, gate: Weight, up: Weight, down: Weight, kind: Activation) -> Tensor:
    """See ``reference.gated``."""
    a, b, c = stored(gate), stored(up), stored(down)
    if x.dtype not in (torch.float32, torch.bfloat16) or a is None or b is None or c is None:
        return reference.gated(x, gate, up, down, kind)
    if few(x) and a.per == b.per:
        h = _inner(rows_of(x), None, a, b, kind)
        return few_rows(h, [c], x.dtype)[0].view(*x.shape[:-1], -1)
    return linear(reference.activate(linear(x, gate), linear(x, up), kind), down)
