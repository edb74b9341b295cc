"""Latent attention of a few tokens, in absorbed form: ``attention``.

The query moves into the latent space, the cache is read once as it is, and the values' projection comes last.
Positions are taken in chunks, chunks in spans; a span has a running softmax of its own, and spans are merged in order.
Where spans begin depends on the row's context alone, so neither other rows nor threads change a bit.

Queries and a cache in bfloat16 are multiplied by the processor's tiles where it has them (``tiles``); else, and in
float32, by vectors of float32.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import tiles
from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import kernel
from deltafin.cpu_kernels.linear import block, prepare
from deltafin.cpu_kernels.many import attend, up_of
from deltafin.cpu_kernels.mathematics import exp, exps
from deltafin.cpu_kernels.stored import (
    ADDRESS,
    BF16,
    F32,
    HEAD,
    INT8,
    KIND,
    OUTPUTS,
    SCALES,
    STRIDE,
    Stored,
    as_array,
    described,
    is_coarse,
    own,
    rounded,
)
from deltafin.cpu_kernels.threads import threads
from deltafin.ops import FEW, reference
from deltafin.quant import MXFP4

CHUNK = tiles.POSITIONS
"""Positions whose scores are made at a time: their latents fit the second-level cache."""

LEAST, MOST = 4, 32
"""Chunks of a span, at least; spans of a row, at most."""

TILE = v.HEADS

PARALLEL = 64 << 10
"""Bytes of cache and weight below which waking a second thread costs more than it saves."""


@kernel()
def spans_of(positions):
    """In how many spans a context is cut."""
    chunks = (positions + CHUNK - 1) // CHUNK
    return max(1, min(MOST, chunks // LEAST))


@kernel()
def _absorb(h, up, plain, value, q, latent, out):
    """Move head h's queries of all rows into the latent space: own part through the key rows, common part as it is."""
    rows, channels = q.shape[0], q.shape[2]
    scale = np.float32(1) / np.sqrt(np.float32(channels))
    whole = latent & ~15
    for n in range(rows):
        y = out[n, h]
        y[:latent] = 0
        for p in range(plain):
            row = h * (plain + value) + p
            w = up[ADDRESS] + row * up[STRIDE]
            a = q[n, h, p] * scale
            if up[KIND] == F32:
                v.axpy_f32(a, w, y.ctypes.data, whole)
                for i in range(whole, latent):
                    y[i] += a * v.peek_f32(w + 4 * i)
            elif up[KIND] == BF16:
                v.axpy_bf16(a, w, y.ctypes.data, whole)
                for i in range(whole, latent):
                    y[i] += a * v.as_f32(np.uint32(v.peek_u16(w + 2 * i)) << np.uint32(16))
            else:
                a *= v.peek_f32(up[SCALES] + 4 * row)
                v.axpy_int8(a, w, y.ctypes.data, whole)
                for i in range(whole, latent):
                    y[i] += a * np.float32(v.peek_i8(w + i))
        for j in range(channels - plain):
            y[latent + j] = q[n, h, plain + j] * scale


@kernel()
def _value(kind, row, i):
    if kind == F32:
        return v.peek_f32(row + 4 * i)
    return v.as_f32(np.uint32(v.peek_u16(row + 2 * i)) << np.uint32(16))


@kernel()
def _score(kind, q, stride, first, second, k, out):
    whole = k & ~15
    if kind == F32:
        v.scores_f32(q, stride, first, second, out.ctypes.data, whole)
    else:
        v.scores_bf16(q, stride, first, second, out.ctypes.data, whole)
    for i in range(whole, k):
        for h in range(TILE):
            x = v.peek_f32(q + h * stride + 4 * i)
            out[h, 0] += x * _value(kind, first, i)
            out[h, 1] += x * _value(kind, second, i)


