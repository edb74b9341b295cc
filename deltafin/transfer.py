"""Activations on their way from one device's memory to another's, counted."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

CARRIED = {"bytes": 0, "transfers": 0}
"""What has crossed between devices in this process, weights aside."""


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` in the memory of ``device``: itself where it lies there already."""
    if x.device == device:
        return x
    count(x)
    return x.to(device)


def count(x: Tensor) -> None:
    """Note that ``x`` crosses."""
    CARRIED["bytes"] += x.nbytes
    CARRIED["transfers"] += 1


def on(device: torch.device) -> AbstractContextManager[object]:
    """Let kernels that are launched in this context run on ``device``: of several GPUs one is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
