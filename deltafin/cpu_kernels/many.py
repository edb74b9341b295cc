"""Products of many rows, for prefill: torch's matrix product over weights that are widened tile by tile.

A tile is used while it is in the cache, so that a packed or half-precision weight costs its own bytes of memory
traffic and never a copy of its size. Rows in bfloat16 are multiplied in bfloat16, with sums in float32, where the
processor has instructions for that: several times faster than in float32.
"""

from collections.abc import Iterator

import torch
from numba import prange
from torch import Tensor

from deltafin.cpu_kernels import vector as v
from deltafin.cpu_kernels.compiling import FEATURES, kernel
from deltafin.cpu_kernels.stored import ADDRESS, SCALE_STRIDE, SCALES, STRIDE, Stored, described
from deltafin.cpu_kernels.threads import threads
from deltafin.quant import MXFP4, Int8

TILE = 1 << 19
"""Elements that are widened at a time, for each of up to ``SHARERS`` threads: 2 MB, of a second-level cache."""

SHARERS = 8
"""More threads share what eight have, which bounds the memory that it takes."""

HALVES = bool({"avx512bf16", "amx-bf16", "bf16"} & FEATURES)
"""Whether the processor multiplies bfloat16 itself; else torch would take longer than in float32."""

ROWS = 512
"""Rows that are multiplied in bfloat16 at a time, at most: see ``filled``."""

POSITIONS = 512
"""Cached positions that a prompt attends to at a time, which bounds the memory of scores."""


