"""Rows of the operation table for CPUs, in Numba: decoding at the memory's speed, on any CPU that Numba knows.

Kernels take a few rows, ``delta_net`` many as well. Other rows, and float64, go to the plain forms of
``ops.reference``.
"""

from collections.abc import Callable
from dataclasses import replace

from deltafin.cpu_kernels import threads, tiles
from deltafin.cpu_kernels.attention import attention
from deltafin.cpu_kernels.delta import delta_net
from deltafin.cpu_kernels.experts import experts, gated
from deltafin.cpu_kernels.layers import WHOLE
from deltafin.cpu_kernels.linear import linear, linears
from deltafin.cpu_kernels.small import mix_depth, rms_norm, route
from deltafin.cpu_kernels.vector import FORM
from deltafin.ops import REFERENCE

OPS = replace(
    REFERENCE,
    name="numba",
    linear=linear,
    linears=linears,
    rms_norm=rms_norm,
    delta_net=delta_net,
    attention=attention,
    route=route,
    experts=experts,
    gated=gated,
    mix_depth=mix_depth,
    together=True,
    whole=WHOLE,
    widens=True,
    form=f"{FORM}, AMX for attention in bfloat16" if tiles.allowed() else FORM,
    threads=threads.threads,
)


def prepare(count: int, cores: list[int], progress: Callable[[str], None] | None = None) -> None:
    """Use ``count`` threads, on ``cores`` if they are as many; compile what was never compiled on this machine."""
    from deltafin.cpu_kernels import warm

    if warm.missing():
        if progress:
            progress("compiling kernels for this CPU (once, a minute or two)")
        warm.compile_all()
    threads.use(count, cores)
