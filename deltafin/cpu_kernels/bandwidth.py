"""What the memory can do: the limit that ``deltafin bench`` holds operations against. Imported by nothing else.

Both loops walk slices from their index 0: with bounds that are computed from the thread's number, the test for a
negative index stays in the loop and keeps it from being vectorised. They ask for memory ahead, as the kernels do:
without that the limit would be lower than what the kernels reach. Sums may be reordered (``fastmath``), so that
several partial ones run at once; a single one would measure the latency of an addition.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from deltafin.cpu_kernels import vector
from deltafin.cpu_kernels.compiling import kernel

STEP = 256
"""Numbers that are asked for and then read at a time, as the kernels do."""


@kernel()
def _ask(mine: np.ndarray) -> None:
    for line in range(0, 4 * STEP, 64):
        vector.ask(mine.ctypes.data + 2 * vector.AHEAD + line)


@kernel(parallel=True, fastmath=True)
def read(values: np.ndarray, threads: int) -> np.float32:
    """Sum all values; every thread sums one contiguous part."""
    part = values.size // threads
    sums = np.zeros((threads, 16), np.float32)  # a cache line each
    for t in numba.prange(threads):
        total = np.float32(0)
        end = (t + 1) * part
        for start in range(t * part, end, STEP):
            mine = values[start : min(start + STEP, end)]
            _ask(mine)
            for i in range(mine.size):
                total += mine[i]
        sums[t, 0] = total
    return sums[:, 0].sum()


@kernel(parallel=True, fastmath=True)
def scale(values: np.ndarray, threads: int) -> None:
    """Read and write every value in place; every thread one contiguous part."""
    part = values.size // threads
    for t in numba.prange(threads):
        end = (t + 1) * part
        for start in range(t * part, end, STEP):
            mine = values[start : min(start + STEP, end)]
            _ask(mine)
            for i in range(mine.size):
                mine[i] *= np.float32(0.999)


def measure(threads: int, size: int, seconds: float, warm: float) -> tuple[float, float]:
    """Return GB/s of reading and of changing in place (reads and writes counted), over ``size`` bytes of memory.

    Medians of passes for ``seconds`` each. Before that, ``warm`` seconds of load: several threads may run at the speed
    of one for the first second or so.
    """
    before = numba.get_num_threads()
    threads = min(threads, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    try:
        values = np.ones(size // 4, np.float32)
        read(values[:1024], threads)
        scale(values[:1024], threads)
        _passes(read, values, threads, warm)
        reading = values.nbytes / statistics.median(_passes(read, values, threads, seconds))
        changing = 2 * values.nbytes / statistics.median(_passes(scale, values, threads, seconds))
    finally:
        numba.set_num_threads(before)
    return reading / 1e9, changing / 1e9


def _passes(kernel: Callable[..., Any], values: np.ndarray, threads: int, seconds: float) -> list[float]:
    """Return the seconds of each pass over ``values``, of at least three."""
    taken, end = [], time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        kernel(values, threads)
        taken.append(time.perf_counter() - began)
    return taken