@kernel(parallel=True)
def _widen_mxfp4(w, first, out, nt):
    """Rows ``first`` on of a packed weight as float32."""
    rows, columns = out.shape
    for t in prange(nt):
        for r in range(rows * t // nt, rows * (t + 1) // nt):
            row = first + r
            codes, scales = w[ADDRESS] + row * w[STRIDE], w[SCALES] + row * w[SCALE_STRIDE]
            v.widen_mxfp4(codes, scales, out.ctypes.data + 4 * r * columns, columns)


def tiles(weight: Stored, as_stored: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Yield first row and float32 rows of every tile of a weight; a tile is good until the next is asked for.

    What need not be widened is one tile. ``as_stored``: plain weights keep their type.
    """
    rows, columns = weight.shape
    step = max(1, TILE * min(threads(), SHARERS) // columns)
    if isinstance(weight, Tensor) and (as_stored or weight.dtype == torch.float32):
        step = rows if weight.is_floating_point() else step
        yield from ((start, weight[start : start + step]) for start in range(0, rows, step))
        return
    room = torch.empty(min(step, rows), columns)
    row = described(weight) if isinstance(weight, MXFP4) else None
    for start in range(0, rows, step):
        tile = room[: min(step, rows - start)]
        if row is not None:
            _widen_mxfp4(row.table[0], start, tile.numpy(), threads())
        elif isinstance(weight, Int8):
            part = slice(start, start + len(tile))
            torch.mul(weight.codes[part], weight.scales[part, None], out=tile)
        elif isinstance(weight, MXFP4):
            part = slice(start, start + len(tile))
            tile.copy_(MXFP4(weight.codes[part], weight.scales[part]).unpack(torch.float32))
        else:
            tile.copy_(weight[start : start + len(tile)])
        yield start, tile


def in_halves(dtype: torch.dtype) -> bool:
    """Whether rows of a type are multiplied in bfloat16."""
    return dtype == torch.bfloat16 and HALVES


def filled(rows: int) -> int:
    """As many rows, or a few more, for products in bfloat16: ROWS at a time and one of 32 numbers.

    Torch's library makes code for each number of rows and each shape of a weight that it meets: 3 ms, and 0.8 MB that
    stay. Of a prompt's rows nearly every expert gets another number. At most 7 rows, or an eighth, are added.
    """
    rest = rows % ROWS
    step = max(8, 1 << (rest - 1).bit_length() >> 4) if rest else 1
    return rows - rest + -(-rest // step) * step


def product(x: Tensor, weight: Stored) -> Tensor:
    """Return ``x @ weight.T`` in float32, for x [N, I] in float32 or bfloat16."""
    exact = isinstance(weight, MXFP4 | Int8) or weight.dtype == torch.bfloat16
    out = torch.empty(len(x), weight.shape[0])
    if in_halves(x.dtype) and exact:
        codes = weight.codes if isinstance(weight, Int8) else weight  # whole numbers, which bfloat16 holds exactly
        more = filled(len(x)) - len(x)
        parts = (torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x).split(ROWS)
        for start, tile in tiles(codes, as_stored=True):
            halves, end = tile.bfloat16().T, start + len(tile)
            for i, part in enumerate(parts):
                here = out[i * ROWS : (i + 1) * ROWS, start:end]
                here.copy_(torch.mm(part, halves)[: len(here)])
        return out.mul_(weight.scales) if isinstance(weight, Int8) else out
    x = x.float()
    for start, tile in tiles(weight):
        torch.mm(x, tile.T, out=out[:, start : start + len(tile)])
    return out


def attend(q_BTHC: Tensor, latent_BSR: Tensor, shared_BSJ: Tensor, up_HCR: Tensor, value: int) -> Tensor:
    """Attend from many tokens, block by block of the cache with a running softmax: BTHV, all float32.

    Expanded (keys and values are made for each position) or absorbed (queries move into the latent space), whichever
    takes fewer operations.
    """
    batch, tokens, heads, channels = q_BTHC.shape
    seen, rank, common = latent_BSR.shape[1], latent_BSR.shape[2], shared_BSJ.shape[2]
    plain = channels - common
    expand = rank * (plain + value) + tokens * (channels + value) < tokens * (2 * rank + common)
    key_up, value_up = up_HCR[:, :plain], up_HCR[:, plain:]
    out = torch.empty(batch, tokens, heads, value)
    for b in range(batch):
        q_HTC = q_BTHC[b].transpose(0, 1) * channels**-0.5
        own, shared_q = q_HTC[..., :plain], q_HTC[..., plain:]
        if not expand:
            own = own @ key_up
        top = torch.full((heads, tokens, 1), -torch.inf)
        mass, acc = torch.zeros_like(top), torch.zeros(heads, tokens, value if expand else rank)
        for start in range(0, seen, POSITIONS):
            c_SR = latent_BSR[b, start : start + POSITIONS].float()
            s_SJ = shared_BSJ[b, start : start + POSITIONS].float()
            keys, values = (key_up @ c_SR.T, c_SR @ value_up.transpose(1, 2)) if expand else (c_SR.T, c_SR)
            scores = own @ keys + shared_q @ s_SJ.T
            first_hidden = seen - tokens - start  # of row 0: position start + first_hidden + 1 and on
            if len(c_SR) > first_hidden + 1:
                hidden = torch.ones(tokens, len(c_SR), dtype=torch.bool).triu(first_hidden + 1)
                scores.masked_fill_(hidden, -torch.inf)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink = torch.exp(top - higher)
            p = scores.sub_(higher).exp_()
            mass = mass * shrink + p.sum(-1, keepdim=True)
            acc, top = acc * shrink + p @ values, higher
        acc /= mass
        out[b] = (acc if expand else acc @ value_up.transpose(1, 2)).transpose(0, 1)
    return out


def many_rows(x: Tensor, weight: Stored) -> Tensor:
    """``linear`` for any number of rows in float32 or bfloat16."""
    return product(x.reshape(-1, x.shape[-1]), weight).to(x.dtype).view(*x.shape[:-1], -1)


def up_of(weight: Stored, heads: int) -> Tensor:
    """The up projection as float32 [H, P + V, R]: the one small weight that is widened whole."""
    whole = torch.empty(*weight.shape)
    for start, tile in tiles(weight):
        whole[start : start + len(tile)] = tile
    return whole.view(heads, -1, weight.shape[1])
