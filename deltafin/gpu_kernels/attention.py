"""Latent attention: ``attention``, and what decoding inside a captured graph needs, ``attend_few`` and ``append``.

A few tokens attend in absorbed form, in three launches: queries move into the latent space; programs each take some
heads and a range of positions, and read the cache as it is, a tile serving as keys and as values; the ranges are
merged and the values' projection comes last, both for a piece of a latent's channels at a time: the last to be done
adds the pieces up, in their order. Where a row's ranges begin depends on its own number of positions alone, so neither
other rows nor the capacity of the buffers change a bit. Many tokens attend to keys and values that are made for a
block of positions at a time, unless absorbed is less work.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from deltafin.gpu_kernels import hopper
from deltafin.gpu_kernels.early import early, let_next, wait
from deltafin.gpu_kernels.expanded import LOG2E, attend_many, kind_of, padded, precision_of
from deltafin.gpu_kernels.linear import BF16, F32, stored, tile
from deltafin.gpu_kernels.mathematics import counted
from deltafin.gpu_kernels.small import KNOWN
from deltafin.ops import FEW, has_halves, reference
from deltafin.weights import Weight

ABSORBED = 64
"""Tokens that attend in absorbed form, at most, where ``hopper`` does it. Each has programs of its own: at 131,072
positions 64 take 3.8 ms so and 11.6 ms in expanded form, at 8,192 0.66 and 0.78 (96 heads, one H200)."""


@triton.jit(do_not_specialize=["rows"])  # one program for any number of rows: the same bits
def _absorb(
    query,
    up,
    scales,
    out,
    arrived,
    rows,
    heads,
    factor,
    PLAIN: constexpr,
    COMMON: constexpr,
    VALUE: constexpr,
    RANK: constexpr,
    PER: constexpr,
    RANKS: constexpr,
    NEXT: constexpr,
    EARLY: constexpr,
):
    """Move a head's queries of all rows into the latent space: RANKS of its channels, and once the common part.

    NEXT: the next kernel may start early. Its programs take a multiprocessor each, so that they spread evenly.
    """
    h, start = tl.program_id(0), tl.program_id(1) * RANKS
    p, j, r = tl.arange(0, padded(PLAIN)), tl.arange(0, padded(COMMON)), start + tl.arange(0, RANKS)
    query += h.to(tl.int64) * (PLAIN + COMMON)
    row = (h * (PLAIN + VALUE) + tl.minimum(p, PLAIN - 1)).to(tl.int64)
    key_up = tile(up, scales, row, r, start, RANK, PER)
    if PER == 4:
        key_up *= tl.load(scales + row)[:, None]
    wait(EARLY)
    let_next(NEXT)
    own = tl.load(query + p, p < PLAIN, 0)  # the next row's is on its way while one is multiplied
    for n in range(rows):
        q = query + (n * heads).to(tl.int64) * (PLAIN + COMMON)
        later = tl.load(q + heads * (PLAIN + COMMON) + p, (p < PLAIN) & (n + 1 < rows), 0)
        place = out + (n * heads + h).to(tl.int64) * (RANK + COMMON)
        tl.store(place + r, tl.sum((own.to(tl.float32) * factor)[:, None] * key_up, 0), r < RANK)
        if tl.program_id(1) == 0:
            tl.store(place + RANK + j, tl.load(q + PLAIN + j, j < COMMON, 0).to(tl.float32) * factor, j < COMMON)
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
    i, r, j = tl.arange(0, HEADS), tl.arange(0, padded(RANK)), tl.arange(0, padded(COMMON))
    h = tl.program_id(0) * GROUP + i
    mine = ((i < GROUP) & (h < heads))[:, None]
    q = query + (n.to(tl.int64) * heads + h)[:, None] * (RANK + COMMON)
    own = tl.load(q + r[None, :], mine & (r < RANK)[None, :], 0)
    both = tl.load(q + RANK + j[None, :], mine & (j < COMMON)[None, :], 0)
    b = (n // tokens).to(tl.int64)
    latent += b * latent_batch
    shared += b * shared_batch
    top = tl.full([HEADS], -float("inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, padded(RANK)], tl.float32)
    for start in range(first, last, TILE):
        s = start + tl.arange(0, TILE)
        here = (s < last)[:, None]
        place = s.to(tl.int64)[:, None]
        k = tl.load(shared + place * shared_stride + j[None, :], here & (j < COMMON)[None, :], 0).to(both.dtype)
        c = tl.load(latent + place * latent_stride + r[None, :], here & (r < RANK)[None, :], 0).to(both.dtype)
        scores = tl.dot(both, tl.trans(k), input_precision=PRECISION)
        if DEPTH >= RANK:
            scores = tl.dot(own, tl.trans(c), scores, input_precision=PRECISION)
        else:
            for begin in range(0, RANK, DEPTH):
                d = begin + tl.arange(0, DEPTH)
                few = tl.load(q + d[None, :], mine & (d < RANK)[None, :], 0)
                x = tl.load(latent + place * latent_stride + d[None, :], here & (d < RANK)[None, :], 0).to(both.dtype)
                scores = tl.dot(few, tl.trans(x), scores, input_precision=PRECISION)
        scores = tl.where((s < last)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(both.dtype), c, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    place = (n.to(tl.int64) * room + split) * heads + h
    tl.store(parts + place[:, None] * RANK + r[None, :], total, mine & (r < RANK)[None, :])
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
    PLAIN: constexpr,
    VALUE: constexpr,
    RANK: constexpr,
    PER: constexpr,
    RANKS: constexpr,
    PIECES: constexpr,
    TILE: constexpr,
    SPLITS: constexpr,
    EARLY: constexpr,
):
    """Merge RANKS channels of a head's ranges and make what they add to its values; the last to arrive adds it up.

    ``sums`` [rows, heads, PIECES, WIDE] is for what each adds, ``arrived`` [rows, heads] says how many have. ``gate``
    [rows, heads, VALUE], if any: the result is multiplied by its sigmoid.
    """
    h, n, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    WIDE: constexpr = padded(VALUE)
    r, v = piece * RANKS + tl.arange(0, RANKS), tl.arange(0, WIDE)
    row = (h * (PLAIN + VALUE) + PLAIN + tl.minimum(v, VALUE - 1)).to(tl.int64)
    seen, size = _range(length, n, tokens, TILE, SPLITS)
    wait(EARLY)
    let_next(EARLY)
    used = tl.cdiv(seen, size)
    place = n.to(tl.int64) * heads + h
    tops += place * room
    parts += (n.to(tl.int64) * room * heads + h) * RANK + r[None, :]
    s = tl.arange(0, SPLITS)
    top = tl.load(tops + s, s < used, -float("inf"))
    part = tl.load(parts + (s * heads)[:, None] * RANK, (s < used)[:, None] & (r < RANK)[None, :], 0)
    mass = tl.load(masses + place * room + s, s < used, 0)
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(part * share[:, None], 0) / tl.sum(mass * share, 0)
    # No sooner: beside the ranges it would take registers, and what these wait for would come after it.
    added = tl.sum(tile(up, scales, row, r, piece * RANKS, RANK, PER).to(tl.float32) * total[None, :], 1)
    if PER == 4:
        added *= tl.load(scales + row)
    sums += place * PIECES * WIDE
    tl.store(sums + piece * WIDE + v, added)
    tl.debug_barrier()
    if tl.atomic_add(arrived + place, 1) == PIECES - 1:
        each = tl.arange(0, PIECES)[:, None] * WIDE + v[None, :]
        y = tl.sum(tl.load(sums + each, cache_modifier=".cg"), 0)
        if gate is not None:
            y *= tl.sigmoid(tl.load(gate + place * VALUE + v, v < VALUE, 0).to(tl.float32))
        tl.store(out + place * VALUE + v, y, v < VALUE)


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
    RANK: constexpr,
    COMMON: constexpr,
    EARLY: constexpr,
):
    """Store one row's latent, after its norm, and shared key."""
    wait(EARLY)
    let_next(EARLY)
    n = tl.program_id(0)
    b, s = (n // tokens).to(tl.int64), (counted(length) - tokens + n % tokens).to(tl.int64)
    r, j = tl.arange(0, padded(RANK)), tl.arange(0, padded(COMMON))
    x += n.to(tl.int64) * (RANK + COMMON)
    raw = tl.load(x + r, r < RANK, 0)
    c = raw.to(tl.float32)
    c = (c * tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)).to(raw.dtype)
    c = (c.to(tl.float32) * tl.load(norm + r, r < RANK, 0).to(raw.dtype).to(tl.float32)).to(raw.dtype)
    tl.store(latent + b * latent_batch + s * latent_stride + r, c, r < RANK)
    tl.store(shared + b * shared_batch + s * shared_stride + j, tl.load(x + RANK + j, j < COMMON), j < COMMON)


