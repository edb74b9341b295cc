"""Latent attention: ``attention``, and what decoding inside a captured graph needs, ``attend_few`` and ``append``.

A few tokens attend in absorbed form, in three launches: queries move into the latent space; programs each take some
heads and a range of positions, and read the cache as it is, a tile serving as keys and as values; the ranges are
merged and the values' projection comes last, both for a piece of a latent's channels at a time: the last to be done
adds the pieces up, in their order. Where a row's ranges begin depends on its own number of positions alone, so neither
other rows nor the capacity of the buffers change a bit. Many tokens attend to keys and values that are made for a
block of positions at a time, unless absorbed is less work.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from deltafin.gpu_kernels.early import early, let_next, wait
from deltafin.gpu_kernels.mathematics import counted
from deltafin.ops import FEW, has_halves, reference
from deltafin.quant import MXFP4, Int8
from deltafin.weights import Weight

ABSORBED = 64
"""Tokens that attend in absorbed form, at most, where ``hopper`` does it. Each has programs of its own: at 131,072
positions 64 take 3.8 ms so and 11.6 ms in expanded form, at 8,192 0.66 and 0.78 (96 heads, one H200)."""

POSITIONS = 2048
"""Positions whose keys and values are made at a time for many tokens: 100 MB of them for 96 heads in bfloat16."""

DENSE, INT8, FP4 = constexpr(0), constexpr(1), constexpr(2)
LOG2E = 1.4426950408889634


@triton.jit
def stored(weight, scales, row, column, columns, mask, KIND: constexpr):
    """Load a tile of a weight [.., columns] and its scales, if any, as they are; ``row`` and ``column`` are indices."""
    row = row.to(tl.int64)[:, None]
    column = column[None, :]
    if KIND == FP4:
        codes = tl.load(weight + row * (columns // 2) + column // 2, mask, 0)
        return codes, tl.load(scales + row * (columns // 32) + column // 32, mask, 0)
    values = tl.load(weight + row * columns + column, mask, 0)
    return values, tl.load(scales + row) if KIND == INT8 else values


@triton.jit
def unpacked(values, scales, column, KIND: constexpr):
    """Return a tile that was ``stored`` in float32."""
    if KIND == FP4:
        codes = values.to(tl.int32) >> column[None, :] % 2 * 4
        units = (codes & 7).to(tl.float32)
        units = tl.where(units < 4, units * 0.5, tl.where(units < 6, units - 2, units * 2 - 8))
        exponent = scales.to(tl.int32)
        power = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2^-127 is a subnormal
        return tl.where(codes & 8 != 0, -units, units) * power
    values = values.to(tl.float32)
    return values * scales if KIND == INT8 else values


@triton.jit(do_not_specialize=["rows"])  # one program for any number of rows: the same bits
def _absorb(
    query,
    up,
    scales,
    out,
    arrived,
    rows,
    heads,
    plain,
    common,
    value,
    rank,
    factor,
    KIND: constexpr,
    PLAIN: constexpr,
    COMMON: constexpr,
    RANKS: constexpr,
    NEXT: constexpr,
    EARLY: constexpr,
):
    """Move a head's queries of all rows into the latent space: RANKS of its channels, and once the common part.

    NEXT: the next kernel may start early. Its programs take a multiprocessor each, so that they spread evenly.
    """
    h = tl.program_id(0)
    p, r = tl.arange(0, PLAIN), tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    query += h.to(tl.int64) * (plain + common)
    mask = (p < plain)[:, None] & (r < rank)[None, :]
    key_up, units = stored(up, scales, h * (plain + value) + tl.minimum(p, plain - 1), r, rank, mask, KIND)
    wait(EARLY)
    let_next(NEXT)
    own = tl.load(query + p, p < plain, 0)  # the next row's is on its way while one is multiplied
    j = tl.arange(0, COMMON)
    key_up = unpacked(key_up, units, r, KIND)
    for n in range(rows):
        q = query + (n * heads).to(tl.int64) * (plain + common)
        later = tl.load(q + heads * (plain + common) + p, (p < plain) & (n + 1 < rows), 0)
        place = out + (n * heads + h).to(tl.int64) * (rank + common)
        tl.store(place + r, tl.sum((own.to(tl.float32) * factor)[:, None] * key_up, 0), r < rank)
        if tl.program_id(1) == 0:
            tl.store(place + rank + j, tl.load(q + plain + j, j < common, 0).to(tl.float32) * factor, j < common)
            tl.store(arrived + n * heads + h, 0)
        own = later


@triton.jit
def _range(length, n, tokens, TILE: constexpr, SPLITS: constexpr):
    """How many positions row n sees, and how many of them are a range."""
    seen = counted(length) - tokens + n % tokens + 1
    return seen, tl.cdiv(tl.cdiv(seen, TILE), SPLITS) * TILE


@triton.jit(do_not_specialize=["length"])
def _attend(
    query,
    latent,
    shared,
    length,
    parts,
    tops,
    masses,
    latent_batch,
    latent_stride,
    shared_batch,
    shared_stride,
    room,
    tokens,
    heads,
    rank,
    common,
    RANK: constexpr,
    COMMON: constexpr,
    HEADS: constexpr,
    GROUP: constexpr,
    DEPTH: constexpr,
    TILE: constexpr,
    SPLITS: constexpr,
    PRECISION: constexpr,
    EARLY: constexpr,
):
    """Attend from GROUP heads of a row to a range of positions: weighted sum of latents, largest score, mass.

    Scores are base-2 logarithms. HEADS is GROUP or more, a power of two. Scores are made DEPTH channels at a time:
    what three products of float32 are made of does not fit the registers at once.
    """
    wait(EARLY)
    split, n = tl.program_id(1), tl.program_id(2)
    seen, size = _range(length, n, tokens, TILE, SPLITS)
    first = split * size
    last = tl.minimum(first + size, seen)
    if first >= last:
        return
    i, r, j = tl.arange(0, HEADS), tl.arange(0, RANK), tl.arange(0, COMMON)
    h = tl.program_id(0) * GROUP + i
    mine = ((i < GROUP) & (h < heads))[:, None]
    q = query + (n.to(tl.int64) * heads + h)[:, None] * (rank + common)
    own = tl.load(q + r[None, :], mine & (r < rank)[None, :], 0)
    both = tl.load(q + rank + j[None, :], mine & (j < common)[None, :], 0)
    b = (n // tokens).to(tl.int64)
    latent += b * latent_batch
    shared += b * shared_batch
    top = tl.full([HEADS], -float("inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, RANK], tl.float32)
    for start in range(first, last, TILE):
        s = start + tl.arange(0, TILE)
        here = (s < last)[:, None]
        place = s.to(tl.int64)[:, None]
        k = tl.load(shared + place * shared_stride + j[None, :], here & (j < common)[None, :], 0).to(both.dtype)
        c = tl.load(latent + place * latent_stride + r[None, :], here & (r < rank)[None, :], 0).to(both.dtype)
        scores = tl.dot(both, tl.trans(k), input_precision=PRECISION)
        if DEPTH == RANK:
            scores = tl.dot(own, tl.trans(c), scores, input_precision=PRECISION)
        else:
            for begin in range(0, rank, DEPTH):
                d = begin + tl.arange(0, DEPTH)
                few = tl.load(q + d[None, :], mine & (d < rank)[None, :], 0)
                x = tl.load(latent + place * latent_stride + d[None, :], here & (d < rank)[None, :], 0).to(both.dtype)
                scores = tl.dot(few, tl.trans(x), scores, input_precision=PRECISION)
        scores = tl.where((s < last)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(both.dtype), c, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    place = (n.to(tl.int64) * room + split) * heads + h
    tl.store(parts + place[:, None] * rank + r[None, :], total, mine & (r < rank)[None, :])
    place = (n.to(tl.int64) * heads + h) * room + split  # what is merged at once lies side by side
    tl.store(tops + place, top, (i < GROUP) & (h < heads))
    tl.store(masses + place, mass, (i < GROUP) & (h < heads))


@triton.jit(do_not_specialize=["length"])
def _finish(
    parts,
    tops,
    masses,
    length,
    up,
    scales,
    gate,
    sums,
    arrived,
    out,
    room,
    tokens,
    heads,
    plain,
    value,
    rank,
    KIND: constexpr,
    RANKS: constexpr,
    VALUE: constexpr,
    PIECES: constexpr,
    TILE: constexpr,
    SPLITS: constexpr,
    GATED: constexpr,
    EARLY: constexpr,
):
    """Merge RANKS channels of a head's ranges and make what they add to its values; the last to arrive adds it up.

    ``sums`` [rows, heads, PIECES, VALUE] is for what each adds, ``arrived`` [rows, heads] says how many have.
    """
    h, n, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, v = piece * RANKS + tl.arange(0, RANKS), tl.arange(0, VALUE)
    row = h * (plain + value) + plain + tl.minimum(v, value - 1)
    seen, size = _range(length, n, tokens, TILE, SPLITS)
    wait(EARLY)
    let_next(EARLY)
    used = tl.cdiv(seen, size)
    place = n.to(tl.int64) * heads + h
    tops += place * room
    parts += (n.to(tl.int64) * room * heads + h) * rank + r[None, :]
    s = tl.arange(0, SPLITS)
    top = tl.load(tops + s, s < used, -float("inf"))
    part = tl.load(parts + (s * heads)[:, None] * rank, (s < used)[:, None] & (r < rank)[None, :], 0)
    mass = tl.load(masses + place * room + s, s < used, 0)
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(part * share[:, None], 0) / tl.sum(mass * share, 0)
    # No sooner: beside the ranges it would take registers, and what these wait for would come after it.
    value_up, units = stored(up, scales, row, r, rank, (v < value)[:, None] & (r < rank)[None, :], KIND)
    sums += place * PIECES * VALUE
    tl.store(sums + piece * VALUE + v, tl.sum(unpacked(value_up, units, r, KIND) * total[None, :], 1))
    tl.debug_barrier()
    if tl.atomic_add(arrived + place, 1) == PIECES - 1:
        each = tl.arange(0, PIECES)[:, None] * VALUE + v[None, :]
        y = tl.sum(tl.load(sums + each, cache_modifier=".cg"), 0)
        if GATED:
            y *= tl.sigmoid(tl.load(gate + place * value + v, v < value, 0).to(tl.float32))
        tl.store(out + place * value + v, y, v < value)


@triton.jit(do_not_specialize=["length"])
def _append(
    x,
    norm,
    latent,
    shared,
    length,
    eps,
    latent_batch,
    latent_stride,
    shared_batch,
    shared_stride,
    tokens,
    rank,
    common,
    RANK: constexpr,
    COMMON: constexpr,
    EARLY: constexpr,
):
    """Store one row's latent, after its norm, and shared key."""
    wait(EARLY)
    let_next(EARLY)
    n = tl.program_id(0)
    b, s = (n // tokens).to(tl.int64), (counted(length) - tokens + n % tokens).to(tl.int64)
    r, j = tl.arange(0, RANK), tl.arange(0, COMMON)
    x += n.to(tl.int64) * (rank + common)
    raw = tl.load(x + r, r < rank, 0)
    c = raw.to(tl.float32)
    c = (c * tl.rsqrt(tl.sum(c * c, 0) / rank + eps)).to(raw.dtype)
    c = (c.to(tl.float32) * tl.load(norm + r, r < rank, 0).to(raw.dtype).to(tl.float32)).to(raw.dtype)
    tl.store(latent + b * latent_batch + s * latent_stride + r, c, r < rank)
    tl.store(shared + b * shared_batch + s * shared_stride + j, tl.load(x + rank + j, j < common), j < common)


@triton.jit
def _expand(
    latent,
    up,
    scales,
    out,
    latent_stride,
    positions,
    outputs,
    rank,
    KIND: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    PRECISION: constexpr,
):
    """Make keys and values [positions, outputs] of a block of latents, in out's type, which products are made in."""
    s = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    row = tl.minimum(o, outputs - 1)
    # The scale of an int8 row comes last: its codes are exact in bfloat16, their products with it are not.
    for start in range(0, rank, DEPTH):
        r = start + tl.arange(0, DEPTH)
        here = (s < positions)[:, None] & (r < rank)[None, :]
        c = tl.load(latent + s.to(tl.int64)[:, None] * latent_stride + r[None, :], here, 0)
        mask = (o < outputs)[:, None] & (r < rank)[None, :]
        KNOWN: constexpr = DENSE if KIND == INT8 else KIND
        w, units = stored(up, scales, row, r, rank, mask, KNOWN)
        w = unpacked(w, units, r, KNOWN)
        kind = out.dtype.element_ty
        total = tl.dot(c.to(kind), tl.trans(w.to(kind)), total, input_precision=PRECISION)
    if KIND == INT8:
        total *= tl.load(scales + row)[None, :]
    place = s.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(out + place, total, (s < positions)[:, None] & (o < outputs)[None, :])


@triton.jit
def _attend_expanded(
    query,
    expanded,
    shared,
    totals,
    tops,
    masses,
    out,
    shared_stride,
    start,
    positions,
    seen,
    tokens,
    heads,
    plain,
    common,
    value,
    factor,
    FIRST: constexpr,
    LAST: constexpr,
    PLAIN: constexpr,
    COMMON: constexpr,
    VALUE: constexpr,
    ROWS: constexpr,
    TILE: constexpr,
    PRECISION: constexpr,
):
    """Attend from ROWS tokens of a head to one block of positions, with what earlier blocks left and for later ones."""
    h = tl.program_id(1)
    i, j = tl.arange(0, PLAIN), tl.arange(0, COMMON)
    v = tl.arange(0, VALUE)
    begin = tl.program_id(0) * ROWS
    t = begin + tl.arange(0, ROWS)
    kind = expanded.dtype.element_ty
    row = t.to(tl.int64) * heads + h
    q = query + row[:, None] * (plain + common)
    own = tl.load(q + i[None, :], (t < tokens)[:, None] & (i < plain)[None, :], 0).to(kind)
    both = tl.load(q + plain + j[None, :], (t < tokens)[:, None] & (j < common)[None, :], 0).to(kind)
    if FIRST:
        top = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, VALUE], tl.float32)
    else:
        top = tl.load(tops + row, t < tokens, 0)
        mass = tl.load(masses + row, t < tokens, 1)
        total = tl.load(totals + row[:, None] * value + v[None, :], (t < tokens)[:, None] & (v < value)[None, :], 0)
    last = seen - tokens + t - start  # of the positions of this block, the last that a token sees
    width = plain + value
    for first in range(0, tl.minimum(positions, seen - tokens + begin + ROWS - start), TILE):
        s = first + tl.arange(0, TILE)
        here = (s < positions)[:, None]
        kv = expanded + (s.to(tl.int64)[:, None] * heads + h) * width
        k = tl.load(kv + i[None, :], here & (i < plain)[None, :], 0)
        c = tl.load(shared + s.to(tl.int64)[:, None] * shared_stride + j[None, :], here & (j < common)[None, :], 0)
        scores = tl.dot(own, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(both, tl.trans(c.to(kind)), scores, input_precision=PRECISION) * factor
        scores = tl.where(s[None, :] <= last[:, None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        values = tl.load(kv + plain + v[None, :], here & (v < value)[None, :], 0)
        total = tl.dot(p.to(kind), values, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    place = row[:, None] * value + v[None, :]
    mask = (t < tokens)[:, None] & (v < value)[None, :]
    if LAST:
        tl.store(out + place, total / mass[:, None], mask)
    else:
        tl.store(totals + place, total, mask)
        tl.store(tops + row, top, t < tokens)
        tl.store(masses + row, mass, t < tokens)


def _packed(up: Weight) -> tuple[Tensor, Tensor, int]:
    """Return what a weight is stored in, its scales (or anything, where there are none), and its kind."""
    if isinstance(up, Int8):
        return up.codes, up.scales, INT8.value
    if isinstance(up, MXFP4):
        return up.codes, up.scales, FP4.value
    return up, up, DENSE.value


def _known(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight) -> bool:
    """Whether the kernels read all of this."""
    known = (torch.float32, torch.bfloat16)
    return (
        q_BTHC.dtype in known
        and latent_BSR.dtype == shared_BSJ.dtype
        and latent_BSR.dtype in known
        and latent_BSR.stride(2) == shared_BSJ.stride(2) == 1
        and (isinstance(up, Int8 | MXFP4) or (up.dtype in known and up.is_contiguous()))
    )


def _kind(q_BTHC: Tensor, latent_BSR: Tensor) -> torch.dtype:
    """What products are made in: bfloat16 where all is that already, and the GPU multiplies it."""
    halves = q_BTHC.dtype == latent_BSR.dtype == torch.bfloat16 and has_halves(q_BTHC.device)
    return torch.bfloat16 if halves else torch.float32


def _precision(device: torch.device) -> str:
    """How a product of float32 stays one: three products of tensor cores, or none where they are too old."""
    return "tf32x3" if device.type == "cuda" and has_halves(device) else "ieee"


def _padded(width: int) -> int:
    """The next power of two, 32 at least: products of 16 columns of bfloat16 come out wrong on Hopper (Triton 3.6)."""
    return max(32, triton.next_power_of_2(width))


def _hopper(kind: torch.dtype, latent_BSR: Tensor, shared_BSJ: Tensor) -> ModuleType | None:
    """Return the form of ``_attend`` for compute capability 9.0, where it reads these caches on this GPU."""
    device, widths = latent_BSR.device, (latent_BSR.shape[2], shared_BSJ.shape[2])
    if kind != torch.bfloat16 or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    caches = latent_BSR, shared_BSJ
    aligned = all(x.data_ptr() % 16 == x.stride(1) % 8 == x.stride(0) % x.stride(1) == 0 for x in caches)
    try:
        from deltafin.gpu_kernels import hopper
    except ImportError:  # Gluon is younger than Triton
        return None
    return hopper if aligned and widths == (hopper.RANK.value, hopper.COMMON.value) else None


def _sizes(kind: torch.dtype, heads: int, ranks: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Return how many programs take a row's heads, and the sizes of ``_attend``.

    SPLITS is how many ranges a row is cut into, at most: some programs for each multiprocessor of a large GPU. It is
    part of the result's last bits, and so no matter of how many rows or multiprocessors there are.
    """
    if kind == torch.bfloat16:
        most = min(32, _padded(heads))
        groups = triton.cdiv(heads, most)
        sizes = {"HEADS": most, "GROUP": triton.cdiv(heads, groups), "TILE": 32, "SPLITS": 256 if groups == 1 else 128}
        return groups, sizes | {"DEPTH": ranks, "num_warps": 4, "num_stages": 2}
    tile = 32 if has_halves(device) else 16
    sizes = {"HEADS": 16, "GROUP": 16, "TILE": tile, "SPLITS": 64, "DEPTH": min(64, ranks)}
    return triton.cdiv(heads, 16), sizes | {"num_warps": 8, "num_stages": 1}


def attend_few(
    q_BTHC: Tensor,
    latent_BSR: Tensor,
    shared_BSJ: Tensor,
    length: Tensor | int,
    up: Weight,
    value_dim: int,
    gate_BTC: Tensor | None = None,
) -> Tensor:
    """Attend in absorbed form from the last T of ``length`` positions; return BTHV in the query's type.

    ``latent_BSR`` and ``shared_BSJ`` are whole buffers of any capacity; ``length`` counts the positions that mean
    something, these T included: a number, or int32 [1] on their device. Nothing is read back from the device, and the
    launches depend on shapes alone, so that a captured graph stays good while the context grows. ``gate_BTC``
    [B, T, H V], if any: the result is multiplied by its sigmoid.
    """
    batch, tokens, heads, channels = q_BTHC.shape
    rank, common = latent_BSR.shape[2], shared_BSJ.shape[2]
    plain, rows, device = channels - common, batch * tokens, q_BTHC.device
    kind, ranks = _kind(q_BTHC, latent_BSR), _padded(rank)
    hopper = _hopper(kind, latent_BSR, shared_BSJ)
    programs, sizes = hopper.sizes(heads) if hopper else _sizes(kind, heads, ranks, device)
    if tokens > FEW:  # many rows are enough programs, and ranges cost what it takes to merge them
        sizes["SPLITS"] = max(1, sizes["SPLITS"] >> (2 * tokens // FEW).bit_length() - 1)
    cut = {"TILE": sizes["TILE"], "SPLITS": sizes["SPLITS"]}
    splits = min(cut["SPLITS"], triton.cdiv(latent_BSR.shape[1], cut["TILE"]))
    weight, scales, storage = _packed(up)
    query = torch.empty(rows, heads, rank + common, dtype=kind, device=device)
    parts = torch.empty(rows, splits, heads, rank, device=device)
    tops, masses = torch.empty(2, rows, heads, splits, device=device)
    piece = min(64, ranks)
    pieces, value = ranks // piece, triton.next_power_of_2(value_dim)
    sums = torch.empty(rows, heads, pieces, value, device=device)
    arrived = torch.empty(rows, heads, dtype=torch.int32, device=device)
    out = torch.empty(batch, tokens, heads, value_dim, dtype=q_BTHC.dtype, device=device)
    _absorb[heads, triton.cdiv(rank, piece)](
        *(q_BTHC.contiguous(), weight, scales, query, arrived),
        *(rows, heads, plain, common, value_dim, rank, channels**-0.5 * LOG2E),
        KIND=storage,
        PLAIN=_padded(plain),
        COMMON=_padded(common),
        RANKS=piece,
        NEXT=hopper is not None,
        num_warps=2 if storage == DENSE.value else 4,  # 6.1 us and 7.1 (96 heads in bfloat16, one H200)
        **early(device),
    )
    if hopper:
        views = (hopper.described(x) for x in (*query.split((rank, common), 2), latent_BSR, shared_BSJ))
        steps = (x.stride(0) // x.stride(1) for x in (latent_BSR, shared_BSJ))
        how = {"GROUP": sizes["GROUP"], "SPLITS": sizes["SPLITS"], "num_warps": hopper.WARPS} | early(device)
        hopper.attend[programs, splits, rows](
            *(*views, length, parts, tops, masses, *steps, splits, tokens, heads), **how
        )
    else:
        _attend[programs, splits, rows](
            *(query, latent_BSR, shared_BSJ, length, parts, tops, masses),
            *(latent_BSR.stride(0), latent_BSR.stride(1), shared_BSJ.stride(0), shared_BSJ.stride(1)),
            *(splits, tokens, heads, rank, common),
            RANK=ranks,
            COMMON=_padded(common),
            PRECISION=_precision(device),
            **sizes,
            **early(device),
        )
    _finish[heads, rows, pieces](
        *(parts, tops, masses, length, weight, scales),
        *(out if gate_BTC is None else gate_BTC.contiguous(), sums, arrived, out),
        *(splits, tokens, heads, plain, value_dim, rank),
        KIND=storage,
        RANKS=piece,
        VALUE=value,
        PIECES=pieces,
        GATED=gate_BTC is not None,
        **cut,
        **early(device),
    )
    return out


def append(
    latent_shared_BTC: Tensor, norm_R: Tensor, eps: float, latent_BSR: Tensor, shared_BSJ: Tensor, length: Tensor | int
) -> None:
    """Store T positions, the last of ``length``: the first R channels after their RMS norm, the other J as they are.

    Buffers and ``length`` as in ``attend_few``; it counts these positions already.
    """
    batch, tokens, _ = latent_shared_BTC.shape
    rank, common = latent_BSR.shape[2], shared_BSJ.shape[2]
    _append[(batch * tokens,)](
        *(latent_shared_BTC.contiguous(), norm_R, latent_BSR, shared_BSJ, length, eps),
        *(latent_BSR.stride(0), latent_BSR.stride(1), shared_BSJ.stride(0), shared_BSJ.stride(1)),
        *(tokens, rank, common),
        RANK=_padded(rank),
        COMMON=_padded(common),
        **early(norm_R.device),
    )


def _blocks(kind: torch.dtype, device: torch.device) -> tuple[int, int, dict[str, int]]:
    """Return how many tokens and positions a program of ``attend_many`` takes at a time, its warps and stages."""
    if kind == torch.float32:
        rows = 32 if has_halves(device) else 16
        return rows, rows, {"num_warps": 4, "num_stages": 1}
    # Others of the same generations have 99 KB of shared memory, not 163 and more.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return 128, 64, {"num_warps": 8, "num_stages": 3}
    return 64, 64, {"num_warps": 4, "num_stages": 2}


def attend_many(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """Attend in expanded form, ``POSITIONS`` at a time with a running softmax. Arguments as ``attention``."""
    batch, tokens, heads, channels = q_BTHC.shape
    seen, rank, common, device = latent_BSR.shape[1], latent_BSR.shape[2], shared_BSJ.shape[2], q_BTHC.device
    outputs, plain = up.shape[0], channels - common
    kind = _kind(q_BTHC, latent_BSR)
    weight, scales, storage = _packed(up)
    precision, query = _precision(device), q_BTHC.contiguous()
    rows, tile, how = _blocks(kind, device)
    expanded = torch.empty(min(seen, POSITIONS), outputs, dtype=kind, device=device)
    totals = torch.empty(tokens, heads, value_dim, device=device)
    tops, masses = torch.empty(2, tokens, heads, device=device)
    out = torch.empty(batch, tokens, heads, value_dim, dtype=q_BTHC.dtype, device=device)
    for b in range(batch):
        for start in range(0, seen, POSITIONS):
            latent, shared = latent_BSR[b, start : start + POSITIONS], shared_BSJ[b, start : start + POSITIONS]
            _expand[triton.cdiv(outputs, 128), triton.cdiv(len(latent), rows)](
                *(latent, weight, scales, expanded, latent.stride(0), len(latent), outputs, rank),
                KIND=storage,
                ROWS=rows,
                COLUMNS=128,
                DEPTH=min(64, _padded(rank)),
                PRECISION=precision,
                **how,
            )
            _attend_expanded[triton.cdiv(tokens, rows), heads](
                *(query[b], expanded, shared, totals, tops, masses, out[b]),
                *(shared.stride(0), start, len(shared), seen, tokens, heads, plain, common, value_dim),
                channels**-0.5 * LOG2E,
                FIRST=start == 0,
                LAST=start + POSITIONS >= seen,
                PLAIN=_padded(plain),
                COMMON=_padded(common),
                VALUE=_padded(value_dim),
                ROWS=rows,
                TILE=tile,
                PRECISION=precision,
                **how,
            )
    return out


def _absorbs(tokens: int, plain: int, value: int, rank: int) -> bool:
    """Whether tokens attend to positions as they are with fewer operations than it takes to expand these before."""
    return tokens <= ABSORBED and tokens * (2 * rank - plain - value) < rank * (plain + value)


def attention(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """See ``reference.attention``."""
    if not _known(q_BTHC, latent_BSR, shared_BSJ, up):
        return reference.attention(q_BTHC, latent_BSR, shared_BSJ, up, value_dim)
    tokens, plain, rank = q_BTHC.shape[1], q_BTHC.shape[3] - shared_BSJ.shape[2], latent_BSR.shape[2]
    here = _hopper(_kind(q_BTHC, latent_BSR), latent_BSR, shared_BSJ)
    if tokens > FEW and not (here and _absorbs(tokens, plain, value_dim, rank)):
        return attend_many(q_BTHC, latent_BSR, shared_BSJ, up, value_dim)
    return attend_few(q_BTHC, latent_BSR, shared_BSJ, latent_BSR.shape[1], up, value_dim)
