"""How fast this machine's memory, processor, disk and GPU are: short tests, kept with their date.

A test of a disk reads pieces as large as an expert at random places, past the page cache. What was measured is kept
in the cache folder, by machine and by disk, until it is measured again.
"""

import hashlib
import importlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from deltafin import machine, placement
from deltafin.direct import PAGE, anonymous, open_direct, pread
from deltafin.errors import UsageError

FILE = 256 << 20
"""Bytes of a temporary file on a disk."""

ARENA = max(FILE, 4 * machine.cache_bytes())
"""Bytes that a measurement of memory spreads over: several times a cache."""

SECONDS, DISK_SECONDS = 0.5, 5.0
"""How long products and copies, and reads of a disk, are measured."""

READERS = 8
"""Reads of the disk that are under way at once."""

PIECES = (1 << 18, 1 << 24)
"""The smallest and the largest piece that is read from a disk at once."""

FORMAT = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Disk:
    """A disk's speed in 1e9 bytes a second, reading pieces of so many bytes; ``direct``: past the page cache."""

    gbs: float
    piece: int
    direct: bool
    date: str


@dataclass(frozen=True)
class Measured:
    """A machine, and how its figures came about, for people."""

    machine: placement.Machine
    notes: list[str]


# Memory and processor ----------------------------------------------------------------------------------------------


def room() -> int:
    """Return ``ARENA``, or a quarter of the memory that is free if that is less, in whole MiB."""
    return min(ARENA, max(machine.memory().available >> 22, 1) << 20)


def bandwidth(threads: int, warm: float = 2.5) -> tuple[float, float]:
    """Return GB/s of reading memory and of changing it in place, with ``threads`` at work, after ``warm`` seconds."""
    import torch

    before = torch.get_num_threads()
    # By name, as a backend is loaded: nothing imports a kernel.
    limits = importlib.import_module("deltafin.cpu_kernels.bandwidth").measure(threads, room(), seconds=0.5, warm=warm)
    torch.set_num_threads(before)  # Numba sets the count for both: torch on two threads was 30 times slower for Nano
    return limits


