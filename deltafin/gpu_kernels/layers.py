"""Whole sublayers for a few tokens, where the model's own forward would have to know how long a cache is."""

from typing import Any

from torch import Tensor

from deltafin import config
from deltafin.gpu_kernels.attention import append, attend_few


def mla(c: config.MLA, w: Any, s: Any, stream: Any, norm: Tensor, query: Tensor | None, ops: Any) -> bool:
    """Add to the stream as ``Block.mix`` does, with positions that are counted on the GPU: so it can be captured."""
    x_BTD = stream.read(query, ops)
    tokens = x_BTD.shape[1]
    length = s.length + tokens if s.position is None else s.position
    q, latent_shared, *gate = ops.linears(ops.rms_norm(x_BTD, norm, stream.eps), w.first)
    if w.q_up is not None:
        q = ops.linear(ops.rms_norm(q, w.q_norm, c.eps), w.q_up)
    end = s.reserve(tokens)
    append(latent_shared, w.latent_norm, c.eps, s.latent_BSR, s.shared_BSJ, length)
    o_BTHV = attend_few(
        *(q.unflatten(-1, (c.heads, -1)), s.latent_BSR, s.shared_BSJ, length, w.latent_up, c.value_dim), *gate
    )
    s.length = end
    stream.add(ops.linear(o_BTHV.flatten(2), w.out))
    return True


WHOLE = {config.MLA: mla}
