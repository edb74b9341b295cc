"""Compile every kernel and keep the results: ``python -m deltafin.cpu_kernels.warm [N]``.

Kernels are compiled in processes of their own, two at a time, so that the process that uses them always runs the copies
that were kept: the first run gives the bits of every later one. What is run is each operation's smallest case.
"""

import subprocess
import sys

import torch

from deltafin.config import SiTU
from deltafin.cpu_kernels import OPS, compiling
from deltafin.ops import DeltaState, DeltaWeights, Expert
from deltafin.quant import MXFP4, Int8


def missing() -> bool:
    """Whether kernels would still have to be compiled for this CPU."""
    mark = compiling.marker()
    return mark is not None and not mark.exists()


def compile_all() -> None:
    """Compile what is missing, in two processes; a failure is left to show when the kernel is used."""
    mark = compiling.marker()
    if mark is None or mark.exists():
        return
    command = [sys.executable, "-m", "deltafin.cpu_kernels.warm"]
    workers = [
        subprocess.Popen([*command, str(part)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in range(2)
    ]
    try:
        if not any([worker.wait() for worker in workers]):
            mark.touch()
    finally:
        for worker in workers:
            worker.kill()


def _delta_net() -> None:
    w = DeltaWeights(*(torch.ones(32, 4) for _ in range(3)), torch.ones(1), torch.ones(32), torch.ones(32))
    s = DeltaState(*(torch.ones(1, 3, 32) for _ in range(3)), torch.ones(1, 1, 32, 32))
    x = torch.ones(1, 1, 32)
    OPS.delta_net(x, x, x, x, torch.ones(1, 1, 1), x, w, s, None, 1e-5)


def _attention() -> None:
    OPS.attention(torch.ones(1, 1, 1, 32), torch.ones(1, 4, 16), torch.ones(1, 4, 16), torch.ones(32, 16), 16)


def _experts() -> None:
    w = torch.ones(32, 32)
    ids, shares = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    OPS.experts(torch.ones(1, 32), ids, shares, lambda _: Expert(w, w, w), SiTU())


def _others() -> None:
    x, packed = torch.ones(1, 32), MXFP4(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    OPS.linears(x, (torch.ones(1, 32), packed, Int8(torch.ones(1, 32, dtype=torch.int8), torch.ones(1))))
    OPS.rms_norm(x, x[0], 1e-5)
    OPS.mix_depth(torch.stack([x, x]), x[0], 1e-5)
    OPS.route(x, torch.ones(2, 32), torch.zeros(2), 1, True, 1.0)


PARTS = ((_attention, _others), (_delta_net, _experts))

if __name__ == "__main__":
    for part in PARTS[int(sys.argv[1])]:
        part()