def products(device: str, threads: int, size: int = 2048) -> float:
    """Return 1e9 operations a second of prefill's matrix products: 512 rows by a square matrix in bfloat16."""
    import torch

    from deltafin import ops

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.ones(512, size, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    w = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    linear = ops.load("numba").linear if device == "cpu" else torch.nn.functional.linear

    def once() -> float:
        began = time.perf_counter()
        linear(x, w)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    taken = median(once, SECONDS)
    torch.set_num_threads(before)
    return 2 * x.numel() * size / taken / 1e9


def gpu() -> dict[str, Any] | None:
    """Return the first CUDA device's memory that is free, its bandwidths and its speed; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    about = torch.cuda.get_device_properties(0)
    size = min(1 << 30, free // 4)
    here = torch.empty(min(size, FILE), dtype=torch.uint8).pin_memory()
    there, twin = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copying(target: Any, source: Any) -> float:
        def once() -> float:
            began = time.perf_counter()
            target[: len(source)].copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        once()
        return len(source) / median(once, SECONDS) / 1e9

    return {
        "gpu": free,
        "gpu_gbs": 2 * copying(there, twin),  # read and written
        "link_gbs": copying(there, here),
        "gpu_gflops": products("cuda", torch.get_num_threads(), 8192),
        "integrated": bool(about.is_integrated),
        "name": about.name,
    }


def median(once: Callable[[], float], seconds: float) -> float:
    """Return the median of what ``once`` answers, called for ``seconds`` but three times at least.

    Where the first call takes longer than that, it is the only one.
    """
    taken, began = [once()], time.perf_counter()
    while taken[0] < seconds and (len(taken) < 3 or time.perf_counter() - began < seconds):
        taken.append(once())
    return statistics.median(taken)


# The disk ----------------------------------------------------------------------------------------------------------


def disk(path: Path, piece: int, seconds: float = DISK_SECONDS) -> Disk:
    """Read pieces at random places of the largest file of weights in a folder, or of one written there.

    A file that is too small to say much is used only where none can be written. Where the disk refuses reads past the
    page cache, the system is asked to drop the pieces from it first, and ``direct`` is false. Raises ``UsageError``
    when there is nothing to read.
    """
    weights = sorted((f for f in path.glob("*.safetensors") if f.is_file()), key=lambda f: f.stat().st_size)
    try:
        if weights and weights[-1].stat().st_size >= FILE:
            return _disk(weights[-1], piece, seconds)
        with tempfile.NamedTemporaryFile("wb", prefix=".deltafin-", dir=path) as f:
            for _ in range(0, FILE, 1 << 20):
                f.write(random.randbytes(1 << 20))  # no disk can store it as less
            f.flush()
            os.fsync(f.fileno())
            return _disk(Path(f.name), piece, seconds)
    except OSError as error:
        if weights:
            return _disk(weights[-1], piece, seconds)
        hint = "--machine takes a file that describes this machine"
        raise UsageError(f"the speed of the disk of {path} cannot be measured ({error})", hint) from error


def _disk(file: Path, piece: int, seconds: float) -> Disk:
    size = file.stat().st_size
    piece = max(min(piece, size // 2) // PAGE * PAGE, PAGE)
    handle, direct = open_direct(file)
    os.close(handle)
    end = time.perf_counter() + seconds

    def read(seed: int) -> int:
        """Read until time is over, one piece at least; return how many bytes that were."""
        place, total, room = random.Random(seed), 0, memoryview(anonymous(piece))
        handle, _ = open_direct(file)
        try:
            while not total or time.perf_counter() < end:
                at = place.randrange(max(1, (size - piece) // PAGE + 1)) * PAGE
                if not direct and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(handle, at, piece, os.POSIX_FADV_DONTNEED)
                total += pread(handle, room, at)
        finally:
            os.close(handle)
        return total

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        total = sum(readers.map(read, range(READERS)))
    return Disk(total / (time.perf_counter() - began) / 1e9, piece, direct, str(date.today()))


# What is kept ------------------------------------------------------------------------------------------------------


def kept() -> Path | None:
    """Return the file that measurements of this machine are kept in, if any can be; a home may be shared by several."""
    name = hashlib.blake2b(f"{platform.node()} {machine.cores()}".encode(), digest_size=6).hexdigest()
    folder = machine.cache_folder()
    return folder and folder / f"machine-{name}.json"


def disk_of(path: Path, expert: int, again: bool = False, progress: Progress | None = None) -> Disk:
    """Return the speed of the disk that ``path`` is on, or would be, measured now if it was not before or ``again``.

    ``expert`` is how many bytes are read at once, more or less. ``progress`` is called with one line before measuring.
    """
    folder, piece, where = _place(path, expert)
    known = _read()
    if again or where not in known:
        if progress:
            progress("measuring the disk")
        known[where] = vars(disk(folder, piece))
        _write(known)
    return Disk(**known[where])


def known_disk(path: Path, expert: int) -> Disk | None:
    """Return what ``disk_of`` measured before, or None. Arguments: as there."""
    found = _read().get(_place(path, expert)[2])
    return Disk(**found) if found else None


def _place(path: Path, expert: int) -> tuple[Path, int, str]:
    """A folder on the disk of ``path``, how much is read of it at once, and how measurements of that are called."""
    folder = path.resolve()
    while not folder.exists():
        folder = folder.parent
    piece = min(max(1 << max(expert - 1, 1).bit_length(), PIECES[0]), PIECES[1])
    return folder, piece, f"disk {folder.stat().st_dev} {piece}"


def measured(path: Path, expert: int, again: bool = False, progress: Progress | None = None) -> Measured:
    """Return this machine with the disk that ``path`` is on. Arguments: see ``disk_of``."""
    threads, known = machine.threads(), _read()
    if again or known.get("speed", {}).get("threads") != threads:
        if progress:
            progress("measuring memory and processor")
        speed = {"threads": threads, "ram_gbs": bandwidth(threads)[0], "cpu_gflops": products("cpu", threads)}
        known["speed"] = speed | {"gpu": gpu(), "date": str(date.today())}
        _write(known)
    speed, found, memory = known["speed"], disk_of(path, expert, again, progress), machine.memory()
    device = dict(speed["gpu"] or {})
    name = device.pop("name", None)
    have = placement.Machine(
        int(memory.available * placement.SHARE), speed["ram_gbs"], found.gbs, speed["cpu_gflops"], **device
    )
    how = "direct reads" if found.direct else "reads that the system may have cached"
    notes = [
        f"memory {memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB ({memory.limit}), "
        f"{have.ram_gbs:.1f} GB/s with {threads} thread{'s' * (threads > 1)}, measured {speed['date']}",
        f"disk {found.gbs:.2f} GB/s ({how} of {found.piece / 1e6:.1f} MB), measured {found.date}",
        f"processor {have.cpu_gflops:,.0f} GFLOP/s",
    ]
    if name:
        notes.append(f"{name}: {have.gpu / 1e9:.1f} GB free, {have.gpu_gbs:,.0f} GB/s, link {have.link_gbs:.0f} GB/s")
    return Measured(have, notes)


def _read() -> dict[str, Any]:
    """Return what was measured before; nothing when the file is missing or not ours."""
    if file := kept():
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["format"] == FORMAT:
                return known
    return {"format": FORMAT}


def _write(known: dict[str, Any]) -> None:
    """Keep measurements, whole or not at all; where that is not possible, they are made again the next time."""
    if file := kept():
        machine.keep(file, json.dumps(known, indent=1))
