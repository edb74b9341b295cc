"""What this machine has: cores, memory, a folder for caches."""

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath


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


def cache_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the largest cache of the first core, shared ones included; 0 where that is not known.

    ``root`` is where ``sys`` is.
    """
    found = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            found.append(int(path.read_text(encoding="utf-8").strip().removesuffix("K")) << 10)
    return max(found)


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


@dataclass(frozen=True)
class Memory:
    """Bytes of RAM: what there is for this process, what of it is free now, and what sets the limit."""

    total: int
    available: int
    limit: str


def resident() -> int | None:
    """Return the bytes of memory that this process takes now, mapped files included; None where that is not known."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory that this process may use: the machine's, or less where a container's limit (cgroup) says so.

    What the system can drop at any time, like cached files, is free. ``root`` is where ``proc`` and ``sys`` are.
    """
    import psutil

    machine = psutil.virtual_memory()
    total, available, limit = machine.total, machine.available, "the machine"
    for where, most, used in _groups(root):
        available = min(available, max(0, most - used))
        if most < total:
            total, limit = most, f"cgroup {where}"
    return Memory(total, available, limit)


def _groups(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield every memory limit that holds for this process: its cgroup, most bytes, bytes that cannot be dropped."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        most, current, prefix = names
        # A limit on a parent holds too. In a container the group's own path may not be there, but the root is its.
        for path in (PurePosixPath(group), *PurePosixPath(group).parents):
            folder = base / str(path).strip("/")
            with suppress(OSError, ValueError):
                limit = int((folder / most).read_text(encoding="utf-8"))  # "max" is no number: no limit
                used = int((folder / current).read_text(encoding="utf-8"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield str(path), limit, used - files


def cache_homes() -> Iterator[Path]:
    """Folders for what can be made again: the user's, and one among temporary files where that cannot be written to."""
    if sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    elif "LOCALAPPDATA" in os.environ:
        home = Path(os.environ["LOCALAPPDATA"])
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    owner = str(os.getuid()) if hasattr(os, "getuid") else "cache"
    for folder in (home, Path(tempfile.gettempdir()) / f"deltafin-{owner}"):
        yield folder / "deltafin"


def cache_folder() -> Path | None:
    """Return the first of ``cache_homes`` that can be written to, made if need be; None where neither can."""
    for folder in cache_homes():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile("wb", dir=folder):
                return folder
    return None


def keep(path: Path, content: str) -> None:
    """Write a file in the cache folder, whole or not at all; that this cannot be done is no reason to complain."""
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def offline() -> bool:
    """Whether the environment says now that the hub is not to be asked."""
    return os.getenv("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_folder() -> Path:
    """Return the hub's cache, which other tools share; the environment says now where it is."""
    home = os.getenv("HF_HOME") or os.path.join(os.getenv("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    chosen = os.getenv("HF_HUB_CACHE") or os.getenv("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(chosen)))
