"""Reading pieces of files past the page cache, straight into memory that was set aside for them.

A page cache under a model larger than memory only costs: what it keeps is taken from the experts that are kept on
purpose, and what it reads ahead is not what comes next.
"""

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deltafin.errors import CheckpointError

if TYPE_CHECKING:  # which brings torch with it
    from deltafin.headers import Entry

PAGE = 4096
"""Direct reads begin and end on a multiple of this, in the file and in memory."""

AGAIN = "the file was changed, or its disk fails; fetch or convert the model again where it is whole"

DIRECT = getattr(os, "O_DIRECT", 0)

_SEEKING = threading.Lock()


class Run(NamedTuple):
    """One read: ``size`` bytes of a file from ``start``, to lie at ``at`` of a slot; both are whole pages."""

    file: int
    start: int
    size: int
    at: int


def up(size: int) -> int:
    """Round up to whole pages."""
    return -(-size // PAGE) * PAGE


def runs(entries: "Iterable[Entry]") -> "tuple[list[Run], dict[Entry, int]]":
    """Return the fewest reads that bring some tensors, and where in the slot each of them then begins.

    A tensor keeps its place within a page. Tensors that share a page, or lie in pages that follow, are one read.
    """
    found: list[Run] = []
    places: dict[Entry, int] = {}
    for e in sorted(entries, key=lambda e: (e.file, e.start)):
        start = e.start // PAGE * PAGE
        last = found[-1] if found else None
        if last and last.file == e.file and start <= up(last.start + last.size):
            last = found[-1] = last._replace(size=max(last.size, e.stop - last.start))
        else:
            last = Run(e.file, start, e.stop - start, last.at + up(last.size) if last else 0)
            found.append(last)
        places[e] = last.at + e.start - last.start
    return found, places


class DirectFiles:
    """Files by number, open for reading in any thread; they stay readable when they are removed from their folder.

    ``direct`` says whether every one of them can be read past the page cache. Where one cannot, pages that a read has
    left there are given back after it.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.direct = True
        self._handles: list[int] = []
        weakref.finalize(self, _close, self._handles)
        for path in paths:
            try:
                handle, past = open_direct(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be opened ({error.strerror})", AGAIN) from error
            self._handles.append(handle)
            self.direct &= past

    def read(self, run: Run, room: memoryview, what: str) -> None:
        """Read one run into ``room``, whole pages; ``what`` names it in the error of a file that is cut or fails."""
        got = 0
        while got < run.size:
            try:
                count = pread(self._handles[run.file], room[got:], run.start + got)
            except OSError as error:
                raise self._error(run, what, f"cannot be read ({error.strerror})") from error
            got += count
            if not count or (got < run.size and got % PAGE):  # a read ends within a page where the file does
                raise self._error(run, what, f"ends at byte {run.start + got}")
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handles[run.file], run.start, up(run.size), os.POSIX_FADV_DONTNEED)

    def _error(self, run: Run, what: str, how: str) -> CheckpointError:
        where = f"bytes {run.start} to {run.start + run.size} are {what}"
        return CheckpointError(f"{self.paths[run.file]} {how}: {where}", AGAIN)


def open_direct(path: Path) -> tuple[int, bool]:
    """Open a file for reads of whole pages; return its handle, and whether these go past the page cache."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    if DIRECT:
        with suppress(OSError):  # of a file system that refuses it, now or when something is read
            handle = os.open(path, flags | DIRECT)
            try:
                pread(handle, memoryview(anonymous(PAGE)), 0)
                return handle, True
            except OSError:
                os.close(handle)
    handle = os.open(path, flags)
    if sys.platform != "darwin":
        return handle, False
    import fcntl

    fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
    return handle, True


def pread(handle: int, room: memoryview, start: int) -> int:
    """Read into ``room`` from ``start`` of a file; return how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [room], start)
    with _SEEKING:  # Windows
        os.lseek(handle, start, os.SEEK_SET)
        content = os.read(handle, len(room))
    room[: len(content)] = content
    return len(content)


def anonymous(size: int) -> mmap.mmap:
    """Return ``size`` bytes of memory, page-aligned, that takes nothing before it is written to."""
    if hasattr(mmap, "MAP_ANONYMOUS"):  # shared memory, the default, cannot be given back page by page
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)
