"""Rows of the operation table for GPUs, in Triton: NVIDIA chips of compute capability 7.5 and up.

Where there is none, Triton's interpreter runs them on the processor, so that they can be tested everywhere.
"""

from dataclasses import replace

from deltafin.gpu_kernels.attention import attention
from deltafin.gpu_kernels.delta import delta_net
from deltafin.gpu_kernels.experts import experts, gated
from deltafin.gpu_kernels.layers import WHOLE
from deltafin.gpu_kernels.linear import linear, linears
from deltafin.gpu_kernels.small import mix_depth, rms_norm, route
from deltafin.ops import REFERENCE

OPS = replace(
    REFERENCE,
    name="triton",
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
)
