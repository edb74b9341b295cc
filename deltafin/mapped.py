"""Files that are mapped into memory, and the tensors in them as views."""

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deltafin.headers import DTYPES, Entry


def view(memory: Tensor, at: int, e: Entry) -> Tensor:
    """Return the tensor that begins at ``at`` of some bytes: a view, or a copy where its type cannot begin there."""
    part, dtype = memory[at : at + e.stop - e.start], DTYPES[e.dtype]
    return (part.clone() if at % dtype.itemsize else part).view(dtype).view(e.shape)


class MappedFiles:
    """Safetensors files by number; each is mapped when something in it is first looked at."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._maps: dict[int, tuple[mmap.mmap, Tensor]] = {}

    def view(self, e: Entry) -> Tensor:
        """Return a tensor: a view of the file, or a copy where its type cannot be read from where it begins."""
        if e.file not in self._maps:
            with self.paths[e.file].open("rb") as f:  # read-only: a private map would count as memory promised
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to weights
                self._maps[e.file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        return view(self._maps[e.file][1], e.start, e)

    def release(self, e: Entry) -> None:
        """Let the system drop a tensor's pages; a view that is still there reads them anew."""
        if e.file in self._maps and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            start = e.start - e.start % mmap.PAGESIZE
            self._maps[e.file][0].madvise(mmap.MADV_DONTNEED, start, e.stop - start)