@kernel()
def _chunk(kind, q, latent, latent_stride, shared, shared_stride, rank, common, start, count, largest, mass, acc):
    """Attend from TILE heads (``q`` [TILE, rank + common]) to positions from ``start`` on: running softmax into acc."""
    tile, p = np.empty((TILE, 2), np.float32), np.empty((TILE, CHUNK), np.float32)
    whole = rank & ~15
    address, stride = q.ctypes.data, 4 * (rank + common)
    for s in range(0, count, 2):
        a, b = start + s, start + min(s + 1, count - 1)
        tile[:] = 0
        _score(kind, address, stride, latent + a * latent_stride, latent + b * latent_stride, rank, tile)
        a, b = shared + a * shared_stride, shared + b * shared_stride
        _score(kind, address + 4 * rank, stride, a, b, common, tile)
        for h in range(TILE):
            p[h, s] = tile[h, 0]
            if s + 1 < count:
                p[h, s + 1] = tile[h, 1]
    for h in range(TILE):
        top = largest[h]
        for s in range(count):
            top = max(top, p[h, s])
        shrink = exp(largest[h] - top) if largest[h] > -np.inf else np.float32(0)
        total = np.float32(0)
        exps(p[h], top, p[h, :count])
        for s in range(count):
            total += p[h, s]
        mass[h] = mass[h] * shrink + total
        largest[h] = top
        if shrink != 1:
            for i in range(rank):
                acc[h, i] *= shrink
    rows = latent + start * latent_stride
    if kind == F32:
        v.weighted_f32(p.ctypes.data, 4 * CHUNK, rows, latent_stride, count, acc.ctypes.data, 4 * rank, whole)
    else:
        v.weighted_bf16(p.ctypes.data, 4 * CHUNK, rows, latent_stride, count, acc.ctypes.data, 4 * rank, whole)
    for i in range(whole, rank):
        for h in range(TILE):
            for s in range(count):
                acc[h, i] += p[h, s] * _value(kind, rows + s * latent_stride, i)


@kernel()
def _span(kind, q, latent, latent_stride, shared, shared_stride, rank, common, first, last, largest, mass, acc):
    """Attend from some tiles of heads to positions first to last, by chunks that all tiles meet in turn."""
    acc[:] = 0
    largest[:] = -np.inf
    mass[:] = 0
    for start in range(first, last, CHUNK):
        count = min(CHUNK, last - start)
        for line in range(0, CHUNK * latent_stride, 64):  # of the next chunk, or what follows the last
            v.ask(latent + (start + CHUNK) * latent_stride + line)
        for h in range(0, len(q), TILE):
            heads = slice(h, h + TILE)
            _chunk(
                *(kind, q[heads], latent, latent_stride, shared, shared_stride, rank, common, start, count),
                *(largest[heads], mass[heads], acc[heads]),
            )


