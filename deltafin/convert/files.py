"""Reading and writing so that nothing is lost without a word: short reads, full disks, and what a crash leaves."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from os import open as open_handle
from pathlib import Path
from typing import Self

import xxhash

from deltafin.errors import CheckpointError, StorageError
from deltafin.headers import Entry
from deltafin.store import Unit


def open_raw(path: Path, mode: str) -> io.FileIO:
    """Open a file without a buffer."""
    return io.FileIO(path, mode)


def put(file: io.FileIO, data: memoryview | bytes | bytearray) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        handle = open_handle(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    with open_raw(temporary, "wb") as f:
        put(f, content)
        os.fsync(f.fileno())
    os.replace(temporary, path)


def reserve(path: Path, size: int) -> None:
    """Give a file its size, and where the system can, its room on the disk."""
    with open_raw(path, "rb+" if path.exists() else "wb+") as f:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(f.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        f.truncate(size)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"{where} cannot be written ({error.strerror or error})",
            f"{'make room' if full else 'mend that'}, then run the same again: what is done is kept in {folder}",
        ) from error


AHEAD = 8 << 20
"""Bytes that the system is asked to read before they are needed."""


def read_ahead(file: io.FileIO, start: int) -> None:
    """Ask the system to read what follows, while something else is done."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, AHEAD, os.POSIX_FADV_WILLNEED)


class Source:
    """The stored tensors of the shards at hand, by number, and of those that were ``kept`` aside, by name."""

    def __init__(self, entries: Mapping[str, Entry], shards: Mapping[int, Path], kept: Mapping[str, Path]) -> None:
        self.entries, self.shards, self.kept = entries, shards, kept
        self._files: dict[Path, io.FileIO] = {}
        self._asked: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with a tensor's bytes from ``start`` on."""
        e = self.entries[name]
        path, start = (self.kept[name], start) if name in self.kept else (self.shards[e.file], e.start + start)
        try:
            if path not in self._files:
                self._files[path] = open_raw(path, "rb")
            file = self._files[path]
            if start + len(into) > self._asked.get(path, 0) - AHEAD // 2:
                read_ahead(file, start)
                self._asked[path] = start + AHEAD
            file.seek(start)
            while into:
                count = file.readinto(into)
                if not count:
                    raise CheckpointError(
                        f"{path} ended at byte {start}, inside {name}", "it was cut since; fetch it again"
                    )
                start, into = start + count, into[count:]
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror or error}), at byte {start}, inside {name}",
                "what is done is kept; run the same again when the file can be read",
            ) from error


class Target:
    """A file of the store that is written at places, with the checksums of the ``units`` whose bytes pass by."""

    def __init__(self, path: Path, units: Sequence[Unit]) -> None:
        self.file = open_raw(path, "rb+")
        self.passing = [Passing(unit) for unit in units]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, place: int, data: memoryview) -> None:
        """Put bytes at a place."""
        self.file.seek(place)
        put(self.file, data)
        for passing in self.passing:
            passing.add(place, data)

    def digests(self) -> list[str]:
        """Return the checksum of each unit, if all of all of them was written, in order; else nothing."""
        found = [passing.digest() for passing in self.passing]
        return [digest for digest in found if digest] if all(found) else []

    def sync(self) -> None:
        """Wait until all of the file is on the disk."""
        os.fsync(self.file.fileno())


class Passing:
    """The checksum of a unit whose bytes pass by; there is none when they do not come in order, and all at once."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.at, self.hash = unit, unit.start, xxhash.xxh3_128()

    def add(self, place: int, data: memoryview | bytes) -> None:
        """Look at what is written to a place; between two are zeros."""
        _, start, size, _ = self.unit
        if start <= place < start + size:
            if place < self.at:
                self.at = start + size + 1
            else:
                self.hash.update(bytes(place - self.at))
                self.hash.update(data)
                self.at = place + len(data)

    def digest(self) -> str | None:
        """Return the checksum of the whole, with zeros after what has passed."""
        left = self.unit.start + self.unit.size - self.at
        if left < 0:
            return None
        self.hash.update(bytes(left))
        return self.hash.hexdigest()
