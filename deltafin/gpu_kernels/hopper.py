"""The middle of ``attend_few`` for compute capability 9.0, in Gluon: what ``attention._attend`` does, step by step.

Triton's compiler lets the next positions wait until the last product is done. Here four warps, which keep the queries
in registers, make scores and shares, and two times four sum half of a latent's channels each; one of these asks for
the positions. Tensor cores make the scores of a tile, then sum the tile before, while softmax turns those scores into
shares: so the sums wait for their turn. Programs of the same positions follow each other: their reads are one.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

RANK, COMMON = gl.constexpr(512), gl.constexpr(64)
"""Channels of a latent and of a shared key: those of Kimi's models, and all that is read here."""

HALF = gl.constexpr(256)

HEADS, TILE, SLOTS = gl.constexpr(64), gl.constexpr(32), gl.constexpr(6)
"""Heads that a program has room for, positions at a time, and tiles under way: shared memory is full of them. Tiles of
64 positions would need eight more registers than a thread that makes scores can have."""

WARPS = 4
"""Warps that a program starts with; it adds twice as many."""

REGISTERS = gl.constexpr(160)
"""Registers of a thread that sums: 128 hold the sum. One that makes scores has 184, of which queries take 128."""

MEMORY, SHARES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2)), gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
"""How shared memory is laid out: of what has rows of 64 channels or more, and of shares."""


