"""What this machine has: its CPU's cores."""

import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def cores() -> list[int]:
    """One logical CPU of each physical core that this process may use, as numbers; all CPUs where that is not known.

    Asked once: kernels bind their threads, and then this thread may use one core alone.
    """
    try:
        usable = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return list(range(_counted()))
    found: dict[str, int] = {}
    for cpu in usable:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            siblings = path.read_text(encoding="utf-8")
        except OSError:
            return usable
        found.setdefault(siblings, cpu)
    return list(found.values())


def _counted() -> int:
    if sys.platform == "darwin":
        with suppress(OSError, ValueError):
            asked = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
            return int(subprocess.run(asked, capture_output=True, text=True, encoding="utf-8", check=False).stdout)
    return os.cpu_count() or 1


def quota() -> float | None:
    """CPUs that a container's limit allows (cgroup), or None."""
    with suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return int(most) / int(period)
    return None


def threads() -> int:
    """How many threads a computation should use: the physical cores, or fewer where a container allows fewer."""
    allowed = quota()
    count = len(cores())
    return count if allowed is None else max(1, min(count, int(allowed)))
