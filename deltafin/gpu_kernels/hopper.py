"""The middle of ``attend_few`` for compute capability 9.0, in Gluon: what ``attention._attend`` does, step by step.

Triton's compiler lets the next positions wait until the last product is done. Here four warps, which keep the queries
in registers, make scores and shares of them, and two times four sum half of a latent's channels each; one of these
asks for the positions. Tensor cores make the scores of a tile, then sum the tile before, while softmax turns those
scores into shares: so the sums wait for their turn. Programs of the same positions follow each other: their reads are
one.
"""

import torch
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

from deltafin.gpu_kernels.early import wait
from deltafin.gpu_kernels.mathematics import counted

RANK, COMMON = gl.constexpr(512), gl.constexpr(64)
"""Channels of a latent and of a shared key: those of Kimi's models, and all that is read here."""

HALF = gl.constexpr(256)

HEADS, TILE, SLOTS = gl.constexpr(64), gl.constexpr(64), gl.constexpr(3)
"""Heads that a program has room for, positions at a time, and tiles under way: shared memory is full of them."""

PIECES, REST = gl.constexpr(5), gl.constexpr(16)
"""Queries are kept in registers in pieces of 256, 128, 64, 32 and 16 channels, each a power of two. There is no room
for the last channels of a latent's, and for those of a shared key: they are in shared memory."""

WARPS = 4
"""Warps that a program starts with; it adds twice as many."""

REGISTERS = gl.constexpr(160)
"""Registers of a thread that sums: 128 hold the sum. One that makes scores has 184, of which queries take 124."""

MEMORY, NARROW = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2)), gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
"""How shared memory is laid out: of what has rows of 64 channels or more, and of what has REST."""


def serves(kind: torch.dtype, latent_BSR: Tensor, shared_BSJ: Tensor) -> bool:
    """Whether products of this kind are made here: of caches in these widths that copies can read, on such a chip."""
    caches, device = (latent_BSR, shared_BSJ), latent_BSR.device
    if kind != torch.bfloat16 or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    aligned = all(x.data_ptr() % 16 == x.stride(1) % 8 == x.stride(0) % x.stride(1) == 0 for x in caches)
    return aligned and [x.shape[2] for x in caches] == [RANK.value, COMMON.value]


