"""Gated feed-forwards on a GPU: ``experts``, all routed experts of a layer at once, and ``gated``."""

from collections.abc import Callable
from typing import Any

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
from deltafin.gpu_kernels.small import KNOWN
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
    """BATCH * BLOCK inner channels of one (row, expert) pair, or with CHOSEN 0 of the one expert for COUNT rows.

    Into ``h`` [count, WIDTH] float32, which is left as it is where ``ids`` say -1.
    """
    pair = tl.program_id(1) * COUNT
    left = count - pair
    if CHOSEN:
        wait(EARLY)
        expert = tl.load(ids + pair)
        x += pair // CHOSEN * COLUMNS
    else:
        expert = tl.full((), 0, tl.int64)
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
    """BATCH * BLOCK outputs of one (row, expert) pair, weighted. ``_few_up`` came before: ids are there already."""
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


def _saturation(activation: Activation) -> dict[str, Any]:
    """What launches say of the activation: limits of gate and up, zeros where they have none."""
    limits = (activation.gate_limit, activation.up_limit) if isinstance(activation, SiTU) else (0.0, 0.0)
    return {"gate_limit": limits[0], "up_limit": limits[1], "SATURATES": isinstance(activation, SiTU)}


def _plainly(weight: Stored, columns: int, outputs: int, rows: int) -> tuple[int, dict[str, Any]]:
    """How many outputs a program has, and what its launch says of that: see ``shape_of``."""
    shape = shape_of(weight.per, columns, outputs, rows)
    sizes = {"BLOCK": shape.block, "BATCH": shape.batch, "QUADS": shape.quads, "STAGES": shape.stages}
    how = {"PER": weight.per, "num_warps": shape.warps, "enable_fp_fusion": False}
    return shape.block * shape.batch, sizes | how | early(weight.codes.device)


def _inner(xs: Tensor, ids: Tensor | None, gate: Stored, up: Stored, activation: Activation) -> Tensor:
    """The activated inner channels of every (row, expert) pair, or of the one expert for every row: float32."""
    (rows, columns), width = xs.shape, gate.codes.shape[-2]
    chosen, together = (0, at_once(rows)) if ids is None else (ids.shape[1], 1)
    h = torch.empty(rows * max(1, chosen), width, device=xs.device)
    each, how = _plainly(gate, columns, width * max(1, chosen), together)
    _few_up[triton.cdiv(width, each), triton.cdiv(len(h), together)](
        *(xs, ids, len(h), gate.codes, gate.scales, up.codes, up.scales, h),
        CHOSEN=chosen,
        WIDTH=width,
        COLUMNS=columns,
        ALIGNED=aligned(gate) and aligned(up),
        COUNT=together,
        **_saturation(activation),
        **how,
    )
    return h


