"""Whether memory is too scarce for what is held in it: page faults, the system's own account, the time of a token."""

import math
from contextlib import suppress
from pathlib import Path

FAULTS = 8
"""Pages of one token that had to come from the disk again: more cannot be chance."""

STALLED = 10.0
"""Percent of the last ten seconds in which something waited for memory."""

SLOW = 1.25
"""How many times as long as the fastest a slow token takes."""

FIRST = 8
"""Tokens that are not judged: what they meet for the first time comes from the disk anyway."""

PATIENCE = 4
"""Tokens in a row that must be slow."""


class Pressure:
    """Counts tokens that were slower than others while the system was short of memory."""

    def __init__(self) -> None:
        self.tokens = 0
        self._slow = 0
        self._best = math.inf
        self._faults = faults()

    def end(self, seconds: float) -> str | None:
        """Note how long a token took; return why less should be held in memory, if so."""
        before, self._faults = self._faults, faults()
        self.tokens += 1
        if self.tokens <= FIRST:
            return None
        came = self._faults - before
        slow = seconds > SLOW * self._best and (came >= FAULTS or (came > 0 and stalled() >= STALLED))
        self._slow = self._slow + 1 if slow else 0
        self._best = min(self._best, seconds)
        if self._slow < PATIENCE:
            return None
        self._slow = 0
        return "because the system is short of memory and tokens became slower"


def faults() -> int:
    """Return how many pages this process had to wait for so far; 0 where that is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def stalled() -> float:
    """Return the percentage of the last ten seconds in which something waited for memory; 0 where that is not known."""
    with suppress(OSError, ValueError, IndexError):
        some = Path("/proc/pressure/memory").read_text(encoding="utf-8").splitlines()[0]
        return float(some.split("avg10=")[1].split()[0])
    return 0.0
