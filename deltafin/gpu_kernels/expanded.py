"""Latent attention of many tokens, in expanded form: ``attend_many``.

Keys and values are made of a block of latents at a time, and all tokens attend to them before the next block is made.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from deltafin.gpu_kernels.linear import stored, tile
from deltafin.ops import has_halves
from deltafin.weights import Weight

POSITIONS = 2048
"""Positions whose keys and values are made at a time: 100 MB of them for 96 heads in bfloat16."""

LOG2E = 1.4426950408889634


@triton.constexpr_function
def padded(width):
    """The next power of two, 32 at least: products of 16 columns of bfloat16 come out wrong on Hopper (Triton 3.6)."""
    return max(32, 1 << (width - 1).bit_length())


def kind_of(q_BTHC: Tensor, latent_BSR: Tensor) -> torch.dtype:
    """What products are made in: bfloat16 where all is that already, and the GPU multiplies it."""
    halves = q_BTHC.dtype == latent_BSR.dtype == torch.bfloat16 and has_halves(q_BTHC.device)
    return torch.bfloat16 if halves else torch.float32


def precision_of(device: torch.device) -> str:
    """How a product of float32 stays one: three products of tensor cores, or none where they are too old."""
    return "tf32x3" if device.type == "cuda" and has_halves(device) else "ieee"


@triton.jit
def _expand(
    latent,
    up,
    scales,
    out,
    latent_stride,
    positions,
    outputs,
    RANK: constexpr,
    PER: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    PRECISION: constexpr,
):
    """Make keys and values [positions, outputs] of a block of latents, in out's type, which products are made in."""
    s = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind = out.dtype.element_ty
    row = tl.minimum(o, outputs - 1).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, RANK, DEPTH):
        r = start + tl.arange(0, DEPTH)
        here = (s < positions)[:, None] & (r < RANK)[None, :]
        c = tl.load(latent + s.to(tl.int64)[:, None] * latent_stride + r[None, :], here, 0)
        w = tile(up, scales, row, r, start, RANK, PER)
        total = tl.dot(c.to(kind), tl.trans(w.to(kind)), total, input_precision=PRECISION)
    if PER == 4:  # no sooner: codes are exact in bfloat16, their products with a scale are not
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
    i, j, v = tl.arange(0, padded(PLAIN)), tl.arange(0, padded(COMMON)), tl.arange(0, padded(VALUE))
    begin = tl.program_id(0) * ROWS
    t = begin + tl.arange(0, ROWS)
    kind = expanded.dtype.element_ty
    row = t.to(tl.int64) * heads + h
    q = query + row[:, None] * (PLAIN + COMMON)
    own = tl.load(q + i[None, :], (t < tokens)[:, None] & (i < PLAIN)[None, :], 0).to(kind)
    both = tl.load(q + PLAIN + j[None, :], (t < tokens)[:, None] & (j < COMMON)[None, :], 0).to(kind)
    if FIRST:
        top = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, padded(VALUE)], tl.float32)
    else:
        top = tl.load(tops + row, t < tokens, 0)
        mass = tl.load(masses + row, t < tokens, 1)
        total = tl.load(totals + row[:, None] * VALUE + v[None, :], (t < tokens)[:, None] & (v < VALUE)[None, :], 0)
    last = seen - tokens + t - start  # of the positions of this block, the last that a token sees
    for first in range(0, tl.minimum(positions, seen - tokens + begin + ROWS - start), TILE):
        s = first + tl.arange(0, TILE)
        here = (s < positions)[:, None]
        kv = expanded + (s.to(tl.int64)[:, None] * heads + h) * (PLAIN + VALUE)
        k = tl.load(kv + i[None, :], here & (i < PLAIN)[None, :], 0)
        c = tl.load(shared + s.to(tl.int64)[:, None] * shared_stride + j[None, :], here & (j < COMMON)[None, :], 0)
        scores = tl.dot(own, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(both, tl.trans(c.to(kind)), scores, input_precision=PRECISION) * factor
        scores = tl.where(s[None, :] <= last[:, None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        values = tl.load(kv + PLAIN + v[None, :], here & (v < VALUE)[None, :], 0)
        total = tl.dot(p.to(kind), values, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    place = row[:, None] * VALUE + v[None, :]
    mask = (t < tokens)[:, None] & (v < VALUE)[None, :]
    if LAST:
        tl.store(out + place, total / mass[:, None], mask)
    else:
        tl.store(totals + place, total, mask)
        tl.store(tops + row, top, t < tokens)
        tl.store(masses + row, mass, t < tokens)


def attend_many(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up: Weight, value_dim: int) -> Tensor:
    """Attend in expanded form, ``POSITIONS`` at a time with a running softmax. Arguments as ``attention``."""
    batch, tokens, heads, channels = q_BTHC.shape
    seen, rank, common, device = latent_BSR.shape[1], latent_BSR.shape[2], shared_BSJ.shape[2], q_BTHC.device
    outputs, query, kind = up.shape[0], q_BTHC.contiguous(), kind_of(q_BTHC, latent_BSR)
    weight = stored(up)
    assert weight is not None, "storage that no kernel reads"
    rows, tile, how = _blocks(kind, device)
    columns = 64 if kind == torch.float32 else 128  # what three products of float32 are made of fills the registers
    expanded = torch.empty(min(seen, POSITIONS), outputs, dtype=kind, device=device)
    totals = torch.empty(tokens, heads, value_dim, device=device)
    tops, masses = torch.empty(2, tokens, heads, device=device)
    out = torch.empty(batch, tokens, heads, value_dim, dtype=q_BTHC.dtype, device=device)
    for b in range(batch):
        for start in range(0, seen, POSITIONS):
            latent, shared = latent_BSR[b, start : start + POSITIONS], shared_BSJ[b, start : start + POSITIONS]
            _expand[triton.cdiv(outputs, columns), triton.cdiv(len(latent), rows)](
                *(latent, weight.codes, weight.scales, expanded, latent.stride(0), len(latent), outputs),
                RANK=rank,
                PER=weight.per,
                ROWS=rows,
                COLUMNS=columns,
                DEPTH=min(64, padded(rank)),
                **how,
            )
            _attend_expanded[triton.cdiv(tokens, rows), heads](
                *(query[b], expanded, shared, totals, tops, masses, out[b]),
                *(shared.stride(0), start, len(shared), seen, tokens, heads, channels**-0.5 * LOG2E),
                FIRST=start == 0,
                LAST=start + POSITIONS >= seen,
                PLAIN=channels - common,
                COMMON=common,
                VALUE=value_dim,
                ROWS=rows,
                TILE=tile,
                **how,
            )
    return out


def _blocks(kind: torch.dtype, device: torch.device) -> tuple[int, int, dict[str, Any]]:
    """How many tokens and positions a program takes at a time, and what else its launches say."""
    precision = {"PRECISION": precision_of(device)}
    if kind == torch.float32:
        rows = 32 if has_halves(device) else 16
        return rows, rows, precision | {"num_warps": 4, "num_stages": 1}
    # Others of the same generations have 99 KB of shared memory, not 163 and more.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return 128, 64, precision | {"num_warps": 8, "num_stages": 3}
    return 64, 64, precision | {"num_warps": 4, "num_stages": 2}