def _few(
    xs: Tensor, ids: Tensor, weights: Tensor, stack: tuple[Stored, ...], activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Every (row, expert) pair for itself, in float32; then the sum of a row's, place by place."""
    gate, up, down = stack
    (rows, chosen), outputs, width = ids.shape, down.codes.shape[1], gate.codes.shape[1]
    h = _inner(xs, ids, gate, up, activation)
    parts = torch.empty(rows * chosen, outputs, device=xs.device)
    y = torch.empty(rows, outputs, dtype=dtype, device=xs.device)
    each, how = _plainly(down, width, outputs * chosen, 1)
    _few_down[triton.cdiv(outputs, each), len(h)](
        *(h, ids, weights, down.codes, down.scales, parts),
        OUTPUTS=outputs,
        COLUMNS=width,
        ALIGNED=aligned(down),
        **how,
    )
    _sum_places[triton.cdiv(outputs, 128), rows](
        *(parts, ids, y, 0, outputs), CHOSEN=chosen, OUTPUTS=outputs, BLOCK=128, **early(xs.device)
    )
    return y


def _inner_in_digits(
    xs: Tensor, ids: Tensor | None, gate: Stored, up: Stored, activation: Activation, arrived: Tensor | None = None
) -> Tensor:
    """See ``_inner``. With ids come counters, int32, which are set to zero for ``_few_in_digits``."""
    (rows, columns), width = xs.shape, gate.codes.shape[-2]
    chosen, together = (0, digits.at_once(rows, columns, xs.device)) if ids is None else (ids.shape[1], 1)
    h = torch.empty(rows * max(1, chosen), width, device=xs.device)
    weights = [digits.words(t) for t in (gate.codes, gate.scales, up.codes, up.scales)]
    counters = (None, 0) if arrived is None else (arrived, arrived.numel())
    sizes = {"CHOSEN": chosen, "WIDTH": width, "COLUMNS": columns} | _saturation(activation)
    if chosen and gate.per == MX:
        tiles, programs = digits.shared_out([width], 1, len(h), xs.device, nibbles.MOST.value)
        nibbles.few_up[len(h), programs](
            *(xs, ids, *weights, h, *counters), tiles=tiles, **sizes, **nibbles.options(xs.device)
        )
        return h
    chunks = triton.cdiv(len(h), together)
    tiles, programs = digits.shared_out([width], 1, chunks, xs.device)
    digits.few_up[chunks, programs](
        *(xs, ids, len(h), *weights, h, *counters),
        tiles=tiles,
        COUNT=together,
        **sizes,
        **digits.options(xs.device, gate.per, 1, 3),
    )
    return h


def _few_in_digits(
    xs: Tensor, ids: Tensor, weights: Tensor, stack: tuple[Stored, ...], activation: Activation, dtype: torch.dtype
) -> Tensor:
    """See ``_few``: two launches, as whichever program is the last to write some outputs of a row's pairs sums them."""
    gate, up, down = stack
    (rows, chosen), outputs, width = ids.shape, down.codes.shape[1], gate.codes.shape[1]
    if down.per == MX:
        form, how, most = nibbles, nibbles.options(xs.device), {"most": nibbles.MOST.value}
    else:
        form, how, most = digits, digits.options(xs.device, down.per, 1, 4), {}
    tiles, programs = digits.shared_out([outputs], 1, rows * chosen, xs.device, **most)
    arrived = torch.empty(rows, programs, dtype=torch.int32, device=xs.device)
    h = _inner_in_digits(xs, ids, gate, up, activation, arrived)
    parts = torch.empty(rows * chosen, outputs, device=xs.device)
    y = torch.empty(rows, outputs, dtype=dtype, device=xs.device)
    form.few_down[len(h), programs](
        *(h, ids, weights, digits.words(down.codes), digits.words(down.scales), parts, arrived, y, tiles),
        CHOSEN=chosen,
        OUTPUTS=outputs,
        COLUMNS=width,
        **how,
    )
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
    xs: Tensor, ids: Tensor, weights: Tensor, stack: tuple[Stored, ...], activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Pairs of rows and experts, sorted by expert on the device, in blocks that each have one expert."""
    gate, up, down = stack
    (rows, chosen), (count, width), outputs = ids.shape, gate.codes.shape[:2], down.codes.shape[1]
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
        *(xs, order, ends, first, count, gate.codes, gate.scales, up.codes, up.scales, h),
        CHOSEN=chosen,
        WIDTH=width,
        COLUMNS=xs.shape[1],
        PER=gate.per,
        PIECES=pieces(xs, gate),
        BLOCK=64,
        **_saturation(activation),
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
            *(parts, ids, y, begin, slice_), CHOSEN=chosen, OUTPUTS=outputs, BLOCK=512, **early(xs.device)
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
    if x_NM.dtype not in KNOWN:
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation, dtype)
    if not isinstance(expert, Stack):
        if not bool((ids_NE >= 0).any()):
            return torch.zeros_like(x_NM, dtype=dtype)
        expert, ids_NE = _gathered(ids_NE, expert)
    gate, up, down = (stored(w) for w in (expert.gate, expert.up, expert.down))
    if gate is None or up is None or down is None or gate.per != up.per:
        return reference.experts(x_NM, ids_NE, weight_NE, expert, activation, dtype)
    if len(x_NM) > ROWS:
        form = _many
    elif in_digits(x_NM.shape[1], gate, up) and in_digits(gate.codes.shape[1], down):
        form = _few_in_digits
    else:
        form = _few
    xs, ids, weights = rows_of(x_NM), ids_NE.contiguous(), weight_NE.contiguous()
    return form(xs, ids, weights, (gate, up, down), activation, dtype or x_NM.dtype)


def _gathered(ids_NE: Tensor, expert: Callable[[int], Expert]) -> tuple[Stack, Tensor]:
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
    if x.dtype not in KNOWN or a is None or b is None or c is None:
        return reference.gated(x, gate, up, down, kind)
    if few(x) and a.per == b.per:
        inner = _inner_in_digits if in_digits(x.shape[-1], a, b) else _inner
        h = inner(rows_of(x), None, a, b, kind)
        return few_rows(h, [c], x.dtype)[0].view(*x.shape[:-1], -1)
    return linear(reference.activate(linear(x, gate), linear(x, up), kind), down)