def attention(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """See ``reference.attention``."""
    caches = latent_BSR, shared_BSJ
    known = q_BTHC.dtype in KNOWN and latent_BSR.dtype == shared_BSJ.dtype and latent_BSR.dtype in KNOWN
    if not known or any(x.stride(2) != 1 for x in caches) or stored(up) is None:
        return reference.attention(q_BTHC, *caches, up, value_dim)
    tokens, plain, rank = q_BTHC.shape[1], q_BTHC.shape[3] - shared_BSJ.shape[2], latent_BSR.shape[2]
    absorbs = hopper.serves(kind_of(q_BTHC, latent_BSR), *caches) and _absorbs(tokens, plain, value_dim, rank)
    if tokens > FEW and not absorbs:
        return attend_many(q_BTHC, *caches, up, value_dim)
    return attend_few(q_BTHC, *caches, latent_BSR.shape[1], up, value_dim)


def _absorbs(tokens: int, plain: int, value: int, rank: int) -> bool:
    """Whether tokens attend to positions as they are with fewer operations than it takes to expand these before."""
    return tokens <= ABSORBED and tokens * (2 * rank - plain - value) < rank * (plain + value)


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
    rows, device = batch * tokens, q_BTHC.device
    weight = stored(up)
    assert weight is not None, "storage that no kernel reads"
    kind = kind_of(q_BTHC, latent_BSR)
    on_hopper = hopper.serves(kind, latent_BSR, shared_BSJ)
    programs, sizes = hopper.sizes(heads) if on_hopper else _sizes(kind, heads, rank, device)
    if tokens > FEW:  # many rows are enough programs, and ranges cost what it takes to merge them
        sizes["SPLITS"] = max(1, sizes["SPLITS"] >> (2 * tokens // FEW).bit_length() - 1)
    splits = min(sizes["SPLITS"], triton.cdiv(latent_BSR.shape[1], sizes["TILE"]))
    piece = min(64, padded(rank))
    pieces = padded(rank) // piece
    query = torch.empty(rows, heads, rank + common, dtype=kind, device=device)
    parts = torch.empty(rows, splits, heads, rank, device=device)
    tops, masses = torch.empty(2, rows, heads, splits, device=device)
    sums = torch.empty(rows, heads, pieces, padded(value_dim), device=device)
    arrived = torch.empty(rows, heads, dtype=torch.int32, device=device)
    out = torch.empty(batch, tokens, heads, value_dim, dtype=q_BTHC.dtype, device=device)
    widths = {"PLAIN": channels - common, "VALUE": value_dim, "RANK": rank, "PER": weight.per, "RANKS": piece}
    _absorb[heads, triton.cdiv(rank, piece)](
        *(q_BTHC.contiguous(), weight.codes, weight.scales, query, arrived, rows, heads, channels**-0.5 * LOG2E),
        COMMON=common,
        NEXT=on_hopper,
        num_warps=2 if weight.per in (F32, BF16) else 4,  # 6.1 us and 7.1 (96 heads in bfloat16, one H200)
        **widths,
        **early(device),
    )
    if on_hopper:
        views = (hopper.described(x) for x in (*query.split((rank, common), 2), latent_BSR, shared_BSJ))
        steps = (x.stride(0) // x.stride(1) for x in (latent_BSR, shared_BSJ))
        hopper.attend[programs, splits, rows](
            *(*views, length, parts, tops, masses, *steps, splits, tokens, heads),
            GROUP=sizes["GROUP"],
            SPLITS=sizes["SPLITS"],
            num_warps=hopper.WARPS,
            **early(device),
        )
    else:
        _attend[programs, splits, rows](
            *(query, latent_BSR, shared_BSJ, length, parts, tops, masses),
            *(latent_BSR.stride(0), latent_BSR.stride(1), shared_BSJ.stride(0), shared_BSJ.stride(1)),
            *(splits, tokens, heads),
            RANK=rank,
            COMMON=common,
            PRECISION=precision_of(device),
            **sizes,
            **early(device),
        )
    gate = None if gate_BTC is None else gate_BTC.contiguous()
    _finish[heads, rows, pieces](
        *(parts, tops, masses, length, weight.codes, weight.scales, gate, sums, arrived, out, splits, tokens, heads),
        PIECES=pieces,
        TILE=sizes["TILE"],
        SPLITS=sizes["SPLITS"],
        **widths,
        **early(device),
    )
    return out


def _sizes(kind: torch.dtype, heads: int, rank: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Return how many programs take a row's heads, and the sizes of ``_attend``.

    SPLITS is how many ranges a row is cut into, at most: some programs for each multiprocessor of a large GPU. It is
    part of the result's last bits, and so no matter of how many rows or multiprocessors there are.
    """
    if kind == torch.bfloat16:
        most = min(32, padded(heads))
        groups = triton.cdiv(heads, most)
        sizes = {"HEADS": most, "GROUP": triton.cdiv(heads, groups), "TILE": 32, "SPLITS": 256 if groups == 1 else 128}
        return groups, sizes | {"DEPTH": rank, "num_warps": 4, "num_stages": 2}
    sizes = {"HEADS": 16, "GROUP": 16, "TILE": 32 if has_halves(device) else 16, "SPLITS": 64, "DEPTH": 64}
    return triton.cdiv(heads, 16), sizes | {"num_warps": 8, "num_stages": 1}


def append(
    latent_shared_BTC: Tensor, norm_R: Tensor, eps: float, latent_BSR: Tensor, shared_BSJ: Tensor, length: Tensor | int
) -> None:
    """Store T positions, the last of ``length``: the first R channels after their RMS norm, the other J as they are.

    Buffers and ``length`` as in ``attend_few``; it counts these positions already.
    """
    batch, tokens, _ = latent_shared_BTC.shape
    _append[(batch * tokens,)](
        *(latent_shared_BTC.contiguous(), norm_R, latent_BSR, shared_BSJ, length, eps),
        *(latent_BSR.stride(0), latent_BSR.stride(1), shared_BSJ.stride(0), shared_BSJ.stride(1)),
        tokens,
        RANK=latent_BSR.shape[2],
        COMMON=shared_BSJ.shape[2],
        **early(norm_R.device),
    )