def sizes(heads: int) -> tuple[int, dict[str, int]]:
    """Return how many programs take a row's heads, and what ``attention._sizes`` says of them."""
    groups = -(-heads // HEADS.value)
    splits = 1 << (128 // groups).bit_length() - 1
    return groups, {"GROUP": -(-heads // groups), "TILE": TILE.value, "SPLITS": splits}


def described(rows: Tensor) -> TensorDescriptor:
    """Describe a cache [B, S, C], or queries [N, H, C], as B S rows for copies of 64 at a time."""
    step = rows.stride(1)
    count = rows.stride(0) // step * (rows.shape[0] - 1) + rows.shape[1]
    return TensorDescriptor(rows, [count, rows.shape[2]], [step, 1], [TILE.value, rows.shape[2]], MEMORY.value)


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
    for piece in gl.static_range(HALF // 64):
        memory = c.slice(piece * 64, 64, dim=1)
        memory.store(gl.where((s < positions)[:, None], memory.load(PIECE), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _score(own, memory, none, slot):
    """Begin to make the scores of a tile."""
    c, k, both, rest, _ = memory
    latents = c.index(slot).permute((1, 0))
    scores = warpgroup_mma(own[0], latents.slice(0, HALF), none, use_acc=False, is_async=True)
    for piece in gl.static_range(1, PIECES):
        latent = latents.slice(RANK - (RANK >> piece), HALF >> piece)
        scores = warpgroup_mma(own[piece], latent, scores, is_async=True)
    scores = warpgroup_mma(rest, latents.slice(RANK - REST, REST), scores, is_async=True)
    return warpgroup_mma(both, k.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _mass(shares):
    """Sum what each of the four threads of a row has of it."""
    return gl.sum(gl.sum(shares.reshape([HEADS, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _publish(turn, slot):
    """Let those who sum begin with a tile: tensor cores, which read past the caches of threads, see its shares."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(turn.index(slot), count=1)


@gluon.jit
def _share(queries, row, memory, between, tops, masses, room, span, EARLY: gl.constexpr):
    """Turn scores into shares, and say by how much what was summed before must shrink: a running softmax.

    What shares are relative to is raised only where a score is 256 times as large: most tiles shrink nothing. It is a
    whole number, so that all shrinks by powers of two, which bfloat16 has.
    """
    c, k, both, rest, shrinks = memory
    loaded, made, turn, _, held = between
    first, last, head, beyond = span
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OWN: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    query, common = queries
    whole = c.index(SLOTS - 1)
    wait(EARLY)
    mbarrier.expect(held.index(0), HEADS * (RANK + COMMON) * 2)
    tma.async_copy_global_to_shared(query, [row, 0], held.index(0), whole)
    tma.async_copy_global_to_shared(common, [row, 0], held.index(0), both)
    mbarrier.wait(held.index(0), 0)
    own = (whole.slice(0, HALF, dim=1).load(OWN),)
    for piece in gl.static_range(1, PIECES):
        own = own + (whole.slice(RANK - (RANK >> piece), HALF >> piece, dim=1).load(OWN),)
    rest.store(whole.slice(RANK - REST, REST, dim=1).load(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(held.index(1), count=1)
    top = gl.full([HEADS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    none = gl.zeros([HEADS, TILE], gl.float32, layout=SCORES)
    mass = _mass(none)
    count = gl.cdiv(last - first, TILE)
    for i in range(count):
        slot = i % SLOTS
        start = first + i * TILE
        mbarrier.wait(loaded.index(slot), i // SLOTS & 1)
        scores = _score(own, memory, none, slot)
        warpgroup_mma_wait(1, deps=[scores])  # the last is still made when the sums hear of their turn
        if i > 0:
            _publish(turn, (i - 1) % SLOTS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if start + TILE > last:
            s = start + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
            scores = gl.where((s < last)[None, :], scores, -float("inf"))
        highest = gl.max(scores, 1)
        higher = gl.where(highest > top + 8, gl.ceil(highest), top)
        shrink = gl.exp2(top - higher)
        shares = gl.exp2(scores - higher[:, None])  # rounded in pairs, for memory: one by one takes as long as this
        top = higher
        # In place of the shared keys of these positions, which have served.
        k.index(slot)._reinterpret(gl.bfloat16, [HEADS, TILE], MEMORY).store(shares.to(gl.bfloat16))
        shrinks.index(slot).store(shrink.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(made.index(slot), count=1)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, mass.type.layout))
        mass = mass * shrink[:, None] + _mass(shares)
    _publish(turn, (count - 1) % SLOTS)
    h = head + gl.arange(0, HEADS, layout=top.type.layout)
    gl.store(tops + h * room, top, h < beyond)
    mass = gl.sum(mass, 1)
    h = head + gl.arange(0, HEADS, layout=mass.type.layout)
    gl.store(masses + h * room, mass, h < beyond)


@gluon.jit
def _sum(memory, between, caches, parts, span, PART: gl.constexpr):
    """Sum half of the latents' channels by their shares."""
    c, k, _, _, shrinks = memory
    loaded, made, turn, free, held = between
    first, last, head, beyond = span
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    if PART == 0:
        for j in gl.static_range(SLOTS - 1):
            _fetch(c, k, loaded, caches, j, span)
        mbarrier.wait(held.index(1), 0)  # queries were there on their way to registers
        _fetch(c, k, loaded, caches, SLOTS - 1, span)
    total = gl.zeros([HEADS, HALF], gl.float32, layout=TOTAL)
    for i in range(gl.cdiv(last - first, TILE)):
        slot = i % SLOTS
        mbarrier.wait(made.index(slot), i // SLOTS & 1)
        if gl.min(shrinks.index(slot).load(gl.BlockedLayout([8], [32], [4], [0])).to(gl.float32), 0) < 1:
            total = total * shrinks.index(slot).load(gl.SliceLayout(1, TOTAL)).to(gl.float32)[:, None]
        shares = k.index(slot)._reinterpret(gl.bfloat16, [HEADS, TILE], MEMORY)
        latents = c.index(slot).slice(PART * HALF, HALF, dim=1)
        positions = last - first - i * TILE
        if positions < TILE:
            _clear(latents, positions)
        mbarrier.wait(turn.index(slot), i // SLOTS & 1)
        total = warpgroup_mma(shares, latents, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        if PART == 0:
            mbarrier.wait(free.index(slot), i // SLOTS & 1)
            _fetch(c, k, loaded, caches, i + SLOTS, span)
    h = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, TOTAL))
    r = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, TOTAL))
    gl.store(parts + h[:, None] * RANK + r[None, :], total, (h < beyond)[:, None])


@gluon.jit(do_not_specialize=["length"])
def attend(
    query,
    common,
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
    EARLY: gl.constexpr,
):
    """Attend from GROUP heads of a row to a range of positions. All as in ``attention._attend``, in bfloat16.

    ``query`` and its ``common`` channels, ``latent`` and ``shared`` are ``described``, the latter two with so many rows
    a batch. What a program makes of the heads behind its own is not kept. Positions are asked for before the kernel
    before has ended: it lets this one start when those before it have, and writes queries alone.
    """
    split, n = gl.program_id(1), gl.program_id(2)
    seen = counted(length) - tokens + n % tokens + 1
    size = gl.cdiv(gl.cdiv(seen, TILE), SPLITS) * TILE
    first = split * size
    last = gl.minimum(first + size, seen)
    if first < last:
        head = gl.program_id(0) * GROUP
        row = n * heads
        c = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, RANK], MEMORY)
        k = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, COMMON], MEMORY)
        both = gl.allocate_shared_memory(gl.bfloat16, [HEADS, COMMON], MEMORY)
        rest = gl.allocate_shared_memory(gl.bfloat16, [HEADS, REST], NARROW)
        shrinks = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        held = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(loaded.index(slot), count=1)
            mbarrier.init(made.index(slot), count=1)
            mbarrier.init(free.index(slot), count=2)
            mbarrier.init(turn.index(slot), count=1)
        mbarrier.init(held.index(0), count=1)
        mbarrier.init(held.index(1), count=1)
        fence_async_shared()
        gl.thread_barrier()
        memory, between = (c, k, both, rest, shrinks), (loaded, made, turn, free, held)
        caches = (latent, shared, n // tokens * latent_rows, n // tokens * shared_rows)
        span = (first, last, head, gl.minimum(head + GROUP, heads))
        parts += (n.to(gl.int64) * room + split) * heads * RANK
        tops += row.to(gl.int64) * room + split
        masses += row.to(gl.int64) * room + split
        gl.warp_specialize(
            [
                (_share, ((query, common), row + head, memory, between, tops, masses, room, span, EARLY)),
                (_sum, (memory, between, caches, parts, span, gl.constexpr(0))),
                (_sum, (memory, between, caches, parts, span, gl.constexpr(1))),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        wait(EARLY)
