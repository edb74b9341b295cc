"""How many threads the kernels use, and where they run.

A thread that waits spins for some ten microseconds, which bridges the gap between two kernels, and then sleeps, so
that Numba's pool and torch's do not starve each other (``deltafin/__init__`` sets that, before either is there). On
Linux every thread gets a core of its own when there is one for each: two threads that the scheduler has put on one core
wait for each other a hundred times longer than the work takes. Torch's threads, which multiply the rows of a prompt,
are left to the scheduler.
"""

import contextlib
import os
import threading

import numba
import torch
from numba import prange

from deltafin.cpu_kernels.compiling import kernel

_workers: list[int] = []
_count = numba.get_num_threads()


def threads() -> int:
    """The number of threads in use."""
    return _count


def use(count: int, cores: list[int]) -> None:
    """Use ``count`` threads from now on, or as many as Numba has; pin them if ``cores`` are as many CPU numbers."""
    global _count
    _count = count = min(count, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(count)
    if count > 1 and count == len(cores):
        with contextlib.suppress(OSError):
            _pin(cores)


@kernel(parallel=True)
def _wake(nt):
    """Start the pool."""
    out = 0
    for t in prange(nt):
        out += t
    return out


def _pin(cores: list[int]) -> None:
    if not _workers:
        torch.set_num_threads(len(cores))  # starts torch's threads, while what they inherit is to run on any core
        before = set(os.listdir("/proc/self/task"))
        _wake(len(cores))
        _workers.extend(sorted(int(t) for t in set(os.listdir("/proc/self/task")) - before))
    if len(_workers) == len(cores) - 1:
        for thread, core in zip([threading.get_native_id(), *_workers], cores, strict=True):
            os.sched_setaffinity(thread, {core})