def sizes(heads: int) -> tuple[int, dict[str, int]]:
    """Return how many programs take a row's heads, and what ``attention._sizes`` says of them."""
    groups = -(-heads // HEADS.value)
    splits = 1 << (128 // groups).bit_length() - 1
    return groups, {"GROUP": -(-heads // groups), "TILE": TILE.value, "SPLITS": splits}


def described(cache: Tensor) -> TensorDescriptor:
    """Describe a cache [B, S, C] as rows, one batch after the other, for copies of TILE rows at a time."""
    step = cache.stride(1)
    rows = cache.stride(0) // step * (cache.shape[0] - 1) + cache.shape[1]
    return TensorDescriptor(cache, [rows, cache.shape[2]], [step, 1], [TILE.value, cache.shape[2]], MEMORY.value)


@gluon.jit
def _rows(base, first, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the addresses of a tile of rows, and the rows."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return base + row.to(gl.int64)[:, None] * stride + column[None, :], row


@gluon.jit
def _fetch(c, k, loaded, caches, i, span):
    """Ask for tile i, if there is one."""
    latent, shared, latent_row, shared_row = caches
    first, last, _, _ = span
    start = first + i * TILE
    slot = i % SLOTS
    if start < last:
        mbarrier.expect(loaded.index(slot), TILE * (RANK + COMMON) * 2)
        tma.async_copy_global_to_shared(latent, [latent_row + start, 0], loaded.index(slot), c.index(slot))
        tma.async_copy_global_to_shared(shared, [shared_row + start, 0], loaded.index(slot), k.index(slot))


@gluon.jit
def _clear(c, positions):
    """Let the latents behind the last position, which may be anything, be zeros: their shares are, too."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s = gl.arange(0, TILE, layout=gl.SliceLayout(1, PIECE))
    for piece in gl.static_range(RANK // 64):
        memory = c.slice(piece * 64, 64, dim=1)
        memory.store(gl.where((s < positions)[:, None], memory.load(PIECE), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _share(query, memory, between, tops, masses, span):
    """Turn scores into shares, and say by how much what was summed before must shrink: a running softmax.

    What shares are relative to is raised only where a score is 256 times as large: most tiles shrink nothing.
    """
    c, k, both, shrinks = memory
    loaded, made, turn, _ = between
    first, last, head, beyond = span
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    place, h = _rows(query + RANK, head, RANK + COMMON, HEADS, COMMON, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    both.store(gl.load(place, (h < beyond)[:, None], 0.0))
    place, h = _rows(query, head, RANK + COMMON, HEADS, RANK, gl.DotOperandLayout(0, SCORES, 2))
    own = gl.load(place, (h < beyond)[:, None], 0.0)
    fence_async_shared()
    gl.thread_barrier()
    top = gl.full([HEADS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    mass = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(1, SCORES))
    none = gl.zeros([HEADS, TILE], gl.float32, layout=SCORES)
    for i in range(gl.cdiv(last - first, TILE)):
        slot = i % SLOTS
        start = first + i * TILE
        mbarrier.wait(loaded.index(slot), i // SLOTS & 1)
        partial = start + TILE > last
        if partial:
            _clear(c.index(slot), last - start)
        scores = warpgroup_mma(own, c.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(both, k.index(slot).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(turn, count=1, pred=i > 0)
        if partial:
            s = start + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
            scores = gl.where((s < last)[None, :], scores, -float("inf"))
        highest = gl.max(scores, 1)
        higher = gl.where(highest > top + 8, highest, top)
        shrink = gl.exp2(top - higher)
        p = gl.exp2(scores - higher[:, None])
        mass = mass * shrink + gl.sum(p, 1)
        top = higher
        gl.thread_barrier()
        k.index(slot)._reinterpret(gl.bfloat16, [HEADS, TILE], SHARES).store(
            p.to(gl.bfloat16)
        )  # the shared keys of these positions have served
        shrinks.index(slot).store(shrink)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(made.index(slot), count=1)
    mbarrier.arrive(turn, count=1)
    h = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORES))
    gl.store(tops + h, top, h < beyond)
    gl.store(masses + h, mass, h < beyond)


@gluon.jit
def _sum(memory, between, caches, parts, span, PART: gl.constexpr):
    """Sum half of the latents' channels by their shares."""
    c, k, _, shrinks = memory
    loaded, made, turn, free = between
    first, last, head, beyond = span
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    if PART == 0:
        for j in gl.static_range(SLOTS):
            _fetch(c, k, loaded, caches, j, span)
    total = gl.zeros([HEADS, HALF], gl.float32, layout=TOTAL)
    for i in range(gl.cdiv(last - first, TILE)):
        slot = i % SLOTS
        mbarrier.wait(made.index(slot), i // SLOTS & 1)
        shrink = shrinks.index(slot).load(gl.SliceLayout(1, TOTAL))
        if gl.min(shrink, 0) < 1:
            total = total * shrink[:, None]
        shares = k.index(slot)._reinterpret(gl.bfloat16, [HEADS, TILE], SHARES)
        mbarrier.wait(turn, i & 1)
        total = warpgroup_mma(shares, c.index(slot).slice(PART * HALF, HALF, dim=1), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        if PART == 0:
            mbarrier.wait(free.index(slot), i // SLOTS & 1)
            _fetch(c, k, loaded, caches, i + SLOTS, span)
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
    latent_rows,
    shared_rows,
    room,
    tokens,
    heads,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Attend from GROUP heads of a row to a range of positions. All as in ``attention._attend``, in bfloat16.

    ``latent`` and ``shared`` are ``described``, with so many rows a batch.
    """
    split, n = gl.program_id(1), gl.program_id(2)
    seen = gl.load(length) - tokens + n % tokens + 1
    size = gl.cdiv(gl.cdiv(seen, TILE), SPLITS) * TILE
    first = split * size
    last = gl.minimum(first + size, seen)
    if first < last:
        head = gl.program_id(0) * GROUP
        query += n.to(gl.int64) * heads * (RANK + COMMON)
        place = (n.to(gl.int64) * room + split) * heads
        c = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, RANK], MEMORY)
        k = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, COMMON], MEMORY)
        both = gl.allocate_shared_memory(gl.bfloat16, [HEADS, COMMON], MEMORY)
        shrinks = gl.allocate_shared_memory(gl.float32, [SLOTS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(loaded.index(slot), count=1)
            mbarrier.init(made.index(slot), count=1)
            mbarrier.init(free.index(slot), count=2)
        mbarrier.init(turn, count=1)
        fence_async_shared()
        gl.thread_barrier()
        memory, between = (c, k, both, shrinks), (loaded, made, turn, free)
        caches = (latent, shared, n // tokens * latent_rows, n // tokens * shared_rows)
        span = (first, last, head, gl.minimum(head + GROUP, heads))
        parts += place * RANK
        gl.warp_specialize(
            [
                (_share, (query, memory, between, tops + place, masses + place, span)),
                (_sum, (memory, between, caches, parts, span, gl.constexpr(0))),
                (_sum, (memory, between, caches, parts, span, gl.constexpr(1))),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
