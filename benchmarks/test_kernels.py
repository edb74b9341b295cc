"""Operations at the shapes of real models, each beside the bytes it must move: ``pytest benchmarks``.

The cases are those of ``deltafin bench --kernels``. What this adds is pytest-benchmark's: choosing with -k, storing
with --benchmark-save and comparing with --benchmark-compare. Nothing here can fail for being slow.
"""

import statistics
import time
from itertools import cycle

import pytest

from deltafin import bench, machine, ops

pytest.importorskip("pytest_benchmark", reason="pip install deltafin[bench]")

CASES = list(bench.cases())


@pytest.fixture(scope="module")
def table() -> ops.Ops:
    """The operations that are timed, on all cores."""
    return ops.ready("numba", machine.threads(), machine.cores())


@pytest.fixture(scope="module")
def limits() -> tuple[float, float]:
    """GB/s of reading memory, and of changing it in place."""
    return bench.bandwidth(machine.threads())


@pytest.fixture(scope="module")
def arena() -> bench.Arena:
    """Where weights lie."""
    return bench.Arena(bench.ARENA)


@pytest.mark.parametrize("case", CASES, ids=[f"{c.kernel} {c.shape}, {c.weights}, {c.rows} rows" for c in CASES])
def test_kernel(case: bench.Case, table: ops.Ops, limits: tuple[float, float], arena: bench.Arena, benchmark) -> None:
    """Time a case, every round on other memory."""
    kernel, calls = getattr(table, case.kernel), case.calls(arena)
    kernel(*calls[0].arguments)  # compiles
    began = time.perf_counter()
    kernel(*calls[-1].arguments)
    rounds = int(min(1000, max(3, bench.CALLS / (time.perf_counter() - began))))
    turns = cycle(calls)
    benchmark.pedantic(kernel, setup=lambda: (next(turns).arguments, {}), rounds=rounds)
    if benchmark.stats:  # none with --benchmark-disable
        moved = statistics.mean(call.moved for call in calls)
        gbs, limit = moved / benchmark.stats.stats.median / 1e9, limits[case.kernel == "delta_net"]
        benchmark.extra_info |= {"gbs": gbs, "limit_gbs": limit, "share": gbs / limit}
        benchmark.stats.name = f"{case.kernel} {case.shape}, {case.weights}, {case.rows} rows: {gbs / limit:.0%}"
