"""The middle of ``attend_few`` for compute capability 9.0, in Gluon: what ``attention._attend`` does, step by step.

Triton's compiler lets the next positions wait until the last product is done. Here four warps make scores and shares,
and two times four sum half of a latent's channels each and fetch what they sum: scores of later positions are made
while earlier ones are summed, and later ones still are on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared,
    commit_group,
    wait_group,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RANK, COMMON = gl.constexpr(512), gl.constexpr(64)
"""Channels of a latent and of a shared key: those of Kimi's models, and all that is read here."""

HALF = gl.constexpr(256)

HEADS, TILE = gl.constexpr(64), gl.constexpr(64)
"""Heads that a program has room for, and positions at a time: with two tiles under way, shared memory is full. Four
tiles of 32 took 111 us where two of 64 take 78 (96 heads, 131,072 positions, one H200), eight warps in step 98."""

WARPS = 4
"""Warps that a program starts with; it adds twice as many."""

REGISTERS = gl.constexpr(192)
"""Registers of a thread that sums: 128 hold the sum."""


def sizes(heads: int) -> tuple[int, dict[str, int]]:
    """Return how many programs take a row's heads, and what ``attention._sizes`` says of them."""
    groups = -(-heads // HEADS.value)
    splits = 1 << (128 // groups).bit_length() - 1
    return groups, {"GROUP": -(-heads // groups), "TILE": TILE.value, "SPLITS": splits}


@gluon.jit
def _rows(base, first, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the addresses of a tile of rows, and the rows."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return base + row.to(gl.int64)[:, None] * stride + column[None, :], row


@gluon.jit
def _hold(memory, query, head, beyond, WIDTH: gl.constexpr):
    """Keep WIDTH channels of the queries in shared memory; zeros stand for heads that are another program's."""
    place, h = _rows(query, head, RANK + COMMON, HEADS, WIDTH, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    memory.store(gl.load(place, (h < beyond)[:, None], 0.0))


@gluon.jit
def _share(queries, cache, between, tops, masses, span):
    """Turn scores into shares, and say by how much what was summed before must shrink: a running softmax."""
    own0, own1, both = queries
    c0, c1, k = cache
    shares, shrinks, loaded, ready, free = between
    first, last, head, beyond = span
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    top = gl.full([HEADS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    mass = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(1, SCORES))
    none = gl.zeros([HEADS, TILE], gl.float32, layout=SCORES)
    for i in range(gl.cdiv(last - first, TILE)):
        slot = i % 2
        mbarrier.wait(loaded.index(slot), i // 2 & 1)
        scores = warpgroup_mma(both, k.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(own0, c0.index(slot).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(own1, c1.index(slot).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        s = first + i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where((s < last)[None, :], scores, -float("inf"))
        higher = gl.maximum(top, gl.max(scores, 1))
        shrink = gl.exp2(top - higher)
        p = gl.exp2(scores - higher[:, None])
        mass = mass * shrink + gl.sum(p, 1)
        top = higher
        mbarrier.wait(free, (i & 1) ^ 1)  # a fresh barrier lets the first one pass
        shares.store(p.to(gl.bfloat16))
        shrinks.store(shrink)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready, count=1)
    h = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    gl.store(tops + h, top, h < beyond)
    gl.store(masses + h, mass, h < beyond)


@gluon.jit
def _fetch(c, k, slot, latent, shared, strides, first, last, PART: gl.constexpr):
    """Ask for a tile's latents, and once for its shared keys; zeros stand for what lies behind the last position."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    place, s = _rows(latent, first, strides[0], TILE, HALF, WIDE)
    async_copy_global_to_shared(c.index(slot), place, (s < last)[:, None])
    if PART == 0:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        place, s = _rows(shared, first, strides[1], TILE, COMMON, NARROW)
        async_copy_global_to_shared(k.index(slot), place, (s < last)[:, None])
    commit_group()


@gluon.jit
def _sum(c, k, between, latent, shared, strides, parts, span, PART: gl.constexpr):
    """Fetch half of the latents' channels, and sum them by their shares."""
    shares, shrinks, loaded, ready, free = between
    first, last, head, beyond = span
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    latent += PART * HALF
    _fetch(c, k, 0, latent, shared, strides, first, last, PART)
    _fetch(c, k, 1, latent, shared, strides, first + TILE, last, PART)
    total = gl.zeros([HEADS, HALF], gl.float32, layout=TOTAL)
    wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded.index(0), count=1)
    for i in range(gl.cdiv(last - first, TILE)):
        slot = i % 2
        mbarrier.wait(ready, i & 1)
        total = total * shrinks.load(gl.SliceLayout(1, TOTAL))[:, None]
        later = warpgroup_mma(shares, c.index(slot), total, is_async=True)
        wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(loaded.index(1 - slot), count=1)
        total = warpgroup_mma_wait(0, deps=[later])
        gl.thread_barrier()
        mbarrier.arrive(free, count=1)
        _fetch(c, k, slot, latent, shared, strides, first + (i + 2) * TILE, last, PART)
    wait_group(0)
    place, h = _rows(parts + PART * HALF, head, RANK, HEADS, HALF, TOTAL)
    gl.store(place, total, (h < beyond)[:, None])


@gluon.jit
def attend(
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
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Attend from GROUP heads of a row to a range of positions. All as in ``attention._attend``, in bfloat16."""
    split, n = gl.program_id(1), gl.program_id(2)
    seen = gl.load(length) - tokens + n % tokens + 1
    size = gl.cdiv(gl.cdiv(seen, TILE), SPLITS) * TILE
    first = split * size
    last = gl.minimum(first + size, seen)
    if first < last:
        MEMORY: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        b = (n // tokens).to(gl.int64)
        latent += b * latent_batch
        shared += b * shared_batch
        head = gl.program_id(0) * GROUP
        beyond = gl.minimum(head + GROUP, heads)
        query += n.to(gl.int64) * heads * (RANK + COMMON)
        place = (n.to(gl.int64) * room + split) * heads
        own0 = gl.allocate_shared_memory(gl.bfloat16, [HEADS, HALF], MEMORY)
        own1 = gl.allocate_shared_memory(gl.bfloat16, [HEADS, HALF], MEMORY)
        both = gl.allocate_shared_memory(gl.bfloat16, [HEADS, COMMON], MEMORY)
        _hold(own0, query, head, beyond, HALF)
        _hold(own1, query + HALF, head, beyond, HALF)
        _hold(both, query + RANK, head, beyond, COMMON)
        c0 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], MEMORY)
        c1 = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, HALF], MEMORY)
        k = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, COMMON], MEMORY)
        shares = gl.allocate_shared_memory(gl.bfloat16, [HEADS, TILE], MEMORY)
        shrinks = gl.allocate_shared_memory(gl.float32, [HEADS], NUMBERS)
        loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(loaded.index(0), count=2)
        mbarrier.init(loaded.index(1), count=2)
        mbarrier.init(ready, count=1)
        mbarrier.init(free, count=2)
        fence_async_shared()
        gl.thread_barrier()
        between, span = (shares, shrinks, loaded, ready, free), (first, last, head, beyond)
        strides = (latent_stride, shared_stride)
        parts += place * RANK
        gl.warp_specialize(
            [
                (_share, ((own0, own1, both), (c0, c1, k), between, tops + place, masses + place, span)),
                (_sum, (c0, k, between, latent, shared, strides, parts, span, gl.constexpr(0))),
                (_sum, (c1, k, between, latent, shared, strides, parts, span, gl.constexpr(1))),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
