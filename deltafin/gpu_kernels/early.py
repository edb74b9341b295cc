"""Kernels that start while the one before still ends: programmatic dependent launch, from compute capability 9.0 on."""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait for the end of the kernel before this one; nothing that it may have written was read or changed so far.

    Every program has to wait: the next kernel takes for granted that all before this one is done.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(EARLY: tl.constexpr):
    """Let the next kernel start, up to its own wait: it asks for its weights, while this one goes on.

    That is for short kernels, and not before large ones that wait at once: their programs are then spread unevenly over
    the chip (16 experts of Kimi K3 in MXFP4: 112 us instead of 101). While a kernel keeps memory busy, what the next
    one asks for is in its way, unless that fits in only where this one has ended (``int8``).
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, bool]:
    """What a launch says whose kernel waits for the one before by itself: it may start early, where chips do that."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": able, "launch_pdl": able}