@kernel()
def _pack(h, absorbed, queries):
    """Head h's absorbed queries of all rows as ``tiles.scores`` reads them: pairs of bfloat16."""
    for n in range(len(absorbed)):
        q, out = absorbed[n, h], queries[n, h // tiles.WIDTH]
        for i in range(len(out)):
            out[i, h % tiles.WIDTH] = rounded(q[2 * i]) | rounded(q[2 * i + 1]) << np.uint32(16)


@kernel()
def _softmax(p, count, top, largest, mass, acc):
    """Scores of one chunk [CHUNK, WIDTH] become weights, with a running softmax; those from ``count`` on are none."""
    heads = p.shape[1]
    for h in range(heads):
        top[h] = largest[h]
    for s in range(count):
        for h in range(heads):
            top[h] = max(top[h], p[s, h])
    for h in range(heads):
        shrink = exp(largest[h] - top[h]) if largest[h] > -np.inf else np.float32(0)
        mass[h] *= shrink
        largest[h] = top[h]
        if shrink != 1:
            for i in range(acc.shape[1]):
                acc[h, i] *= shrink
    for s in range(count):
        for h in range(heads):
            p[s, h] -= top[h]
        exps(p[s], np.float32(0), p[s])
    for s in range(count):
        for h in range(heads):
            mass[h] += p[s, h]
    p[count:] = 0


@kernel()
def _tile_span(q, latent, latent_stride, shared, shared_stride, rank, common, first, last, largest, mass, acc):
    """``_span`` of bfloat16 by tiles, from groups of WIDTH heads: ``q`` uint32 [groups, (rank + common) / 2, WIDTH]."""
    acc[:] = 0
    largest[:] = -np.inf
    mass[:] = 0
    own, common_size, pairs = 2 * CHUNK * rank, 2 * CHUNK * common, 2 * CHUNK * rank
    room = np.empty(own + common_size + pairs + 6 * CHUNK * tiles.WIDTH + HEAD, np.uint8)
    room = room[-room.ctypes.data & (HEAD - 1) :]  # tiles that cross cache lines take double
    own_address = np.int64(room.ctypes.data)
    common_address = own_address + own
    pair_address = common_address + common_size
    p = room[own + common_size + pairs :][: 4 * CHUNK * tiles.WIDTH].view(np.float32).reshape(CHUNK, tiles.WIDTH)
    p_address = pair_address + pairs
    turned = p_address + 4 * CHUNK * tiles.WIDTH
    top = np.empty(tiles.WIDTH, np.float32)
    tiles.begin()
    for start in range(first, last, CHUNK):
        count = min(CHUNK, last - start)
        c, c_stride = latent + start * latent_stride, latent_stride
        s, s_stride = shared + start * shared_stride, shared_stride
        for line in range(0, CHUNK * latent_stride, 64):  # of the next chunk, or what follows the last
            v.ask(latent + (start + CHUNK) * latent_stride + line)
        if count < CHUNK:  # what lies behind the last position may hold anything, and need not be ours
            room[: own + common_size] = 0
            for i in range(count):
                v.copy(c + i * c_stride, own_address + 2 * i * rank, 2 * rank)
                v.copy(s + i * s_stride, common_address + 2 * i * common, 2 * common)
            c, c_stride, s, s_stride = own_address, 2 * rank, common_address, 2 * common
        tiles.pair(c, c_stride, pair_address, rank)
        for g in range(len(q)):
            heads = slice(g * tiles.WIDTH, (g + 1) * tiles.WIDTH)
            tiles.scores(c, c_stride, s, s_stride, q[g].ctypes.data, rank, common, p_address)
            _softmax(p, count, top, largest[heads], mass[heads], acc[heads])
            tiles.turn(p_address, turned)
            tiles.weighted(turned, pair_address, acc[heads].ctypes.data, rank)
    tiles.end()


@kernel()
def _tasks(cache, lengths, tokens, q, queries, largest, mass, acc, t, nt):
    """Thread t's share of all (row, span), or of all (row, span, tile of heads) where there are few spans."""
    kind, latent, latent_batch, latent_stride, shared, shared_batch, shared_stride, rank, common = cache
    work = 0
    for n in range(len(lengths)):
        work += spans_of(lengths[n])
    in_tiles = queries.shape[1] > 0
    parts = 1 if work >= 2 * nt else queries.shape[1] if in_tiles else q.shape[1] // TILE
    width, work = q.shape[1] // parts, work * parts
    begin, end, at = work * t // nt, work * (t + 1) // nt, 0
    for n in range(len(lengths)):
        spans = spans_of(lengths[n])
        chunks = (lengths[n] + CHUNK - 1) // CHUNK
        b = n // tokens
        for span in range(spans):
            first = chunks * span // spans * CHUNK
            last = min(chunks * (span + 1) // spans * CHUNK, lengths[n])
            for part in range(parts):
                if begin <= at < end:
                    heads = slice(part * width, (part + 1) * width)
                    where = (
                        *(latent + b * latent_batch, latent_stride, shared + b * shared_batch, shared_stride),
                        *(rank, common, first, last),
                    )
                    out = (largest[n, span, heads], mass[n, span, heads], acc[n, span, heads])
                    if tiles.KNOWN and in_tiles:
                        groups = slice(heads.start // tiles.WIDTH, heads.stop // tiles.WIDTH)
                        _tile_span(queries[n, groups], *where, *out)
                    else:
                        _span(kind, q[n, heads], *where, *out)
                at += 1


@kernel()
def _finish(h, up, plain, value, lengths, largest, mass, acc, coarse, prepared, out):
    """Merge head h's spans and make its values, for all rows."""
    rank = acc.shape[3]
    for n in range(len(lengths)):
        spans = spans_of(lengths[n])
        top = largest[n, 0, h]
        for span in range(1, spans):
            top = max(top, largest[n, span, h])
        y = acc[n, 0, h]
        for span in range(spans):
            share = exp(largest[n, span, h] - top)
            mass[n, span, h] *= share
            if span == 0:
                for i in range(rank):
                    y[i] *= share
            else:
                mass[n, 0, h] += mass[n, span, h]
                other = acc[n, span, h]
                for i in range(rank):
                    y[i] += share * other[i]
        if up[KIND] == INT8:
            prepare(True, False, coarse, y, prepared[h])
        for i in range(0, value, v.BLOCK):
            first, count = h * (plain + value) + plain + i, min(v.BLOCK, value - i)
            place = out.ctypes.data + 4 * ((n * out.shape[1] + h) * value + i)
            block(up, first, count, y.ctypes.data, prepared[h].ctypes.data, rank, place)
        for i in range(value):
            out[n, h, i] /= mass[n, 0, h]


@kernel(parallel=True)
def few_queries(
    up, plain, value, q, coarse, cache, lengths, tokens, absorbed, queries, largest, mass, acc, prepared, out, nt
):
    """All heads of all rows; ``queries`` uint32 [rows, groups, (rank + common) / 2, WIDTH] has groups to use tiles."""
    heads = q.shape[1]
    for stage in range(3):
        for thread in prange(nt):
            t = np.int64(thread)  # ``prange`` counts in unsigned numbers, for which callees would be compiled anew
            w, seen, ready, asked, tiled = own(up), own(lengths), own(prepared), own(absorbed), own(queries)
            sums = own(largest), own(mass), own(acc)
            if stage == 0:
                xs = own(q)
                for h in range(heads * t // nt, heads * (t + 1) // nt):
                    _absorb(h, w, plain, value, xs, acc.shape[3], asked)
                    if queries.shape[1]:
                        _pack(h, asked, tiled)
            elif stage == 1:
                _tasks(cache, seen, tokens, asked, tiled, *sums, t, nt)
            else:
                y = own(out)
                for h in range(heads * t // nt, heads * (t + 1) // nt):
                    _finish(h, w, plain, value, seen, *sums, coarse, ready, y)


@kernel()
def _room(rows, spans, heads, rank):
    """Room for sums that begins at a whole cache line: tiles that cross lines take double."""
    size = rows * spans * heads * rank
    room = np.empty(size + HEAD // 4, np.float32)
    first = (-room.ctypes.data & (HEAD - 1)) >> 2
    return room[first : first + size].reshape(rows, spans, heads, rank)


@kernel()
def attend_few(up, value, q, coarse, cache, seen, tokens, in_tiles, nt):
    """Attend from the last ``tokens`` of ``seen`` positions: ``q`` [rows, H, C]; values [rows, H, V]."""
    size = 4 if cache[0] == F32 else 2
    rank, common = cache[7], cache[8]
    rows, heads, channels = q.shape
    lengths = np.empty(rows, np.int64)
    for n in range(rows):
        lengths[n] = seen - tokens + n % tokens + 1
    tile = tiles.WIDTH if in_tiles else TILE
    spans, groups = spans_of(seen), (heads + tile - 1) // tile
    absorbed = np.zeros((rows, groups * tile, rank + common), np.float32)
    largest, mass = np.empty((2, rows, spans, groups * tile), np.float32)
    queries = np.zeros((rows, groups if in_tiles else 0, (rank + common) // 2, tile), np.uint32)
    acc = _room(rows, spans, groups * tile, rank)
    prepared = np.empty((heads, HEAD + 8 * rank), np.uint8)
    out = np.empty((rows, heads, value), np.float32)
    if size * seen * rank + up[STRIDE] * up[OUTPUTS] < PARALLEL:
        nt = 1
    few_queries(
        *(up, channels - common, value, q, coarse, cache, lengths, tokens),
        *(absorbed, queries, largest, mass, acc, prepared, out, nt),
    )
    return out


def cache_of(latent_BSR: Tensor, shared_BSJ: Tensor) -> tuple[int, ...] | None:
    """A cache as the kernels see it: kind, addresses, bytes from row to row and place to place, widths; or None."""
    if (
        latent_BSR.dtype not in (torch.float32, torch.bfloat16)
        or latent_BSR.stride(2) != 1
        or shared_BSJ.stride(2) != 1
    ):
        return None
    size = latent_BSR.element_size()
    return (
        F32 if size == 4 else BF16,
        *(latent_BSR.data_ptr(), size * latent_BSR.stride(0), size * latent_BSR.stride(1)),
        *(shared_BSJ.data_ptr(), size * shared_BSJ.stride(0), size * shared_BSJ.stride(1)),
        *(latent_BSR.shape[2], shared_BSJ.shape[2]),
    )


def suits_tiles(dtype: torch.dtype, cache: tuple[int, ...]) -> bool:
    """Whether queries that are rounded to ``dtype`` and a cache of these widths are multiplied by tiles."""
    halves = dtype == torch.bfloat16 and cache[0] == BF16
    return halves and cache[7] % tiles.RANK == 0 and cache[8] % tiles.COMMON == 0 and tiles.allowed()


def attention(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Stored, value_dim: int) -> Tensor:
    """See ``reference.attention``."""
    batch, tokens, heads, channels = q_BTHC.shape
    if q_BTHC.dtype == torch.float64:
        return reference.attention(q_BTHC, latent_BSR, shared_BSJ, up, value_dim)
    row, cache = None if isinstance(up, MXFP4) else described(up), cache_of(latent_BSR, shared_BSJ)
    if tokens > FEW or row is None or cache is None:
        return attend(q_BTHC.float(), latent_BSR, shared_BSJ, up_of(up, heads), value_dim).to(q_BTHC.dtype)
    q, dtype = as_array(q_BTHC).reshape(batch * tokens, heads, channels), q_BTHC.dtype
    about = (cache, latent_BSR.shape[1], tokens, suits_tiles(dtype, cache), threads())
    o = attend_few(row.table[0], value_dim, q, is_coarse(dtype), *about)
    return torch.from_numpy(o).to(dtype).view(batch, tokens, heads, value_dim)
